"""The kit's words that GPT-2, BERT and ViT do not use, in every kit: values and gradients equal plain torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.parameters.role import BIAS, HIDDEN_MATRIX
from meshwright.compute.parameters.shard import Initial, seed_of, shard_specs
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_kit
from tests.oracle.tensor import config_for
from tests.workers import run_ranks

B, T, H, A, N = 12, 5, 24, 4, 32
V, SMOOTHING = 37, 0.1
FACTOR = 1 / 7
DRAWN = Initial(1.0)

KITS: dict[str, dict[str, Any]] = {
    "serial": {"kind": "none"},
    "1-D": {"kind": "megatron", "size": 2},
    "2.5-D": {"kind": "tesseract", "q": 2, "d": 2},
    **{
        f"sub-graph, common {common}, {branch}": {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
        for common in ("all", "one")
        for branch in ("attention-core", "attention", "block")
    },
}


class RmsNorm(nn.Module):
    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.norm = kit.norm(H, 1e-6, kind="rms")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.norm(x)


def plain_rms_norm(weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights["norm.weight"]


class GroupNorm(nn.Module):
    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.norm = kit.norm(H, 1e-5, kind="group", groups=4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.norm(x)


def plain_group_norm(weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    groups = x.unflatten(-1, (4, -1))  # [B, T, 4, H/4]
    mean = groups.mean((1, 3), keepdim=True)
    variance = (groups - mean).pow(2).mean((1, 3), keepdim=True)
    normed = (groups - mean) / (variance + 1e-5).sqrt()
    return normed.flatten(2) * weights["norm.weight"] + weights["norm.bias"]


class Paths(nn.Module):
    """Branches without biases, with a parameter of each kind inside: cut along the first dim, and along another."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.heads = kit.local_heads(A)
        self.expand = kit.branches.expand(H, 3 * N, DRAWN, groups=3, bias=False)
        self.gains = kit.local((A, N // A), 0, DRAWN, HIDDEN_MATRIX)
        self.table = kit.local((T, A), 1, DRAWN, BIAS)
        self.contract = kit.branches.contract(N, H, DRAWN, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        one, two, three = self.expand(x).unbind(2)
        inside = (one * two + three).unflatten(-1, (self.heads, -1))  # [B, T, A, N/A]
        return self.contract((inside * self.gains() + self.table()[:, :, None]).flatten(2))


def plain_paths(weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    one, two, three = (x @ weight for weight in weights["expand.weight"].unbind(1))
    inside = (one * two + three).unflatten(-1, (A, -1))
    inside = inside * weights["gains.weight"] + weights["table.weight"][:, :, None]
    return inside.flatten(2) @ weights["contract.weight"]


class HeadNorms(nn.Module):
    """Each head's width is normed, by one layer norm and one RMS norm for all heads."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.heads = kit.local_heads(A)
        self.expand = kit.branches.expand(H, N, DRAWN, bias=False)
        self.layer = kit.norm(N // A, 1e-5, inside=True)
        self.rms = kit.norm(N // A, 1e-6, kind="rms", inside=True)
        self.contract = kit.branches.contract(N, H, DRAWN, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        heads = self.expand(x).unflatten(-1, (self.heads, -1))
        return self.contract((self.layer(heads) * self.rms(heads)).flatten(2))


def plain_head_norms(weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    heads, shape = (x @ weights["expand.weight"]).unflatten(-1, (A, -1)), (N // A,)
    layer = F.layer_norm(heads, shape, weights["layer.weight"], weights["layer.bias"], 1e-5)
    rms = F.rms_norm(heads, shape, weights["rms.weight"], 1e-6)
    return (layer * rms).flatten(2) @ weights["contract.weight"]


class Slices(nn.Module):
    """A feed-forward without biases."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.expand = kit.expand(H, N, DRAWN, bias=False)
        self.contract = kit.contract(N, H, DRAWN, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.contract(self.expand(x).tanh())


def plain_slices(weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    return (x @ weights["expand.weight"]).tanh() @ weights["contract.weight"]


class SmoothHeads(nn.Module):
    """Two heads with label smoothing: if classes are cut, one head is all padding on the last rank."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.near = kit.head_loss(HeadShape(H, V, 40, DRAWN, bias=True, smoothing=SMOOTHING))
        self.far = kit.head_loss(HeadShape(H, V, 80, DRAWN, smoothing=SMOOTHING))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.near(x, labels, FACTOR) + self.far(x, labels, 3 * FACTOR)


def plain_smooth_heads(weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    near = x @ weights["near.weight"].t() + weights["near.bias"]
    far = x @ weights["far.weight"].t()

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(
            logits[..., :V].flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=SMOOTHING
        )

    return FACTOR * loss(near) + 3 * FACTOR * loss(far)


WORDS: dict[str, tuple[Callable[[Kit], nn.Module], Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]]] = {
    "rms_norm": (RmsNorm, plain_rms_norm),
    "group_norm": (GroupNorm, plain_group_norm),
    "branches and local": (Paths, plain_paths),
    "norms of heads": (HeadNorms, plain_head_norms),
    "expand and contract": (Slices, plain_slices),
    "smoothed heads": (SmoothHeads, plain_smooth_heads),
}


def drawn(device: torch.device, label: str, *shape: int) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed_of(label))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def part_of_rank(kit: Kit, mesh: Mesh, x: Tensor) -> Tensor:
    """A rank's part of activations [B, T, H] between two pairs."""
    columns = mesh.size("col") if "col" in mesh.grid.names else 1
    return kit.slice(x, "batch").chunk(columns, -1)[mesh.index("col") if columns > 1 else 0]


Pairs = dict[str, tuple[Tensor, Tensor]]
"""A rank's results and the expected results, by name."""


def compare(mesh: Mesh, config: Config, word: str) -> Pairs:
    make, plain = WORDS[word]
    kit = build_kit(config, mesh)
    module = make(kit).double()
    specs = shard_specs(module)
    weights = {name: drawn(mesh.device, name, *spec.shape).requires_grad_() for name, spec in specs.items()}
    boxes = {name: spec.box(mesh.grid, mesh.rank).slices for name, spec in specs.items()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name][boxes[name]])

    whole_x = drawn(mesh.device, "x", B, T, H).requires_grad_()
    whole_labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1)).to(mesh.device)
    whole_labels[::5, 2:] = -100
    wanted = plain(weights, whole_x, whole_labels)
    above = drawn(mesh.device, "above", *wanted.shape)
    wanted.backward(above)

    x = part_of_rank(kit, mesh, whole_x.detach()).clone().requires_grad_()
    y = module(x, kit.slice(whole_labels, "batch"))
    y.backward(part_of_rank(kit, mesh, above) if above.dim() else above)
    assert x.grad is not None
    assert whole_x.grad is not None
    value = y.detach().clone()
    if wanted.dim():
        answers = {"value": (value, part_of_rank(kit, mesh, wanted.detach()))}
    else:
        mesh.comm(*config.layout.batch_axes).all_reduce(value)
        answers = {"value": (value, wanted.detach())}
    answers["gradient"] = (x.grad, part_of_rank(kit, mesh, whole_x.grad))
    for name, parameter in module.named_parameters():
        gradient, whole = parameter.grad, weights[name].grad
        assert whole is not None
        if parameter.numel():
            assert gradient is not None, name
            mesh.comm(*specs[name].sum_axes(mesh)).all_reduce(gradient)
            answers[name] = gradient, whole[boxes[name]]
    return answers


def compare_all(mesh: Mesh, config: Config) -> dict[str, Pairs]:
    return {word: compare(mesh, config, word) for word in WORDS}


@pytest.mark.parametrize("name", KITS)
def test_words(name: str) -> None:
    config = config_for("gpt2", KITS[name])
    ranks = run_ranks(compare_all, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    for word in WORDS:
        for pairs in (answers[word] for answers in ranks):
            for what, (mine, wanted) in pairs.items():
                assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12), f"{word}, {what}: {mine} for {wanted}"
        assert len(ranks[0][word]) > 2  # a rank that holds everything has gradients of parameters, too
