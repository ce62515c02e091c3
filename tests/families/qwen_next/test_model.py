"""Qwen3-Next and Qwen3.5 against transformers with equal random weights, in float64; the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.models.decoder import KeyValueCache
from meshwright.families.qwen_next.model import QwenNextModel
from meshwright.ranks.mesh import Mesh
from tests.compute.models.harness import random_model, train_both
from tests.families.qwen_next.models import (
    KINDS,
    ONE,
    STEPS,
    B,
    T,
    as_theirs,
    batch,
    config_of,
    hugging_face,
    their_logits,
)
from tests.workers import run_ranks


def loss_of(model: QwenNextModel, tokens: Tensor, labels: Tensor) -> Tensor:
    return model({"tokens": tokens, "labels": labels}, {"labels": 1 / labels.numel()})[0]


def distances(mesh: Mesh, changes: dict[str, Any]) -> tuple[float, float, dict[str, float], list[list[float]]]:
    """Return the relative distances of logits, losses and each gradient, and the losses of some steps."""
    config = config_of(**changes)
    model = random_model(QwenNextModel, mesh, config)
    theirs = hugging_face(model, config)

    def their_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(their_logits(theirs, tokens).flatten(0, 1), labels.flatten())

    tokens, labels = batch()
    wanted = their_logits(theirs, tokens).detach()
    logits = model.head.logits(model.hidden(tokens)).detach()
    loss, other = loss_of(model, tokens, labels), their_loss(tokens, labels)
    loss.backward()
    other.backward()
    ours = as_theirs({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, config)
    apart = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        apart[name] = float((ours.pop(name) - parameter.grad).norm() / parameter.grad.norm())
    assert ours == {}, f"not compared: {list(ours)}"
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, theirs)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    both = train_both(optimizers, STEPS, lambda step: (loss_of(model, *batch(step)), their_loss(*batch(step))))
    return float((logits - wanted).norm() / wanted.norm()), abs(float((loss - other).detach())), apart, list(both)


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    for kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}", reason="pip install transformers")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_steps_equal_hugging_faces(kind: str) -> None:
    ((logits, loss, gradients, (ours, theirs)),) = run_ranks(distances, ONE, KINDS[kind])
    assert logits < 1e-9
    assert loss < 1e-9
    assert max(gradients.values()) < 1e-9, gradients
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def cached_logits(mesh: Mesh, prompt: int) -> tuple[Tensor, Tensor, Tensor, Tensor, KeyValueCache]:
    """Return the logits of the tokens from the prompt's last token on, in one pass and token by token.

    The third and fourth are logits of rows that change places after the prompt.
    """
    model = random_model(QwenNextModel, mesh, config_of(**KINDS["qwen3_next"])).eval()
    tokens, _ = batch()
    cache, moved = KeyValueCache(), KeyValueCache()
    with torch.no_grad():
        whole = model.head.logits(model.hidden(tokens))[:, prompt - 1 :]
        steps = [model.head.logits(model.hidden(tokens[:, :prompt], cache))[:, -1:]]
        for position in range(prompt, T):
            steps.append(model.head.logits(model.hidden(tokens[:, position : position + 1], cache)))
        model.hidden(tokens[:, :prompt], moved)
        moved.select([2, 0])
        after = model.head.logits(model.hidden(tokens[[2, 0], prompt : prompt + 1], moved))
    return whole, torch.cat(steps, 1), after, whole[[2, 0], 1:2], cache


@pytest.mark.parametrize("prompt", [1, 2, 66])
def test_the_cache_holds_states_and_changes_nothing(prompt: int) -> None:
    ((whole, steps, after, wanted, cache),) = run_ranks(cached_logits, ONE, prompt)
    assert cache.num_tokens == T
    columns = 2 * (2 * 6 + 3 * 5)
    shapes = [[tuple(x.shape) for x in pair] for pair in cache.layers]
    assert shapes == [[(B, 3, columns), (B, 6, 6, 5)]] * 3 + [[(B, 2, T, 8)] * 2]
    torch.testing.assert_close(steps, whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(after, wanted, rtol=1e-10, atol=1e-11)
