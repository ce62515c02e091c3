"""BERT against transformers' BERT with equal random weights, in float64, in both orders of norms; padding; counts.

BertForPreTraining is the reference of the original order, MegatronBertForPreTraining of Megatron's order.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import IGNORED, Batch, counts_of, scales_of
from meshwright.compute.parameters.shard import num_parameters, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.families.bert.convert import BertFamily
from meshwright.families.bert.model import BERT
from meshwright.families.bert.section import Bert
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_model
from tests.compute.models.harness import random_model, train_both
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
B, T, STEPS, VOCABULARY = 3, 11, 20, 300
Order = Literal["original", "megatron"]
ORDERS: tuple[Order, ...] = ("original", "megatron")


def config_of(**model: Any) -> Config:
    shape = {
        "family": "bert", "layers": 2, "hidden": 24, "heads": 3, "positions": 16, "vocabulary": VOCABULARY,
        "vocabulary_multiple": 64, "dropout": 0.0,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": shape | model, "data": {"sequence": T}, "precision": precision})


def batch_of(step: int = 0, real: tuple[int, ...] = (T, T - 2, T - 5)) -> Batch:
    """Return rows with `real` tokens before the padding, four labels a row, and both next-sentence answers."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (B, T), generator=generator)
    labels = torch.full((B, T), IGNORED)
    for row, count in enumerate(real):
        places = torch.randperm(count, generator=generator)[:4]
        labels[row, places] = tokens[row, places]
    return {
        "tokens": tokens,
        "segments": (torch.arange(T) >= 5).long().expand(B, T).contiguous(),
        "mask": (torch.arange(T) < torch.tensor(real).unsqueeze(1)).long(),
        "labels": labels,
        "next_sentence": torch.tensor([[0], [1], [1]]),
    }


def loss_of(model: BERT, batch: Batch) -> Tensor:
    """Return the sum of the two means, as Hugging Face does."""
    return model(batch, scales_of(model.labels, counts_of(batch, model.labels), 1.0))[0]


def hugging_face(model: BERT, config: Config) -> nn.Module:
    """Return transformers' model with our weights."""
    import transformers as theirs

    shape = config.model
    assert isinstance(shape, Bert)
    kinds = {
        "original": (theirs.BertConfig, theirs.BertForPreTraining),
        "megatron": (theirs.MegatronBertConfig, theirs.MegatronBertForPreTraining),
    }
    settings, kind = kinds[shape.norm_order]
    made = kind(
        settings(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=shape.inner, layer_norm_eps=shape.norm_epsilon,
            max_position_embeddings=shape.positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            attn_implementation="eager", pad_token_id=None,
        )
    ).double()  # fmt: skip
    weights = as_theirs(shape, {name: parameter.detach() for name, parameter in model.named_parameters()})
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, f"not theirs: {list(weights)}"
    return made


def as_theirs(model: Bert, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and reshape our weights or gradients as transformers', without the padding."""
    theirs: dict[str, Tensor] = {}
    for pair in BertFamily().pairs(model):
        parts = pair.to_theirs(ours[pair.name][: pair.shape[0] - pair.padding])
        theirs |= dict(zip(pair.theirs, parts, strict=True))
    return theirs


def theirs_on(theirs: nn.Module, batch: Batch) -> Any:
    return theirs(
        batch["tokens"],
        attention_mask=batch["mask"],
        token_type_ids=batch["segments"],
        labels=batch["labels"],
        next_sentence_label=batch["next_sentence"].squeeze(1),
    )


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def compare_gradients(mesh: Mesh, order: Order) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return relative distances of the logits, of both losses and the losses' sum, and of each gradient."""
    config = config_of(norm_order=order)
    model, batch = random_model(BERT, mesh, config), batch_of()
    theirs = hugging_face(model, config)
    wanted = theirs_on(theirs, batch)
    h = model.hidden_states(batch)[0]
    with torch.no_grad():
        answers = model.next_sentence_head.logits(model.pooled(h)).squeeze(1)
        logits = {
            "masked": distance(model.head.logits(model.transformed(h)), wanted.prediction_logits),
            "next": distance(answers, wanted.seq_relationship_logits),
        }
    counts = counts_of(batch, model.labels)
    losses = {
        "labels": F.cross_entropy(wanted.prediction_logits.flatten(0, 1), batch["labels"].flatten()),
        "next_sentence": F.cross_entropy(wanted.seq_relationship_logits, batch["next_sentence"].flatten()),
    }
    apart = {}
    for name, count in zip(model.labels, counts, strict=True):
        alone = model.loss(h, batch, {other: (other == name) / count for other in model.labels})
        apart[name] = distance(alone.detach(), losses[name].detach())
    loss = loss_of(model, batch)
    loss.backward()
    wanted.loss.backward()
    apart["sum"] = distance(loss.detach(), wanted.loss.detach())
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad
    assert isinstance(config.model, Bert)
    ours = as_theirs(config.model, gradients)
    distances = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        # The keys' bias adds one value to all of a query's scores: its gradient is noise around 0 in both programs.
        if name.endswith("key.bias"):
            assert max(float(ours.pop(name).norm()), float(parameter.grad.norm())) < 1e-15
            continue
        distances[name] = distance(ours.pop(name), parameter.grad)
    assert not ours, f"not compared: {list(ours)}"
    return logits, apart, distances


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    pytest.importorskip("transformers.models.megatron_bert.modeling_megatron_bert", reason="pip install transformers")
    return pytest.importorskip("transformers.models.bert.modeling_bert", reason="pip install transformers")


@pytest.mark.parametrize("order", ORDERS)
def test_logits_losses_and_gradients_equal_hugging_faces(order: Order) -> None:
    ((logits, losses, gradients),) = run_ranks(compare_gradients, ONE, order)
    assert max(logits.values()) < 1e-9, logits
    assert max(losses.values()) < 1e-12, losses
    assert len(gradients) == 3 + 2 + 2 * (16 - 1) + 2 + 5 + 2  # embeddings, norm, blocks, pooler, heads
    assert max(gradients.values()) < 1e-9, gradients


def compare_training(mesh: Mesh, order: Order) -> tuple[list[float], list[float]]:
    config = config_of(norm_order=order)
    model = random_model(BERT, mesh, config)
    theirs = hugging_face(model, config)
    # Adam would amplify the noise in the gradient of the keys' biases, so epsilon is above this noise.
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, theirs)]

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        batch = batch_of(step)
        return loss_of(model, batch), theirs_on(theirs, batch).loss

    return train_both(optimizers, STEPS, losses_at)


@pytest.mark.parametrize("order", ORDERS)
def test_twenty_steps_equal_hugging_faces(order: Order) -> None:
    ((ours, theirs),) = run_ranks(compare_training, ONE, order)
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def padded_losses(mesh: Mesh, next_sentence: bool) -> tuple[float, float, int]:
    """Return the losses of a batch, and of the batch with other tokens and segments in its padding."""
    model = random_model(BERT, mesh, config_of(next_sentence=next_sentence))
    batch = batch_of()
    other = dict(batch)
    padding = batch["mask"] == 0
    other["tokens"] = torch.where(padding, (batch["tokens"] + 1) % VOCABULARY, batch["tokens"])
    other["segments"] = torch.where(padding, 1 - batch["segments"], batch["segments"])
    with torch.no_grad():
        return float(loss_of(model, batch)), float(loss_of(model, other)), int(padding.sum())


@pytest.mark.parametrize("next_sentence", [True, False])
def test_padding_is_seen_by_nobody(next_sentence: bool) -> None:
    ((loss, other, num),) = run_ranks(padded_losses, ONE, next_sentence)
    assert num == 7
    assert loss == other


def right_counts(mesh: Mesh) -> tuple[list[int], list[int], list[int]]:
    """Return the model's counts, the counts from the logits, and the numbers of labels."""
    model = random_model(BERT, mesh, config_of())
    batch = batch_of()
    with torch.no_grad():
        h = model.hidden_states(batch)[0]
        likeliest = model.head.logits(model.transformed(h)).argmax(-1)
        answers = model.next_sentence_head.logits(model.pooled(h)).argmax(-1)
        batch["labels"][0] = torch.where(batch["labels"][0] == IGNORED, IGNORED, likeliest[0])  # a row of right answers
        wanted = [int((likeliest == batch["labels"]).sum()), int((answers == batch["next_sentence"]).sum())]
        return model.num_correct(h, batch), wanted, counts_of(batch, model.labels)


def test_right_answers_are_counted() -> None:
    ((counted, wanted, of),) = run_ranks(right_counts, ONE)
    assert counted == wanted
    assert counted[0] >= 4
    assert of == [12, 3]


def loss_without_next_sentence(mesh: Mesh) -> tuple[tuple[str, ...], float, float, list[str]]:
    """Return the small model's labels and loss, the large model's masked loss and additional parameters."""
    small, large = random_model(BERT, mesh, config_of(next_sentence=False)), random_model(BERT, mesh, config_of())
    weights = dict(large.named_parameters())
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(weights.pop(name))
        batch = batch_of()
        (alone,) = large(batch, {"labels": 1 / 12, "next_sentence": 0.0})
        return small.labels, float(loss_of(small, batch)), float(alone), list(weights)


def test_without_next_sentence() -> None:
    ((labels, loss, masked, more),) = run_ranks(loss_without_next_sentence, ONE)
    assert labels == ("labels",)
    assert loss == masked
    assert more == ["pooler.weight", "pooler.bias", "next_sentence_head.weight", "next_sentence_head.bias"]


def dropout_facts(mesh: Mesh, order: Order) -> tuple[bool, bool]:
    """Return whether two passes differ, in training and in evaluation."""
    model = random_model(BERT, mesh, config_of(dropout=0.5, norm_order=order))
    with torch.no_grad():
        training = [float(loss_of(model, batch_of())) for _ in range(2)]
        model.eval()
        evaluating = [float(loss_of(model, batch_of())) for _ in range(2)]
    return training[0] != training[1], evaluating[0] != evaluating[1]


@pytest.mark.parametrize("order", ORDERS)
def test_dropout_acts_in_training_alone(order: Order) -> None:
    assert run_ranks(dropout_facts, ONE, order) == [(True, False)]


def first_loss(mesh: Mesh, order: Order) -> float:
    model = build_model(config_of(norm_order=order), SerialKit(mesh), mesh)
    assert isinstance(model, BERT)
    with torch.no_grad():
        return float(loss_of(model, batch_of()))


@pytest.mark.parametrize("order", ORDERS)
def test_an_untrained_model_knows_nothing(order: Order) -> None:
    assert run_ranks(first_loss, ONE, order)[0] == pytest.approx(math.log(VOCABULARY) + math.log(2), abs=0.2)


def count(mesh: Mesh, name: str) -> tuple[int, int]:
    """Return the numbers of a shipped model's parameters and of the padding's, on the meta device."""
    model = parse_config({"model": name}).model
    assert isinstance(model, Bert)
    with torch.device("meta"):
        made = BERT(model, SerialKit(Mesh(mesh.grid, 0, torch.device("meta"), mesh.transport)))
    tables = (model.padded_vocabulary - model.vocabulary) + (model.padded(2) - 2) * 2
    biases = (model.padded_vocabulary - model.vocabulary) + (model.padded(2) - 2)
    return num_parameters(list(shard_specs(made).values())), tables * model.hidden + biases


@pytest.mark.parametrize("name, wanted", [("bert-base", 110_106_428), ("bert-large", 336_226_108)])
def test_parameter_counts_are_the_published_ones(name: str, wanted: int) -> None:
    ((counted, padding),) = run_ranks(count, ONE, name)
    assert counted - padding == wanted


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("bert-tiny", 2.7e6),
        ("megatron-bert-336m", 336e6),
        ("megatron-bert-1.3b", 1.28e9),
        ("megatron-bert-3.9b", 3.87e9),
    ],
)
def test_sizes_are_what_the_names_say(name: str, wanted: float) -> None:
    ((counted, padding),) = run_ranks(count, ONE, name)
    assert counted - padding == pytest.approx(wanted, rel=0.02)
