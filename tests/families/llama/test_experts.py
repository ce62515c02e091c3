"""Experts against transformers' Mixtral and Qwen3-MoE with equal random weights, in float64."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import SAMPLES
from meshwright.families.llama.model import LlamaModel
from meshwright.ranks.mesh import Mesh
from tests.compute.models.harness import random_model
from tests.families.llama.models import ONE, as_theirs, batch, config_of, hugging_face
from tests.workers import run_ranks

THEIRS = ("mixtral", "qwen2_moe", "qwen3_moe")

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", {"count": 4, "per_token": 2}, {}),
    "mixtral, three of five": ("mixtral", {"count": 5, "per_token": 3}, {"tied": True}),
    "qwen2": (
        "qwen2_moe", {"count": 5, "per_token": 2, "renormalise": False, "shared": 28, "shared_gate": True},
        {"biases": ["query-key-value"]},
    ),
    "qwen3": ("qwen3_moe", {"count": 8, "per_token": 3}, {"head_norms": True, "head_width": 8}),
    "qwen3, shares as they are": (
        "qwen3_moe", {"count": 6, "per_token": 2, "renormalise": False}, {"head_norms": True, "head_width": 8},
    ),
}  # fmt: skip


class WideRouter(nn.Module):
    """A router in float64; transformers' router rounds every input to float32."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.weight, self.chosen = theirs.weight, theirs.top_k
        self.renormalises = vars(theirs).get("norm_topk_prob", True)  # a Mixtral has no such field, and always does

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(h.flatten(0, -2), self.weight)
        shares, ids = logits.softmax(-1).topk(self.chosen, -1)
        return logits, shares / shares.sum(-1, keepdim=True) if self.renormalises else shares, ids


def balance_of(logits: list[Tensor], experts: Any, rows: int) -> Tensor:
    """Return the mean of transformers' loss by layer and sequence, in float64.

    Over all layers at once, transformers' function would count the first experts of all layers as one expert.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    with patch.object(torch.Tensor, "float", lambda x: x), patch.object(torch, "float32", torch.float64):
        values = [
            load_balancing_loss_func((part,), experts.count, experts.per_token)
            for layer in logits
            for part in layer.chunk(rows)
        ]
    return torch.stack(values).mean()


def distances(mesh: Mesh, kind: str, experts: dict[str, Any], changes: dict[str, Any], coefficient: float) -> Any:
    """Return the relative distances of logits, losses and each gradient, and the balance's part of the loss."""
    config = config_of(**changes, experts=experts | {"balance": coefficient})
    model = random_model(LlamaModel, mesh, config)
    theirs = hugging_face(kind, model, config)
    logits_of_routers: list[Tensor] = []
    for path, module in list(theirs.named_modules()):
        if type(module).__name__.endswith("TopKRouter"):
            router = WideRouter(module)
            router.register_forward_hook(lambda _, __, out: logits_of_routers.append(out[0]))
            theirs.get_submodule(path.rpartition(".")[0]).gate = router
    tokens, labels = batch()
    logits = model.head.logits(model.hidden(tokens)).detach()
    scales = {"labels": 1 / labels.numel(), SAMPLES: 1 / len(tokens)}
    loss = model({"tokens": tokens, "labels": labels}, scales)[0]
    wanted = theirs(tokens).logits
    plain = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    their_loss = plain + coefficient * balance_of(logits_of_routers, config.model.experts, len(tokens))
    loss.backward()
    their_loss.backward()
    ours = as_theirs({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, config)
    apart = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, name
        apart[name] = float((ours.pop(name) - parameter.grad).norm() / parameter.grad.norm())
    assert ours == {}, f"not compared: {list(ours)}"
    far = float((logits - wanted).detach().norm() / wanted.detach().norm())
    return far, abs(float((loss - their_loss).detach())), apart, float((their_loss - plain).detach())


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    for kind in THEIRS:
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}", reason="pip install transformers")


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_logits_losses_and_gradients_equal_hugging_faces(case: str, coefficient: float) -> None:
    kind, experts, changes = CASES[case]
    ((logits, loss, gradients, balance),) = run_ranks(distances, ONE, kind, experts, changes, coefficient)
    assert logits < 1e-9
    assert loss < 1e-9
    assert max(gradients.values()) < 1e-9, gradients
    assert balance >= coefficient * experts["per_token"] * 0.5  # about k for equally busy experts


REAL_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "vocabulary": 32000, "hidden": 512, "heads": 16, "key_value_heads": 4, "feed_forward": 896, "tied": False,
        "experts": {"count": 8, "per_token": 2},
    },
    "qwen3_moe": {
        "vocabulary": 151936, "hidden": 256, "heads": 4, "key_value_heads": 2, "head_width": 128, "head_norms": True,
        "feed_forward": 96, "experts": {"count": 128, "per_token": 8},
    },
}  # fmt: skip
"""The vocabularies, experts and heads of Mixtral 8x7B and Qwen3-30B-A3B; fewer and narrower layers."""


def real_distances(mesh: Mesh, kind: str) -> tuple[float, float, dict[str, float]]:
    """Return the relative distances of logits, losses and gradients of 1,024 tokens, both programs in float32."""
    config = config_of("float32", 512, **REAL_SIZES[kind], positions=512, vocabulary_multiple=128)
    model = random_model(LlamaModel, mesh, config)
    theirs = hugging_face(kind, model, config)
    tokens = torch.randint(config.model.vocabulary, (2, 513), generator=torch.Generator().manual_seed(1))
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    wanted = theirs(tokens).logits
    with torch.no_grad():
        far = float((model.head.logits(model.hidden(tokens)) - wanted).norm() / wanted.norm())
    loss = model({"tokens": tokens, "labels": labels}, {"labels": 1 / labels.numel(), SAMPLES: 1 / len(tokens)})[0]
    their_loss = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    loss.backward()
    their_loss.backward()
    ours = as_theirs({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, config)
    apart = {
        name: float((ours[name] - p.grad).norm() / p.grad.norm())
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    assert apart.keys() == ours.keys()
    return far, float((loss - their_loss).abs() / their_loss), apart


@pytest.mark.long
@pytest.mark.parametrize("kind", REAL_SIZES)
def test_real_vocabularies_and_many_experts_in_float32(kind: str) -> None:
    """With two threads, each of 1,024 tokens takes the same experts in both programs."""
    ((logits, loss, gradients),) = run_ranks(real_distances, ONE, kind, threads=2)
    assert logits < 1e-5
    assert loss < 1e-6
    assert max(gradients.values()) < 1e-5, gradients
