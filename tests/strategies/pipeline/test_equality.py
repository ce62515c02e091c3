"""Every schedule computes as one device does: float64 gradients to 1e-12 relative, losses to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracle.pipeline import CHUNKED, SCHEDULES, WHOLE, pipelined, serial
from tests.oracle.run import check, run
from tests.oracle.tensor import BLOCKS, ONE_D, SEQUENCE


@pytest.mark.diagonal
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_equals_serial(stages: int, schedule: str) -> None:
    check(run(pipelined("gpt2", stages, schedule, WHOLE)), serial("gpt2"))


@pytest.mark.parametrize("stages, schedule, placed", CHUNKED)
def test_chunks_equal_serial(stages: int, schedule: str, placed: dict[str, Any]) -> None:
    """Stages have several chunks in loops and lines; in a v one stage has both copies of the tied table."""
    check(run(pipelined("gpt2", stages, schedule, WHOLE, placed=placed)), serial("gpt2"))


@pytest.mark.parametrize("model", ["untied", "bert", "megatron-bert", "vit"])
def test_every_model_equals_serial(model: str) -> None:
    check(run(pipelined(model, 2, "message-driven", WHOLE)), serial(model))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_data_parallelism(schedule: str) -> None:
    check(run(pipelined("gpt2", 2, schedule, WHOLE, 2)), serial("gpt2"))


@pytest.mark.diagonal
@pytest.mark.parametrize("schedule", ["1f1b", "message-driven"])
@pytest.mark.parametrize("tensor", [ONE_D[0], SEQUENCE[0], BLOCKS[1]], ids=["1-D", "1-D cut", "2-D"])
def test_with_tensor_kits(tensor: dict[str, Any], schedule: str) -> None:
    check(run(pipelined("gpt2", 2, schedule, tensor)), serial("gpt2"))


@pytest.mark.parametrize(
    "model, common, branch, schedule",
    [
        ("gpt2", "all", "attention-core", "1f1b"),
        ("gpt2", "one", "attention", "message-driven"),  # messages of no rows
        *[
            pytest.param(model, common, branch, schedule, marks=pytest.mark.long)
            for model, branch in [("gpt2", "block"), ("bert", "attention-core"), ("vit", "attention")]
            for common in ("all", "one")
            for schedule in SCHEDULES
        ],
    ],
)
def test_with_sub_graphs(model: str, common: str, branch: str, schedule: str) -> None:
    tensor = {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
    check(run(pipelined(model, 2, schedule, tensor)), serial(model))


@pytest.mark.parametrize("common", ["all", pytest.param("one", marks=pytest.mark.long)])
def test_sub_graphs_with_data_parallelism(common: str) -> None:
    """The layout has eight ranks."""
    tensor = {"kind": "subgraph", "size": 2, "common": common, "branch": "block"}
    batch = {"batch": {"global": 24, "micro": 6}}
    check(run(pipelined("gpt2", 2, "message-driven", tensor, 2, **batch)), serial("gpt2"))


@pytest.mark.long
def test_sixteen_ranks() -> None:
    """data 2 x pipe 2 x [2, 2, 2]: five axes."""
    config = pipelined("gpt2", 2, "message-driven", BLOCKS[2], 2, batch={"global": 24, "micro": 4})
    config_serial = {"batch": {"global": 24, "micro": 4}}
    check(run(config), run(pipelined("gpt2", 1, "gpipe", WHOLE, **config_serial))[0])
