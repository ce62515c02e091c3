"""`make validate`: the data are whole, every line is used, and errors stay below the admitted errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from meshwright.config import Config
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.memory import Memory
from meshwright.planner.plan.predict import Prediction
from meshwright.planner.plan.software import Software
from meshwright.strategies.pipeline.span import Timeline, task_span
from meshwright.strategies.pipeline.task import Task, TaskKind
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PASSES
from validation import axonn, paper, tesseract
from validation.__main__ import COMPARE
from validation.case import Row
from validation.paper import PAPERS, Paper, load_paper, merged, read_table
from validation.report import Result

ROWS = {"tesseract": 24, "axonn": 6, "megatron-sc21": 10, "megatron-2019": 3, "super": 3, "bai": 8}
"""The number of figures in each paper's tables."""
CLAIMS = {"tesseract": 1, "axonn": 2}


@dataclass
class QuickPlanner:
    """A planner with one prediction for all, which checks only that the run is legal."""

    cluster: Cluster
    software: Software

    def predict(self, config: Config) -> Prediction:
        forward, backward = (task_span(0, Task(kind, 0), 0.0, 1.0) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD))
        phases = dict.fromkeys((PASSES, DATA_PARALLEL, OPTIMIZER), 1.0)
        memory = (Memory(1, 1, 1, 1, 1, 1),) * config.layout.pipeline.size
        return Prediction(config, self.cluster, 3.0, phases, memory, (), Timeline(1, (forward, backward)), 1.0, 1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "Planner", QuickPlanner)


def few(name: str, table: str, *lines: int) -> Paper:
    """Return a paper with some lines of a table, and without the other tables."""
    paper = load_paper(name)
    kept = tuple(paper.tables[table][line] for line in lines)
    return replace(paper, tables=dict.fromkeys(paper.tables, ()) | {table: kept})


def test_every_paper_is_compared_and_every_table_is_a_papers() -> None:
    assert {path.stem for path in PAPERS.glob("*.yaml")} == set(COMPARE)
    tables = [table for name in COMPARE for table in load_paper(name).tables]
    assert sorted(tables) == sorted(path.stem for path in PAPERS.glob("*.csv"))


@pytest.mark.parametrize("path", sorted(PAPERS.glob("*.csv")), ids=lambda path: path.stem)
def test_tables_have_all_columns_in_every_line(path) -> None:
    lines = read_table(path)
    assert lines
    assert all(None not in line and None not in line.values() for line in lines), "too many or too few columns"
    assert path.read_text().startswith("# "), "a table says where its figures come from"


@pytest.mark.parametrize("name", list(COMPARE))
def test_every_line_of_every_table_is_used(name: str, quick: None) -> None:
    finding = COMPARE[name](load_paper(name))
    assert len(finding.rows) == ROWS[name]
    assert len(finding.claims) == CLAIMS.get(name, 0)
    assert all(row.published > 0 for row in finding.rows)


def test_an_error_is_relative_to_what_was_published_and_a_mean_of_those_that_count() -> None:
    rows = (Row("a", "s", 2.0, 3.0), Row("b", "s", 4.0, 3.0), Row("c", "s", 1.0, 9.0, counts=False))
    assert [row.error for row in rows[:2]] == [0.5, -0.25]
    assert Result(load_paper("axonn"), finding := axonn.Finding(rows), None).holds is False
    assert finding.mean_error == pytest.approx(0.375)


def test_merged_lays_sections_over_sections() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {"a": {"b": 3, "c": 2}, "d": [2]}


def test_a_fit_changes_the_cluster_for_its_paper_alone() -> None:
    fitted, by_file = load_paper("tesseract"), load_paper("tesseract", fitted=False)
    assert (
        fitted.cluster.links["torch"].levels[1].bandwidth_bytes_per_second
        < by_file.cluster.links["torch"].levels[1].bandwidth_bytes_per_second
    )
    assert fitted.cluster.device.peak_flops_per_second == by_file.cluster.device.peak_flops_per_second
    assert [name for name in COMPARE if load_paper(name).has_fit] == ["tesseract", "axonn"]


def test_tesseract_at_64_gpus() -> None:
    finding = tesseract.compare(few("tesseract", "tesseract_strong", 2, 5, 10))
    assert finding.claims[0].holds, finding.claims[0].found
    assert finding.mean_error < 0.25


def test_axonns_phases_and_memory() -> None:
    paper = few("axonn", "axonn_phases", 1, 2)
    finding = axonn.compare(paper)
    assert [row.quantity for row in finding.rows] == [axonn.MEMORY, axonn.PIPELINE_SECONDS, axonn.DATA_SECONDS]
    assert all(abs(row.error) < 0.1 for row in finding.rows)


@pytest.mark.long
@pytest.mark.parametrize("name", list(COMPARE))
def test_errors_stay_below_those_that_are_admitted(name: str) -> None:
    paper = load_paper(name)
    result = Result(paper, COMPARE[name](paper), None)
    assert result.holds, (result.finding.mean_error, result.finding.claims)
