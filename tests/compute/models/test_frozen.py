"""Frozen parameters: every layout equals plain torch in float64, no gradient or state is held or computed, and a
checkpoint has the weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.config import Config, parse_run
from meshwright.config.section import with_field
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.checkpoint.restore import stateless_of
from meshwright.training.parts import Parts
from meshwright.training.stage_costs import check_frozen, time_links
from tests.compute.bits.runs import ended
from tests.harness import build
from tests.oracle.run import train_step
from tests.planner.plan.checked import check as check_counts
from tests.tools.verify.cases import config_for, verdict_of
from tests.training.checkpoint.states import Leg, run_leg, whole
from tests.workers import run_ranks

CPU = torch.device("cpu")


def frozen(patterns: tuple[str, ...], model: str = "gpt2", **changes: Any) -> Config:
    return with_field(config_for(model, **changes), "model.frozen", patterns)


def replicas(sync: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return {"layout": {"data": {"size": size, "sync": sync, "bucket": 4096, **more}}}


FLAT, EVEN = {"kind": "tesseract", "q": 2}, {"batch": {"global": 12, "micro": 4}}
MEGATRON = {"kind": "megatron", "size": 2}
V = {"size": 2, "chunks": 2, "placement": "v", "partition": [0, 1, 1, 0]}
EXPERTS = {"size": 2, "expert": 2, "bucket": 4096}

CASES: dict[str, Config] = {
    "one rank": frozen(("blocks.0.*",)),
    "norms and biases": frozen(("*_norm.*", "*.bias"), **replicas("allreduce")),
    "zero1": frozen(("blocks.0.*", "tokens.*"), **replicas("zero1")),
    "zero2": frozen(("blocks.*.attention.*",), **replicas("zero2")),
    "zero3": frozen(("blocks.1.*", "positions.*"), **replicas("zero3")),
    "zero3, all layers": frozen(("tokens.*", "positions.*", "blocks.*"), **replicas("zero3")),
    "zero3 in groups": frozen(("blocks.0.*",), **replicas("zero3", 4, shard=2), batch={"global": 12, "micro": 3}),
    "server": frozen(("blocks.0.*",), **replicas("server-gradient")),
    "ring": frozen(("blocks.0.*",), **replicas("ring")),
    "rooted": frozen(("blocks.0.*",), **replicas("rooted")),
    "tied table": frozen(("tokens.*",), layout={"pipeline": {"size": 2}}),
    "tied table in a v": frozen(("tokens.*",), layout={"pipeline": V}),
    "table in a v": frozen(("blocks.0.*",), layout={"pipeline": V}),
    "first stage": frozen(("tokens.*", "positions.*", "blocks.0.*"), "untied", layout={"pipeline": {"size": 1}}),
    "stages without one": frozen(
        ("tokens.*", "positions.*", "blocks.0.*"), layout={"pipeline": {"size": 2, "partition": [1, 1]}}
    ),
    "two stages without one": frozen(
        ("positions.*", "tokens.*", "blocks.*"), layout={"pipeline": {"size": 3, "partition": [1, 1, 0]}}
    ),
    "deferred": frozen(("blocks.*.weight",), layout={"pipeline": {"size": 2, "schedule": "axonn"}}),
    "stages of slices": frozen(
        ("blocks.0.*", "*.bias"), layout={"pipeline": {"size": 2}, "data": {"size": 2, "sync": "zero2"}}
    ),
    "1-D": frozen(("blocks.0.*",), layout={"tensor": MEGATRON}),
    "1-D, sequence cut": frozen(
        ("blocks.0.feed_forward.*",), layout={"tensor": MEGATRON | {"sequence_parallel": True}}
    ),
    "2-D": frozen(("blocks.0.*", "tokens.*"), layout={"tensor": FLAT}, **EVEN),
    "2-D in panels": frozen(("blocks.1.*",), layout={"tensor": FLAT}, memory={"summa": "stream"}, **EVEN),
    "branches": frozen(("blocks.0.*",), layout={"tensor": {"kind": "subgraph", "size": 2}}, **EVEN),
    "contexts": frozen(("blocks.0.*",), layout={"context": {"size": 2, "kind": "ring"}}),
    "recomputed": frozen(("blocks.0.*",), memory={"recompute": 1}, **replicas("zero3")),
    "llama": frozen(("*query_key_value*",), "llama", **replicas("zero1")),
    "untied head": frozen(("head.*",), "untied", layout={"tensor": MEGATRON}),
    "experts": frozen(("*.router.*", "*.contract.*"), "experts", layout={"data": EXPERTS}),
    "router's bias": frozen(("*.router.bias", "*.shared.*"), "deepseek", **replicas("zero1")),
    "bert": frozen(("blocks.*",), "bert", **replicas("zero2")),
    "pairs": frozen(("*.0.*", "tokens.*"), "t5", **replicas("zero3")),
    "images": frozen(("blocks.0.*",), "vit", layout={"tensor": MEGATRON}),
}


@pytest.mark.few(14)
@pytest.mark.parametrize("name", CASES)
def test_layouts_equal_plain_torch(name: str, tmp_path: Path) -> None:
    verdict = verdict_of(CASES[name], tmp_path, 3)
    verdict.check()
    compared = {row.name for row in verdict.rows if row.kind == "weight"}
    assert compared == {row.name for row in verdict.rows if row.kind == "initial"}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return op(*args, **(kwargs or {}))


def step_of(*patterns: str) -> tuple[Parts, int]:
    parts = build(frozen(patterns) if patterns else config_for(), solo_mesh(CPU))
    with Products() as products:
        train_step(parts, 0)
    return parts, products.count


def test_nothing_is_held_and_computed_for_them() -> None:
    (whole_run, all_products), (parts, products) = step_of(), step_of("blocks.0.*")
    trained = {place.name for slot in parts.strategy.slots for place in slot.places}
    names = set(parts.specs)
    assert names - trained == {name for name in names if name.startswith("blocks.0.")} != set()
    assert sum(x.gradients.numel() for x in parts.strategy.buckets) < sum(
        x.gradients.numel() for x in whole_run.strategy.buckets
    )
    assert all(parts.model.get_parameter(name).grad is None for name in names)
    # Four linears, each in four microbatches.
    assert all_products - products == 16
    kinds = [[state.kind for state in states] for slot, states in parts.stored() if not slot.rule.trained]
    assert kinds == [["weight"]] * len(kinds) != []


def test_no_gradient_goes_back_before_the_first_that_is_trained() -> None:
    (_, some), (_, most) = step_of("blocks.0.*", "blocks.1.*"), step_of("*[!h].weight", "tokens.*", "*_norm.*")
    assert most < some


def legs(config: Config, source: Path | None, target: Path | None, span: range) -> list[Leg]:
    return run_ranks(
        run_leg, config.grid, config, source, target, span.start, span.stop,
        token_axes=config.layout.token_axes,
    )  # fmt: skip


@pytest.mark.parametrize("sync", ["allreduce", "zero1", "zero3", "server-gradient"])
def test_a_checkpoint_goes_on_in_another_layout(sync: str, tmp_path: Path) -> None:
    patterns = ("blocks.0.*", "tokens.*")
    straight = legs(frozen(patterns), None, None, range(4))
    before = legs(frozen(patterns, **replicas(sync)), None, tmp_path, range(2))
    checkpoint = Checkpoint(tmp_path / "step-2")
    kinds = {kind for name, kind in checkpoint.manifest.parts if name.startswith(("blocks.0.", "tokens."))}
    assert kinds == {"weight"}
    after = legs(frozen(patterns, layout={"pipeline": {"size": 2}}), tmp_path / "step-2", None, range(2, 4))
    written, taken = (whole([leg[place] for leg in ranks]) for ranks, place in ((before, 2), (after, 1)))
    assert written.keys() == taken.keys()
    assert all(torch.equal(written[key], taken[key]) for key in written)
    torch.testing.assert_close(after[0][0], straight[0][0][2:], rtol=1e-10, atol=0)


def test_more_may_be_frozen_on_the_way_and_not_less(tmp_path: Path) -> None:
    some, more = frozen(("blocks.0.*",)), frozen(("blocks.*",), **replicas("zero1"))
    legs(some, None, tmp_path, range(2))
    legs(more, tmp_path / "step-2", tmp_path, range(2, 3))
    with pytest.raises(AssertionError, match=r"has no exp_avg of blocks.1.* which its run did not train"):
        legs(some, tmp_path / "step-3", None, range(3, 4))
    assert stateless_of(some, Checkpoint(tmp_path / "step-3")).startswith("blocks.1.")
    assert stateless_of(more, Checkpoint(tmp_path / "step-2")) == ""
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1}}  # without states nothing is missing
    legs(frozen(("blocks.*",), **sgd), None, tmp_path / "sgd", range(1))
    legs(frozen((), **sgd), tmp_path / "sgd" / "step-1", None, range(1, 2))


def test_a_resumed_run_that_trains_more_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A text of some words to learn by heart.\n" * 40)
    tree = {
        "model": {"layers": 1, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 257, "dropout": 0.0},
        "data": {"source": str(tmp_path / "text.txt"), "sequence": 16}, "batch": {"global": 4}, "steps": 1,
        "layout": {"transport": "threads"}, "validation": "none", "metrics": {"sinks": []}, "device": "cpu",
        "compile": "none", "threads": 1,
    }  # fmt: skip
    mw.train(mw.load(tree, ["model.frozen=[tokens.*]"]), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^model.frozen=\[\] trains tokens.weight, of which .* has no states"):
        mw.train(mw.load(tree, ["steps=2"]), tmp_path / "out", resume=True)


def test_half_precision_has_no_masters_of_them() -> None:
    parts = build(frozen(("blocks.0.*",), precision={"level": "O2", "dtype": "bf16"}), solo_mesh(CPU))
    train_step(parts, 0)
    held = {
        place.name: state.values.dtype for _, states in parts.stored() for state in states for place in state.places
    }
    assert held["blocks.0.attention.query_key_value.weight"] == torch.bfloat16
    assert held["blocks.1.attention.query_key_value.weight"] == torch.float32
    assert held["blocks.0.attention_norm.weight"] == torch.float32  # stored as a trained norm is


def test_equal_bits_in_every_layout() -> None:
    def run_of(layout: dict[str, Any]) -> Config:
        tree = {
            "model": {
                "layers": 2, "hidden": 32, "heads": 4, "positions": 16, "vocabulary": 300, "frozen": ["blocks.0.*"],
                "vocabulary_multiple": 8,
            },
            "data": {"sequence": 16}, "batch": {"global": 8, "micro": 2}, "steps": 2, "layout": layout,
            "bits": {"kind": "layout-free", "tensor": 2, "sequence": 1}, "compile": "none", "threads": 1,
        }  # fmt: skip
        return parse_run(tree, [])

    alone = ended(run_of({"transport": "torch"}))
    for layout in ({"data": {"size": 2, "sync": "zero3"}}, {"tensor": MEGATRON}, {"pipeline": {"size": 2}}):
        assert alone.differing(ended(run_of(layout))) == []


@pytest.mark.parametrize("sync", ["allreduce", "zero1", "zero3"])
def test_plans_count_what_such_runs_do(sync: str) -> None:
    more = {"batch": {"global": 48, "micro": 8}}
    check_counts([frozen(("blocks.0.*", "*.bias"), **replicas(sync), **more)])


def test_a_partition_is_measured_where_the_embeddings_are_frozen() -> None:
    seconds = time_links(frozen(("tokens.*", "positions.*")), CPU)
    assert len(seconds) == 4
    assert min(seconds) > 0


def test_a_pattern_matches_a_name() -> None:
    with pytest.raises(ConfigError, match=r"model.frozen=block.0.\* matches no parameter; valid: .*blocks"):
        check_frozen(frozen(("block.0.*",)))
    with pytest.raises(ConfigError, match=r"model.frozen=blok.\*.attn.\* .*; valid: .*blocks.0.attention.\*, "):
        check_frozen(frozen(("blok.*.attn.*",)))
    with pytest.raises(ConfigError, match=r"model.frozen=\* freezes every parameter: nothing is left to train"):
        check_frozen(frozen(("*",)))


@pytest.mark.parametrize("sync", ["server-loss"])
def test_syncs_that_want_every_gradient_refuse(sync: str) -> None:
    words = [f"layout.data={{size: 2, sync: {sync}}}", "model.frozen=[blocks.0.*]"]
    with pytest.raises(ConfigError, match=f"layout.data.sync={sync} expects a gradient of every parameter"):
        parse_run({}, words)
