"""Recordings of parts: shared if equal, and of a part's parameters without a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.compute.model import Chunk
from meshwright.compute.subgraph.section import Subgraph
from meshwright.compute.tensor.section import Tesseract
from meshwright.config import Config, parse_config
from meshwright.planner.plan import recordings as recordings_module
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recordings import Recording, Recordings, as_recorded

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 512, "dropout": 0.0},
    "llama": {
        "family": "llama", "layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "feed_forward": 128,
        "positions": 64, "vocabulary": 512,
    },
}  # fmt: skip
EMBEDDINGS, HEAD = Chunk(range(0), True, False), Chunk(range(0), False, True)


def config_of(family: str, tensor: dict[str, Any], **fields: Any) -> Config:
    tree = {"model": MODELS[family], "data": {"sequence": 64}, "batch": {"global": 8, "micro": 4}, "precision": "bf16"}
    return parse_config({**tree, "layout": {"tensor": tensor}, **fields})


def parts_of(config: Config) -> list[Recording]:
    recordings = Recordings()
    embedded = recordings.of(config, EMBEDDINGS, ())
    hidden = recordings.of(config, Chunk(range(1), False, False), embedded.outgoing)
    return [embedded, hidden, recordings.of(config, HEAD, hidden.outgoing)]


def ends_of(config: Config) -> list[Recording]:
    embedded, _, head = parts_of(config)
    return [embedded, head]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("common", ["all", "one"])
def test_branches_and_recomputation_change_no_end(model: str, common: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end recorded under each layout's own section equals the end that a search shares."""
    configs = [
        config_of(model, {"kind": "subgraph", "size": 2, "common": common, "branch": branch}, memory=memory)
        for branch in ("attention", "attention-core", "block")
        for memory in ({}, {"recompute": "selective"})
    ]
    shared = [ends_of(config) for config in configs]
    monkeypatch.setattr(Subgraph, "replica_of_ends", property(lambda self: (self, 1)))
    assert [ends_of(config) for config in configs] == shared


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("summa", ["gather", "whole", "stream"])
def test_a_square_of_tesseract_is_recorded_as_a_replica(
    model: str, summa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part recorded with all squares equals the part of one square with its share of the rows."""
    config = config_of(model, {"kind": "tesseract", "q": 2, "d": 2}, memory={"summa": summa})
    single = config_of(model, {"kind": "tesseract", "q": 2}, batch={"global": 4, "micro": 2}, memory={"summa": summa})
    alone, layer = parts_of(single), Chunk(range(1), False, False)
    assert parts_of(config) == alone
    assert as_recorded(config, layer).layout == as_recorded(single, layer).layout
    monkeypatch.setattr(Tesseract, "replica", property(lambda self: (self, 1)))
    assert as_recorded(config, layer).layout != as_recorded(single, layer).layout
    assert parts_of(config) == alone


@pytest.mark.parametrize("tensor", [{"kind": "none"}, {"kind": "megatron", "size": 2, "sequence_parallel": True}])
def test_ranks_of_experts_are_replicas_of_parts_without_experts(
    tensor: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part without experts recorded on all ranks of the expert axis equals the part recorded on one."""
    model = MODELS["llama"] | {"experts": {"count": 4, "per_token": 2, "dense_layers": 1}}
    cut, whole = (
        config_of(
            "llama", tensor, model=model, layout={"data": {"size": size, "expert": size}, "tensor": tensor},
            batch={"global": 8 * size, "micro": 4},
        )
        for size in (2, 1)
    )  # fmt: skip
    dense, routed = (Chunk(range(layer, layer + 1), False, False) for layer in range(2))
    expert_sizes = {part: as_recorded(cut, part).layout.data.expert for part in (EMBEDDINGS, dense, routed, HEAD)}
    assert expert_sizes == {EMBEDDINGS: 1, dense: 1, routed: 2, HEAD: 2}
    alone = [Recordings().of(whole, EMBEDDINGS, ())]
    alone.append(Recordings().of(whole, dense, alone[0].outgoing))
    monkeypatch.setattr(recordings_module, "as_recorded", lambda config, chunk: as_recorded(config, routed))
    recordings = Recordings()
    assert recordings.of(cut, EMBEDDINGS, ()) == alone[0]
    assert recordings.of(cut, dense, alone[0].outgoing) == alone[1]


def test_embeddings_that_compute_a_tensor_of_each_branch_are_recorded_with_a_ranks_branches() -> None:
    model = {"family": "t5", "layers": 1, "hidden": 64, "heads": 4, "head_width": 16, "vocabulary": 512}
    config = config_of("gpt", {"kind": "subgraph", "size": 2}, model=model, data={"sequence": 64})
    embedded = Recordings().of(config, EMBEDDINGS, ())
    assert any(form.shape[-3:] == (2, 64, 64) for form in embedded.outgoing)  # two of four heads
    assert Recordings().of(config, Chunk(range(1), False, False), embedded.outgoing).outgoing


def test_ends_of_sub_graphs_are_recorded_once() -> None:
    recordings = Recordings()
    for branch in ("attention", "attention-core", "block"):
        recordings.of(config_of("gpt", {"kind": "subgraph", "size": 2, "branch": branch}), EMBEDDINGS, ())
    assert len(recordings.recorded) == 1


@pytest.mark.parametrize("tensor", [
    {"kind": "megatron", "size": 2}, {"kind": "tesseract", "q": 2, "d": 1}, {"kind": "subgraph", "size": 2},
], ids=lambda tensor: tensor["kind"])  # fmt: skip
@pytest.mark.parametrize("model", MODELS)
def test_parameters_without_a_run_are_those_of_a_recording(model: str, tensor: dict[str, Any]) -> None:
    """Parameters are equal, except for facts that only a run finds."""
    config, recordings = config_of(model, tensor), Recordings()
    built = recordings.parameters(config, EMBEDDINGS)
    assert not recordings.recorded
    recorded = recordings.of(config, EMBEDDINGS, ()).parameters
    assert built == tuple(replace(each, comes_with_b=False, read_back=built[0].read_back) for each in recorded)


def test_a_bound_of_layers_records_no_head() -> None:
    estimates = Estimates(Planner(load_cluster("dgx-h100")))
    config = config_of("llama", {"kind": "megatron", "size": 2})
    lower = estimates.least_seconds(config, layers=True)
    without = len(estimates.planner.recordings.recorded)
    assert lower < estimates.least_seconds(config)
    assert len(estimates.planner.recordings.recorded) > without
