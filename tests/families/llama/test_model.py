"""Llama against transformers' Llama, Qwen2, Qwen3 and Mistral with equal random weights, in float64; the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.models.decoder import KeyValueCache
from meshwright.compute.parameters.shard import num_parameters, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import parse_config
from meshwright.families.llama.model import LlamaModel
from meshwright.ranks.mesh import Mesh
from tests.compute.models.harness import random_model, train_both
from tests.families.llama.logits import CLAMPS_BY_CONFIG
from tests.families.llama.models import (
    ONE,
    STEPS,
    B,
    T,
    as_theirs,
    batch,
    config_of,
    hugging_face,
    losses_of,
    their_logits,
)
from tests.families.llama.sizes import COUNTS
from tests.workers import run_ranks

THEIRS = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo3", "gemma2", "gemma3", "phi3", "gpt_oss")

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"theta": 1e4},
    "linear": {"kind": "linear", "factor": 4.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original": 16, "low_frequency": 0.5, "theta": 100.0},
    "yarn": {"kind": "yarn", "factor": 4.0, "original": 16, "fast": 4.0, "slow": 0.25, "theta": 500.0},
}

OLMO: dict[str, Any] = {"norms": "behind", "whole_norms": True}

GEMMA: dict[str, Any] = {"family": "gemma", "hidden": 36, "head_width": 8, "query_scalar": 11}
"""The factor of the embeddings is 6, which is not rounded."""

GPT_OSS: dict[str, Any] = {"family": "gpt-oss", "experts": {"count": 4, "per_token": 2}}

SHARP = {**ROPES["yarn"], "truncate": False}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tied": True, "rope": ROPES["llama3"]}),
    "llama, biased": ("llama", {"biases": ["query-key-value", "output", "feed-forward"], "rope": ROPES["linear"]}),
    "llama, one key": ("llama", {"key_value_heads": 1, "rope": ROPES["yarn"]}),
    "qwen2": ("qwen2", {"biases": ["query-key-value"], "key_value_heads": 6, "rope": ROPES["yarn"]}),
    "qwen3": ("qwen3", {"head_norms": True, "head_width": 8, "tied": True}),
    "mistral": ("mistral", {"head_width": 10}),
    "mistral, window": ("mistral", {"window": 5}),
    "smollm3": ("smollm3", {"rotary_layers": [True, False], "tied": True, "rope": ROPES["yarn"]}),
    "smollm3, windows": (
        "smollm3",
        {"rotary_layers": [False, True], "window": 4, "window_layers": [False, True], "layers": 3},
    ),
    "olmo2": ("olmo2", {**OLMO, "rope": {"theta": 500.0}}),
    "olmo2, biased": ("olmo2", {**OLMO, "biases": ["query-key-value", "output"], "tied": True}),
    "olmo3": (
        "olmo3",
        {
            **OLMO,
            "window": 5,
            "window_layers": [True, False],
            "rope": ROPES["yarn"],
            "window_rope": {"theta": 500.0},
        },
    ),
    "gemma2": (
        "gemma2",
        {**GEMMA, "window": 5, "window_layers": [True, False], "score_cap": 0.5, "logit_cap": 0.3},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            "head_norms": True,
            "window": 7,
            "window_layers": [True, False],
            "window_rope": {"theta": 50.0},
            "rope": ROPES["linear"],
            "tied": False,
        },
    ),
    "phi3": ("phi3", {"family": "phi", "window": 5}),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "window": 5, "window_layers": [True, False], "rope": SHARP}),
    "gpt_oss, clamped": ("gpt_oss", {**GPT_OSS, "gate_slope": 2.5, "gate_limit": 0.05, "head_width": 6}),
    "gpt_oss, few biases": ("gpt_oss", {**GPT_OSS, "biases": ["feed-forward"], "key_value_heads": 6}),
    "qwen2, windows": ("qwen2", {"biases": ["query-key-value"], "window": 7, "window_layers": [False, True]}),
    "qwen3, windows": ("qwen3", {"head_norms": True, "window": 3, "window_layers": [True, False]}),
}


def loss_of(model: LlamaModel, tokens: Tensor, labels: Tensor) -> Tensor:
    return model({"tokens": tokens, "labels": labels}, {"labels": 1 / labels.numel()})[0]


def distances(
    mesh: Mesh, kind: str, changes: dict[str, Any]
) -> tuple[float, float, dict[str, float], list[list[float]]]:
    """Return the relative distances of logits, losses and each gradient, and the losses of some steps."""
    config = config_of(**changes)
    model = random_model(LlamaModel, mesh, config)
    theirs = hugging_face(kind, model, config)
    tokens, labels = batch()
    wanted = their_logits(theirs, tokens).detach()
    logits = model.head.logits(model.hidden(tokens)).detach()
    loss, their_loss = loss_of(model, tokens, labels), losses_of(theirs, tokens, labels)
    loss.backward()
    their_loss.backward()
    ours = as_theirs({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, config)
    apart = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        apart[name] = float((ours.pop(name) - parameter.grad).norm() / parameter.grad.norm())
    assert ours == {}, f"not compared: {list(ours)}"

    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, theirs)]

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        return loss_of(model, *batch(step)), losses_of(theirs, *batch(step))

    for optimizer in optimizers:
        optimizer.zero_grad()
    both = train_both(optimizers, STEPS, losses_at)
    return float((logits - wanted).norm() / wanted.norm()), abs(float((loss - their_loss).detach())), apart, list(both)


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    for kind in THEIRS:
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}", reason="pip install transformers")


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_steps_equal_hugging_faces(case: str) -> None:
    if case == "gpt_oss, clamped" and not CLAMPS_BY_CONFIG:
        pytest.skip("this release of transformers has a constant clamp")
    ((logits, loss, gradients, (ours, theirs)),) = run_ranks(distances, ONE, *CASES[case])
    assert logits < 1e-9
    assert loss < 1e-9
    assert max(gradients.values()) < 1e-9, gradients
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def cached_logits(mesh: Mesh, prompt: int) -> tuple[Tensor, Tensor, int, tuple[int, ...]]:
    """Return the logits of the tokens from the prompt's last token on, in one pass and token by token."""
    model = random_model(LlamaModel, mesh, config_of(rope=ROPES["yarn"], head_norms=True)).eval()
    tokens, _ = batch()
    cache = KeyValueCache()
    with torch.no_grad():
        whole = model.head.logits(model.hidden(tokens))[:, prompt - 1 :]
        steps = [model.head.logits(model.hidden(tokens[:, :prompt], cache))[:, -1:]]
        for position in range(prompt, T):
            steps.append(model.head.logits(model.hidden(tokens[:, position : position + 1], cache)))
    return whole, torch.cat(steps, 1), cache.num_tokens, tuple(cache.layers[0][0].shape)


@pytest.mark.parametrize("prompt", [1, 4])
def test_the_cache_holds_key_value_heads_and_changes_nothing(prompt: int) -> None:
    ((whole, steps, num_tokens, shape),) = run_ranks(cached_logits, ONE, prompt)
    assert num_tokens == T
    assert shape == (B, 2, T, 4)
    torch.testing.assert_close(steps, whole, rtol=1e-11, atol=1e-12)


def count(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Return each shipped model's parameters without the table's padding: of meta tensors, and from `products`."""
    meta = SerialKit(Mesh(mesh.grid, 0, torch.device("meta"), mesh.transport))
    counts = {}
    for name in COUNTS:
        config = parse_config({"model": name, "data": {"sequence": 1}})
        model = config.model
        padding = (model.padded_vocabulary - model.vocabulary) * model.hidden * (1 if model.tied else 2)
        built = num_parameters(list(shard_specs(LlamaModel(model, meta)).values()))
        products = LlamaModel.products(config).total - 2 * model.layers * model.heads * model.width_of_head
        counts[name] = built - padding, round(products)
    return counts


def test_shipped_models_have_their_published_sizes() -> None:
    (counts,) = run_ranks(count, ONE)
    for name, (built, products) in counts.items():
        published = COUNTS[name]
        assert built == published if "-mini" not in name else built == pytest.approx(published, rel=0.02)
        table = 0 if parse_config({"model": name, "data": {"sequence": 1}}).model.tied else 1
        model = parse_config({"model": name, "data": {"sequence": 1}}).model
        idle = model.experts.count - model.experts.per_token if model.experts is not None else 0
        # Each weight of a matrix multiplies a token once, except an untied embedding and idle experts.
        unused = table * model.vocabulary + 3 * idle * model.layers * model.feed_forward
        if model.expert_biases:  # 2 N and H for each idle expert
            unused += idle * model.layers * (2 * model.feed_forward / model.hidden + 1)
        assert products == pytest.approx(built - unused * model.hidden, rel=1e-3)
