"""The serial kit's layers against plain torch, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.serial import SerialKit
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

B, T, H = 2, 5, 12


def plain(layer: nn.Module, kind: str, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if kind == "norm":
        return F.layer_norm(x, (H,), weight, bias, 1e-5)
    y = x @ weight.flatten(1) + bias.flatten()
    return y.view(B, T, 3, -1) if kind == "groups" else y


def layer_of(mesh: Mesh, kind: str) -> nn.Module:
    kit = SerialKit(mesh)
    layers = {
        "norm": lambda: kit.norm(H, 1e-5),
        "expand": lambda: kit.expand(H, 24, Initial(0.5)),
        "groups": lambda: kit.expand(H, 36, Initial(0.5), groups=3),
        "contract": lambda: kit.contract(H, 7, Initial(0.5)),
    }
    return layers[kind]()


def compare(mesh: Mesh, kind: str) -> list[tuple[Tensor, Tensor]]:
    layer = layer_of(mesh, kind)
    initialise(layer, mesh, 1)
    layer.double()
    with torch.no_grad():
        layer.bias.copy_(torch.linspace(-1, 1, layer.bias.numel(), dtype=torch.float64).view_as(layer.bias))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, H, generator=generator, dtype=torch.float64).to(mesh.device).requires_grad_()
    y = layer(x)
    above = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(mesh.device)
    leaves = [x, layer.weight, layer.bias]
    ours = torch.autograd.grad(y, leaves, above)
    wanted = plain(layer, kind, x)
    theirs = torch.autograd.grad(wanted, leaves, above)
    return [(y.detach(), wanted.detach()), *zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("kind", ["norm", "expand", "groups", "contract"])
def test_layers(kind: str) -> None:
    (answers,) = run_ranks(compare, Grid((("data", 1),)), kind)
    for mine, wanted in answers:
        assert mine.shape == wanted.shape
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)


def norm_of_half(mesh: Mesh) -> tuple[torch.dtype, Tensor, Tensor]:
    norm = SerialKit(mesh).norm(H, 1e-5)
    initialise(norm, mesh, 1)
    x = torch.linspace(0, 300, B * T * H, device=mesh.device).view(B, T, H).bfloat16()
    y = norm(x).detach()
    return norm.weight.dtype, y, F.layer_norm(x.float(), (H,)).bfloat16()


def test_norm_of_half_is_computed_in_float32() -> None:
    ((dtype, mine, wanted),) = run_ranks(norm_of_half, Grid((("data", 1),)))
    assert dtype == torch.float32
    assert torch.equal(mine, wanted)
