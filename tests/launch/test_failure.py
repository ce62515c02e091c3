"""One cause out of many deaths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.errors import DataError, DivergedError, LaunchError, MeshwrightError
from meshwright.launch.failure import Death, Failure, Report, explain_failure, read_reports


def report(rank: int, nanoseconds: int, summary: str = "ValueError: x") -> Report:
    return Report(rank, nanoseconds, summary, "Traceback of it")


def test_reports_come_back_in_the_order_of_time(tmp_path: Path) -> None:
    early, late = report(3, 5), report(0, 9)
    for written in (late, early):
        written.write(tmp_path, attempt=1)
    report(2, 1).write(tmp_path, attempt=0)
    assert read_reports(tmp_path, attempt=1) == [early, late]
    assert read_reports(tmp_path, attempt=2) == []


@pytest.mark.parametrize(
    "death, reports, message",
    [
        (
            Death(1, -9),
            [],
            "rank 1 was killed by signal 9 (SIGKILL); if nobody killed it, the machine ran out of memory",
        ),
        (Death(1, -11), [], "rank 1 was killed by signal 11 (SIGSEGV)"),
        (Death(0, 3), [], "rank 0 exited with code 3 and left no message"),
        (Death(1, -15), [report(0, 5)], "rank 1 was killed by signal 15 (SIGTERM)"),
        (Death(0, 1), [report(2, 4), report(0, 5)], "rank 2 failed: ValueError: x\nTraceback of it"),
        (Death(1, -6), [report(0, 5)], "rank 0 failed: ValueError: x\nTraceback of it"),
        (Death(1, -6), [], "rank 1 was killed by signal 6 (SIGABRT)"),
    ],
)
def test_explain(death: Death, reports: list[Report], message: str) -> None:
    assert explain_failure(death, reports).text == message


@pytest.mark.parametrize(
    "failure, before, again",
    [
        (Failure("killed", lost=True), Failure("killed", lost=True), True),
        (Failure("a bug", lost=False), None, True),
        (Failure("a bug", lost=False), Failure("another", lost=False), True),
        (Failure("a bug", lost=False), Failure("a bug", lost=False), False),
        (Failure("a wrong config", lost=False, certain=True), None, False),
    ],
)
def test_what_is_started_again(failure: Failure, before: Failure | None, again: bool) -> None:
    assert failure.again(before) == again


def test_a_mistake_is_certain_unless_its_class_says_otherwise() -> None:
    class FlippedBit(MeshwrightError):
        restartable = True

    def certain(error: Exception) -> bool:
        return explain_failure(Death(0, 1), [Report.of(0, error)]).certain

    assert certain(DivergedError("the loss is nan"))
    assert not certain(FlippedBit("replica 1 differs"))
    assert not certain(ValueError("a bug"))


def test_report_of_a_bug_has_one_line_and_a_traceback() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        written = Report.of(2, error)
    assert written.summary == "ValueError: first"
    assert 'raise ValueError("first\\nsecond")' in written.details


def test_report_of_a_users_mistake_is_its_text() -> None:
    assert str(Report.of(2, DataError("no such file: a.txt"))) == "rank 2 failed: no such file: a.txt"


def test_a_rank_is_named_once() -> None:
    error = LaunchError("rank 1 on node1 found nobody at node0:29500 within 3 s")
    assert str(replace(Report.of(1, error), host="node1")) == str(error)
    assert str(replace(Report.of(0, error), host="node0")) == f"rank 0 on node0 failed: {error}"
    assert str(replace(Report.of(11, error), host="node1")) == f"rank 11 on node1 failed: {error}"


def test_report_of_an_exit() -> None:
    assert "it called exit with 2" in str(Report.of(0, SystemExit(2)))
