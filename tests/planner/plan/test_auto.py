"""`layout: auto`: the planner decides the fields that run file, command line and launcher leave open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api import load
from meshwright.config.load import load_undecided
from meshwright.ranks.errors import ConfigError
from tests.planner.plan.questions import TREE

WORDS = ("memory.recompute=none", "memory.offload.to=none", "layout.tensor.kind=none", "layout.pipeline.size=1")


def run_file(folder: Path, **changes: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(TREE | changes))
    return path


def test_a_layout_is_found_and_what_is_said_stays(tmp_path: Path) -> None:
    path = run_file(tmp_path, layout="auto", plan={"cluster": "hal", "devices": 2})
    config = load(path, [*WORDS, "layout.data.sync=ring", "batch.micro=2"])
    layout = config.layout
    assert (layout.world_size, layout.data.size, layout.data.sync) == (2, 2, "ring")
    assert (config.batch.micro, layout.ranks_per_node) == (2, 2)


def test_the_launcher_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    path = run_file(tmp_path, layout="auto", plan={"cluster": "hal"})
    config = load(path, [*WORDS, "batch.micro=2"])
    assert (config.layout.world_size, config.layout.ranks_per_node) == (4, 2)


def test_who_looks_for_a_layout_reads_the_rest(tmp_path: Path) -> None:
    path = run_file(tmp_path, layout="auto", plan={"cluster": "hal"})
    assert load_undecided(path, ["batch.micro=2"]).batch.micro == 2
    assert load_undecided(path) == load_undecided(run_file(tmp_path))


def test_another_layout_is_left_alone(tmp_path: Path) -> None:
    assert load(run_file(tmp_path, layout={"data": {"size": 4}})).layout.data.size == 4
    with pytest.raises(ConfigError, match="plan"):
        load(run_file(tmp_path, plan={"cluster": "hal"}))


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"clusters": "hal"}, "plan.clusters=hal is an unknown key; valid: cluster, devices"),
        ({"cluster": "hal", "devices": 0}, "plan.devices=0 is not a whole number"),
        ({"devices": 2}, "plan.cluster=none says nothing of where to run"),
        ({"cluster": "hall"}, "--cluster=hall is no cluster"),
        ("hal", "plan=hal is no section"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(run_file(tmp_path, layout="auto", plan=plan))
