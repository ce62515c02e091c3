"""DeepSeek's layers under every axis equal one device: float64 gradients to 1e-12 relative, losses to 1e-10.

Latent attention alone has a rotary key that all heads share: on every tensor rank the key's gradient is a part of a
sum, which a layout that cuts heads must not forget. With experts, groups and moving biases choose the experts, next to
a shared feed-forward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from tests.compute.bits.runs import ended
from tests.families.deepseek.layouts import DENSE, LATER, RING, SHAPE, ULYSSES, deepseek, serial
from tests.families.deepseek.models import ROUTED, YARN
from tests.oracle.context import BLOCKS, CUT, ONE_D
from tests.oracle.run import check, run

SUBGRAPH = {"kind": "subgraph", "size": 2}
ZERO1 = {"size": 2, "sync": "zero1", "bucket": 8192}
EXPERTS = {"data": {"size": 2, "expert": 2}}

LATENT_LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D": {"tensor": ONE_D},
    "1-D of 4, cut": {"tensor": CUT | {"size": 4}},
    "2-D": {"tensor": BLOCKS},
    "2.5-D": {"tensor": BLOCKS | {"d": 2}},
    "branches": {"tensor": SUBGRAPH | {"branch": "block"}},
    "branches' cores": {"tensor": SUBGRAPH | {"branch": "attention-core"}},
    "common layers on one rank": {"tensor": SUBGRAPH | {"branch": "attention-core", "common": "one"}},
    "ring": {"context": RING},
    "ulysses x 1-D": {"context": ULYSSES, "tensor": ONE_D},
    "ring x cut x stages x replicas": {"context": RING, "tensor": CUT, "pipeline": {"size": 2}, "data": ZERO1},
    "stages x 2-D": {"pipeline": {"size": 2, "schedule": "message-driven"}, "tensor": BLOCKS},
    "slices": {"data": {"size": 2, "sync": "zero3"}},
}
LATENT_LONG = {"2.5-D", "branches", "common layers on one rank", "stages x 2-D", "slices", "ring"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D": {"tensor": ONE_D},
    "cut": {"tensor": CUT},
    "ring": {"context": RING},
    "stages": {"pipeline": {"size": 2, "schedule": "message-driven"}},
    "experts x cut": EXPERTS | {"tensor": CUT},
    "experts x stages x ring": EXPERTS | {"pipeline": {"size": 2}, "context": RING},
    "experts x slices": {"data": {"size": 4, "expert": 2, "sync": "zero3"}},
    "experts x groups of slices": {"data": {"size": 4, "expert": 2, "shard": 2, "sync": "zero3"}},
    "experts x chunks": EXPERTS | {"pipeline": {"size": 2, "chunks": 2, "schedule": "1f1b"}},
    "ring x cut x stages x replicas": {"context": RING, "tensor": CUT, "pipeline": {"size": 2}, "data": ZERO1},
    "zero2": {"data": {"size": 2, "sync": "zero2"}},
    "server": {"data": {"size": 2, "sync": "server-gradient"}},
}
ONLY_LONG = {"1-D", "ring", "experts x stages x ring", "experts x slices", "experts x chunks", "zero2", "server", "cut"}


LATER_LAYOUTS: dict[str, dict[str, Any]] = {
    "cut": {"tensor": CUT},
    "stages x ring": {"pipeline": {"size": 2, "partition": [1, 0]}, "context": RING},
    "experts x ulysses x slices": {"data": {"size": 2, "expert": 2, "sync": "zero3"}, "context": ULYSSES},
    "one rank for both ends": {"pipeline": {"size": 2, "chunks": 2, "placement": "v", "partition": [1, 1, 1, 0]}},
    "zero2 x 1-D": {"data": {"size": 2, "sync": "zero2"}, "tensor": ONE_D},
}
LATER_LONG = {"cut", "zero2 x 1-D", "one rank for both ends"}


def marked(layouts: dict[str, dict[str, Any]], only_long: set[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) if name in only_long else name for name in layouts]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", marked(LATENT_LAYOUTS, LATENT_LONG))
def test_latent_attention_equals_serial(name: str) -> None:
    check(run(deepseek(DENSE, LATENT_LAYOUTS[name])), serial("dense"))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", marked(LAYOUTS, ONLY_LONG))
def test_equals_serial(name: str) -> None:
    check(run(deepseek(SHAPE, LAYOUTS[name])), serial("routed"))


@pytest.mark.parametrize("name", marked(LATER_LAYOUTS, LATER_LONG))
def test_later_tokens_equal_serial(name: str) -> None:
    """A rank with a part of every sequence reads tokens and labels of others' parts; the last stage embeds tokens."""
    layout = LATER_LAYOUTS[name]
    chunked = "chunks" in layout.get("pipeline", {})
    model, expected = (LATER | {"layers": 3}, "later of 3") if chunked else (LATER, "later")
    check(run(deepseek(model, layout)), serial(expected))


def test_later_tokens_of_other_documents_are_not_counted() -> None:
    """With `documents: separate`, the last stage counts no later token of another document."""
    data = {"sequence": 24, "documents": "separate"}
    layout = {"context": RING, "pipeline": {"size": 2, "partition": [1, 0]}}
    check(run(deepseek(LATER, layout, data=data)), run(deepseek(LATER, {}, data=data))[0])


@pytest.mark.parametrize("name, recompute", [("experts x cut", 1), ("ring", "selective")])
def test_equals_serial_with_recomputation(name: str, recompute: str | int) -> None:
    """Tokens of an expert are counted once, also if layers are computed twice."""
    check(run(deepseek(SHAPE, LAYOUTS[name], memory={"recompute": recompute})), serial("routed"))


@pytest.mark.long
def test_twenty_steps_of_a_mixture() -> None:
    layout = EXPERTS | {"context": RING, "tensor": ONE_D}
    check(run(deepseek(SHAPE, layout, steps=20)), run(deepseek(SHAPE, {}, steps=20))[0])


def free_of_layout(*words: str, cuts: bool = True) -> Config:
    """Return a run with the same bits in every layout; `cuts`: whether layouts may cut layers and sequences."""
    shape = {
        "family": "deepseek", "layers": 2, "hidden": 64, "heads": 8, "query_rank": 32, "key_value_rank": 32,
        "head_width": 8, "rotary_width": 8, "value_width": 16, "feed_forward": 256, "positions": 32, "vocabulary": 301,
        "vocabulary_multiple": 64, "later_tokens": 1, "dropout": 0.1,
    }  # fmt: skip
    routed = ROUTED | {"width": 32, "shared": 32, "bias_rate": None, "balance": 0.3}
    tree = {
        "seed": 3, "model": shape | ({} if cuts else {"experts": routed}), "data": {"sequence": 32},
        "batch": {"global": 4, "micro": 2}, "optimizer": {"lr": 1e-2, "clip": 0.5}, "steps": 2,
        "bits": {"kind": "layout-free"} | ({"tensor": 4, "sequence": 4} if cuts else {}),
    }  # fmt: skip
    return parse_config(tree, words)


M2, M4 = (("layout.tensor=megatron", f"layout.tensor.size={size}") for size in (2, 4))


@pytest.mark.parametrize(
    "words",
    [
        (*M4, "layout.tensor.sequence_parallel=true"),
        pytest.param((*M2, "layout.context=2"), marks=pytest.mark.long),
        pytest.param(("layout.pipeline.size=2",), marks=pytest.mark.long),
    ],
    ids=["1-D, cut", "1-D x ulysses", "stages"],
)
def test_bits_are_those_of_one_device(words: tuple[str, ...]) -> None:
    assert ended(free_of_layout(*words)).differing(ended(free_of_layout("batch.micro=4"))) == []


def test_bits_of_experts_are_those_of_one_device() -> None:
    words = ("layout.data.size=2", "layout.data.expert=2", "layout.data.sync=zero1")
    alone = ended(free_of_layout("batch.micro=4", cuts=False))
    assert ended(free_of_layout(*words, cuts=False)).differing(alone) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_trains_as_on_one_device(level: str) -> None:
    precision = {"level": level, "dtype": "bf16"}
    expected, _ = run(deepseek(SHAPE, {}, precision=precision))[0]
    for losses, _ in run(deepseek(SHAPE, LAYOUTS["experts x cut"], precision=precision)):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    "model, layout, message",
    [
        (
            {}, {"tensor": BLOCKS},
            "layout.tensor.kind=tesseract does not cut the experts of model.experts.count=6; valid: none, megatron",
        ),
        (
            {"experts": None, "key_value_rank": 13}, {"tensor": BLOCKS},
            "layout.tensor.q=2 does not divide model.key_value_rank=13; valid: 1, 13",
        ),
        ({}, {"tensor": ONE_D | {"size": 3}}, "layout.tensor.size=3 does not divide model.heads=4; valid: 1, 2, 4"),
        ({"rotary_width": 3}, {}, "model.rotary_width=3 is odd, and rotary positions turn pairs"),
        ({"rope": YARN | {"slow": 5.0}}, {}, "model.rope.slow=5.0 is above model.rope.fast=4.0"),
        (
            {"experts": {"count": 6, "groups": 4}}, {},
            "model.experts.groups=4 does not divide model.experts.count=6; valid: 1, 2, 3, 6",
        ),
        (
            {"experts": {"count": 6, "groups": 6}}, {},
            "model.experts.groups=6 leaves one of model.experts.count=6 in each, and a group is chosen by its best two",
        ),
        (
            {"experts": {"count": 6, "groups": 3, "groups_per_token": 1, "per_token": 3}}, {},
            "model.experts.per_token=3 is more than the 2 experts of model.experts.groups_per_token=1; valid: 2 or",
        ),
        ({"later_weight": 0.1}, {}, "model.later_weight=0.1 has no effect with model.later_tokens=0; valid: leave"),
        ({"later_tokens": 16}, {}, "model.later_tokens=16 looks past the last of data.sequence=16 tokens; valid: 15"),
        (
            {"experts": {"count": 6, "shared_gate": True}}, {},
            "model.experts.shared_gate=true has no effect with model.experts.shared=0",
        ),
        (
            {"experts": {"count": 6, "balance_over": "batch"}}, {},
            "model.experts.balance_over=batch has no effect with model.experts.balance=0",
        ),
        (
            {"later_tokens": 1}, {"data": {"size": 2, "sync": "server-loss"}},
            "layout.data.sync=server-loss computes losses where all outputs come together, and model.experts.balance",
        ),
        ({"experts": {"count": 6, "groups_per_token": 2}}, {}, "model.experts.groups_per_token=2 is more than"),
        ({"experts": {"count": 6, "dense_layers": 2}}, {}, "dense_layers=2 leaves none of model.layers=2 for experts"),
    ],
)  # fmt: skip
def test_what_does_not_go_is_refused(model: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"model": SHAPE | {"heads": 4} | model, "data": {"sequence": 16}, "layout": layout})
    assert message in str(refusal.value)
