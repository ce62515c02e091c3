"""In every kit an activation shared by all heads enters the heads' branches, and a sum over heads leaves the branches.
A model that uses both equals one device in float64, is planned to the byte, and under `bits: layout-free` ends with one
device's bits."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.compute.bits import arithmetic
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify.reference_kit import ReferenceKit
from tests.compute.bits.cut_layouts import CUT as BY_SEQUENCE
from tests.compute.bits.cut_layouts import M2, M4, U2, config_of
from tests.compute.bits.runs import Ended, ended
from tests.compute.tensor.latent import latent
from tests.oracle.run import check, run
from tests.oracle.tensor import config_for
from tests.planner.plan.counted import CPU, CUT, DEEP, FLAT, GATHER, MEGATRON, SUBGRAPHS, counts
from tests.planner.plan.measured import Measured, measured
from tests.workers import run_ranks


def shared(tensor: dict[str, Any], **changes: Any) -> Config:
    return latent(config_for("untied", tensor, **({"steps": 3, **GATHER} | changes)))


@cache
def on_one_device() -> Any:
    return run(shared({"kind": "none"}))[0]


@pytest.mark.parametrize(
    "tensor",
    [MEGATRON, MEGATRON | {"size": 4}, CUT, CUT | {"size": 4}, FLAT, DEEP, *SUBGRAPHS],
    ids=lambda tensor: "-".join(map(str, tensor.values())),
)
def test_equals_one_device(tensor: dict[str, Any]) -> None:
    check(run(shared(tensor)), on_one_device())


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize("tensor", [MEGATRON, FLAT, SUBGRAPHS[2]], ids=lambda tensor: tensor["kind"])
def test_equals_one_device_where_a_context_cuts_sequences(context: str, tensor: dict[str, Any]) -> None:
    check(run(shared(tensor, layout={"tensor": tensor, "context": {"size": 2, "kind": context}})), on_one_device())


@pytest.mark.parametrize("tensor", [MEGATRON, CUT, FLAT, SUBGRAPHS[1], SUBGRAPHS[4]], ids=str)
def test_is_planned_to_the_byte(tensor: dict[str, Any]) -> None:
    config = shared(tensor, batch={"global": 16, "micro": 8})
    grid = config.grid
    ranks: list[list[Measured]] = run_ranks(
        measured, grid, [config], token_axes=config.layout.token_axes, transport="torch"
    )
    assert list(counts(Planner(CPU).predict(config), 0, ranks[0][0])) == []


@pytest.mark.host
def test_the_reference_says_the_same_words() -> None:
    def both(mesh: Mesh) -> list[torch.Tensor]:
        x, above = (torch.linspace(-1, 1, n, dtype=torch.float64) for n in (2 * 3 * 5, 2 * 3 * 4 * 5))
        answers = []
        for kit in (SerialKit(mesh), ReferenceKit()):
            leaf = x.view(2, 3, 5).clone().requires_grad_()
            heads = kit.enter(leaf, 4)
            (heads * above.view(2, 3, 4, 5)).sum().backward()
            answers += [heads.detach().clone(), leaf.grad, kit.leave(heads * above.view(2, 3, 4, 5)).detach()]
        return answers

    (answers,) = run_ranks(both, Grid((("data", 1),)))
    for mine, plain in zip(answers[:3], answers[3:], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-15, atol=1e-15)


@cache
def bits_of_one_device(precision: str) -> Ended:
    return ended(latent(config_of("gpt2", precision, ("batch.micro=4", "model.tied=false", "model.dropout=0"))))


def in_layout(precision: str, *words: str) -> Ended:
    return ended(latent(config_of("gpt2", precision, ("model.tied=false", "model.dropout=0", *words))))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "precision, words",
    [("float32", M2), ("float32", (*M4, *BY_SEQUENCE)), ("O1", M4), ("O2", (*M2, *U2)), ("O2", (*M4, *BY_SEQUENCE))],
)
def test_layouts_end_with_the_bits_of_one_device(precision: str, words: tuple[str, ...]) -> None:
    assert in_layout(precision, *words).differing(bits_of_one_device(precision)) == []


@pytest.mark.host
def test_the_order_of_parts_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device that adds four parts one after the other ends with other bits than the tree of two ranks."""

    def in_turn(addends: Iterable[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(torch.add, addends)

    wanted = bits_of_one_device("float32")
    monkeypatch.setattr(arithmetic, "tree_sum", in_turn)
    assert in_layout("float32", "batch.micro=4").differing(wanted) != []
