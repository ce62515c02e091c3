"""Drawn layouts of every axis end with the bits of one device: a covering set, and 500 with --long."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from meshwright.compute.parameters import rounding
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.mesh import Mesh
from tests.compute.bits.runs import ended
from tests.fuzz.__main__ import COVERING_BITS
from tests.fuzz.bits import AXES, KINDS, ROUNDED, config_of, differing, numbered, on_one_device, small_of

COVERING = [json.loads(line) for line in COVERING_BITS.read_text().splitlines()]
OF_ROUNDED = ("gpt2", "llama", "bert", "t5", "delta nets", "experts")
"""Runs with states rounded at random without --long: rounding is by elements, not by layers."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long)
        if case["precision"] in ROUNDED and case["run"] not in OF_ROUNDED
        else case
        for case in COVERING
    ],
    ids=lambda case: case["run"],
)
def test_a_covering_set_of_layouts_ends_with_the_bits_of_one_device(case) -> None:
    kind = case["run"], case["precision"]
    # The second step reads the states that the first step has rounded.
    assert differing(kind, small_of(kind, case["words"], steps=1 + (kind[1] in ROUNDED))) == []


@pytest.mark.long
@pytest.mark.parametrize("number", range(500))
def test_500_drawn_layouts_of_all_axes_end_with_the_bits_of_one_device(number: int) -> None:
    kind, config = numbered(number)
    assert differing(kind, config, **({"transport": "torch"} if number % 10 == 9 else {})) == []


def test_the_covering_set_has_every_value_of_every_axis() -> None:
    found = {word for case in COVERING for word in case["words"]}
    assert {word for values in AXES.values() for value in values for word in value} <= found
    assert {(case["run"], case["precision"]) for case in COVERING} >= {kind for kind in KINDS if kind[1] in ROUNDED}


@pytest.mark.parametrize("precision", ROUNDED)
def test_bits_that_a_layout_draws_by_itself_are_seen(precision: str) -> None:
    """The planted random bits count the elements of a rank."""

    def plant(mesh: Mesh) -> None:
        def own(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
            return torch.arange(box.num_elements, dtype=torch.int32, device=device)

        rounding.global_index = own  # type: ignore[assignment]

    kind = "gpt2", precision
    config = config_of(kind, ("layout.tensor=megatron", "layout.tensor.size=2"))
    found = ended(config, plant, forked=True).differing(on_one_device(kind, config.steps))
    assert any("exp_avg" in name for name in found), found
