"""Conversion of points to the curves and rates of a cluster file (plan/cluster.py).

A call's time is decomposed in the terms that plan/timing.py adds up: launch, then bytes, then the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from meshwright.compute.precision import DTYPES
from meshwright.planner.calibrate.kernels import product_shapes
from meshwright.planner.calibrate.timing import CPU_BATCH_FLOPS, Points
from meshwright.planner.plan.cluster import Curve, Device, Level, Links, Measured, interpolated

LEAST_PART = 1 / 50
"""Lower bound on the share of a call's time that is left after subtracting known terms. For the smallest calls the
difference is noise."""

SPECIAL_BYTES = 8
"""Bytes that a special or random kernel reads and writes per element."""

DIGITS = 4


def merged(ranks: Sequence[Mapping[str, Points]]) -> dict[str, Points]:
    """Return the medians over the ranks, point by point."""
    first = ranks[0]
    return {
        name: [
            tuple(map(statistics.median, zip(*(of[name][index] for of in ranks), strict=True)))
            for index in range(len(points))
        ]
        for name, points in first.items()
    }


def fit_device(device_type: Literal["cpu", "cuda"], memory: int, points: Mapping[str, Points]) -> Device:
    """Fit a device to the points of measure_device.

    The efficiency curve is fitted to the dtype with the most points. Other dtypes share this curve, with peaks that
    yield the measured rates.
    """
    # A GPU's host issues kernels while the device runs others, so the time to issue is no part of a kernel's time.
    issue, launch = (
        (points["launch"][0][1], points["graph"][0][1]) if device_type == "cuda" else (0.0, points["launch"][0][1])
    )
    bandwidth = tuple(
        (size, rounded(size / max(seconds - launch, seconds * LEAST_PART))) for size, seconds in points["stream"]
    )
    names = [name.removeprefix("product ") for name in points if name.startswith("product ")]
    products = {name: _rates(device_type, name, points[f"product {name}"], bandwidth) for name in names}
    curve = max(products, key=lambda name: len(products[name]))
    peak = max(rate for _, rate in products[curve])
    efficiency = tuple((side, rounded(rate / peak)) for side, rate in products[curve])
    # Other dtypes have one or few points: the same curve is assumed, below another peak.
    peaks = {name: rounded(rates[-1][1] / interpolated(efficiency, rates[-1][0])) for name, rates in products.items()}
    attention = [flops / seconds / peak for flops, seconds in points["attention"]]
    norms: dict[str, Any] = {}
    if points["norm"]:
        shares = [min(1.0, size / seconds / interpolated(bandwidth, size)) for size, seconds in points["norm"][:2]]
        ((rows, seconds),) = points["norm"][2:]
        norms = {"norms": tuple(map(rounded, shares)), "norm_row": rounded(seconds / rows)}
    # timing.py takes the longer of an element's time and its bytes'.
    elements = {
        name: rounded(points[name][0][1] / points[name][0][0]) for name in ("mixed", "strided") if points.get(name)
    }
    if points.get("sum"):
        ((count, seconds),) = points["sum"]
        norms["sums"] = rounded(min(1.0, 2 * count / seconds / interpolated(bandwidth, 2 * count)))
    for name in ("special", "random"):  # beyond launch and bytes: the mean over the kernels of a kind
        beyond = []
        for count, seconds in points[name]:
            touched = count * SPECIAL_BYTES
            # On a CPU `tiny` instead of `launch`: these kernels run outside of autograd, which `launch` includes.
            rest = seconds - (launch if issue else points["tiny"][0][1]) - touched / interpolated(bandwidth, touched)
            beyond.append(max(0.0, rest / count))
        elements[name] = rounded(statistics.mean(beyond))
    return Device.model_validate(
        {
            "kind": device_type,
            "capability": tuple(map(int, points["capability"][0])) if device_type == "cuda" else None,
            "memory": memory,
            "reserved": int(points["reserved"][0][0]),
            "staged": int(points["staged"][0][0]),
            "peak": peaks | {curve: rounded(peak)},
            "efficiency": efficiency,
            "attention": rounded(min(1.0, statistics.mean(attention))) if attention else None,
            "bandwidth": bandwidth,
            **norms,
            "launch": rounded(launch),
            "issue": rounded(issue),
            "elements": elements,
            "host_link": rounded(points["host link"][0][0] / points["host link"][0][1]),
            "disk": rounded(points["disk"][0][0] / points["disk"][0][1]),
        }
    )


def _rates(device_type: Literal["cpu", "cuda"], dtype: str, points: Points, bandwidth: Curve) -> Points:
    """Return (side, flops per second) of products; for a CPU without the time that memory takes."""
    rates = []
    for side, seconds in points:
        computing = seconds
        if device_type == "cpu":
            # A core either loads operands or multiplies, so memory time is subtracted here and added again by
            # plan/timing.py. A GPU loads the next tiles during the product, so the longer of both times counts.
            batch, shapes = max(1, CPU_BATCH_FLOPS // (2 * int(side) ** 3)), product_shapes(int(side))
            touched = [batch * (m * n + m * k + n * k) * DTYPES[dtype].itemsize for m, n, k in shapes]
            memory = statistics.mean(size / interpolated(bandwidth, size) for size in touched) / batch
            computing = max(seconds - memory, seconds * LEAST_PART)
        rates.append((side, 2 * side**3 / computing))
    return rates


def fit_links(measured: Mapping[int, Mapping[str, Points]], overlaps: float) -> Links:
    """Fit links to the points of measure_links, by number of ranks. The only level is fitted to sends."""
    fewest = min(measured)
    rows = [
        Measured(verb=verb, ranks=ranks, points=tuple((size, rounded(seconds)) for size, seconds in points))
        for ranks, verbs in sorted(measured.items())
        for verb, points in verbs.items()
    ]
    return Links(levels=(fit_level(measured[fewest]["send"]),), measured=tuple(rows), overlaps=rounded(overlaps))


def fit_level(points: Points) -> Level:
    """Fit seconds = latency + bytes / bandwidth with least squares of relative errors; neither term is negative."""
    # With absolute errors the largest payload alone would decide the line.
    weights = [1 / seconds**2 for _, seconds in points]
    sums = [
        sum(w * size**power * seconds**degree for w, (size, seconds) in zip(weights, points, strict=True))
        for power, degree in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    ]
    weight, x, xx, y, xy = sums
    divisor = weight * xx - x * x
    latency, slope = ((y * xx - x * xy) / divisor, (weight * xy - x * y) / divisor) if divisor > 0 else (0.0, 0.0)
    if latency < 0 or slope <= 0:
        # A negative latency or slope is noise: then a line through the origin, with bandwidth only.
        latency, slope = 0.0, xy / xx
    return Level(latency_seconds=rounded(latency), bandwidth_bytes_per_second=rounded(1 / slope))


def rounded(value: float) -> float:
    """Round to DIGITS significant digits, the precision of a measurement."""
    return float(f"{value:.{DIGITS}g}")
