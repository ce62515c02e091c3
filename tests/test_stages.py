"""Bytes that stages hold, counted on meta tensors."""

from __future__ import annotations

import pytest
import torch

from meshwright.compute.parameters.shard import shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.machine import Machine
from meshwright.ranks.mailbox import CutForms, TensorMeta
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.pipeline.stages import Stages
from meshwright.training.all_stages import plan_stages
from meshwright.training.decisions import resolve_layout
from meshwright.training.rank_model import build_model
from meshwright.training.stage_costs import BuiltStages
from tests.harness import build, resolved
from tests.oracle.pipeline import WHOLE, laid_out, pipelined
from tests.oracle.tensor import BLOCKS, ONE_D, SEQUENCE
from tests.workers import run_ranks


def planned(config: Config, rank: int = 0) -> tuple[Mesh, Stages]:
    config = resolved(config)
    mesh = planned_mesh(Grid(config.layout.axes), rank, config.layout.token_axes)
    return mesh, plan_stages(config, mesh)


@pytest.mark.parametrize("model", ["gpt2", "untied", "bert", "megatron-bert", "vit"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_have_each_parameter_once_but_the_tied(model: str, stages: int) -> None:
    config = pipelined(model, stages, "gpipe", WHOLE)
    _, plan = planned(config)
    serial = shard_specs(
        build_model(config, SerialKit(solo_mesh(torch.device("meta"))), solo_mesh(torch.device("meta")))
    )
    assert plan.specs.keys() == serial.keys()
    assert {name: spec.shape for name, spec in plan.specs.items()} == {
        name: spec.shape for name, spec in serial.items()
    }
    tied = {name for name, spec in plan.specs.items() if spec.tied}
    assert tied == ({"tokens.weight"} if model not in ("untied", "vit") and stages > 1 else set())
    assert [layer for chunk in plan.chunks for layer in chunk.layers] == list(range(config.model.layers))
    assert [(chunk.first, chunk.last) for chunk in plan.chunks] == [
        (index == 0, index == stages - 1) for index in range(stages)
    ]


@pytest.mark.parametrize(
    "tensor, shape",
    [
        (WHOLE, (6, 12, 24)),
        (ONE_D[0], (6, 12, 24)),
        (SEQUENCE[0], (6, 6, 24)),
        (BLOCKS[1], (3, 12, 12)),
        (BLOCKS[2], (3, 12, 12)),
    ],
    ids=["serial", "1-D", "1-D cut", "2-D", "2.5-D"],
)
def test_what_passes_between_stages(tensor: dict[str, object], shape: tuple[int, ...]) -> None:
    batch = {"global": 24, "micro": 12 if tensor.get("d") == 2 else 6}
    _, plan = planned(pipelined("gpt2", 2, "gpipe", tensor, batch=batch))
    forms = (TensorMeta(shape, torch.float64),)
    assert plan.message(0) == {"before": {}, "after": {0: CutForms(forms, False)}}
    assert plan.message(1) == {"before": {0: CutForms(forms, True)}, "after": {}}


def of_a_size(free: int) -> int:
    config = resolved(pipelined("gpt2", 2, "gpipe", WHOLE, batch={"global": 24, "micro": 1}))
    config = laid_out(config, pipeline={"schedule": "message-driven"})
    fixed = max(BuiltStages().fixed_bytes(config))
    limit = resolve_layout(config, Machine(1, fixed + free, shared=False)).config.layout.pipeline.limit
    assert isinstance(limit, int)
    return limit


def test_memory_bounds_the_microbatches_in_flight() -> None:
    assert of_a_size(0) == 1
    assert of_a_size(10**12) == 24
    few, more = of_a_size(1_000_000), of_a_size(2_000_000)
    assert 1 < few < more < 24
    assert more - 2 * few in (0, 1)


def parts_in_use(mesh: Mesh, config: Config) -> tuple[list[str], int]:
    parts = build(config, mesh)
    names = [name for name, _ in parts.model.named_parameters()]
    return names, sum(slot.parameter.numel() for slot in parts.strategy.slots)


def test_a_rank_holds_its_stage_alone() -> None:
    config = laid_out(pipelined("gpt2", 3, "gpipe", WHOLE), pipeline={"partition": (0, 4, 0)})
    (first, _), (middle, _), (last, _) = run_ranks(parts_in_use, Grid(config.layout.axes), config)
    assert first == ["tokens.weight", "positions.weight"]
    assert all(name.startswith("blocks.") for name in middle)
    assert last == ["tokens.weight", "norm.weight", "norm.bias"]
