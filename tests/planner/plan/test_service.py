"""Questions are answered from kept estimates, and runs are judged before submission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.gate import gate_of, refuse_unfit
from meshwright.planner.plan.kept import KeptRecordings
from meshwright.planner.plan.search import search
from meshwright.planner.plan.service import PlanService
from meshwright.planner.plan.software import load_program
from meshwright.ranks.errors import ConfigError
from meshwright.tools.submit.job import planned_line
from tests.planner.plan.questions import TREE

A100 = load_cluster("dgx-a100")
FULL: dict[str, Any] = {
    "model": "llama-3.2-1b", "data": {"sequence": 8192}, "precision": "bf16", "batch": {"global": 64, "micro": 16},
    "layout": {"data": {"size": 4, "sync": "allreduce"}},
}  # fmt: skip


def test_answers_are_those_of_plan_and_later_ones_record_nothing() -> None:
    service = PlanService(A100, load_program())
    question = {"run": TREE, "devices": 4, "top": 2}
    told = service.ask(question)
    alone = search(parse_config(TREE), A100, 4, 2)
    assert [each["seconds"] for each in told["layouts"]][:1] == [alone.predictions[0].seconds]
    before = service.models.planner.recordings
    again = service.ask(question | {"words": ["layout.data.sync=zero1"]})
    assert again["layouts"][0]["config"]["layout"]["data"]["sync"] == "zero1"
    assert service.models.planner.recordings is before, "kept"
    own = service.ask({"run": TREE | {"layout": {"data": 2}}, "ask": "layout"})
    assert own["layout"].startswith("data 2")
    assert own["seconds"] > 0


def test_a_line_that_cannot_be_answered_ends_nothing() -> None:
    service = PlanService(A100, load_program())
    lines = [
        '{"id": 7, "run": {"model": {"layers": 3}, "wrong": 1}, "devices": 2}', "no json", "[1]", " ",
        '{"devices": 2, "cluster": "x"}', '{"model": "gpt2-small", "sequence": 64, "batch": 8}',
        '{"id": "a", "model": "gpt2-mini", "sequence": 64, "batch": 8, "devices": 1, "top": 1}',
    ]  # fmt: skip
    told = [json.loads(line) for line in service.serve(lines)]
    assert [("error" in each) for each in told] == [True] * 5 + [False]
    assert told[0]["id"] == 7
    assert "wrong" in told[0]["error"]
    assert "cluster=x is no field of a question" in told[3]["error"]
    assert "devices=None is no number of devices" in told[4]["error"]
    assert told[5]["id"] == "a"
    assert told[5]["answer"].startswith("one device")


def test_a_run_that_does_not_fit_is_told_what_does() -> None:
    config = parse_config(FULL)
    gate = gate_of(config, A100)
    assert not gate.fits
    assert "are missing" in gate.text
    assert "batch.micro=" in gate.remedy
    words = gate.remedy.partition(" (")[0].split()
    assert gate_of(parse_config(FULL, words), A100).fits, "the remedy is one"
    with pytest.raises(ConfigError, match=r"does not fit dgx-a100; valid: .*batch\.micro=.*, or --anyway"):
        refuse_unfit(config, A100, anyway=False)
    assert "does not fit" in refuse_unfit(config, A100, anyway=True)


def test_a_second_submission_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    config, found = parse_config(TREE), []

    class Counted(KeptRecordings):
        def save(self) -> None:
            found.append((self.found, len(self._changed)))
            super().save()

    monkeypatch.setattr("meshwright.planner.plan.gate.KeptRecordings", Counted)
    first, again = gate_of(config, A100), gate_of(config, A100)
    assert first == again
    (before, new), (recalled, more) = found
    assert (before, more) == (0, 0)
    assert new > 0
    assert recalled > 0


def test_a_submission_is_planned_where_a_cluster_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config(TREE | {"layout": {"data": 2}})
    assert planned_line(config, None, anyway=False) == []
    unknown = parse_config(TREE | {"layout": {"data": {"size": 2, "sync": "server-loss"}}})
    assert planned_line(unknown, "dgx-a100", anyway=True)[0].startswith("not planned on dgx-a100: ")
    with pytest.raises(ConfigError, match="server-loss"):
        planned_line(unknown, "dgx-a100", anyway=False)
    [line] = planned_line(config, "dgx-a100", anyway=False)
    assert line.startswith("planned on dgx-a100: data 2")
    with pytest.raises(ConfigError, match="--anyway=given has no effect without a cluster"):
        planned_line(config, None, anyway=True)
    with pytest.raises(ConfigError, match="does not fit dgx-a100"):
        planned_line(parse_config(FULL), "dgx-a100", anyway=False)
