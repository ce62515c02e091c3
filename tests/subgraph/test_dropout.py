"""Dropout under sub-graphs: ranks that hold different rows or different heads draw different masks, in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import Config, parse_config
from meshwright.model import Batch, rows_of
from meshwright.models.attention import AttentionCore
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.loop import Trainer
from tests.data_parallel.test_equality import global_batch
from tests.harness import build
from tests.tensor.test_equality import config_for
from tests.workers import run_ranks


class Same:
    """The same samples again and again."""

    def __init__(self, config: Config) -> None:
        self.batch = global_batch(config, 0)

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    def samples(self, first: int, count: int) -> Batch:
        start = first % len(self)
        return rows_of(self.batch, slice(start, start + count))

    def held_out(self, first: int, count: int) -> Batch:
        return self.samples(first, count)


def config_of(common: str, data: int) -> Config:
    tensor = {"kind": "subgraph", "size": 2, "common": common, "branch": "attention"}
    tree = config_for("gpt2", tensor, data, steps=3).model_dump(mode="json", by_alias=True)
    tree["model"]["dropout"] = 0.5
    tree["batch"]["micro"] = 12
    return parse_config(tree)


Draws = dict[str, list[bytes]]
"""In order: the zeros of each dropout outside of branches; the random stream as it is at each attention core."""


def draws(mesh: Mesh, config: Config) -> tuple[Draws, list[float]]:
    """The draws of two steps on the same samples; and their losses."""
    parts = build(config, mesh)
    drawn: Draws = {"outside": [], "inside": []}

    def saw(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.numel():  # without common layers there is nothing to drop
            drawn["outside"].append((output == 0).cpu().numpy().tobytes())

    def run(function: Any, *arguments: Any) -> Any:
        drawn["inside"].append(torch.get_rng_state().numpy().tobytes())
        return function(*arguments)

    for module in parts.model.modules():
        if isinstance(module, AttentionCore):
            module.run = run
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(saw)
    trainer = Trainer(parts, Same(config))
    losses = [float(str(trainer.turn(None)[0][0]["loss"])) for _ in range(2)]
    return drawn, losses


@pytest.mark.host  # a GPU's trainer tells of a step one later, and its masks come from another generator
@pytest.mark.parametrize("common, data", [("all", 2), ("one", 1)])
def test_masks_differ_where_rows_or_heads_do(common: str, data: int) -> None:
    config = config_of(common, data)
    ranks = run_ranks(draws, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert len({tuple(losses) for _, losses in ranks}) == 1
    for where in ("outside", "inside"):
        draw = [drawn[where] for drawn, _ in ranks if drawn[where]]
        assert len(draw) == (1 if common == "one" and where == "outside" else 2 * data)
        every_mask = [mask for masks in draw for mask in masks]
        assert len(set(every_mask)) == len(every_mask), f"a mask came twice {where} of branches"
