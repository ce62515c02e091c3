"""Element-wise work by torch's operations, Meshwright's and Inductor's: python -m benchmarks.islands [--rounds N]

Each is a forward and a backward pass in float32 on one CPU thread: the loss of 256 tokens over 8,192 classes (the three
products have width 8 and hardly count), also with smoothed labels (on a CPU this loss alone is compiled); GELU of
[1024, 1024]; a residual sum with a layer norm of [1024, 1024]. Contenders take turns; milliseconds of processor time
are the median of the rounds. Compiling needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.tensor.cross_entropy import Classes, chunked_loss
from meshwright.compute.tensor.gelu import gelu
from meshwright.compute.tensor.islands import Islands, compiled_islands
from meshwright.ranks.comm import RankGroup, SoloComm

TOKENS, CLASSES, WIDTH, SIDE = 256, 8192, 8, 1024
Contenders = dict[str, Callable[[], Tensor]]


def losses(islands: Islands) -> Contenders:
    h = torch.randn(TOKENS, WIDTH, requires_grad=True)
    table = torch.randn(CLASSES, WIDTH, requires_grad=True)
    labels = torch.randint(CLASSES, (TOKENS,))
    alone = SoloComm(RankGroup("", (0,), 0))

    def ours(smoothing: float, compiled: Islands | None) -> Callable[[], Tensor]:
        classes = Classes(CLASSES, alone, smoothing, islands=compiled)
        return lambda: chunked_loss(h, table, None, labels, classes, 1 / TOKENS)

    return {
        "torch": lambda: F.cross_entropy(h @ table.t(), labels),
        "ours": ours(0.0, None),
        "torch, smoothed": lambda: F.cross_entropy(h @ table.t(), labels, label_smoothing=0.1),
        "ours, smoothed": ours(0.1, None),
        "islands, smoothed": ours(0.1, islands),
    }


def gelus(islands: Islands) -> Contenders:
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    return {
        "torch": lambda: F.gelu(x, approximate="tanh"),
        "ours": lambda: gelu(x),
        "islands": lambda: gelu(x, islands),
    }


def norms() -> Contenders:
    x, h, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((SIDE, SIDE), (SIDE, SIDE), SIDE, SIDE))

    def residual_norm(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + h, (SIDE,), weight, bias)

    compiled = torch.compile(residual_norm, fullgraph=True, options={"compile_threads": 1})
    return {
        "torch": lambda: residual_norm(x, h, weight, bias),
        "compiled": lambda: compiled(x, h, weight, bias),
    }


def seconds_of(call: Callable[[], Tensor]) -> float:
    """Return processor seconds of a forward and a backward pass."""
    begin = time.process_time()
    out = call()
    out.backward(torch.ones_like(out))
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    islands = compiled_islands()
    for name, contenders in {"loss": losses(islands), "GELU": gelus(islands), "residual + norm": norms()}.items():
        for call in contenders.values():
            seconds_of(call)  # compiles
        times: dict[str, list[float]] = {who: [] for who in contenders}
        for _ in range(rounds):
            for who, call in contenders.items():
                times[who].append(seconds_of(call))
        shown = ", ".join(f"{who} {1e3 * statistics.median(seconds):.2f} ms" for who, seconds in times.items())
        print(f"{name}, forward and backward: {shown}", flush=True)


if __name__ == "__main__":
    main()
