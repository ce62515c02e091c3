"""The head with cross entropy, forward and backward: Meshwright's, torch's, Liger's and quack's.

    python -m benchmarks.head [--device cuda] [--rounds N]

| contender                    | holds                                                                 |
|------------------------------|-----------------------------------------------------------------------|
| torch, whole logits          | [T, V] logits and gradients; also under torch.compile                 |
| torch, linear_cross_entropy  | chunks (torch 2.13), torch's default options                          |
| Liger                        | chunks; with liger-kernel, on a GPU; sums in float32                  |
| quack                        | chunks of 4,096 tokens; with quack-kernels, on a GPU; sums in float32 |
| ours; ours, compiled         | chunks; the table's gradient in float32                               |

Contenders take turns. Milliseconds are the median of the rounds: of the device on a GPU, of one thread's processor on a
CPU. Bytes are the most beyond the operands: of a GPU's allocator, on a CPU of a process that frees blocks of 1 MiB and
more at once (`MALLOC`). A contender whose package is not installed, or that fails, has a line with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.tensor.cross_entropy import Classes, chunked_loss
from meshwright.compute.tensor.islands import compiled_islands
from meshwright.ranks.comm import RankGroup, SoloComm

Head = Callable[[Tensor, Tensor], Tensor]
"""head(h, table) returns the mean loss."""

SHAPES = {
    "cpu": {
        "float32": (1024, 256, 8192, torch.float32),
        "bf16": (1024, 256, 8192, torch.bfloat16),
    },
    "cuda": {
        "gpt2-small": (32768, 768, 50304, torch.bfloat16),
        "llama-3.2-1b": (8192, 2048, 128256, torch.bfloat16),
    },
}
"""Tokens, width, classes and dtype, by device and name."""

PACKAGES = {"Liger": "liger-kernel", "quack": "quack-kernels"}
"""Packages of contenders on a GPU."""


MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": "0"}
"""Variables of glibc for the process that measures a CPU's bytes."""


def liger_head(labels: Tensor) -> Head:
    """Return Liger's head. Raises ImportError without liger-kernel."""
    from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
        liger_fused_linear_cross_entropy as fused,
    )

    return lambda h, table: fused(h, table, labels, accum_dtype=torch.float32)


def quack_head(labels: Tensor) -> Head:
    """Return quack's head. Raises ImportError without quack-kernels."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as fused  # type: ignore[import-not-found]

    return lambda h, table: fused(h, table, labels)


def contenders(device: str, classes: int, labels: Tensor) -> Iterator[tuple[str, Callable[[], Head]]]:
    """Yield each contender's name, and a function that makes the head."""

    def whole(h: Tensor, table: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, table), labels)

    def of_torch() -> Head:
        options = torch.nn.LinearCrossEntropyOptions()  # torch 2.13
        return lambda h, table: F.linear_cross_entropy(h, table, labels, options=options)

    def ours(compiles: bool) -> Head:
        alone, islands = SoloComm(RankGroup("", (0,), 0)), compiled_islands() if compiles else None
        head_classes = Classes(classes, alone, device_type=device, islands=islands)
        return lambda h, table: chunked_loss(h, table, None, labels, head_classes, 1 / labels.numel())

    yield "torch, whole logits", lambda: whole
    yield "the same, compiled", lambda: torch.compile(whole, fullgraph=True, options={"compile_threads": 1})
    yield "torch, linear_cross_entropy", of_torch
    if device == "cuda":
        yield "Liger", lambda: liger_head(labels)
        yield "quack", lambda: quack_head(labels)
    yield "ours", lambda: ours(False)
    yield "ours, compiled", lambda: ours(True)


def status(field: str) -> int:
    """Return bytes of this process by the name of a line of /proc/self/status."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def timed(device: str, call: Callable[[], Tensor]) -> tuple[float, int]:
    """Return seconds of a forward and a backward pass, and the peak of bytes above the start."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory becomes the present memory
        before, began = status("VmRSS"), time.process_time()
        call().backward()
        return time.process_time() - began, status("VmHWM") - before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call().backward()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() - before


def measured(device: str, name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return by contender: the median of the seconds, the most bytes, the loss, and the distance of both gradients from
    those of the first contender. A contender that is missing or fails has `error`; a package's has `version`.

    Args:
        device: cpu or cuda.
        name: A name of SHAPES.
        rounds: The number of rounds counted.
    """
    tokens, width, classes, dtype = SHAPES[device][name]
    h = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    table = (torch.randn(classes, width, device=device, dtype=dtype) * 0.02).requires_grad_()
    labels = torch.randint(classes, (tokens,), device=device)
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Tensor]] = {}
    first: tuple[Tensor, ...] = ()
    for contender, make in contenders(device, classes, labels):
        found[contender] = {}
        try:
            if contender in PACKAGES:
                found[contender]["version"] = version(PACKAGES[contender])
            head = make()

            def call(head: Head = head) -> Tensor:
                h.grad = table.grad = None
                return head(h, table)

            loss = call()
            loss.backward()
            gradients = tuple(x.grad.float() for x in (h, table) if x.grad is not None)
            first = first or gradients
            gaps = [float((a - b).norm() / b.norm()) for a, b in zip(gradients, first, strict=True)]
            found[contender] |= {"loss": float(loss.detach()), "gradients_off": max(gaps)}
            calls[contender] = call
        except PackageNotFoundError:
            found[contender]["error"] = f"{PACKAGES[contender]} is not installed"
        except Exception as error:  # a package that fails leaves the others' figures
            found[contender]["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    del first
    times: dict[str, list[tuple[float, int]]] = {contender: [] for contender in calls}
    for turn in range(rounds + 2):
        for contender, call in calls.items():
            told = timed(device, call)
            if turn > 1:
                times[contender].append(told)
    for contender, each in times.items():
        found[contender] |= {
            "seconds": statistics.median(seconds for seconds, _ in each), "bytes": max(size for _, size in each),
        }  # fmt: skip
    return found


def measured_on_cpu(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of `measured` on a CPU, with the bytes of a second process under MALLOC."""
    command = [sys.executable, "-m", "benchmarks.head", "--json", name, "--rounds", "2"]
    told = subprocess.run(command, capture_output=True, check=True, text=True, env=os.environ | MALLOC).stdout
    found = measured("cpu", name, rounds)
    for contender, each in json.loads(told.splitlines()[-1]).items():
        if "bytes" in each:
            found[contender]["bytes"] = each["bytes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", choices=SHAPES["cpu"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.json:
        print(json.dumps(measured("cpu", options.json, options.rounds)))
        return
    for name, (tokens, width, classes, _) in SHAPES[options.device].items():
        on_cpu = options.device == "cpu"
        found = measured_on_cpu(name, options.rounds) if on_cpu else measured("cuda", name, options.rounds)
        first = found["torch, whole logits"]["seconds"]
        print(f"{name}: {tokens:,} tokens of width {width:,}, {classes:,} classes; torch {torch.__version__}")
        for contender, each in found.items():
            if "error" in each:
                print(f"  {contender:28} {each['error']}")
                continue
            print(
                f"  {contender:28} {1e3 * each['seconds']:8.2f} ms {each['seconds'] / first:5.2f} "
                f"{each['bytes'] / 1e6:8.0f} MB  loss {each['loss']:.5f}  gradients {each['gradients_off']:.1e} off"
            )


if __name__ == "__main__":
    main()
