"""Traces of module calls: equal twice, in every family, and a planted mistake in an operation is named."""

from __future__ import annotations

import pytest
import torch

from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.call_trace import BACKWARD, FORWARD, ROOT, WEIGHTS, Call, first_parted, traced_passes
from meshwright.training.parts import build
from tests.oracle.batches import BATCHES
from tests.oracle.tensor import MODELS, config_for


def traced(model: str) -> tuple[str, ...]:
    config = config_for(model, {"kind": "none"}, batch={"global": 6, "micro": 6})
    parts = build(config, solo_mesh(torch.device("cpu"), config.grid.names))
    return traced_passes(parts, BATCHES[config.model.family](config, 0), 0)


@pytest.mark.parametrize("model", MODELS)
def test_a_familys_trace_is_equal_twice_and_has_all_passes(model: str) -> None:
    lines = traced(model)
    assert first_parted(lines, traced(model)) == ""
    calls = [Call.of(line) for line in lines]
    config = config_for(model, {"kind": "none"})
    parts = build(config, solo_mesh(torch.device("cpu"), config.grid.names))
    forwards, backwards = ({call.path for call in calls if call.direction == way} for way in (FORWARD, BACKWARD))
    assert ROOT in forwards
    assert forwards == backwards
    assert {call.path for call in calls if call.direction == WEIGHTS} == {
        name for name, _ in parts.model.named_parameters()
    }


FORWARD_LINES = (
    "forward blocks.0.attention Attention 0000000000000000 1111111111111111",
    "forward blocks.0 Block 0000000000000000 2222222222222222",
    "forward model GPT 0000000000000000 3333333333333333",
)


@pytest.mark.parametrize(
    "index, before, now, told",
    [
        (1, "2222", "2223", "forward pass, blocks.0 (Block): outputs differ, inputs are equal"),
        (
            0, "0000000000000000 1", "0000000000000001 1",
            "forward pass, blocks.0 (Block), at blocks.0.attention (Attention): inputs differ, and no earlier call "
            "does: an operation between modules",
        ),
        (
            1, "0000000000000000 2", "0000000000000001 2",
            "forward pass, model (GPT), at blocks.0 (Block): inputs differ, and no earlier call does: an operation "
            "between modules",
        ),
        (1, "blocks.0 Block", "blocks.1 Block", "forward pass, blocks.0 (Block) was called, and here blocks.1 (Block)"),
    ],
)  # fmt: skip
def test_the_first_call_with_other_bits_is_named(index: int, before: str, now: str, told: str) -> None:
    here = [*FORWARD_LINES]
    here[index] = here[index].replace(before, now)
    assert here[index] != FORWARD_LINES[index]
    assert first_parted(FORWARD_LINES, here) == told
    assert first_parted(FORWARD_LINES, FORWARD_LINES) == ""
    assert first_parted(FORWARD_LINES, FORWARD_LINES[:2]) == "3 calls were certified, here are 2"


def test_a_line_is_read_as_it_was_written() -> None:
    for line in FORWARD_LINES:
        assert Call.of(line).line == line
