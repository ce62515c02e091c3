"""Memory that other programs do not keep: inputs and weights in FP8, results computed again, layers in host memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from meshwright.compute.model import Chunk
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.config import Config, parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.dispatched import Weighted
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import HostCopy, Kernel, Program
from meshwright.planner.plan.recordings import Recording
from meshwright.planner.plan.software import Software, load_program
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.pipeline.task import TaskKind

TOKENS, HIDDEN, INNER, HEADS = 256, 128, 512, 4
HALF, FLOPS = 2, 2


def run_of(**model: Any) -> Config:
    sizes = {"layers": 4, "hidden": HIDDEN, "heads": HEADS, "feed_forward": INNER, "vocabulary": 512}
    return parse_config({
        "model": {"family": "llama", "positions": TOKENS, **sizes, **model},
        "data": {"sequence": TOKENS},
        "batch": {"global": 2, "micro": 1},
        "precision": {"level": "O2", "dtype": "bf16", "accumulate": "stored"},
    })  # fmt: skip


LATENTS = {
    "family": "deepseek", "query_rank": 64, "key_value_rank": 32, "head_width": 32,
    "rotary_width": 16, "value_width": 32, "experts": {"count": 8, "per_token": 2, "width": 96, "dense_layers": 1},
}  # fmt: skip


def planner(*facts: str, cluster: str = "dgx-b200") -> Planner:
    program = load_program("megatron-core", facts)
    return Planner(program.on(load_cluster(cluster)), program.software)


def layer(config: Config, *facts: str, number: int = 1) -> Recording:
    recordings = planner(*facts).recordings
    ends = recordings.of(config, Chunk(range(0), True, False), ())
    return recordings.of(config, Chunk(range(number, number + 1), False, False), ends.outgoing)


def passes(recording: Recording) -> tuple[Program, Program]:
    """Return the programs of the last microbatch."""
    return recording.programs[TaskKind.FORWARD][-1], recording.programs[TaskKind.BACKWARD][-1]


def freed_in_the_end(recording: Recording) -> int:
    """Return the bytes that forward and backward pass leave together, without storages handed to the neighbours."""
    left: dict[int, int] = {}
    for kind, programs in recording.programs.items():
        for number, size in programs[-1].memory:
            left[number] = left.get(number, 0) + size
        for number in recording.leaving[kind][-1]:
            left.pop(number, None)
    return sum(left.values())


@pytest.mark.parametrize("products, scales", [("fp8", 0), ("mxfp8", 32)])
def test_inputs_of_linears_are_kept_in_fp8(products: str, scales: int) -> None:
    """The inputs of queries, keys and values, and of both linears of the feed-forward: a byte in place of two, and
    MXFP8's scales. Attention keeps the output linear's input in bf16 anyway."""
    wide, low = (layer(run_of(), f"products={products}", f"low_inputs={low}") for low in ("false", "true"))
    elements = TOKENS * (HIDDEN + HIDDEN + INNER)
    spared = elements - (elements // scales if scales else 0)
    assert passes(wide)[0].kept_bytes - passes(low)[0].kept_bytes == spared
    # The backward pass frees the copies, and computes and casts as before.
    assert sum(each.kept_bytes for each in passes(wide)) == sum(each.kept_bytes for each in passes(low))
    assert freed_in_the_end(wide) == freed_in_the_end(low)
    assert passes(wide)[1].events == passes(low)[1].events
    assert low.holds_input  # by the norm


def test_inputs_of_a_router_are_kept_in_bf16() -> None:
    """Rows of experts are kept in FP8; the hidden states, which the router reads, in bf16."""
    config = run_of(experts={"count": 8, "per_token": 2, "width": 96})
    wide, low = (layer(config, "products=fp8", f"low_inputs={low}") for low in ("false", "true"))
    rows = 2 * TOKENS
    assert passes(wide)[0].kept_bytes - passes(low)[0].kept_bytes == TOKENS * HIDDEN + rows * (HIDDEN + 96)


def test_weights_in_fp8_take_the_bytes_of_their_orders() -> None:
    """Hopper multiplies one order of a matrix, MXFP8 scales rows and columns: two orders. Blackwell's FP8: one."""
    hopper, blackwell = (load_cluster(name).device for name in ("dgx-h100", "dgx-b200"))

    def beyond(products: str, held: str | None) -> list[float]:
        facts = {"products": products, "low_weights": held}
        return [Software.model_validate(facts).low_weight(device) for device in (hopper, blackwell)]

    assert beyond("fp8", "alone") == [0, -1]
    assert beyond("fp8", "copies") == [2, 1]
    assert beyond("mxfp8", "alone") == [1 / 16, 1 / 16]
    assert beyond("fp8", None) == beyond("stored", "alone") == [0, 0]


@pytest.mark.parametrize("held, each", [("alone", -1), ("copies", 1)])
def test_weights_of_layers_alone_are_in_fp8(held: str, each: int) -> None:
    """The matrices of four layers; not tables, norms."""
    config = run_of()
    plain, low = (
        planner("products=fp8", *facts).predict(config).fullest for facts in ([], [f"low_weights={held}"])
    )  # fmt: skip
    assert low.weights - plain.weights == each * 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert (low.gradients, low.states) == (plain.gradients, plain.states)


def flops(program: Program) -> float:
    return sum(event.times * event.flops for event in program.events if isinstance(event, Kernel))


def touched(program: Program) -> int:
    return sum(event.times * event.touched_bytes for event in program.events if isinstance(event, Kernel))


def test_widened_latents_are_computed_again() -> None:
    """Queries, keys and values with the width of queries are not kept; the operand shared by all heads is. Two products
    are computed twice."""
    kept, again = (layer(run_of(**LATENTS), *facts, number=2) for facts in ([], ["recomputed=mla_up_proj"]))
    spared = TOKENS * (3 * HEADS * 48 - 16) * HALF
    assert passes(kept)[0].kept_bytes - passes(again)[0].kept_bytes == spared
    products = FLOPS * TOKENS * HEADS * (64 * 48 + 32 * (32 + 32))
    assert flops(passes(again)[1]) - flops(passes(kept)[1]) == products
    assert passes(again)[0].events == passes(kept)[0].events
    assert freed_in_the_end(again) == freed_in_the_end(kept)


def test_activations_of_experts_are_computed_again() -> None:
    config = run_of(experts={"count": 8, "per_token": 2, "width": 96})
    kept, again = (layer(config, *facts) for facts in ([], ["recomputed=moe_act"]))
    assert passes(kept)[0].kept_bytes - passes(again)[0].kept_bytes == 2 * TOKENS * 96 * HALF
    assert flops(passes(again)[1]) == flops(passes(kept)[1])
    read, written = 2 * TOKENS * (2 * 96 + 1) * HALF, 2 * TOKENS * 96 * HALF
    assert touched(passes(again)[1]) - touched(passes(kept)[1]) == read + written
    assert freed_in_the_end(again) == freed_in_the_end(kept)


def test_norms_before_experts_are_computed_again() -> None:
    """A norm before another linear is a part of the linear, and stays."""
    experts = run_of(experts={"count": 8, "per_token": 2, "width": 96})
    spared = []
    for config in (run_of(), experts):
        kept, again = (passes(layer(config, *facts))[0] for facts in ([], ["recomputed=layernorm"]))
        spared.append(kept.kept_bytes - again.kept_bytes)
    assert spared == [0, TOKENS * HIDDEN * HALF]


def test_a_layer_in_host_memory_keeps_nothing_on_the_device() -> None:
    config = run_of()
    here, away = (layer(config, *facts) for facts in ([], ["host_layers=2"]))
    forward, backward = passes(away)
    moved = [event for program in (forward, backward) for event in program.events if isinstance(event, HostCopy)]
    assert [each.to_host for each in moved] == [True, False]
    # The output is handed on; the input, which the norm keeps, is moved too.
    output = TOKENS * HIDDEN * HALF
    assert forward.kept_bytes == output
    assert forward.host_bytes == passes(here)[0].kept_bytes - output + output == -backward.host_bytes
    assert not away.holds_input
    assert freed_in_the_end(away) == freed_in_the_end(here)
    # The copies run during the pass, with an equal layer's tensors on the device.
    assert forward.peak_bytes == passes(here)[0].peak_bytes + forward.host_bytes
    # A layer after the first two is as before.
    assert layer(config, "host_layers=2", number=3) == layer(config, number=3)


def test_layers_in_host_memory_are_in_a_plan_of_memory() -> None:
    config = run_of()
    here, away = (planner(*facts).predict(config).fullest for facts in ([], ["host_layers=3"]))
    assert away.activations < here.activations
    assert away.host > here.host


def test_values_with_other_strides_are_copied() -> None:
    """A layer keeps the copied values, not the whole result of the linear of queries, keys and values."""
    here, copied = (passes(layer(run_of(), f"copies_values={copies}"))[0] for copies in ("false", "true"))
    assert here.kept_bytes - copied.kept_bytes == TOKENS * 2 * HIDDEN * HALF


def test_weighted_activations_have_exact_gradients() -> None:
    shape = ExpertsShape(8, 6, 2, 1, True, 0.0, None, Initial(0.02), Initial(0.02))
    x, weights = (torch.randn(*sizes, dtype=torch.float64, requires_grad=True) for sizes in ((5, 2, 6), (5, 1)))
    dy = torch.randn(5, 6, dtype=torch.float64)
    expected = torch.autograd.grad(shape.activated(x) * weights, (x, weights), dy)
    for found, own in zip(
        torch.autograd.grad(Weighted.apply(x, weights, shape), (x, weights), dy), expected, strict=True
    ):
        torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fact", ["low_inputs=true", "low_weights=alone", "recomputed=moe_act", "host_layers=2"])
def test_our_own_runs_refuse_the_facts(fact: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--fact={fact} is of tensors that other programs keep")):
        load_program("meshwright", ["products=fp8", fact])


def test_weights_in_fp8_need_products_in_fp8() -> None:
    with pytest.raises(ConfigError, match="low_weights=alone has no effect"):
        load_program("megatron-core", ["low_weights=alone"])


def test_a_program_that_builds_parts_leaves_no_pieces_of_the_whole_model() -> None:
    """The first segments of a whole model's weights are larger than one part's segments."""
    config = parse_config({
        "model": {"family": "gpt2", "layers": 8, "hidden": 2048, "heads": 16, "vocabulary": 512, "positions": TOKENS},
        "data": {"sequence": TOKENS},
        "batch": {"global": 8, "micro": 1},
        "layout": {"data": {"size": 8, "sync": "zero3"}},
        "memory": {"recompute": 1},
        "precision": {"level": "O2", "dtype": "bf16"},
    })  # fmt: skip
    held = []
    for builds in ("whole", "parts"):
        program = load_program("llm-foundry-2023", [f"builds={builds}"])
        held.append(Planner(program.on(load_cluster("dgx-h100")), program.software).predict(config).fullest)
    whole, parts = held
    assert whole.allocated == parts.allocated
    assert whole.cached > parts.cached + 100e6, (whole.text, parts.text)
