"""Recordings of parts: shared if equal, and of a part's parameters without a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.compute.model import Chunk
from meshwright.compute.subgraph.section import Subgraph
from meshwright.config import Config, parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recordings import Recording, Recordings

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 512, "dropout": 0.0},
    "llama": {
        "family": "llama", "layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "feed_forward": 128,
        "positions": 64, "vocabulary": 512,
    },
}  # fmt: skip
EMBEDDINGS, HEAD = Chunk(range(0), True, False), Chunk(range(0), False, True)


def config_of(model: str, tensor: dict[str, Any], **fields: Any) -> Config:
    tree = {"model": MODELS[model], "data": {"sequence": 64}, "batch": {"global": 8, "micro": 4}, "precision": "bf16"}
    return parse_config({**tree, "layout": {"tensor": tensor}, **fields})


def ends_of(config: Config) -> list[Recording]:
    recordings = Recordings()
    embedded = recordings.of(config, EMBEDDINGS, ())
    hidden = recordings.of(config, Chunk(range(1), False, False), embedded.outgoing)
    return [embedded, recordings.of(config, HEAD, hidden.outgoing)]


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
    monkeypatch.setattr(Subgraph, "ends", property(lambda self: self))
    assert [ends_of(config) for config in configs] == shared


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
