"""Kernels take the roofline's seconds, by hand."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.timing import Timer
from meshwright.ranks.errors import ConfigError
from tests.planner.plan.clusters import FLAT, cluster

PRODUCT = Kernel("product", 2e9, 10**6, 10**6, "fp16", 1000)
LAUNCH = 1e-5


def seconds(kernel: Kernel, ranks: int = 1) -> float:
    return Timer(FLAT, ranks).kernel_seconds(kernel)


def test_product_is_bound_by_flops_or_by_bytes() -> None:
    assert seconds(PRODUCT) == pytest.approx(2e9 / (1e14 * 0.5) + LAUNCH)
    assert seconds(PRODUCT._replace(dtype="float32")) == pytest.approx(2e9 / (1e13 * 0.5) + LAUNCH)
    assert seconds(PRODUCT._replace(touched_bytes=10**8)) == pytest.approx(1e8 / 1e12 + LAUNCH)


def test_a_cpu_moves_what_it_multiplies_by_itself() -> None:
    device = FLAT.device.model_copy(update={"kind": "cpu"})
    timer = Timer(FLAT.model_copy(update={"device": device}), 1)
    product = PRODUCT._replace(touched_bytes=10**8)
    assert timer.kernel_seconds(product) == pytest.approx(2e9 / (1e14 * 0.5) + 1e8 / 1e12 + LAUNCH)


def test_float32_products_take_tensor_cores_where_a_run_and_its_devices_do() -> None:
    product, device = PRODUCT._replace(dtype="float32"), FLAT.device
    peak = {**device.peak_flops_per_second, "tf32": 5e13}
    cores = FLAT.model_copy(update={"device": device.model_copy(update={"peak_flops_per_second": peak})})
    assert Timer(cores, 1, tf32=True).kernel_seconds(product) == pytest.approx(2e9 / (5e13 * 0.5) + LAUNCH)
    assert Timer(cores, 1).kernel_seconds(product) == Timer(FLAT, 1, tf32=True).kernel_seconds(product)
    assert Timer(cores, 1, tf32=True).kernel_seconds(PRODUCT) == seconds(PRODUCT)


def test_efficiency_lies_between_points_over_the_logarithm_of_the_side() -> None:
    middle = PRODUCT._replace(side=1000**0.5 * 100**0.5)
    assert seconds(middle) == pytest.approx(2e9 / (1e14 * 0.3) + LAUNCH)


def test_sides_beyond_the_curve_take_its_ends() -> None:
    assert seconds(PRODUCT._replace(side=10)) == seconds(PRODUCT._replace(side=100))
    assert seconds(PRODUCT._replace(side=9000)) == seconds(PRODUCT)


def test_fused_attention_has_a_part_of_the_peak() -> None:
    attention = Kernel("attention", 1e9, 10**6, 10**6, "fp16")
    assert seconds(attention) == pytest.approx(1e9 / (1e14 * 0.25) + LAUNCH)


def test_others_go_at_the_pace_of_the_memory_and_dear_elements_slower() -> None:
    plain = Kernel("element", 0.0, 10**8, 10**7, "fp16")
    assert seconds(plain) == pytest.approx(1e8 / 1e12 + LAUNCH)
    assert seconds(plain._replace(kind="special")) == pytest.approx(1e8 / 1e12 + 1e-9 * 1e7 + LAUNCH)
    assert seconds(plain._replace(kind="random")) == seconds(plain)  # the device has no pace of random numbers


def test_kernels_that_load_no_vectors_have_paces_of_their_own() -> None:
    """An element of a cast has a least time, a sum of rows a share of the memory's pace."""
    device = FLAT.device.model_copy(update={"seconds_per_element": {"mixed": 1e-10, "strided": 1e-12}, "sums": 0.5})
    timer = Timer(FLAT.model_copy(update={"device": device}), 1)
    plain = Kernel("element", 0.0, 10**8, 10**7, "fp16")
    for kind, work in (("mixed", 1e-10 * 1e7), ("strided", 1e8 / 1e12), ("sum", 1e8 / 0.5e12), ("element", 1e-4)):
        assert timer.kernel_seconds(plain._replace(kind=kind)) == pytest.approx(work + LAUNCH)  # type: ignore[arg-type]


def test_a_gpus_softmax_of_long_rows_reads_them_three_times() -> None:
    softmax = Kernel("special", 0.0, 10**8, 0, "float32", 12288, operation="_softmax")
    assert seconds(softmax) == pytest.approx(1e8 / 1e12 + LAUNCH)
    assert seconds(softmax._replace(side=12289)) == pytest.approx(2e8 / 1e12 + LAUNCH)


def test_attention_has_kernels_beside_its_backward_pass() -> None:
    attention = Kernel("attention", 1e9, 10**6, 10**7, "fp16", operation="a_fused_attention")
    backward = attention._replace(operation="a_fused_attention_backward")
    assert seconds(backward) == seconds(attention)  # a share of all kernels, as calibrate measures
    device = FLAT.device.model_copy(update={"attention_beside_bytes": 10})
    timer = Timer(FLAT.model_copy(update={"device": device}), 1)
    assert timer.kernel_seconds(attention) == seconds(attention)
    assert timer.kernel_seconds(backward) == pytest.approx(seconds(attention) + 10 * 1e7 / 1e12)
    single = backward._replace(dtype="float32")
    assert timer.kernel_seconds(single) == seconds(single)


def test_products_float32_attention_and_tf32_may_have_figures_of_their_own() -> None:
    device = FLAT.device
    peak = {**device.peak_flops_per_second, "tf32": 5e13}
    facts = {"tf32_efficiency": ((1.0, 0.1),), "float32_attention_efficiency": ((1.0, 0.2),)}
    own = device.model_copy(update={"peak_flops_per_second": peak, "product_launch_seconds": 3e-5, **facts})
    timer = Timer(FLAT.model_copy(update={"device": own}), 1, tf32=True)
    assert timer.kernel_seconds(PRODUCT) == pytest.approx(seconds(PRODUCT) - LAUNCH + 3e-5)
    assert timer.kernel_seconds(PRODUCT._replace(dtype="float32")) == pytest.approx(2e9 / (5e13 * 0.1) + 3e-5)
    attention = Kernel("attention", 1e9, 10**6, 10**6, "float32")
    assert timer.kernel_seconds(attention) == pytest.approx(1e9 / (1e13 * 0.2) + LAUNCH)


def test_small_kernels_have_the_small_bandwidth() -> None:
    assert seconds(Kernel("element", 0.0, 10**4, 10**4, "int64")) == pytest.approx(1e4 / 1e11 + LAUNCH)
    assert seconds(Kernel("element", 0.0, 0, 0, "int64")) == LAUNCH


def test_ranks_take_turns_on_cores() -> None:
    shared = cluster({"latency": 0, "bandwidth": 1}, cores=2)
    alone = Timer(shared, 2).kernel_seconds(PRODUCT)
    assert alone == seconds(PRODUCT, 4)  # each has a device of its own there
    assert Timer(shared, 1).kernel_seconds(PRODUCT) == alone
    assert Timer(shared, 3).kernel_seconds(PRODUCT) == pytest.approx(1.5 * alone)


def test_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"precision\.dtype=bf16 .*made-up.*; valid: float32, fp16"):
        seconds(PRODUCT._replace(dtype="bf16"))


def test_no_fused_attention_where_there_is_none() -> None:
    device = FLAT.device.model_copy(update={"attention_efficiency": None})
    with pytest.raises(AssertionError, match="made-up has no fused attention"):
        Timer(FLAT.model_copy(update={"device": device}), 1).kernel_seconds(Kernel("attention", 1e9, 1, 1, "fp16"))


def test_turns_as_they_were_measured_but_no_less_than_the_share_of_a_core() -> None:
    shared = FLAT.model_copy(update={"cores": 2, "turns": ((2.0, 1.2), (4.0, 3.0))})
    assert [shared.oversubscription(ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([1.0, 1.2, 3.0, 6.0])
    lucky = shared.model_copy(update={"turns": ((4.0, 1.5),)})
    assert [lucky.oversubscription(ranks) for ranks in (2, 4)] == pytest.approx([1.25, 2.0])
    assert shared.model_copy(update={"cores": None}).oversubscription(4) == 1
