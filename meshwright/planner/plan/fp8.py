"""FP8 or bf16: the step in the other format, and the width from which a linear in FP8 takes less time than in bf16.

| kernel of a linear [K, N] and n tokens  | bytes in bf16          | bytes in FP8                               |
|-----------------------------------------|------------------------|--------------------------------------------|
| y = x W, dx = dy Wᵀ                     | 2 (nK + KN + nN) each  | nK + KN + 2 nN, nN + KN + 2 nK             |
| greatest magnitudes, casts              | -                      | 2 and 3 each of nK, nN and, twice, KN      |
| the same if elements are fused          | -                      | nK, nN; 2 and 3 of KN; 3 of KN             |

The weight gradient is in bf16 in both. If a program fuses elements (Software.fuses_elements), the kernels that make x
and dy write them in e4m3 in addition, and a weight's rows are read once.
"""

from __future__ import annotations

from meshwright.config import Config
from meshwright.config.rules import broken_rules
from meshwright.config.section import with_field
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.timing import Timer

FIELD, FP8, BF16 = "precision.products", "fp8", "stored"
WIDENING = 4
"""Outputs of the linear that is asked about, in inputs: the first one of a feed-forward."""
WIDTHS = range(256, 16384 + 1, 256)


def in_other_format(config: Config, cluster: Cluster) -> tuple[str, Config] | None:
    """Return (`precision.products=...`, the run in bf16 if it is in FP8, or the reverse); None without such a run."""
    if cluster.device.peak_of(FP8, tf32=False) is None or config.precision.dtype != "bf16":
        return None
    products = BF16 if config.precision.in_fp8 else FP8
    variant = with_field(config, FIELD, products)
    return None if broken_rules(variant) else (f"{FIELD}={products}", variant)


def width_sentence(timer: Timer, tokens: int, *, fused: bool) -> str:
    """Say from which width on FP8 pays on a device.

    Args:
        tokens: of a microbatch.
        fused: whether element kernels in a row are one.
    """
    least = None
    for width in reversed(WIDTHS):
        low, half = (seconds_of_linear(timer, tokens, width, dtype, fused=fused) for dtype in (FP8, "bf16"))
        if low >= half:
            break
        least = width
    told = "in none" if least is None else f"from K = {least:,} on"
    return f"FP8 takes less time than bf16 in linears [K, {WIDENING} K] of {tokens:,} tokens {told}."


def seconds_of_linear(timer: Timer, tokens: int, width: int, dtype: str, *, fused: bool) -> float:
    """Return the seconds of the forward product and of the input gradient, with the casts of FP8."""
    outputs = WIDENING * width
    x, y, weight = tokens * width, tokens * outputs, width * outputs
    flops, side = 2.0 * tokens * weight, float(tokens * weight) ** (1 / 3)
    size = 1 if dtype == FP8 else 2
    products = [
        Kernel("product", flops, size * (read + weight) + 2 * written, max(read, written), dtype, side)
        for read, written in ((x, y), (y, x))
    ]

    def moving(touched: int) -> float:
        return timer.kernel_seconds(Kernel("cast", 0.0, touched, touched, "bf16"))

    seconds = sum(map(timer.kernel_seconds, products))
    if dtype == FP8 and fused:  # x and dy by kernels that run anyway, and are launched already
        seconds += moving(2 * weight) + 2 * moving(3 * weight) + moving(x + y) - moving(0)
    elif dtype == FP8:
        seconds += sum(moving(2 * each) + moving(3 * each) for each in (x, y, weight, weight))
    return seconds
