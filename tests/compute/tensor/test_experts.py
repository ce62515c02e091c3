"""Experts with a capacity equal a loop over sequences, tokens and choices, in float64; dropped pairs are counted."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.model import Batch
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.experts import Experts, dropped_pairs
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.compute.tensor.swiglu import clamped_swiglu
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.step import train_step
from tests.families.llama.experts import BOUNDED, BOUNDED_LAYOUTS, LAYOUTS, MODEL, experts
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
B, T, H, N = 3, 10, 6, 5


CLAMP = (1.7, 0.5)
"""A slope, and a limit that many gates and ups exceed."""


def looped(h: Tensor, weights: dict[str, Tensor], chosen: int, most: int) -> tuple[Tensor, int]:
    """Compute token by token in the order of each sequence, and count dropped pairs: an expert with `most` tokens gives
    nothing.

    With biases the gates and ups are clamped.
    """
    out, dropped, (slope, limit) = torch.zeros_like(h), 0, CLAMP
    router, expand, contract = (weights[f"{name}.weight"] for name in ("router", "expand", "contract"))
    biased = "router.bias" in weights
    own, wide, last = (weights.get(f"{name}.bias", torch.zeros(())) for name in ("router", "expand", "contract"))
    for b in range(h.shape[0]):
        load = [0] * router.shape[1]
        for t in range(h.shape[1]):
            shares, ids = (h[b, t] @ router + own).softmax(-1).topk(chosen)
            for share, expert in zip(shares / shares.sum(), ids.tolist(), strict=True):
                load[expert] += 1
                if load[expert] > most:
                    dropped += 1
                    continue
                gate, up = (h[b, t] @ expand[expert].flatten(1)).view(2, -1) + (wide[expert] if biased else 0)
                inside = F.silu(gate) * up
                if biased:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                    inside = up * gate * (gate * slope).sigmoid()
                out[b, t] = out[b, t] + share * (inside @ contract[expert] + (last[expert] if biased else 0))
    return out, dropped


def compared(
    mesh: Mesh, count: int, chosen: int, capacity: float, biased: bool
) -> tuple[list[float], int, int, float]:  # fmt: skip
    """Return the distances of output and gradients, both numbers of dropped pairs, and evaluation's distance to a loop
    without drops."""
    shape = ExpertsShape(
        H, N, count, chosen, True, False, capacity, Initial(0.5), Initial(0.5), linear_biases=biased,
        clamp=CLAMP if biased else None,
    )  # fmt: skip
    layer = Experts(mesh, shape)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = values.to(mesh.device)
    h = torch.randn(B, T, H, generator=generator, dtype=torch.float64).to(mesh.device).requires_grad_()
    weights = dict(layer.named_parameters())
    assert len(weights) == 3 + 3 * biased
    most = math.ceil(capacity * chosen * T / count)
    wanted, dropped = looped(h, weights, chosen, most)
    gradients = torch.autograd.grad(wanted.square().sum(), (h, *weights.values()))
    y = layer(h)[0]
    y.square().sum().backward()
    pairs = [(y, wanted), *zip((h.grad, *(weight.grad for weight in weights.values())), gradients, strict=True)]
    norms = [float(theirs.detach().norm()) for _, theirs in pairs]
    # A token that one expert alone takes has a share of 1: the router's gradient is rounding, and no yardstick.
    yardsticks = [norm if norm > 1e-9 else max(norms) for norm in norms]
    distances = [
        float((mine - theirs).detach().norm()) / yardstick  # type: ignore[operator]
        for (mine, theirs), yardstick in zip(pairs, yardsticks, strict=True)
    ]
    counted = int(dropped_pairs(layer, mesh.device))
    whole = looped(h, weights, chosen, T)[0]
    return distances, counted, dropped, float((layer.eval()(h)[0] - whole).detach().norm())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count, chosen, capacity", [(4, 2, 1.0), (5, 3, 0.6), (4, 1, 0.3), (3, 2, 1.5)])
def test_a_capacity_takes_the_first_tokens(count: int, chosen: int, capacity: float, biased: bool) -> None:
    """Evaluation drops no token."""
    ((distances, counted, dropped, apart),) = run_ranks(compared, ONE, count, chosen, capacity, biased)
    assert max(distances) < 1e-12
    assert counted == dropped
    assert (dropped > 0) == (capacity < 1.5)
    assert apart < 1e-12


def dropped_by(mesh: Mesh, config: Any) -> int:
    """Return this rank's dropped pairs of a step."""
    parts = build(config, mesh)
    batch: Batch = global_batch(config, 0)
    train_step(parts, batch)
    return int(dropped_pairs(parts.model, mesh.device))


@pytest.mark.parametrize("recompute", ["none", 1])
def test_what_is_dropped_is_counted_once(recompute: str | int) -> None:
    """Recomputed passes do not count again; over an axis with the same tokens on all ranks, each rank counts once."""
    serial = experts({}, model=BOUNDED)
    (alone,) = run_ranks(dropped_by, Grid(serial.layout.axes), serial)
    config = experts(BOUNDED_LAYOUTS["ring x cut"], model=BOUNDED, memory={"recompute": recompute})
    ranks = run_ranks(dropped_by, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert sum(ranks) == 2 * alone > 0


def at_once(
    mesh: Mesh, dtype: torch.dtype, capacity: float | None, grouped: bool, frozen: bool, biased: bool = False
) -> list[Tensor]:
    """Return the outputs of two passes and the summed gradients of experts with separate memory; one expert takes no
    token."""
    shape = ExpertsShape(
        16, 8, 5, 2, True, False, capacity, Initial(0.5), Initial(0.5), linear_biases=biased,
        clamp=CLAMP if biased else None,
    )  # fmt: skip
    layer, generator = Experts(mesh, shape), torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(mesh.device, dtype)
    layer.router.weight.data[:, 3] = -100.0
    layer.expand.weight.requires_grad_(not frozen)
    h = torch.randn(B, T, 16, generator=generator).abs().to(mesh.device, dtype).requires_grad_()
    with patch.object(Experts, "grouped", lambda self, x: grouped):
        ys = [layer(h)[0] for _ in range(2)]
        for y in ys:
            y.square().sum().backward()
        empty = layer.outputs(h.flatten(0, 1)[:0], layer.runs_of(h[0, :0], torch.zeros(1, 5, dtype=torch.long)))
        empty.sum().backward()
    assert not frozen or layer.expand.weight.grad is None
    return [y.detach() for y in ys] + [x.grad for x in (h, *layer.parameters()) if x.grad is not None]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_for_all_experts_has_the_bits_of_one_for_each(
    dtype: torch.dtype, capacity: float | None, frozen: bool
) -> None:
    """Ends of rows on the device for torch's grouped product, which a CPU has as well; ranks may have no rows."""
    one, each = (run_ranks(at_once, ONE, dtype, capacity, grouped, frozen) for grouped in (True, False))
    assert len(one[0]) == 5 + (not frozen)
    for mine, wanted in zip(*one, *each, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_one_kernel_for_all_experts_sums_biases_as_one_for_each(capacity: float | None) -> None:
    """The kernel adds an expert's rows in another order."""
    one, each = (run_ranks(at_once, ONE, torch.float32, capacity, grouped, False, True)[0] for grouped in (True, False))
    assert len(one) == 9
    for mine, wanted in zip(one, each, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_a_clamped_swiglu_is_torchs() -> None:
    """Beyond the bounds the slope is zero. On a bound the slope is one here and in torch 2.13, and another in torch
    2.15."""
    x = torch.randn(7, 3, 2, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    gate, up = theirs[..., 0, :].clamp(max=CLAMP[1]), theirs[..., 1, :].clamp(-CLAMP[1], CLAMP[1])
    wanted = (up + 1) * gate * torch.sigmoid(CLAMP[0] * gate)
    y, dy = clamped_swiglu(mine, *CLAMP), torch.linspace(-1, 1, wanted.numel()).double().view(wanted.shape)
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert 0.2 < float((mine.grad == 0).double().mean()) < 0.7


def step_of(mesh: Mesh, config: Any, grouped: bool) -> tuple[float, list[Tensor]]:
    """Return the loss and the weights after a step."""
    parts = build(config, mesh)
    with patch.object(Experts, "grouped", lambda self, x: grouped):
        loss = train_step(parts, global_batch(config, 0)).loss
    return loss, [parameter.detach().clone() for parameter in parts.model.parameters()]


@pytest.mark.parametrize("layout", ["experts x cut", "experts x replicas"])
def test_rows_of_other_ranks_are_sorted_and_multiplied_at_once(layout: str) -> None:
    model = MODEL | {"feed_forward": 16}  # the kernel reads rows of multiples of 16 bytes
    config = experts(LAYOUTS[layout], model=model, precision={"level": "O0", "dtype": "float32"})
    grid = Grid(config.layout.axes)
    one, each = (
        run_ranks(step_of, grid, config, grouped, token_axes=config.layout.token_axes, forked=True)
        for grouped in (True, False)
    )
    for (loss, weights), (wanted, others) in zip(one, each, strict=True):
        assert loss == wanted
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, others, strict=True))
