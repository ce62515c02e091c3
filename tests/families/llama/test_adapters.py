"""Adapters against peft over transformers' classes, in float64: logits, gradients to 1e-9, 20 steps of AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meshwright.families.llama.convert import LlamaFamily
from meshwright.families.llama.model import LlamaModel
from meshwright.ranks.mesh import Mesh
from meshwright.training.convert.adapters import factors_of
from tests.compute.models.harness import random_model, train_both
from tests.families.llama.models import ONE, STEPS, batch, config_of, hugging_face, losses_of
from tests.workers import run_ranks

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"rank": 4}),
    "llama, biased": (
        "llama",
        {"biases": ["query-key-value", "output", "feed-forward"], "key_value_heads": 1},
        {"rank": 3, "on": ["v_proj", "gate", "attention.output"], "alpha": 5.0},
    ),
    "qwen3": ("qwen3", {"head_norms": True, "head_width": 8, "tied": True}, {"rank": 16, "rslora": True}),
    "dora": ("llama", {"key_value_heads": 2}, {"rank": 4, "dora": True}),
    "dora, biased": (
        "qwen2",
        {"biases": ["query-key-value"]},
        {"rank": 2, "dora": True, "on": ["query", "value", "down_proj"]},
    ),
}


def loss_of(model: LlamaModel, tokens: Tensor, labels: Tensor) -> Tensor:
    return model({"tokens": tokens, "labels": labels}, {"labels": 1 / labels.numel()})[0]


class Base:
    """The parameters of a model without adapters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, x) for name, x in self.model.named_parameters() if ".adapter." not in name)


def distances(
    mesh: Mesh, kind: str, changes: dict[str, Any], adapter: dict[str, Any]
) -> tuple[float, dict[str, float], list[list[float]]]:
    """Return the relative distances of logits and of each gradient of an adapter, and the losses of some steps."""
    import peft

    config = config_of(**changes, adapter=adapter)
    model = random_model(LlamaModel, mesh, config)
    factors = {factor.theirs: factor for factor in factors_of(LlamaFamily(), config.model)}
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors}
    settings = config.model.adapter
    alpha = 2 * settings.rank if settings.alpha is None else settings.alpha
    base = hugging_face(kind, cast(LlamaModel, Base(model)), config)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # transformers warns about peft
    theirs = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=settings.rank, lora_alpha=alpha, target_modules=sorted(modules), use_rslora=settings.rslora,
            use_dora=settings.dora,
        ),
    )  # fmt: skip
    state = {name: x.detach().clone() for name, x in peft.get_peft_model_state_dict(theirs).items()}
    assert state.keys() == factors.keys()
    ours = dict(model.named_parameters())
    with torch.no_grad():
        values = {name: factor.to_theirs(ours[factor.name]) for name, factor in factors.items()}
        values |= {name: state[name] + values[name] for name in values if factors[name].changes_magnitudes}
        peft.set_peft_model_state_dict(theirs, values)
    tokens, labels = batch()
    wanted = theirs(tokens).logits.detach()
    logits = model.head.logits(model.hidden(tokens)).detach()
    loss_of(model, tokens, labels).backward()
    losses_of(theirs, tokens, labels).backward()
    trained = {name: x for name, x in theirs.named_parameters() if x.requires_grad}
    gradients = {name.replace(".default", ""): x.grad for name, x in trained.items()}
    gradients = {name.replace("vector.weight", "vector"): x for name, x in gradients.items()}
    apart = {}
    for name, factor in factors.items():
        mine, other = ours[factor.name].grad, gradients.pop(name)
        assert mine is not None
        apart[name] = float((factor.to_theirs(mine) - other).norm() / other.norm())
    assert gradients == {}, f"not compared: {list(gradients)}"
    assert all(x.grad is None for name, x in ours.items() if ".adapter." not in name)

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        return loss_of(model, *batch(step)), losses_of(theirs, *batch(step))

    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizers = [
        torch.optim.AdamW([x for x in each.parameters() if x.requires_grad], **options) for each in (model, theirs)
    ]
    for optimizer in optimizers:
        optimizer.zero_grad()
    both = train_both(optimizers, STEPS, losses_at)
    return float((logits - wanted).norm() / wanted.norm()), apart, list(both)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import transformers and peft before the ranks are forked."""
    for kind in ("llama", "qwen2", "qwen3"):
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}", reason="pip install transformers")
    pytest.importorskip("peft", reason="pip install peft")


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_steps_equal_pefts(case: str) -> None:
    ((logits, gradients, (ours, theirs)),) = run_ranks(distances, ONE, *CASES[case])
    assert logits < 1e-9
    assert max(gradients.values()) < 1e-9, gradients
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS
