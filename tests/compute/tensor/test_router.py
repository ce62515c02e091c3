"""Routers' losses and biases are the same under every layout, accumulation, recomputation and stages: float64 gradients
to 1e-12 relative, losses to 1e-10.

A balance over the batch equals a balance over a microbatch of the whole batch, under every layout. Biases move by the
loads of the global batch, counted here by a loop over the rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.tensor.router import Router
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.step import train_step
from tests.families.deepseek.layouts import LATER, RING, SHAPE, ULYSSES, deepseek
from tests.families.llama.experts import MODEL, experts
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.context import CUT
from tests.oracle.run import check, run
from tests.workers import run_ranks

LLAMA = MODEL["experts"] | {"router_z": 0.02}
ROUTED = SHAPE["experts"]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one microbatch a replica": {"data": {"size": 4}},
    "accumulated": {},
    "experts x cut": {"data": {"size": 2, "expert": 2}, "tensor": CUT},
    "stages x ring": {"pipeline": {"size": 2, "schedule": "message-driven"}, "context": RING},
    "chunks": {"pipeline": {"size": 2, "chunks": 2, "schedule": "1f1b"}, "data": {"size": 2}},
    "slices x ulysses": {"data": {"size": 2, "sync": "zero3"}, "context": ULYSSES},
}
ONLY_LONG = {"one microbatch a replica", "chunks"}
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in ONLY_LONG else name for name in LAYOUTS]


def llama(over: str, layout: dict[str, Any], micro: int, **changes: Any) -> Config:
    model = MODEL | {"experts": LLAMA | {"balance_over": over}}
    return experts(layout, model=model, batch={"global": 8, "micro": micro}, **changes)


def routed(over: str, layout: dict[str, Any], micro: int, **changes: Any) -> Config:
    model = SHAPE | {"experts": ROUTED | {"balance_over": over}}
    return deepseek(model, layout, batch={"global": 8, "micro": micro}, **changes)


@cache
def over_eight_rows(family: Any) -> Any:
    """Return one device's run with the global batch as one microbatch."""
    return run(family("microbatch", {}, 8))[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_balance_over_the_batch(name: str) -> None:
    check(run(llama("batch", LAYOUTS[name], 2)), over_eight_rows(llama))


@pytest.mark.parametrize("name", ["experts x cut", "stages x ring"])
def test_a_balance_over_the_batch_of_sigmoids(name: str) -> None:
    check(run(routed("batch", LAYOUTS[name], 1)), over_eight_rows(routed))


@pytest.mark.parametrize("recompute", [1, pytest.param("selective", marks=pytest.mark.long)])
def test_a_balance_over_the_batch_with_recomputation(recompute: str | int) -> None:
    config = llama("batch", LAYOUTS["slices x ulysses"], 2, memory={"recompute": recompute})
    check(run(config), over_eight_rows(llama))


def test_a_balance_over_the_batch_with_dropout_draws_the_same_masks_twice() -> None:
    """The counting pass computes the training pass's numbers: two microbatches of four rows on one device equal a step
    that is given the counts of the training passes."""
    model = MODEL | {"experts": LLAMA | {"balance_over": "batch"}, "dropout": 0.3}
    config = experts({}, model=model, batch={"global": 8, "micro": 4})
    ((told, counted),) = run_ranks(loads_of_both_passes, Grid(config.layout.axes), config)
    for one, other in zip(told, counted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def loads_of_both_passes(mesh: Mesh, config: Config) -> tuple[list[Tensor], list[Tensor]]:
    """Return the mean sequence's loads of each router in the first pass, and in the second pass."""
    parts = build(config, mesh)
    seen: dict[Router, list[Tensor]] = {}
    for router in parts.model.modules():
        if isinstance(router, Router):

            def note(module: Any, _: Any, logits: Tensor, own: Router = router) -> None:
                if logits.requires_grad:
                    ids = logits.detach().topk(own.shape.chosen, -1)[1]
                    seen.setdefault(own, []).append(torch.bincount(ids.flatten(), minlength=own.shape.count))

            router.register_forward_hook(note)
    train_step(parts, global_batch(config, 0))
    return [router.loads for router in seen], [sum(counts).double() / 8 for counts in seen.values()]  # type: ignore[misc]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_balance_over_a_microbatch(name: str) -> None:
    """The rows of a microbatch follow from `batch.micro` alone."""
    check(run(llama("microbatch", LAYOUTS[name], 2)), of_two_rows())


@cache
def of_two_rows() -> Any:
    return run(llama("microbatch", {}, 2))[0]


def test_the_three_are_three_numbers() -> None:
    losses = [run(llama(over, {}, 2))[0][0][0] for over in ("sequence", "microbatch", "batch")]
    assert len(set(losses)) == 3


def biases(mesh: Mesh, config: Config) -> dict[str, Tensor]:
    """Return this rank's biases after the run's steps."""
    parts = build(config, mesh)
    for step in range(config.steps):
        train_step(parts, global_batch(config, step), step)
    return {name: p.detach().clone() for name, p in parts.model.named_parameters() if name.endswith("router.bias")}


def moved(config: Config) -> dict[str, Tensor]:
    held = run_ranks(biases, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    found: dict[str, Tensor] = {}
    for own in held:
        for name, bias in own.items():
            assert torch.equal(found.setdefault(name, bias), bias), f"{name} is another on another rank"
    return found


@cache
def moved_on_one_device() -> dict[str, Tensor]:
    return moved(deepseek(LATER, {}, batch={"global": 8, "micro": 8}))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout, changes",
    [
        ({}, {"batch": {"global": 8, "micro": 1}}),
        ({"data": {"size": 2, "expert": 2}, "tensor": CUT}, {"memory": {"recompute": 1}}),
        ({"pipeline": {"size": 2, "partition": [1, 0]}, "context": RING}, {}),
        ({"data": {"size": 2, "sync": "zero1"}}, {"optimizer": {"name": "sgd", "lr": 1e-2, "clip": None}}),
    ],
    ids=["accumulated", "recomputed", "stages", "zero1, sgd"],
)
def test_biases_move_alike(layout: dict[str, Any], changes: dict[str, Any]) -> None:
    """Biases are equal to the last bit: moves are signs of sums of integers."""
    expected = moved_on_one_device()
    if "optimizer" in changes:
        expected = moved(deepseek(LATER, {}, batch={"global": 8, "micro": 8}, **changes))
    found = moved(deepseek(LATER, layout, **({"batch": {"global": 8, "micro": 2}} | changes)))
    assert found.keys() == expected.keys()
    assert len(found) == 3  # of a layer, and of two later tokens
    for name, bias in found.items():
        assert torch.equal(bias, expected[name]), name
        assert bool(bias.any()), name


def first_move(mesh: Mesh, config: Config) -> list[tuple[Tensor, Tensor]]:
    """Return each router's bias after a step, and the bias by a loop over the router's tokens."""
    parts = build(config, mesh)
    loads: dict[Router, Tensor] = {}
    for router in parts.model.modules():
        if isinstance(router, Router):

            def note(module: Any, _: Any, logits: Tensor, own: Router = router) -> None:
                load = loads.setdefault(own, torch.zeros(own.shape.count, dtype=torch.float64))
                for scores in logits.detach().sigmoid().flatten(0, 1):
                    groups = scores.view(own.shape.groups, -1)
                    best = [float(group.sort(descending=True)[0][:2].sum()) for group in groups]
                    kept = sorted(range(len(best)), key=lambda index: -best[index])[: own.shape.groups_chosen]
                    of_kept = [e for e in range(own.shape.count) if e // groups.shape[1] in kept]
                    for expert in sorted(of_kept, key=lambda e: -float(scores[e]))[: own.shape.chosen]:
                        load[expert] += 1

            router.register_forward_hook(note)
    train_step(parts, global_batch(config, 0))
    rate = config.model.routing.bias_rate
    return [(router.bias.detach().clone(), rate * (load.mean() - load).sign()) for router, load in loads.items()]  # type: ignore[union-attr]


def test_a_bias_falls_where_more_tokens_came_than_to_the_mean_expert() -> None:
    config = deepseek(SHAPE, {}, batch={"global": 8, "micro": 4})
    (pairs,) = run_ranks(first_move, Grid(config.layout.axes), config)
    assert len(pairs) == 1
    for bias, expected in pairs:
        torch.testing.assert_close(bias, expected, rtol=0, atol=1e-15)
        assert bool((bias > 0).any())
        assert bool((bias < 0).any())


@pytest.mark.parametrize("over, told", [("microbatch", "balance_over=microbatch goes by batch.micro"), ("batch", "")])
def test_bits_that_are_free_of_the_layout_refuse_loads_of_a_microbatch(over: str, told: str) -> None:
    """Biases and a balance over the batch keep the bits (tests/compute/bits/test_experts.py)."""
    tree = {
        "model": MODEL | {"family": "llama", "experts": LLAMA | {"balance_over": over, "bias_rate": 0.1}},
        "data": {"sequence": 24}, "bits": "layout-free", "batch": {"global": 8, "micro": 2},
    }  # fmt: skip
    if not told:
        assert parse_config(tree).bits.layout_free
        return
    with pytest.raises(ConfigError, match=told):
        parse_config(tree)
