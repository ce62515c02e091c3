"""Stages of benchmarks/one_gpu.py that need no run: products in FP8, grouped products, a checkpoint's copy, a small
microbatch in a CUDA graph, backward passes that sum columns, and NCCL between two processes that share the card.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PRODUCTS = ((768, 768), (768, 3072), (2048, 8192), (4096, 14336))
"""Widths in and out of the four linear layers of the table of FP8's arithmetic."""
PRODUCT_TOKENS = 16384
EXPERTS = (("mixtral-mini", 8, 2, 512, 352), ("qwen3-30b-a3b", 128, 8, 2048, 768))
"""Name, experts, experts a token, hidden, feed-forward."""
NCCL_SECONDS = 60
"""Seconds after which two ranks that wait for each other are ended."""


def device_seconds(act: Callable[[], object], times: int = 10) -> float:
    """Return the median of the device's seconds, after three calls that are not counted."""
    for _ in range(3):
        act()
    seconds = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        act()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [R, K] in FP8 (e4m3) and scales [R, 1], float32: the largest of a row becomes 448."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def fp8() -> dict[str, Any]:
    """Return milliseconds of x W [16,384, K] x [K, N] in bf16, in FP8 with scales by row, and of the cast of x."""
    found: dict[str, Any] = {}
    cast = torch.compile(by_rows)
    for inner, outer in PRODUCTS:
        x = torch.randn(PRODUCT_TOKENS, inner, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
        (rows, row_scale), (columns, column_scale) = cast(x), cast(weight)

        def product(rows: Any = rows, columns: Any = columns, a: Any = row_scale, b: Any = column_scale) -> Any:
            return torch._scaled_mm(rows, columns.t(), scale_a=a, scale_b=b.t(), out_dtype=torch.bfloat16)

        exact = x.float() @ weight.float().t()
        found[f"{inner} x {outer}"] = {
            "bf16_ms": device_seconds(lambda x=x, w=weight: x @ w.t()) * 1e3,  # type: ignore[misc]
            "fp8_ms": device_seconds(product) * 1e3,
            "cast_ms": device_seconds(lambda x=x: cast(x)) * 1e3,  # type: ignore[misc]
            "fp8_error": float((product().float() - exact).norm() / exact.norm()),
            "bf16_error": float(((x @ weight.t()).float() - exact).norm() / exact.norm()),
        }
    return found


def grouped() -> dict[str, Any]:
    """Return milliseconds of one layer's expanding product over experts, forward: one product each, and grouped."""
    found: dict[str, Any] = {}
    for name, experts, taken, hidden, inner in EXPERTS:
        rows = 8192 * taken
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(experts, hidden, inner * 2, device="cuda", dtype=torch.bfloat16)
        counts = torch.full((experts,), rows // experts)
        ends = counts.cumsum(0).to("cuda", torch.int32)

        def one_each(x: Any = x, weight: Any = weight, counts: Any = tuple(counts.tolist())) -> Any:
            return torch.cat([piece @ matrix for piece, matrix in zip(x.split(counts), weight, strict=True)])

        def together(x: Any = x, weight: Any = weight, ends: Any = ends) -> Any:
            return torch._grouped_mm(x, weight, offs=ends)

        gap = float((one_each().float() - together().float()).abs().max())
        found[name] = {
            "one_each_ms": device_seconds(one_each) * 1e3, "grouped_ms": device_seconds(together) * 1e3,
            "largest_difference": gap,
        }  # fmt: skip
    return found


def checkpoint_copy(parameters: int = 2**29) -> dict[str, float]:
    """Return seconds of copies of float32 tensors to pageable and to pinned host memory, and of pinning."""
    source = torch.randn(parameters, device="cuda")
    pinning = time.perf_counter()
    pinned = torch.empty(parameters, pin_memory=True)
    pinning = time.perf_counter() - pinning

    def seconds(act: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return {
        "bytes": source.nbytes, "pageable_seconds": seconds(lambda: source.to("cpu", copy=True)),
        "pinned_seconds": seconds(lambda: pinned.copy_(source, non_blocking=True)), "pinning_seconds": pinning,
    }  # fmt: skip


def graphs(layers: int = 12, hidden: int = 768, rows: int = 2, length: int = 1024) -> dict[str, float]:
    """Return milliseconds of forward and backward of 2 x 1,024 tokens through torch's layers, with GPT-2 small's count
    and width: eager, compiled, and compiled into a CUDA graph."""
    layer = torch.nn.TransformerEncoderLayer(
        hidden, 12, 4 * hidden, 0.0, torch.nn.functional.gelu, batch_first=True, norm_first=True, device="cuda"
    )
    trunk = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    x = torch.randn(rows, length, hidden, device="cuda")

    def step(model: Any) -> Callable[[], object]:
        def act() -> object:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            return loss

        return act

    ways = {
        "eager_ms": trunk, "compiled_ms": torch.compile(trunk),
        "graph_ms": torch.compile(trunk, mode="reduce-overhead"),
    }  # fmt: skip
    return {name: device_seconds(step(model)) * 1e3 for name, model in ways.items()}


RANK = """
import os, sys
import torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
x = torch.full((1 << 20,), float(rank + 1), device="cuda")
dist.all_reduce(x)
assert float(x[0]) == 3 and float(x[-1]) == 3, x
parts = [torch.empty(4, device="cuda") for _ in range(2)]
dist.all_gather(parts, torch.full((4,), float(rank), device="cuda"))
assert [float(part[0]) for part in parts] == [0, 1]
own = torch.empty(4, device="cuda")
dist.reduce_scatter_tensor(own, torch.arange(8.0, device="cuda"))
assert own.tolist() == [2.0 * (4 * rank + i) for i in range(4)]
taken = torch.empty(4, device="cuda")
dist.all_to_all_single(taken, torch.full((4,), float(rank), device="cuda"))
assert taken.tolist() == [0, 0, 1, 1]
peer = 1 - rank
ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty_like(x), peer)]
[work.wait() for work in dist.batch_isend_irecv(ops)]
torch.cuda.synchronize()
dist.barrier()
print("all verbs right", flush=True)
dist.destroy_process_group()
"""


def nccl() -> dict[str, Any]:
    """Run two processes under NCCL on the one card, with equal host ids and with two; return the last lines."""
    found: dict[str, Any] = {}
    for name, ids in (("one host id", ("a", "a")), ("a host id each", ("a", "b"))):
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), str(store)], stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True,
                    env=os.environ | {"NCCL_HOSTID": host_id, "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"},
                )
                for rank, host_id in enumerate(ids)
            ]  # fmt: skip
            began, told = time.perf_counter(), []
            for rank in ranks:
                try:
                    output = rank.communicate(timeout=max(1, NCCL_SECONDS - (time.perf_counter() - began)))[0]
                except subprocess.TimeoutExpired:
                    rank.kill()
                    output = rank.communicate()[0] + "\nended after waiting"
                told.append({"code": rank.returncode, "last_lines": output.strip().splitlines()[-6:]})
            found[name] = {"seconds": time.perf_counter() - began, "ranks": told}
    return found


def equal_bits() -> dict[str, Any]:
    """Count the different losses of 18 layouts under `bits: layout-free`; the ranks are threads of this GPU."""
    from benchmarks import bits

    found = {}
    for precision in ("float32", "bf16"):
        words = ("device=cuda", f"precision={precision}")
        losses = {
            layout: tuple(x.hex() for x in bits.run(bits.small("layout-free", *words, *layout.split()), 3)[0])
            for layout in bits.EIGHTEEN
        }
        found[precision] = {"layouts": len(losses), "kinds": len({*losses.values()}), "one device": losses[""]}
    return found


def sums(rows: int = 32768, hidden: int = 768) -> dict[str, Any]:
    """Return milliseconds, and TB/s of the bytes that must move, of backward passes that also sum columns
    (column_sums.py) in bf16, and of the references under torch.compile; the largest difference of a result, divided by
    the largest element; whether ten runs of a kernel have equal bits."""
    from meshwright.compute.tensor import column_sums as own

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    dy, x, residual, inner, inputs = (draw(rows, width) for width in (hidden,) * 3 + (4 * hidden,) * 2)
    weight = torch.randn(hidden, device="cuda")
    parts = [draw(rows // 1024, 1024, 12, hidden // 12).transpose(1, 2) for _ in range(3)]
    norm = dy, x, weight, residual, 1e-5
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], int]] = {
        "layer norm": (own.norm_backward_by_kernel, own.norm_backward_reference, (*norm, True), 4),
        "RMS norm": (own.norm_backward_by_kernel, own.norm_backward_reference, (*norm, False), 4),
        "GELU": (own.gelu_backward_by_kernel, own.gelu_backward_reference, (inner, inputs, True), 12),
        "heads": (own.join_heads_by_kernel, own.join_heads_reference, (parts,), 6),
    }
    found: dict[str, Any] = {}
    for name, (kernel, reference, arguments, activations) in cases.items():
        compiled = torch.compile(reference, dynamic=False)
        made, exact = kernel(*arguments), reference(*arguments)
        again = [kernel(*arguments) for _ in range(10)]
        seconds = device_seconds(lambda k=kernel, a=arguments: k(*a))  # type: ignore[misc]
        gaps = [
            float((a.float() - b.float()).abs().max() / b.abs().max())
            for a, b in zip(made, exact, strict=True)
            if b.numel()
        ]
        found[name] = {
            "kernel_ms": seconds * 1e3, "terabytes_a_second": activations * dy.nbytes / seconds / 1e12,
            "compiled_reference_ms": device_seconds(lambda c=compiled, a=arguments: c(*a)) * 1e3,  # type: ignore[misc]
            "largest_difference": max(gaps),
            "equal_bits": all(all(map(torch.equal, made, each)) for each in again),
        }  # fmt: skip
    return found


PROBES: dict[str, Callable[[], Any]] = {
    "sums": sums, "nccl": nccl, "equal bits": equal_bits, "fp8": fp8, "grouped": grouped, "graphs": graphs,
    "checkpoint copy": checkpoint_copy,
}  # fmt: skip
