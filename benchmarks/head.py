"""The head with cross entropy, forward and backward: Meshwright's, torch's and Liger's.

    python -m benchmarks.head [--device cuda] [--rounds N]

| contender                    | holds                                                                 |
|------------------------------|-----------------------------------------------------------------------|
| torch, whole logits          | [T, V] logits and gradients; also under torch.compile                 |
| torch, linear_cross_entropy  | chunks (torch 2.13), torch's default options                          |
| Liger                        | chunks; with liger-kernel installed, on a GPU; sums in float32        |
| ours; ours, compiled         | chunks; the table's gradient in float32                               |

Contenders take turns. Milliseconds are the median of the rounds: of the device on a GPU, of one thread's processor on a
CPU. Bytes are the most that a GPU's allocator had beyond the operands.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.islands import Contenders
from meshwright.compute.tensor.cross_entropy import Classes, chunked_loss
from meshwright.compute.tensor.islands import compiled_islands
from meshwright.ranks.comm import RankGroup, SoloComm

SHAPES = {
    "cpu": ((1024, 256, 8192, torch.float32),),
    "cuda": ((32768, 768, 50304, torch.bfloat16), (8192, 2048, 128256, torch.bfloat16)),
}
"""Tokens, width, classes and dtype."""


def contenders(device: str, tokens: int, width: int, classes: int, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield each contender's name, and a function that returns the loss of the same operands."""
    h = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    table = (torch.randn(classes, width, device=device, dtype=dtype) * 0.02).requires_grad_()
    labels = torch.randint(classes, (tokens,), device=device)

    def fresh() -> tuple[Tensor, Tensor]:
        h.grad = table.grad = None
        return h, table

    def whole(h: Tensor, table: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, table), labels)

    compiled = torch.compile(whole, fullgraph=True, options={"compile_threads": 1})
    yield "torch, whole logits", lambda: whole(*fresh())
    yield "the same, compiled", lambda: compiled(*fresh())
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        yield "torch, linear_cross_entropy", lambda: F.linear_cross_entropy(*fresh(), labels, options=options)
    if device == "cuda" and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
            liger_fused_linear_cross_entropy as liger,
        )

        yield "Liger", lambda: liger(*fresh(), labels, accum_dtype=torch.float32)
    alone = SoloComm(RankGroup("", (0,), 0))
    for name, islands in (("ours", None), ("ours, compiled", compiled_islands())):
        head_classes = Classes(classes, alone, device_type=device, islands=islands)
        yield name, lambda head_classes=head_classes: chunked_loss(*fresh(), None, labels, head_classes, 1 / tokens)


def timed(device: str, call: Callable[[], Tensor]) -> tuple[float, int]:
    """Return seconds of a forward and a backward pass, and the peak of bytes above the start."""
    if device == "cpu":
        began = time.process_time()
        call().backward()
        return time.process_time() - began, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call().backward()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() - before


def measured(device: str, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return by shape and contender: the median of the seconds, the bytes, and the loss."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES[device]:
        calls: Contenders = dict(contenders(device, *shape))
        losses = {name: float(call().detach()) for name, call in calls.items()}
        times: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
        for turn in range(rounds + 2):
            for name, call in calls.items():
                told = timed(device, call)
                if turn > 1:
                    times[name].append(told)
        tokens, width, classes, dtype = shape
        found[f"{tokens} x {width} over {classes} in {str(dtype).removeprefix('torch.')}"] = {
            name: {
                "seconds": statistics.median(seconds for seconds, _ in told), "bytes": max(size for _, size in told),
                "loss": losses[name],
            }
            for name, told in times.items()
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for shape, told in measured(options.device, options.rounds).items():
        first = next(iter(told.values()))["seconds"]
        print(shape)
        for name, each in told.items():
            print(
                f"  {name:28} {1e3 * each['seconds']:8.2f} ms {each['seconds'] / first:5.2f} "
                f"{each['bytes'] / 1e6:8.0f} MB  loss {each['loss']:.5f}"
            )


if __name__ == "__main__":
    main()
