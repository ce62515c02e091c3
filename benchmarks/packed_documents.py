"""Time and memory of documents in one row: attention by document and with a mask of T x T, and rings by kernel.

    python -m benchmarks.packed_documents [--sequence 4096] [--rounds 5]

On this machine, forward and backward of one layer's attention, float32, over a row of documents of some length: with a
mask of T x T, as one causal row (documents joined), and document by document; and the peak of bytes without the
arguments. On the meta device, as in a plan: the bytes of a layer's ring attention of Llama-3.1-8B on an H100 with
131,072 tokens over 8 ranks, in tiles and by the fused kernels; and the steps that a ring of 8 takes for documents.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.interleave import machine
from meshwright.compute.context.context import WHOLE_SEQUENCES
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.ranks.grid import Grid
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.training.on_device import AsOnDevice, Attention

HEADS, WIDTH = 12, 64
LENGTHS = (20, 100, 500, 2000)
"""Tokens of a document."""


def starts_of(sequence: int, length: int) -> Tensor:
    """Return the starts of documents of `length` tokens in a row of `sequence`; the last document is shorter."""
    places = torch.arange(sequence)
    return (places - places % length).unsqueeze(0)


def with_mask(starts: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    same = (starts[:, :, None] == starts[:, None, :]).tril()
    mask = torch.zeros_like(same, dtype=q.dtype).masked_fill_(~same, -torch.inf).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def joined(starts: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_document(starts: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return WHOLE_SEQUENCES.attend(q, k, v, AttentionSpec(causal=True, documents=starts))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "mask of T x T": with_mask, "joined": joined, "by document": by_document,
}  # fmt: skip


def timed(sequence: int, length: int, rounds: int) -> dict[str, tuple[float, int]]:
    """Return (seconds, peak bytes) of each way, in turns."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, gradient = (torch.randn(1, HEADS, sequence, WIDTH, generator=generator) for _ in range(4))
    inputs, starts = [x.requires_grad_() for x in (q, k, v)], starts_of(sequence, length)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    held: dict[str, int] = {}
    for turn in range(rounds + 1):
        for way, attend in WAYS.items():
            if turn == 0:  # not timed: the first turn of a shape, with every tensor's bytes counted
                with LiveBytes() as live:
                    torch.autograd.grad(attend(starts, *inputs), inputs, gradient)
                held[way] = live.peak
                continue
            began = time.perf_counter()
            torch.autograd.grad(attend(starts, *inputs), inputs, gradient)
            seconds[way].append(time.perf_counter() - began)
    return {way: (statistics.median(seconds[way]), held[way]) for way in WAYS}


def ring_bytes(attention: Attention, sequence: int = 131072, ranks: int = 8) -> int:
    """Return the most bytes of a rank of a ring while a layer of Llama-3.1-8B attends, both ways, in bf16."""
    mesh = planned_mesh(Grid((("context", ranks),)), 1, ("context",), "cuda")
    q, k, v = (
        torch.empty(1, heads, sequence // ranks, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (32, 8, 8)
    )
    with AsOnDevice("cuda", attention), LiveBytes() as live:
        out = RingAttention(mesh).attend(q, k, v, AttentionSpec(causal=True))
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return live.peak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_documents", description=__doc__)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    console.print(machine())
    table = Table("tokens a document", *(f"{way}, ms" for way in WAYS), *(f"{way}, MB" for way in WAYS), "of the mask")
    for length in LENGTHS:
        told = timed(options.sequence, length, options.rounds)
        ratio = told["by document"][0] / told["mask of T x T"][0]
        milliseconds = (f"{seconds * 1e3:.1f}" for seconds, _ in told.values())
        table.add_row(str(length), *milliseconds, *(f"{held / 1e6:.0f}" for _, held in told.values()), f"{ratio:.3f}")
    console.print(table)
    mesh = planned_mesh(Grid((("context", 8),)), 1, ("context",), "cpu")
    steps = Table("tokens a document", "steps of a ring of 8 ranks that are taken, of 7")
    for length in (*LENGTHS, 16384, 131072):
        steps.add_row(f"{length:,}", str(len(RingAttention(mesh).steps(starts_of(131072, length))) - 1))
    console.print(steps)
    for attention, name in (("torch", "in tiles"), ("fused", "by fused kernels")):
        console.print(f"a layer's ring, {name}: {ring_bytes(attention) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
