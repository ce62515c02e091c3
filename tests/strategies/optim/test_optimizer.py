"""The optimizer against plain torch, and steps that are applied whole or not at all."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compute.model import rows_of
from meshwright.ranks.errors import DivergedError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.states import InPlace
from meshwright.training.parts import Parts
from tests.harness import build, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.workers import run_ranks

STEPS = 6
CLIPS = (None, 1.0, 1e4)
"""No clipping; a clip below the norm of the gradients; a clip above the norm, which scales no gradient."""
SYNCS = ("allreduce", "zero1", "server-gradient")
OPTIMIZERS = {
    "adamw": {"name": "adamw", "lr": 1e-2, "betas": [0.8, 0.9], "epsilon": 1e-6, "weight_decay": 0.2},
    "sgd": {"name": "sgd", "lr": 0.5, "weight_decay": 0.1},
    "momentum": {"name": "momentum", "lr": 0.2, "momentum": 0.7, "weight_decay": 0.1},
}


def planted(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) * 1000 + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def plant(parts: Parts, step: int) -> None:
    """Give every slot the slot's part of a gradient made from the parameter's name."""
    for slot in parts.strategy.slots:
        gradient = torch.zeros_like(slot.parameter)
        for place in slot.places:
            whole = planted(place.name, torch.Size(place.shape), step)
            gradient[place.start : place.stop] = whole[place.box.slices].flatten()
        slot.parameter.grad = gradient


def step_ours(mesh: Mesh, sync: str, settings: dict[str, Any], clip: float | None) -> dict[str, Tensor]:
    optimizer = settings | {"clip": clip, "schedule": {"warmup": 2, "decay": "linear", "floor": 0.5}}
    parts = build(config_for(sync, mesh.size("data"), batch={"global": 12}, optimizer=optimizer, steps=STEPS), mesh)
    for step in range(STEPS):
        plant(parts, step)
        parts.optimizer.step(step)
        parts.strategy.publish()
    if settings["name"] == "adamw" and parts.strategy.slots[0].parameter.numel():
        assert parts.optimizer.steps_taken == STEPS
        assert set(parts.optimizer.held.tensors(0)) == {"weight", "exp_avg", "exp_avg_sq"}
    return {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}


def step_torchs(mesh: Mesh, settings: dict[str, Any], clip: float | None) -> dict[str, Tensor]:
    """Step with plain torch: two groups by hand, torch's clipping, the rates of torch's schedulers written out."""
    model = build(config_for("allreduce", 1), mesh).model
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    decayed = [p for name, p in parameters.items() if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in parameters.items() if not (name.endswith("weight") and "norm" not in name)]
    groups = [{"params": decayed, "weight_decay": settings["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    if settings["name"] == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=1.0, betas=tuple(settings["betas"]), eps=settings["epsilon"], foreach=False
        )
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=settings.get("momentum", 0.0), foreach=False)
    shares = [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = planted(name, parameter.shape, step).to(mesh.device)
        if clip is not None:
            nn.utils.clip_grad_norm_(list(parameters.values()), clip)
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * shares[step]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def step_all(mesh: Mesh, sync: str) -> dict[tuple[str, float | None], dict[str, Tensor]]:
    """Step every optimizer, clipped and not; `sync`: a sync of Meshwright, or torch."""
    return {
        (name, clip): step_torchs(mesh, settings, clip) if sync == "torch" else step_ours(mesh, sync, settings, clip)
        for name, settings in OPTIMIZERS.items()
        for clip in CLIPS
    }


@cache
def stepped(sync: str, size: int) -> list[dict[tuple[str, float | None], dict[str, Tensor]]]:
    return run_ranks(step_all, Grid((("data", size),)), sync)


@pytest.mark.parametrize("sync, size", [("allreduce", 1), ("zero1", 3), ("server-gradient", 2)])
@pytest.mark.parametrize("clip", CLIPS, ids=["unclipped", "clipped", "below the clip"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch(name: str, clip: float | None, sync: str, size: int) -> None:
    wanted = stepped("torch", 1)[0][name, clip]
    for rank, answers in enumerate(stepped(sync, size)):
        for parameter, weight in answers[name, clip].items():
            text = f"{parameter} at rank {rank}"
            torch.testing.assert_close(
                weight, wanted[parameter], rtol=1e-11, atol=1e-13, msg=lambda m, t=text: f"{t}: {m}"
            )


def overflow(mesh: Mesh, sync: str, level: str, bad: float) -> list[tuple[bool, float, bool]]:
    """Make good, bad, good, good steps in fp16, with the bad value on the last rank alone. Return (applied, scale,
    moved) of each step."""
    precision = {"level": level, "dtype": "fp16", "loss_scale": {"initial": 256.0, "interval": 2}}
    config = config_for(sync, mesh.size("data"), batch={"global": 12}, precision=precision)
    parts = build(config, mesh)
    everyone = global_batch(config, 0)
    total = int((everyone["labels"] != -100).sum())
    facts = []
    for step in range(4):
        batch = parts.strategy.share(
            lambda first, count: rows_of(everyone, slice(first, first + count)), config.replica_batch
        )
        forward_and_backward(parts, batch, {"labels": parts.optimizer.scaler.scale / total}, final=False)
        if step == 1 and mesh.rank == mesh.size("data") - 1:
            parameter = parts.model.get_parameter("blocks.0.attention.output.bias")
            assert parameter.grad is not None
            parameter.grad[0] = bad
        zeros = batch | {"labels": torch.full_like(batch["labels"], -100)}  # the final microbatch adds the sums alone
        forward_and_backward(parts, zeros, {"labels": 1.0}, final=True)
        parts.strategy.finish()
        before = snapshot(parts)
        applied = parts.optimizer.step(step).applied
        parts.strategy.publish()
        after = snapshot(parts)
        moved = len(before) != len(after) or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        facts.append((applied, parts.optimizer.scaler.scale, moved))
    assert parts.optimizer.steps_taken == 3, "Adam's bias correction goes by the steps that were applied"
    return facts


def snapshot(parts: Parts) -> list[Tensor]:
    """Return all tensors that a step may change on this rank: states, masters, weights."""
    held = parts.optimizer.held
    assert isinstance(held, InPlace)
    states = [value.clone() for index in range(len(held.slots)) for value in held.tensors(index).values()]
    return [*states, *(parameter.detach().clone() for parameter in parts.model.parameters())]


def overflow_all(mesh: Mesh, level: str) -> dict[str, list[tuple[bool, float, bool]]]:
    return {f"{sync} {bad}": overflow(mesh, sync, level, bad) for sync in SYNCS for bad in (torch.inf, torch.nan)}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(level: str) -> None:
    for rank, answers in enumerate(run_ranks(overflow_all, Grid((("data", 2),)), level)):
        for case, facts in answers.items():
            wanted = [(True, 256.0, True), (False, 128.0, False), (True, 128.0, True), (True, 256.0, True)]
            assert facts == wanted, f"{case} at rank {rank}"


def diverge(mesh: Mesh) -> tuple[str, bool]:
    config = config_for("allreduce", mesh.size("data"))
    parts = build(config, mesh)
    batch = rows_of(global_batch(config, 0), slice(0, 1))
    forward_and_backward(parts, batch, {"labels": 1.0}, final=True)
    parts.strategy.finish()
    gradient = parts.strategy.slots[0].parameter.grad
    assert gradient is not None
    gradient[0] = torch.nan
    before = snapshot(parts)
    try:
        parts.optimizer.step(6)
    except DivergedError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, snapshot(parts), strict=True))
    return "", False


def test_a_gradient_that_is_no_number_ends_a_run_without_a_loss_scale() -> None:
    ((text, untouched),) = run_ranks(diverge, Grid((("data", 1),)))
    assert text == "step 7: the gradient norm is nan: the run has diverged"
    assert untouched
