"""gpt-oss under every axis equals one device: float64 gradients to 1e-12 relative, losses to 1e-10."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compute.models.adapter_section import Adapter
from meshwright.config import Config, parse_config
from meshwright.families.llama.convert_gpt_oss import GptOssFamily
from meshwright.families.llama.gpt_oss import GptOss
from meshwright.ranks.errors import ConfigError
from meshwright.training.convert.adapters import factors_of
from tests.families.llama.experts import BOUNDED_LAYOUTS, LAYOUTS, OSS, RING, ULYSSES, ZERO1, experts
from tests.oracle.context import CUT
from tests.oracle.data_parallel import SYNCS
from tests.oracle.run import check, run

BOUNDED = OSS | {"experts": OSS["experts"] | {"capacity": 0.75}}

OWN: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "ulysses": {"context": ULYSSES},
    "ring of 4 x replicas": {"context": RING | {"size": 4}, "data": ZERO1},
}
FEW = {"1-D", "1-D, cut", "ulysses x cut", "experts x cut", "experts x stages x ring", "experts x slices"}
"""Layouts that run without --long; the others are combinations of these."""


def oss(layout: dict[str, Any], **changes: Any) -> Config:
    return experts(layout, **({"model": OSS} | changes))


@cache
def alone(bounded: bool = False) -> Any:
    return run(oss({}, model=BOUNDED if bounded else OSS))[0]


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in OWN])
def test_equals_serial(name: str) -> None:
    check(run(oss(OWN[name])), alone())


def test_ranks_that_copy_keys_equal_serial() -> None:
    """Four ranks copy two key-value heads; each rank has some queries of a head, and these queries' sinks."""
    model = OSS | {"key_value_heads": 2}
    check(run(oss({"tensor": CUT | {"size": 4}}, model=model)), run(oss({}, model=model))[0])


@pytest.mark.parametrize(
    "name", ["1-D, cut", *(pytest.param(name, marks=pytest.mark.long) for name in BOUNDED_LAYOUTS)]
)
def test_a_capacity_is_a_sequences(name: str) -> None:
    check(run(oss(BOUNDED_LAYOUTS[name], model=BOUNDED)), alone(bounded=True))
    assert alone(bounded=True)[0] != alone()[0], "nothing was dropped"


@pytest.mark.parametrize("sync", [sync for sync in SYNCS if sync != "server-loss"])
def test_equals_serial_with_every_sync(sync: str) -> None:
    check(run(oss({"data": {"size": 2, "sync": sync, "bucket": 8192}})), alone())


@pytest.mark.parametrize("recompute", ["selective", 1, "offload"])
def test_equals_serial_with_recomputation(recompute: str | int) -> None:
    check(run(oss(LAYOUTS["ulysses x cut"], memory={"recompute": recompute})), alone())


CHANGES: dict[str, Any] = {
    "biases": ["query-key-value", "output"], "window": 24, "window_layers": [], "gate_slope": 1.702, "gate_limit": 7.0,
    "rope": {"theta": 500.0},
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_has_an_effect(field: str) -> None:
    assert run(oss({}, steps=2, model=OSS | {field: CHANGES[field]}))[0][0] != alone()[0][:2]


@pytest.mark.parametrize("layout", ["ring", pytest.param("experts x cut", marks=pytest.mark.long)])
def test_verify_holds(layout: str) -> None:
    assert mw.verify(oss(LAYOUTS[layout], data={"sequence": 24, "documents": "separate"}), steps=2).holds


REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["layout.tensor=tesseract", "layout.tensor.q=2"], "layout.tensor.kind=tesseract does not cut the experts"),
    ({}, ["layout.tensor=subgraph", "layout.tensor.size=2"], "layout.tensor.kind=subgraph does not cut the experts"),
    ({}, ["model.experts.shared=12"], "model.experts.shared=12 is no field of model.family=gpt-oss.*; valid: 0"),
    ({}, ["model.experts.dense_layers=1"], "model.experts.dense_layers=1 is no field of model.family=gpt-oss"),
    ({}, ["model.experts.bias_rate=0.1"], "model.experts.bias_rate=0.1 is no field .*; valid: null"),
    ({"experts": None}, [], "model.experts"),
    ({"activation": "geglu"}, [], "model.activation"),
]


@pytest.mark.parametrize("model, words, message", REFUSED)
def test_what_does_not_go_is_refused(model: dict[str, Any], words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": OSS | model, "data": {"sequence": 24}}, words)


@pytest.mark.parametrize("layout", ["1-D, cut", "experts"])
def test_adapters_equal_serial(layout: str) -> None:
    model = OSS | {"adapter": {"rank": 2, "on": ["query_key_value", "feed_forward.*"], "begin": "random"}}
    check(run(oss(LAYOUTS[layout], model=model)), run(oss({}, model=model))[0])


def test_adapters_of_experts_are_of_one_parameter() -> None:
    model = parse_config({"model": OSS | {"adapter": {"rank": 2}}, "data": {"sequence": 24}}).model
    factors = [each for each in factors_of(GptOssFamily(), model) if each.parameter]
    assert {each.parameter.removeprefix("model.layers.1.") for each in factors} >= {
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    }  # fmt: skip
    for factor in factors:
        ours = torch.randn(factor.spec.shape)
        assert torch.equal(factor.to_ours(factor.to_theirs(ours)), ours), factor.name
    on_attention = model.model_copy(update={"adapter": Adapter(rank=2, on=("attention.*",))})
    assert len(factors_of(GptOssFamily(), on_attention)) == 2 * 2 * 4


def test_a_family_of_few_words_has_experts_with_biases() -> None:
    model = parse_config({"model": {"family": "gpt-oss"}, "data": {"sequence": 24}}).model
    assert isinstance(model, GptOss)
    assert model.expert_biases
    assert (model.experts.count, model.experts.per_token, model.clamp) == (32, 4, (1.702, 7.0))
