"""GPT-2 against transformers' GPT-2 with equal random weights, in float64; cache, padding, count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.models.decoder import KeyValueCache
from meshwright.compute.parameters.shard import num_parameters, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.families.gpt.model import GPT
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_model
from tests.compute.models.harness import random_model, train_both
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
B, T, STEPS = 3, 11, 20
BLOCK = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.output",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "feed_forward.expand",
    "mlp.c_proj": "feed_forward.contract",
}


def config_of(**model: Any) -> Config:
    shape = {
        "layers": 2, "hidden": 24, "heads": 3, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 64,
        "dropout": 0.0,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": shape | model, "data": {"sequence": T}, "precision": precision})


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(300, (B, T + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: GPT, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return model({"tokens": tokens, "labels": labels}, {"labels": 1 / labels.numel()})[0]


def hugging_face(model: GPT, config: Config) -> nn.Module:
    """Return transformers' model with our weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = config.model
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary, n_positions=shape.positions, n_embd=shape.hidden, n_layer=shape.layers,
            n_head=shape.heads, layer_norm_epsilon=shape.norm_epsilon, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            tie_word_embeddings=shape.tied, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
        )
    ).double()  # fmt: skip
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(as_theirs(ours[our_name(name)], parameter))
    return theirs


def our_name(name: str) -> str:
    name = name.removeprefix("transformer.")
    plain = {"wte.weight": "tokens.weight", "wpe.weight": "positions.weight", "lm_head.weight": "head.weight"}
    if name in plain:
        return plain[name]
    if name.startswith("ln_f."):
        return name.replace("ln_f", "norm")
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"blocks.{layer}.{BLOCK[part]}.{kind}"


def as_theirs(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a tensor without the rows of padding, with the three groups side by side."""
    if ours.shape[0] > theirs.shape[0]:
        return ours[: theirs.shape[0]]
    return ours.reshape(theirs.shape)


def losses_of(theirs: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())


def compare_gradients(mesh: Mesh, tied: bool) -> tuple[float, dict[str, float], float]:
    """Return the relative distances of the logits and of each gradient, and the losses' distance."""
    config = config_of(tied=tied)
    model = random_model(GPT, mesh, config)
    theirs = hugging_face(model, config)
    tokens, labels = batch()
    wanted = theirs(tokens).logits.detach()
    logits = model.head.logits(model.hidden(tokens)).detach()
    loss = loss_of(model, tokens, labels)
    loss.backward()
    their_loss = losses_of(theirs, tokens, labels)
    their_loss.backward()
    ours = dict(model.named_parameters())
    distances = {}
    for name, parameter in theirs.named_parameters():
        gradient = ours.pop(our_name(name)).grad
        assert gradient is not None
        assert parameter.grad is not None
        distances[name] = float((as_theirs(gradient, parameter.grad) - parameter.grad).norm() / parameter.grad.norm())
    assert ours == {}, f"not compared: {list(ours)}"
    return (
        float((logits - wanted).norm() / wanted.norm()),
        distances,
        abs(float(loss.detach()) - float(their_loss.detach())),
    )


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    return pytest.importorskip("transformers.models.gpt2.modeling_gpt2", reason="pip install transformers")


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_hugging_faces(tied: bool) -> None:
    ((logits, gradients, loss),) = run_ranks(compare_gradients, ONE, tied)
    assert logits < 1e-9
    assert loss < 1e-12
    assert len(gradients) == 2 + 2 * 12 + 2 + (not tied)
    assert max(gradients.values()) < 1e-9, gradients


def compare_training(mesh: Mesh) -> tuple[list[float], list[float]]:
    config = config_of(tied=True)
    model = random_model(GPT, mesh, config)
    theirs = hugging_face(model, config)
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, theirs)]

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        tokens, labels = batch(step)
        return loss_of(model, tokens, labels), losses_of(theirs, tokens, labels)

    return train_both(optimizers, STEPS, losses_at)


def test_twenty_steps_equal_hugging_faces() -> None:
    ((ours, theirs),) = run_ranks(compare_training, ONE)
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def cached_logits(mesh: Mesh, prompt: int) -> tuple[Tensor, Tensor, int]:
    """Return the logits of the tokens from the prompt's last token on, in one pass and token by token."""
    model = random_model(GPT, mesh, config_of()).eval()
    tokens, _ = batch()
    cache = KeyValueCache()
    with torch.no_grad():
        whole = model.head.logits(model.hidden(tokens))[:, prompt - 1 :]
        steps = [model.head.logits(model.hidden(tokens[:, :prompt], cache))[:, -1:]]
        for position in range(prompt, T):
            steps.append(model.head.logits(model.hidden(tokens[:, position : position + 1], cache)))
    return whole, torch.cat(steps, 1), cache.num_tokens


@pytest.mark.parametrize("prompt", [1, 4])
def test_the_cache_changes_nothing(prompt: int) -> None:
    ((whole, steps, num_tokens),) = run_ranks(cached_logits, ONE, prompt)
    assert num_tokens == T
    torch.testing.assert_close(steps, whole, rtol=1e-11, atol=1e-12)


def padded_loss(mesh: Mesh, multiple: int) -> tuple[int, float, Tensor]:
    model = random_model_without_padding(mesh, multiple)
    tokens, labels = batch()
    loss = loss_of(model, tokens, labels)
    loss.backward()
    gradient = model.get_parameter("tokens.weight").grad
    assert gradient is not None
    return gradient.shape[0], float(loss.detach()), gradient


def random_model_without_padding(mesh: Mesh, multiple: int) -> GPT:
    """Return a model with large weights in the padding rows, so that a use of the padding changes the loss."""
    model = build_model(config_of(vocabulary_multiple=multiple), SerialKit(mesh), mesh)
    assert isinstance(model, GPT)
    with torch.no_grad():
        model.get_parameter("tokens.weight")[300:] = 5.0
    return model


def test_padding_rows_change_nothing() -> None:
    ((rows, loss, gradient),) = run_ranks(padded_loss, ONE, 1)
    ((padded_rows, padded, padded_gradient),) = run_ranks(padded_loss, ONE, 256)
    assert (rows, padded_rows) == (300, 512)
    assert padded == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(padded_gradient[:300], gradient, rtol=1e-11, atol=1e-14)
    assert padded_gradient[300:].count_nonzero() == 0


def count(mesh: Mesh, name: str) -> tuple[int, int]:
    """Return the numbers of a shipped model's parameters and of the padding's, on the meta device."""
    config = parse_config({"model": name})
    with torch.device("meta"):
        model = GPT(config.model, SerialKit(Mesh(mesh.grid, 0, torch.device("meta"), mesh.transport)))
    padding = (config.model.padded_vocabulary - config.model.vocabulary) * config.model.hidden
    return num_parameters(list(shard_specs(model).values())), padding


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, wanted: int) -> None:
    ((counted, padding),) = run_ranks(count, ONE, name)
    assert counted - padding == wanted


def dropout_facts(mesh: Mesh) -> tuple[bool, bool]:
    """Return whether two passes differ, in training and in evaluation."""
    model = random_model(GPT, mesh, config_of(dropout=0.5))
    tokens, labels = batch()
    with torch.no_grad():
        training = [float(loss_of(model, tokens, labels)) for _ in range(2)]
        model.eval()
        evaluating = [float(loss_of(model, tokens, labels)) for _ in range(2)]
    return training[0] != training[1], evaluating[0] != evaluating[1]


def test_dropout_acts_in_training_alone() -> None:
    assert run_ranks(dropout_facts, ONE) == [(True, False)]


def first_loss(mesh: Mesh) -> float:
    model = build_model(config_of(), SerialKit(mesh), mesh)
    tokens, labels = batch()
    with torch.no_grad():
        return float(loss_of(model, tokens, labels))


def test_an_untrained_model_knows_nothing() -> None:
    assert run_ranks(first_loss, ONE)[0] == pytest.approx(math.log(300), abs=0.1)
