"""`train --explain` counts without running what a run then sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.build import build
from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.families import family_of
from meshwright.grid import Grid
from meshwright.mesh import Mesh
from meshwright.train.explain import render
from meshwright.train.plan import plan_step
from tests.data_parallel.test_equality import config_for as data_config
from tests.tensor.test_equality import config_for
from tests.workers import run_ranks

Counts = dict[tuple[str, str], tuple[int, int]]

LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"kind": "none"}, 2),
    ({"kind": "megatron", "size": 2}, 2),
    ({"kind": "megatron", "size": 2, "sequence_parallel": True}, 1),
    ({"kind": "tesseract", "q": 2, "d": 1}, 1),
    ({"kind": "tesseract", "q": 2, "d": 2}, 1),
]


def measured(mesh: Mesh, config: Config) -> Counts:
    """Calls and bytes of one step, without the optimizer's norm; every token counts, as in a plan."""
    parts = build(config, mesh)
    shapes = family_of(config).shapes(config)
    for final in (False, True):
        ones = {name: torch.ones(config.micro, *shape, dtype=torch.long) for name, shape in shapes.items()}
        batch = {name: parts.kit.slice_batch(x) for name, x in ones.items()}
        parts.strategy.backward(parts.model, batch, dict.fromkeys(parts.model.labels, 1.0), final=final)
    parts.strategy.finish()
    parts.strategy.publish()
    return {key: (entry.calls, entry.sent_bytes) for key, entry in mesh.ledger.traffic.items()}


@pytest.mark.parametrize("model", ["gpt2", "megatron-bert"])
@pytest.mark.parametrize("tensor, data", LAYOUTS, ids=str)
def test_planned_is_measured(tensor: dict[str, Any], data: int, model: str) -> None:
    config = config_for(model, tensor, data, batch={"global": 24 * data, "micro": 12}, memory={"summa": "gather"})
    planned = {key: (entry.calls, entry.sent_bytes) for key, entry in plan_step(config).traffic.items()}
    ranks = run_ranks(measured, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert ranks[0] == planned


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    render(plan_step(config_for("gpt2", {"kind": "tesseract", "q": 2, "d": 2})))
    text = capsys.readouterr().out
    for words in (
        "8 ranks: data 1 (allreduce), depth 2, row 2, col 2",
        "What stays",
        "dim 0 over row",
        "feed_forward.con",
    ):
        assert words in text, words


def test_fully_sharded_is_torch_s() -> None:
    with pytest.raises(ConfigError, match="is laid out by torch: --explain cannot count it"):
        plan_step(data_config("fsdp", 2))


def test_autocast_needs_numbers() -> None:
    config = config_for("gpt2", {"kind": "none"}, precision={"level": "O1", "dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"precision\.level=O1 casts by operator: --explain cannot count it"):
        plan_step(config)
