"""Adapters of every family: `verify` compares with plain torch, patterns name linears, checkpoints go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compute.models.adapter_section import Adapter
from meshwright.compute.models.adapters import first_of_a
from meshwright.compute.parameters.initial import first_values
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.config import Config, parse_run
from meshwright.config.section import with_field
from meshwright.ranks.errors import ConfigError
from meshwright.training.stage_costs import check_frozen
from tests.compute.bits.runs import ended
from tests.planner.plan.checked import check as check_counts
from tests.tools.verify.cases import config_for, verdict_of

MEGATRON = {"kind": "megatron", "size": 2}
FLAT = {"kind": "tesseract", "q": 2}
EVEN = {"batch": {"global": 12, "micro": 4}}


def adapted(model: str = "gpt2", adapter: dict[str, Any] | None = None, **changes: Any) -> Config:
    settings = Adapter.model_validate({"rank": 4, "begin": "random", **(adapter or {})})
    return with_field(config_for(model, **changes), "model.adapter", settings)


CASES: dict[str, Config] = {
    "one rank": adapted(),
    "zero2": adapted(layout={"data": {"size": 2, "sync": "zero2", "bucket": 4096}}),
    "zero3": adapted(layout={"data": {"size": 2, "sync": "zero3", "bucket": 4096}}),
    "server": adapted(layout={"data": {"size": 2, "sync": "server-gradient", "bucket": 4096}}),
    "1-D": adapted(layout={"tensor": MEGATRON}),
    "2-D": adapted(layout={"tensor": FLAT}, **EVEN),
    "branches": adapted(layout={"tensor": {"kind": "subgraph", "size": 2}}, **EVEN),
    "deferred": adapted(layout={"pipeline": {"size": 2, "schedule": "axonn"}}),
    "parts": adapted("llama", {"on": ("query", "value", "contract")}, layout={"tensor": MEGATRON}),
    "experts": adapted("experts", layout={"data": {"size": 2, "expert": 2, "bucket": 4096}}),
    "latent": adapted("deepseek", layout={"data": {"size": 2, "sync": "zero1", "bucket": 4096}}),
    "bert": adapted("bert", layout={"tensor": MEGATRON}),
    "pairs": adapted("t5", {"on": ("*.attention.*",)}, layout={"data": {"size": 2, "sync": "zero3"}}),
    "images": adapted("vit", layout={"tensor": MEGATRON}),
    "dora": adapted("llama", {"dora": True}, layout={"tensor": MEGATRON | {"sequence_parallel": True}}),
    "recomputed, rslora": adapted(adapter={"rslora": True, "alpha": 3.0}, memory={"recompute": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_equal_plain_torch(name: str, tmp_path: Path) -> None:
    verdict = verdict_of(CASES[name], tmp_path, 3)
    verdict.check()
    compared = {row.name for row in verdict.rows if row.kind == "weight"}
    assert compared == {row.name for row in verdict.rows if row.kind == "initial"}
    assert any(".adapter." in name for name in compared)


@pytest.mark.parametrize(
    "on, message",
    [
        (("querry",), "model.adapter.on=querry names no linear of the layers; valid: query, "),
        (("attention",), "model.adapter.on=attention names no linear of the layers; valid: "),
        (("query", "blocks.7.*"), "model.adapter.on=blocks.7.* names no linear"),
    ],
)
def test_a_pattern_without_a_linear_is_refused_with_near_names(on: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_frozen(adapted("llama", {"on": on}))
    assert message in str(refusal.value)


def test_frozen_parameters_next_to_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.frozen=tokens.* has no effect next to model.adapter"):
        parse_run({}, ["model.adapter={rank: 4}", "model.frozen=[tokens.*]"])


def test_adapters_of_one_leading_rank_are_refused() -> None:
    words = ["model.adapter={rank: 4}", "layout.tensor={kind: subgraph, size: 2, common: one}"]
    with pytest.raises(ConfigError, match=r"layout.tensor.common=one runs adapters on one rank alone"):
        parse_run({}, words)


def test_a_begins_as_torchs_linear() -> None:
    values = first_values("blocks.0.x.adapter.a.weight", ShardSpec((100, 800), {}, first_of_a(100)), 3)
    assert -0.1 <= float(values.min()) < -0.0999
    assert 0.0999 < float(values.max()) <= 0.1
    torch.testing.assert_close(values.std(), torch.tensor(0.1 / 3**0.5), rtol=5e-3, atol=0)


LAYOUTS = {
    "zero3": {"data": {"size": 2, "sync": "zero3"}},
    "1-D": {"tensor": MEGATRON},
    "cut": {"tensor": MEGATRON | {"sequence_parallel": True}},
    "stages": {"pipeline": {"size": 2}},
}
BLOCKS = {
    "2-D": {"tensor": {"kind": "tesseract", "q": 2}},
    "sub-graphs": {"tensor": {"kind": "subgraph", "size": 2}},
    "cores": {"tensor": {"kind": "subgraph", "size": 2, "branch": "attention-core"}, "pipeline": 2},
    "contexts x cut": {"context": 2, "tensor": MEGATRON | {"sequence_parallel": True}},
}


def layout_free(layout: dict[str, Any], bits: dict[str, int], adapter: dict[str, Any], **model: Any) -> Config:
    tree = {
        "model": {
            "family": "llama", "layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2, "feed_forward": 128,
            "positions": 16, "vocabulary": 300, "vocabulary_multiple": 8,
            "adapter": {"rank": 4, "begin": "random"} | adapter,
        } | model,
        "data": {"sequence": 16}, "batch": {"global": 4, "micro": 2}, "steps": 2, "layout": layout,
        "bits": {"kind": "layout-free"} | bits, "compile": "none", "threads": 1,
    }  # fmt: skip
    return parse_run(tree, [])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_equal_bits_in_every_layout(dropout: float) -> None:
    bits, adapter = {"tensor": 2, "sequence": 2}, {"dropout": dropout}
    alone = ended(layout_free({"transport": "torch"}, bits, adapter))
    for name, layout in LAYOUTS.items():
        assert alone.differing(ended(layout_free(layout, bits, adapter))) == [], name


def test_equal_bits_with_parts_of_the_hidden_width() -> None:
    # Four parts of two key-value heads: parts share columns.
    bits, adapter = {"tensor": 4, "hidden": 2, "sequence": 4}, {"dropout": 0.2}
    alone = ended(layout_free({"transport": "torch"}, bits, adapter))
    for name, layout in (BLOCKS | {"cut": LAYOUTS["cut"]}).items():
        assert alone.differing(ended(layout_free(layout, bits, adapter))) == [], name


EXPERTS = {"experts": {"count": 4, "per_token": 2, "balance": 0.3}, "feed_forward": 64, "biases": []}
OF_EXPERTS = {
    "expert axis": {"data": {"size": 2, "expert": 2}},
    "1-D": {"tensor": MEGATRON},
    "cut x expert axis": {"tensor": MEGATRON | {"sequence_parallel": True}, "data": {"size": 2, "expert": 2}},
    "contexts x stages": {"context": 2, "pipeline": 2},
}


@pytest.mark.parametrize("bits", [{"samples": 1}, {"tensor": 2, "sequence": 4}], ids=["grains", "parts"])
def test_adapters_of_experts_have_equal_bits(bits: dict[str, int]) -> None:
    alone = ended(layout_free({"transport": "torch"}, bits, {}, **EXPERTS))
    assert any("feed_forward.expand.adapter.b" in name for name in alone.tensors)
    for name, layout in OF_EXPERTS.items():
        if "tensor" in bits or layout.keys() == {"data"}:
            assert alone.differing(ended(layout_free(layout, bits, {}, **EXPERTS))) == [], name


DORA = {"dora": True}


@pytest.mark.parametrize("bits", [{"samples": 1}, {"tensor": 2, "sequence": 2}], ids=["grains", "parts"])
def test_magnitudes_have_equal_bits(bits: dict[str, int]) -> None:
    alone = ended(layout_free({"transport": "torch"}, bits, DORA))
    assert any(".adapter.d." in name and values.any() for name, values in alone.tensors.items())
    for name, layout in LAYOUTS.items():
        if "tensor" in bits or "tensor" not in layout:
            assert alone.differing(ended(layout_free(layout, bits, DORA))) == [], name


def test_magnitudes_of_equal_bits_are_those_of_the_usual_mode() -> None:
    runs = [layout_free({}, bits, adapter) for bits, adapter in (
        ({"tensor": 2, "sequence": 2}, DORA), ({"kind": "usual"}, DORA), ({"kind": "usual"}, {}),
    )]  # fmt: skip
    exact, usual, without = ([float.fromhex(x) for x in ended(run).numbers[1].split()] for run in runs)
    assert exact == pytest.approx(usual, rel=1e-5)
    assert exact != pytest.approx(without, rel=1e-4)


@pytest.mark.parametrize("bits, field", [({"hidden": 2}, "bits.hidden"), ({"tensor": 4}, "bits.tensor")])
def test_magnitudes_need_whole_columns(bits: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=. .*model.adapter.dora needs whole columns"):
        layout_free({}, bits, DORA)


def test_the_parts_of_the_hidden_width_cut_the_rank() -> None:
    with pytest.raises(ConfigError, match=r"bits.hidden=2 does not cut model.adapter.rank=3 "):
        layout_free({}, {"hidden": 2}, {"rank": 3})
    assert parse_run({"bits": "layout-free", "model": {"adapter": {"rank": 3}}}, []).bits.hidden == 1


@pytest.mark.parametrize("sync", ["allreduce", "zero3"])
def test_a_plan_counts_no_states_of_the_base(sync: str) -> None:
    layout = {"data": {"size": 2, "sync": sync, "bucket": 4096}}
    check_counts([adapted(layout=layout, batch={"global": 48, "micro": 8})])
