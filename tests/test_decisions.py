"""What `auto` becomes: all ranks take the same, from memory that is really there, and a resumed run takes it again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.build import build
from meshwright.checkpoint import Checkpoint
from meshwright.config import Config, parse_config
from meshwright.decisions import Decided, as_before, decide_limit, decide_summa, resolved_fields
from meshwright.errors import CheckpointError
from meshwright.free_memory import free_memory_bytes, host_memory_bytes
from meshwright.machine import available_memory_bytes
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from tests.train.runs import config_for, losses_of, make_corpus, run
from tests.workers import run_ranks

CPU = torch.device("cpu")
MODEL = {"layers": 4, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 8}


def tiny(**sections: Any) -> Config:
    tree = {"model": MODEL, "data": {"sequence": 16}, "batch": {"global": 8, "micro": 1}} | sections
    return parse_config(tree)


STAGES = tiny(layout={"pipeline": {"size": 2}})
BLOCKS = tiny(layout={"tensor": {"kind": "tesseract", "q": 2}}, batch={"global": 8, "micro": 2})


def limits(mesh: Mesh, free: list[int]) -> tuple[Config, tuple[str, ...]]:
    decided = decide_limit(Decided(STAGES), mesh, 1_000_000, free[mesh.rank])
    return decided.config, decided.notes


def test_every_stage_takes_what_the_fullest_rank_can_hold() -> None:
    (first, notes), other = run_ranks(limits, Grid(STAGES.layout.axes), [100_000_000, 7_000_000])
    assert first.layout.pipeline.limit == 3
    assert notes == ("layout.pipeline.limit=auto: 3 microbatches in 3.00 MB of 7.00 MB of free memory",)
    assert other == (first, notes)


def ways(mesh: Mesh, free: list[int]) -> tuple[str, tuple[str, ...]]:
    decided = decide_summa(Decided(BLOCKS), mesh, [1_000_000] * 4, free[mesh.rank])
    return decided.config.memory.summa, decided.notes


@pytest.mark.parametrize("least, way", [(40_000_000, "gather"), (20_000_000, "whole"), (10_000_000, "stream")])
def test_products_of_all_ranks_travel_as_the_fullest_can_afford(least: int, way: str) -> None:
    told = run_ranks(ways, Grid(BLOCKS.layout.axes), [10**9, 10**9, least, 10**9])
    note = f"memory.summa=auto: {way}, for gathered weights of 8.00 MB in {least / 1e6:.2f} MB of free memory"
    assert told == [(way, (note,))] * 4


def built(mesh: Mesh, config: Config) -> tuple[dict[str, Any], tuple[str, ...]]:
    parts = build(config, mesh)
    return resolved_fields(config, parts.config), parts.notes


def test_a_run_says_what_it_has_decided() -> None:
    config = tiny(layout={"pipeline": {"size": 2, "partition": "measured"}})
    (fields, notes), other = run_ranks(built, Grid(config.layout.axes), config)
    assert other == (fields, notes)
    layers = fields["layout.pipeline.partition"]
    assert sum(layers) == 4
    assert fields == {"layout.pipeline.partition": layers, "layout.pipeline.limit": 8}
    assert notes[0] == f"layout.pipeline.partition=measured: {layers[0]} + {layers[1]} layers"
    assert notes[1].startswith("layout.pipeline.limit=auto: 8 microbatches in ")


def test_what_is_set_is_not_decided() -> None:
    config = tiny(layout={"pipeline": {"size": 2, "partition": [1, 3], "limit": 2}})
    assert run_ranks(built, Grid(config.layout.axes), config) == [({}, ())] * 2


def test_moments_and_gradients_to_come_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step they are pages that nobody has touched, which the system counts as available."""
    coming: list[int] = []
    monkeypatch.setattr("meshwright.build.free_memory_bytes", lambda mesh, more: coming.append(more) or 10**9)
    config = tiny(layout={"tensor": {"kind": "tesseract", "q": 1}})
    parts = build(config, solo_mesh(CPU, ("data", "pipe", "depth", "row", "col")))
    elements = sum(slot.parameter.numel() for slot in parts.strategy.slots)
    assert coming == [3 * 4 * elements]  # two moments and the gradient, in float32
    assert parts.optimizer.coming_bytes == 2 * 4 * elements
    parts.optimizer.prepare_states(0)
    assert parts.optimizer.coming_bytes == 0


def test_the_ranks_of_a_node_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other nodes have their own: a job over 100 nodes is not a hundred times as cramped."""
    assert 0 < host_memory_bytes(solo_mesh(CPU)) <= available_memory_bytes() * 2
    monkeypatch.setattr("meshwright.free_memory.available_memory_bytes", lambda: 8_000)
    four = replace(solo_mesh(CPU), ranks_here=4)
    assert host_memory_bytes(four) == 2_000
    assert free_memory_bytes(four, 500) == 1_500
    assert free_memory_bytes(four, 5_000) == 0


def test_a_resumed_run_takes_what_it_had_decided() -> None:
    dump = STAGES.model_dump(mode="json", by_alias=True)
    resolved = {"layout.pipeline.partition": [3, 1], "layout.pipeline.limit": 5}
    again = as_before(STAGES, dump, resolved)
    assert (again.layout.pipeline.partition, again.layout.pipeline.limit) == ((3, 1), 5)
    assert resolved_fields(STAGES, again) == resolved
    longer = parse_config(dump | {"steps": 7, "optimizer": {"lr": 0.5}})
    assert as_before(longer, dump, resolved).layout.pipeline.limit == 5
    other = tiny(layout={"pipeline": {"size": 3}})
    assert as_before(other, dump, resolved) == other


@pytest.mark.parametrize(
    "resolved, message",
    [
        (
            {"layout.pipeline.partition": [3, 2]},
            "do not fit its config: layout.pipeline.partition=[3, 2] does not add up",
        ),
        ({"layout.pipeline.limit": "many"}, "cannot be read"),
        ({"layout.pipeline.limit": 0}, "cannot be read"),
    ],
)
def test_forged_decisions_are_refused(resolved: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        as_before(STAGES, STAGES.model_dump(mode="json", by_alias=True), resolved)
    assert message in str(caught.value)


def test_train_keeps_what_it_decided_and_resumes_with_it(tmp_path: Path) -> None:
    """A manifest that says otherwise than this machine would decide is what the resumed run follows."""
    layout = {"pipeline": {"size": 2, "partition": "measured"}, "transport": "torch"}
    model = MODEL | {"layers": 3, "dropout": 0.0}
    parts = {"layout": layout, "model": model, "checkpoint": {"every": 2}, "batch": {"global": 4, "micro": 1}}
    corpus = make_corpus(tmp_path)
    out = run(config_for(corpus, **parts, steps=2), tmp_path / "out")
    manifest = Checkpoint(out / "checkpoints" / "step-2").manifest
    resolved = manifest.origin.resolved
    assert sum(resolved["layout.pipeline.partition"]) == 3
    assert resolved["layout.pipeline.limit"] == 4
    assert manifest.origin.config["layout"]["pipeline"]["partition"] == "measured"
    other = {"layout.pipeline.partition": [0, 3], "layout.pipeline.limit": 1}
    assert other != resolved
    replace(manifest, origin=replace(manifest.origin, resolved=other)).write(out / "checkpoints" / "step-2")
    run(config_for(corpus, **parts, steps=4), out, resume=True)
    assert Checkpoint(out / "checkpoints" / "step-4").manifest.origin.resolved == other
    assert [step for step, _ in losses_of(out)] == [1, 2, 3, 4]
