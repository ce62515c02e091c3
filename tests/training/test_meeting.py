"""Ranks with different facts are refused before anything is built. Ranks with equal facts print no message."""

from __future__ import annotations

import json
import re
import socket
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from meshwright.config import Config
from meshwright.data.files import silent
from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch import Rank, StopRequest
from meshwright.ranks.mesh import Mesh
from meshwright.training import meeting
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.meeting import facts_of, meet, placement_notes, ranks_without
from meshwright.training.worker import train_rank
from tests.training.runs import config_for, make_corpus
from tests.workers import run_ranks as run_threads

TRIO = Grid((("data", 3),))
run_ranks = partial(run_threads, transport="torch")
"""Ranks are processes: a rank patches the name of this host and the environment's restart count."""


def said(mesh: Mesh, facts: list[dict[str, str]]) -> str:
    try:
        meet(mesh, facts[mesh.rank])
    except LaunchError as error:
        return str(error)
    return ""


def test_ranks_that_agree_meet() -> None:
    assert run_ranks(said, TRIO, [{"optimizer.lr": "0.1"}] * 3) == ["", "", ""]


def test_the_first_that_differs_is_named_on_every_rank() -> None:
    """A rank has additional keys, lacks keys, or has other values, in texts of different lengths."""
    facts = [{"optimizer.lr": "0.1", "steps": "8"}, {"optimizer.lr": "0.1", "steps": "8"}, {"optimizer.lr": "0.2"}]
    host = socket.gethostname()
    text = f"rank 2 on {host} differs from rank 0 on {host}: optimizer.lr is 0.2, not 0.1; steps is absent, not 8; "
    assert run_ranks(said, TRIO, facts) == [f"{text}no step was made"] * 3


def train_joined(mesh: Mesh, config: Config, out: Path, data: Path, attempts: list[int]) -> None:
    environment = Environment(mesh.rank, mesh.grid.world_size, 0, 1, attempts[mesh.rank], "torchrun")
    train_rank(Rank(mesh, environment, StopRequest()), config, config, out, data, resume=False)


def test_a_restart_that_one_node_has_counted_goes_on(corpus: Path, tmp_path: Path) -> None:
    """The launcher of rank 0 has counted no restart: alone, rank 0 would refuse the folder of this job."""
    config = resolve(config_for(corpus, steps=4), this_machine()).config
    data, grid = config.data.prepare(config, silent), Grid(config.layout.axes)
    run_ranks(train_joined, grid, config, tmp_path, data, [0, 0])
    identity = (tmp_path / "run.json").read_text()
    run_ranks(train_joined, grid, config, tmp_path, data, [0, 1])
    assert (tmp_path / "run.json").read_text() == identity
    with pytest.raises(AssertionError, match="holds a run already"):
        run_ranks(train_joined, grid, config, tmp_path, data, [0, 0])


def test_many_differences_are_counted() -> None:
    facts = [{f"key{index}": str(rank) for index in range(9)} for rank in range(3)]
    assert "key2 is 1, not 0 (and 6 more); no step" in run_ranks(said, TRIO, facts)[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def test_facts_are_of_the_config_the_data_the_code_and_the_libraries(corpus: Path, tmp_path: Path) -> None:
    config = config_for(corpus)
    facts = facts_of(config, corpus, resume=False)
    assert (facts["optimizer.lr"], facts["layout.data.size"], facts["--resume"]) == ("0.01", "2", "False")
    digest = re.compile(r"[0-9a-f]{16}")
    assert digest.fullmatch(facts["the source code of meshwright"])
    assert {"the version of torch", "the version of Python"} <= facts.keys()
    for name in ("header.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    assert facts_of(config, tmp_path, resume=False) == facts, "the same data in another folder"
    header = tmp_path / "header.json"
    tree = json.loads(header.read_text())
    tree["sha256"]["train.bin"] = "0" * 64
    header.write_text(json.dumps(tree))
    other = facts_of(config, tmp_path, resume=False)
    assert [key for key in facts if facts[key] != other[key]] == ["data"]


def placed(mesh: Mesh, hosts: list[str], folders: list[str]) -> tuple[list[str], list[str]]:
    with patch("socket.gethostname", return_value=hosts[mesh.rank]):
        return placement_notes(mesh), ranks_without(mesh, Path(folders[mesh.rank]))


def test_ranks_that_are_dealt_out_in_turns_are_warned(tmp_path: Path) -> None:
    answers = run_ranks(placed, TRIO, ["a", "b", "a"], [str(tmp_path)] * 3)
    assert [notes[0].split(": ")[1] for notes, _ in answers] == [
        "neighbouring ranks are on different hosts (0 on a, 1 on b, 2 on a)"
    ] * 3


def test_ranks_in_blocks_that_share_a_folder_are_not(tmp_path: Path) -> None:
    assert run_ranks(placed, TRIO, ["a", "a", "b"], [str(tmp_path)] * 3) == [([], [])] * 3
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_see_a_folder_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE_SECONDS", 0.1)
    (tmp_path / "own").mkdir()
    answers = run_ranks(placed, TRIO, ["a", "a", "b"], [str(tmp_path), str(tmp_path), str(tmp_path / "own")])
    assert [blind for _, blind in answers] == [["rank 2 on b"]] * 3
