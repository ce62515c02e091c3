"""T5 against transformers' T5 with equal random weights, in float64; padding, buckets, cache, counts, dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compute.model import counts_of, scales_of
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.families.seq2seq.encoder_decoder import EncoderDecoderChain
from meshwright.families.seq2seq.t5 import T5Model, distance_buckets
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_model
from tests.compute.models.harness import random_model
from tests.families.seq2seq.pairs import counted_parameters, decoded, dropout_facts, pair_batch
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
S, T, VOCABULARY = 11, 9, 360

BLOCK = {
    "attention_norm": "layer.0.layer_norm",
    "attention.query_key_value": "layer.0.SelfAttention.{q,k,v}",
    "attention.output": "layer.0.SelfAttention.o",
    "cross_norm": "layer.1.layer_norm",
    "cross.query": "layer.1.EncDecAttention.q",
    "cross.key_value": "layer.1.EncDecAttention.{k,v}",
    "cross.output": "layer.1.EncDecAttention.o",
}
FEED_FORWARD = {
    "feed_forward_norm": "layer_norm",
    "feed_forward.expand": "DenseReluDense.wi",
    "feed_forward.contract": "DenseReluDense.wo",
}
OUTSIDE = {
    "tokens": "shared",
    "encoder_distances": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder_distances": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "blocks.1.final_norm": "encoder.final_layer_norm",
    "norm": "decoder.final_layer_norm",
}


def config_of(**model: Any) -> Config:
    shape = {
        "family": "t5", "layers": 2, "hidden": 24, "heads": 3, "head_width": 5, "feed_forward": 40, "positions": 16,
        "vocabulary": VOCABULARY, "vocabulary_multiple": 40, "distance_buckets": 8, "distance_max": 9, "dropout": 0.0,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": shape | model, "data": {"sequence": S}, "precision": precision})


def their_names(name: str) -> list[str]:
    """Return transformers' names of one of our parameters, several if transformers splits the parameter."""
    name = name.removesuffix(".weight")
    theirs = OUTSIDE.get(name)
    if theirs is None:
        _, layer, part = name.split(".", 2)
        stack, block = ("encoder", int(layer)) if int(layer) < 2 else ("decoder", int(layer) - 2)
        last = f"layer.{1 if stack == 'encoder' else 2}."
        theirs = f"{stack}.block.{block}." + (BLOCK[part] if part in BLOCK else last + FEED_FORWARD[part])
    if "{" not in theirs:
        return [f"{theirs}.weight"]
    prefix, letters = theirs.removesuffix("}").split("{")
    return [f"{prefix}{letter}.weight" for letter in letters.split(",")]


def as_theirs(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename our weights or gradients, and order the dims, as transformers'."""
    made = {}
    for name, value in ours.items():
        keeps = value.dim() == 1 or name in ("tokens.weight", "encoder_distances.weight", "decoder_distances.weight")
        parts = value.unbind(1) if value.dim() == 3 else [value]
        made |= {theirs: part if keeps else part.t() for theirs, part in zip(their_names(name), parts, strict=True)}
    return made


def hugging_face(model: T5Model, config: Config) -> nn.Module:
    """Return transformers' model with our weights, and with norms in float64 instead of at most float32."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = config.model
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=shape.vocabulary, d_model=shape.hidden, d_kv=shape.head_width, d_ff=shape.inner,
            num_layers=shape.layers, num_heads=shape.heads, dropout_rate=0.0, layer_norm_epsilon=shape.norm_epsilon,
            relative_attention_num_buckets=shape.distance_buckets, relative_attention_max_distance=shape.distance_max,
            attn_implementation="eager",
        )
    )  # fmt: skip
    for path in [path for path, _ in theirs.named_modules()]:
        if path.endswith("layer_norm"):
            parent, name = path.rsplit(".", 1)
            setattr(theirs.get_submodule(parent), name, nn.RMSNorm(shape.hidden, shape.norm_epsilon))
    theirs.double()
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, value in as_theirs({name: value.detach() for name, value in model.named_parameters()}).items():
            parameters.pop(name).copy_(value)
    assert parameters == {}, f"without a counterpart: {list(parameters)}"
    return theirs


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def compare(mesh: Mesh, padded: bool) -> tuple[float, float, dict[str, float]]:
    """Return the relative distances of the logits, of the loss, and of each gradient."""
    config = config_of()
    model = random_model(EncoderDecoderChain, mesh, config)
    assert isinstance(model, T5Model)
    theirs, batch = hugging_face(model, config), pair_batch(VOCABULARY, S, T, padded)
    wanted = theirs(
        input_ids=batch["source"], attention_mask=batch["source_mask"], decoder_input_ids=batch["target"],
        labels=batch["labels"],
    )  # fmt: skip
    with torch.no_grad():
        logits = distance(model.head.logits(model.hidden_states(batch)[0]), wanted.logits)  # type: ignore[operator]
    (loss,) = model(batch, scales_of(model.labels, counts_of(batch, model.labels), 1.0))
    loss.backward()
    wanted.loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad
    ours = as_theirs(gradients)
    distances = {
        name: distance(ours.pop(name), parameter.grad)
        for name, parameter in theirs.named_parameters() if parameter.grad is not None
    }  # fmt: skip
    assert not ours, f"not compared: {list(ours)}"
    return logits, distance(loss.detach(), wanted.loss.detach()), distances


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    return pytest.importorskip("transformers.models.t5.modeling_t5", reason="pip install transformers")


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_logits_loss_and_gradients_equal_hugging_faces(padded: bool) -> None:
    ((logits, loss, gradients),) = run_ranks(compare, ONE, padded)
    assert logits < 1e-12
    assert loss < 1e-13
    assert len(gradients) == 5 + 2 * 8 + 2 * 13
    assert max(gradients.values()) < 1e-11, gradients


def test_buckets_are_hugging_faces(transformers: Any) -> None:
    theirs = transformers.T5Attention._relative_position_bucket
    ahead = torch.arange(-400, 401)
    for buckets, most in ((32, 128), (8, 9), (16, 50)):
        ours = distance_buckets(ahead.neg().clamp(min=0), buckets, most)
        assert ours.tolist() == theirs(ahead, False, buckets, most).tolist()
        both = distance_buckets(ahead.abs(), buckets // 2, most) + buckets // 2 * (ahead > 0)
        assert both.tolist() == theirs(ahead, True, buckets, most).tolist()


def test_the_cache_changes_nothing() -> None:
    ((whole, stepwise, reordered),) = run_ranks(decoded, ONE, config_of())
    torch.testing.assert_close(stepwise, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(reordered, whole, rtol=1e-12, atol=1e-14)


def test_dropout_acts_in_training_alone() -> None:
    assert run_ranks(dropout_facts, ONE, config_of(dropout=0.5)) == [(True, False)]


@pytest.mark.parametrize(
    "name, wanted",
    [("t5-small", 60_506_624), ("t5-base", 222_903_552), ("t5-large", 737_668_096)],
)
def test_parameter_counts_are_the_published_ones(name: str, wanted: int) -> None:
    assert run_ranks(counted_parameters, ONE, name) == [wanted]


def test_thirty_two_heads_are_wider() -> None:
    """There are 16 heads more of 64 in each of 72 attentions, and in two tables."""
    (counted,) = run_ranks(counted_parameters, ONE, "t5-large-32heads")
    assert counted == 737_668_096 + 72 * 4 * 1024 * 16 * 64 + 2 * 32 * 16


def first_loss(mesh: Mesh) -> tuple[float, float]:
    """Return the untrained loss at the published widths, and the spread of the first self-attention's scores."""
    config = config_of(hidden=96, heads=6, head_width=16)
    model = build_model(config, SerialKit(mesh), mesh)
    assert isinstance(model, T5Model)
    batch = pair_batch(VOCABULARY, S, T, True)
    with torch.no_grad():
        h = model.embed_tokens(batch["source"], 0)
        block = model.get_submodule("blocks.0")
        query, key, _ = block.attention.query_key_value(block.attention_norm(h)).unflatten(-1, (6, 16)).unbind(2)
        scores = torch.einsum("bsae,btae->bast", query, key)
        return float(model(batch, scales_of(model.labels, counts_of(batch, model.labels), 1.0))[0]), float(scores.std())


def test_an_untrained_model_knows_nothing_and_its_scores_are_not_sharp() -> None:
    ((loss, spread),) = run_ranks(first_loss, ONE)
    assert loss == pytest.approx(math.log(VOCABULARY), abs=1.0)
    assert spread == pytest.approx(1.0, abs=0.25)
