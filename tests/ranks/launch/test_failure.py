"""The failure's explanation is the first cause of many deaths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.ranks.errors import DataError, DivergedError, LaunchError, MeshwrightError
from meshwright.ranks.launch.failure import (
    MPIEXEC,
    SERVER,
    STORE,
    Death,
    Failure,
    Report,
    explain_failure,
    read_reports,
)


def report(rank: int, nanoseconds: int, summary: str = "ValueError: x") -> Report:
    return Report(rank, nanoseconds, summary, "Traceback of it")


def test_reports_come_back_in_the_order_of_time(tmp_path: Path) -> None:
    early, late = report(3, 5), report(0, 9)
    for written in (late, early):
        written.write(tmp_path, attempt=1)
    report(2, 1).write(tmp_path, attempt=0)
    assert read_reports(tmp_path, attempt=1) == [early, late]
    assert read_reports(tmp_path, attempt=2) == []


MEMORY = "; if nobody killed it, the machine ran out of memory"
ENDED = "rank 2 failed: ValueError: x\nTraceback of it"


@pytest.mark.parametrize(
    "death, reports, message",
    [
        (Death(1, -9, host="h"), [], f"rank 1 was killed by signal 9 (SIGKILL) on h{MEMORY}"),
        (Death(1, -11, host="h"), [], "rank 1 was killed by signal 11 (SIGSEGV) on h"),
        (Death(0, 3, host="h"), [], "rank 0 exited with code 3 and left no message, on h"),
        (Death(1, -15, host="h"), [report(0, 5)], "rank 1 was killed by signal 15 (SIGTERM) on h"),
        (Death(0, 1), [report(2, 4), report(0, 5)], ENDED),
        (Death(1, -6), [report(2, 5)], ENDED),
        (Death(1, -6, host="h"), [], "rank 1 was killed by signal 6 (SIGABRT) on h"),
        # If a process that ranks need was killed, ranks report lost connections.
        (Death(STORE, -9, host="h"), [report(2, 5)], f"{STORE} was killed by signal 9 (SIGKILL) on h"),
        (Death(SERVER, -15, host="h"), [report(2, 5)], f"{SERVER} was killed by signal 15 (SIGTERM) on h"),
        (Death(SERVER, None, host="h"), [report(2, 5)], f"{SERVER} has died on h"),
        (Death(MPIEXEC, -9, host="h"), [report(2, 5)], "mpiexec was killed by signal 9 (SIGKILL) on h"),
        (Death(MPIEXEC, -6), [report(2, 5)], ENDED),
        (Death(STORE, 1), [report(2, 5)], ENDED),
        (Death(STORE, 1, host="h"), [], f"{STORE} exited with code 1 and left no message, on h"),
    ],
)
def test_explain(death: Death, reports: list[Report], message: str) -> None:
    assert explain_failure(death, reports).text == message


@pytest.mark.parametrize("who", [1, STORE, SERVER, MPIEXEC])
@pytest.mark.parametrize("status", [-9, -15, -1, -2, None])
def test_a_kill_from_outside_is_never_the_same_error_twice(who: int | str, status: int | None) -> None:
    failure = explain_failure(Death(who, status), [])
    assert failure.again(failure)
    assert failure.rank == (who == 1)


@pytest.mark.parametrize("who", [STORE, SERVER, MPIEXEC])
@pytest.mark.parametrize("status", [-11, -6, 1])
def test_a_process_that_ends_twice_by_its_own_fault_is_not_started_a_third_time(who: str, status: int) -> None:
    failure = explain_failure(Death(who, status), [])
    assert failure.again(None)
    assert not failure.again(failure)


def test_the_cause_of_several_deaths_is_the_one_that_takes_the_others_along() -> None:
    deaths = [Death(1, 1), Death(0, 255), Death(3, -9), Death(STORE, -9), Death(SERVER, -9)]
    assert [death.who for death in sorted(deaths, key=lambda death: death.order)] == [SERVER, STORE, 3, 0, 1]


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
