"""A fit to a made-up machine's points returns the figures of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.planner.calibrate.fit import fit_device, fit_level, fit_links, merged
from meshwright.planner.calibrate.kernels import _norms
from meshwright.planner.calibrate.timing import CallTimer, Points, effort_of
from meshwright.planner.plan.cluster import interpolated

PAYLOADS = (2**10, 2**14, 2**18, 2**22)


def line(latency: float, bandwidth: float) -> Points:
    return [(size, latency + size / bandwidth) for size in PAYLOADS]


def test_a_line_is_found_again() -> None:
    level = fit_level(line(20e-6, 3e9))
    assert level.latency_seconds == pytest.approx(20e-6, rel=1e-3)
    assert level.bandwidth_bytes_per_second == pytest.approx(3e9, rel=1e-3)


def test_small_payloads_count_as_much_as_large_ones() -> None:
    """10 % more time for the largest payload moves the fitted latency, a thousandth of this time, by at most 10 %."""
    points = line(1e-6, 4e9)
    points[-1] = (points[-1][0], points[-1][1] * 1.1)
    assert fit_level(points).latency_seconds == pytest.approx(1e-6, rel=0.1)


@pytest.mark.parametrize("points", [[(1024, 2e-5), (4096, 1e-5)], [(1024, 1e-6), (4096, 8e-6)], [(1024, 1e-5)]])
def test_no_latency_and_no_bandwidth_below_zero(points: Points) -> None:
    level = fit_level(points)
    assert level.latency_seconds >= 0
    assert 0 < level.bandwidth_bytes_per_second < 1e12


def test_ranks_are_merged_by_their_medians() -> None:
    ranks = [{"stream": [(8, seconds), (64, 10 * seconds)]} for seconds in (1.0, 9.0, 2.0)]
    assert merged(ranks) == {"stream": [(8, 2.0), (64, 20.0)]}


LAUNCH, TINY, PEAK, BANDWIDTH = 4e-6, 1e-6, 5e10, 2e10
EFFICIENCY = {64: 0.25, 256: 1.0, 1024: 0.8}


def product_seconds(side: int, rate: float, element_bytes: int) -> float:
    """Return the mean seconds of the products [s, s] and [s, s], [4s, s/2] and [s/2, s/2], [2s, 2s] and [2s, s/4] at
    `rate`. Operands and results pass through the memory."""
    touched = (3 + 4.25 + 5) / 3 * side**2 * element_bytes
    return 2 * side**3 / rate + touched / BANDWIDTH


def device_points() -> dict[str, Points]:
    elements = 2**18
    return {
        "launch": [(1, LAUNCH)],
        "tiny": [(1, TINY)],
        "reserved": [(3e8, 0.0)],
        "staged": [(8e7, 0.0)],
        "product float32": [(side, product_seconds(side, PEAK * part, 4)) for side, part in EFFICIENCY.items()],
        "product float64": [(256, product_seconds(256, 2.5e10, 8))],
        "product bf16": [(1024, product_seconds(1024, 0.8 * 1e11, 2))],
        "attention": [(1e9, 1e9 / (0.5 * PEAK)), (4e9, 4e9 / (0.6 * PEAK))],
        "norm": [],
        "stream": [(size, LAUNCH + size / BANDWIDTH) for size in (2**12, 2**16, 2**24)],
        "special": [(elements, TINY + 8 * elements / BANDWIDTH + elements * 1e-9)],
        "random": [(elements, TINY + 8 * elements / BANDWIDTH + elements * 7e-9)],
        "host link": [(1e8, 0.02)],
        "disk": [(2e8, 0.4)],
    }


def test_a_device_is_found_again() -> None:
    device = fit_device("cpu", 2**30, device_points())
    assert device.peak_flops_per_second == {"float32": 5e10, "float64": 2.5e10, "bf16": pytest.approx(1e11, rel=1e-3)}
    assert dict(device.efficiency) == EFFICIENCY
    assert dict(device.attention_efficiency) == {1.0: pytest.approx(0.55, rel=1e-3)}
    assert [rate for _, rate in device.bandwidth_bytes_per_second] == pytest.approx([BANDWIDTH] * 3, rel=1e-3)
    assert device.launch_seconds == LAUNCH
    assert device.seconds_per_element == {
        "special": pytest.approx(1e-9, rel=1e-2),
        "random": pytest.approx(7e-9, rel=1e-2),
    }
    assert (device.host_link_bytes_per_second, device.disk_bytes_per_second, device.reserved_bytes) == (5e9, 5e8, 3e8)


def test_what_a_gpu_takes_has_no_part_of_its_hosts() -> None:
    """The host's 12 us to issue a kernel are not subtracted from products' times: once this gave float64 twice the
    peak."""
    issue, launch, elements = 12e-6, 2e-6, 2**26
    points = device_points() | {
        "launch": [(1, issue)],
        "graph": [(1, launch)],
        "capability": [(9.0, 0.0)],
        "tiny": [(1, issue / 2)],
        "product bf16": [(side, 2 * side**3 / (7e14 * part)) for side, part in EFFICIENCY.items()],
        "product float64": [(1024, 2 * 1024**3 / (0.8 * 6e13))],
        "norm": [(2**28, 2**28 / 1e12), (2**28, 2**28 / 2e12), (2**16, 2**16 * 4e-9)],
        "stream": [(2**12, issue), (2**30, launch + 2**30 / 3e12)],
        "special": [(elements, launch + 8 * elements / 3e12 + elements * 1e-12)],
        "mixed": [(elements, elements * 3e-12)],
        "strided": [(elements, elements * 4e-12)],
        "sum": [(2**28, 2**29 / 1e12)],
    }
    del points["product float32"]
    device = fit_device("cuda", 2**36, points)
    assert (device.issue_seconds, device.launch_seconds) == (issue, launch)
    assert device.capability == (9, 0)
    assert device.peak_flops_per_second == {"bf16": 7e14, "float64": pytest.approx(6e13, rel=1e-3)}
    assert device.bandwidth_bytes_per_second[-1] == (2**30, pytest.approx(3e12, rel=1e-3))
    assert device.seconds_per_element["special"] == pytest.approx(1e-12, rel=0.02)
    at = interpolated(device.bandwidth_bytes_per_second, 2**28)
    assert device.norms == pytest.approx((1e12 / at, 2e12 / at), rel=1e-3)
    assert device.norm_row_seconds == pytest.approx(4e-9, rel=1e-3)
    paces = [device.seconds_per_element[name] for name in ("mixed", "strided")]
    assert paces == pytest.approx([3e-12, 4e-12], rel=1e-3)
    assert device.sums == pytest.approx(1e12 / interpolated(device.bandwidth_bytes_per_second, 2**29), rel=1e-3)


def test_a_norms_three_kernels_are_timed_one_by_one() -> None:
    """The test times a norm's kernels on this CPU; calibrate times these on a GPU alone."""
    timer = CallTimer(torch.device("cpu"), 0.001, lambda: None, 2**20)
    effort = replace(effort_of("cpu", quick=True), special_elements=2**14)
    (forward, written), (back, taken), (rows, summed) = _norms(effort, timer, torch.float32)
    assert (forward, back, rows) == (2 * 2**16, 3 * 2**16, 16)
    assert min(written, taken, summed) > 0


def test_kernels_that_are_lost_in_their_launch_have_a_bandwidth_all_the_same() -> None:
    points = device_points() | {"stream": [(64, 0.9 * LAUNCH), (2**24, LAUNCH + 2**24 / BANDWIDTH)]}
    assert all(rate > 0 for _, rate in fit_device("cpu", 2**30, points).bandwidth_bytes_per_second)


def test_a_machine_without_fused_attention_says_so() -> None:
    assert fit_device("cpu", 2**30, device_points() | {"attention": []}).attention_efficiency is None


def test_links_keep_what_was_timed() -> None:
    links = fit_links({4: {"send": line(9e-6, 1e9)}, 2: {"send": line(5e-6, 2e9), "all_reduce": line(7e-6, 1e9)}}, 0.25)
    assert links.overlaps == 0.25
    assert [(row.verb, row.ranks) for row in links.measured] == [("send", 2), ("all_reduce", 2), ("send", 4)]
    assert interpolated(links.measured[1].points, 2**18) == pytest.approx(7e-6 + 2**18 / 1e9, rel=1e-3)
    assert links.levels[0].bandwidth_bytes_per_second == pytest.approx(2e9, rel=1e-3)
