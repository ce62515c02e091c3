"""The original Transformer against torch's with equal random weights, in float64; positions, cache, counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import Batch, counts_of, scales_of
from meshwright.compute.models.chain import chain_of
from meshwright.config import Config, parse_config
from meshwright.families.seq2seq.encoder_decoder import EncoderDecoderChain
from meshwright.families.seq2seq.transformer import sinusoids
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.compute.models.harness import random_model
from tests.families.seq2seq.pairs import B, counted_parameters, decoded, dropout_facts, pair_batch
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
S, T, VOCABULARY = 11, 9, 300
SMOOTHING = 0.1

ENCODER = {
    "self_attn.in_proj_": ("attention.query_key_value",),
    "self_attn.out_proj.": ("attention.output",),
    "linear1.": ("feed_forward.expand",),
    "linear2.": ("feed_forward.contract",),
    "norm1.": ("attention_norm",),
    "norm2.": ("feed_forward_norm",),
}
DECODER = ENCODER | {
    "multihead_attn.in_proj_": ("cross.query", "cross.key_value"),
    "multihead_attn.out_proj.": ("cross.output",),
    "norm2.": ("cross_norm",),
    "norm3.": ("feed_forward_norm",),
}
"""torch's names in a layer, and our names; several if torch's parameter joins several of ours side by side."""


def config_of(**model: Any) -> Config:
    shape = {
        "family": "transformer", "layers": 2, "hidden": 24, "heads": 4, "feed_forward": 40, "positions": 16,
        "vocabulary": VOCABULARY, "vocabulary_multiple": 64, "label_smoothing": SMOOTHING, "dropout": 0.0,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": shape | model, "data": {"sequence": S}, "precision": precision})


def torchs(config: Config) -> nn.Transformer:
    """Return torch's model with a norm after each sum, and without the last norms, which the paper has not."""
    shape = config.model
    theirs = nn.Transformer(
        shape.hidden, shape.heads, shape.layers, shape.layers, shape.inner, 0.0, layer_norm_eps=shape.norm_epsilon,
        batch_first=True, norm_first=False, dtype=torch.float64,
    )  # fmt: skip
    theirs.encoder.norm = theirs.decoder.norm = None
    return theirs


def as_theirs(ours: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename our blocks' weights or gradients, and order the dims, as torch's."""
    made = {}
    for block in range(2 * layers):
        stack, layer = ("encoder", block) if block < layers else ("decoder", block - layers)
        for theirs, names in (ENCODER if stack == "encoder" else DECODER).items():
            for kind in ("weight", "bias"):
                parts = [ours.pop(f"blocks.{block}.{name}.{kind}") for name in names]
                columns = [
                    part.flatten(1).t() if kind == "weight" and part.dim() > 1 else part.flatten() for part in parts
                ]
                made[f"{stack}.layers.{layer}.{theirs}{kind}"] = torch.cat(columns)
    return made


def their_logits(theirs: nn.Transformer, table: Tensor, batch: Batch) -> Tensor:
    """Return the logits [B, T, V], with embeddings, positions and softmax of sections 3.4 and 3.5."""
    hidden = table.shape[1]

    def embedded(ids: Tensor) -> Tensor:
        rows = [[math.sin(place / 10000 ** (column / hidden)) if column % 2 == 0
                 else math.cos(place / 10000 ** ((column - 1) / hidden)) for column in range(hidden)]
                for place in range(ids.shape[1])]  # fmt: skip
        return table[ids] * math.sqrt(hidden) + torch.tensor(rows, dtype=torch.float64)

    padding = batch["source_mask"] == 0
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    h = theirs(
        embedded(batch["source"]), embedded(batch["target"]), tgt_mask=causal, src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )  # fmt: skip
    return h @ table[:VOCABULARY].t()


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def compare(mesh: Mesh, padded: bool, smoothing: float) -> tuple[float, float, dict[str, float]]:
    """Return the relative distances of the logits, of the loss, and of each gradient."""
    config = config_of(label_smoothing=smoothing)
    model, theirs, batch = (
        random_model(EncoderDecoderChain, mesh, config),
        torchs(config),
        pair_batch(VOCABULARY, S, T, padded),
    )
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    table = ours.pop("tokens.weight").clone().requires_grad_()
    theirs.load_state_dict(as_theirs(ours, config.model.layers))
    assert not ours, f"without a counterpart: {list(ours)}"
    wanted = their_logits(theirs, table, batch)
    wanted_loss = F.cross_entropy(wanted.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)
    wanted_loss.backward()
    with torch.no_grad():
        logits = distance(model.head.logits(model.hidden_states(batch)[0]), wanted)  # type: ignore[operator]
    (loss,) = model(batch, scales_of(model.labels, counts_of(batch, model.labels), 1.0))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    distances = {"tokens": distance(gradients.pop("tokens.weight"), table.grad)}  # type: ignore[arg-type]
    for name, gradient in as_theirs(gradients, config.model.layers).items():
        wanted_gradient = theirs.get_parameter(name).grad
        assert wanted_gradient is not None, f"{name} has no gradient"
        distances[name] = distance(gradient, wanted_gradient)
    assert not gradients, f"not compared: {list(gradients)}"
    return logits, distance(loss.detach(), wanted_loss.detach()), distances


@pytest.mark.parametrize("padded, smoothing", [(False, 0.0), (True, SMOOTHING)], ids=["whole", "padded, smoothed"])
def test_logits_loss_and_gradients_equal_torchs(padded: bool, smoothing: float) -> None:
    ((logits, loss, gradients),) = run_ranks(compare, ONE, padded, smoothing)
    assert logits < 1e-12
    assert loss < 1e-13
    assert len(gradients) == 1 + 2 * 12 + 2 * 18
    assert max(gradients.values()) < 1e-11, gradients


def test_positions_are_waves() -> None:
    places = sinusoids(3, 4, 6, torch.device("cpu"))
    assert places.shape == (4, 6)
    torch.testing.assert_close(places, sinusoids(0, 7, 6, torch.device("cpu"))[3:])
    torch.testing.assert_close(places[1, :2], torch.tensor([math.sin(4), math.cos(4)], dtype=torch.float64))
    assert float(places[2, 5]) == pytest.approx(math.cos(5 / 10000 ** (4 / 6)), rel=1e-14)


def test_the_cache_changes_nothing() -> None:
    ((whole, stepwise, reordered),) = run_ranks(decoded, ONE, config_of())
    torch.testing.assert_close(stepwise, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(reordered, whole, rtol=1e-12, atol=1e-14)


def test_dropout_acts_in_training_alone() -> None:
    assert run_ranks(dropout_facts, ONE, config_of(dropout=0.5)) == [(True, False)]


@pytest.mark.parametrize("name, wanted", [("transformer-base", 65e6), ("transformer-big", 213e6)])
def test_parameter_counts_are_the_published_ones(name: str, wanted: float) -> None:
    """Table 3's counts are rounded; counted by hand: 37000 H + L (8 H² + 2 H + 4 HN + 2 N + ...)."""
    assert run_ranks(counted_parameters, ONE, name) == [pytest.approx(wanted, rel=0.03)]


def counted_flops(mesh: Mesh) -> int:
    """Return torch's flops of products, forward and backward, without attention's, which torch's kernel hides."""
    from torch.utils.flop_counter import FlopCounterMode

    model = random_model(EncoderDecoderChain, mesh, config_of(vocabulary_multiple=1))
    batch = pair_batch(VOCABULARY, S, S, False)
    with FlopCounterMode(display=False) as counter:
        model(batch, {"labels": 1.0})[0].backward()
    counts = {str(name).split(".")[-1]: number for name, number in counter.get_flop_counts()["Global"].items()}
    return sum(number for name, number in counts.items() if "attention" not in name)


def test_flops_are_those_of_the_products() -> None:
    config = config_of(vocabulary_multiple=1)
    model = config.model
    attention = 6 * 3 * model.layers * 2 * S**2 * model.hidden
    assert run_ranks(counted_flops, ONE) == [B * (chain_of(config).flops_per_sample(config) - attention)]
