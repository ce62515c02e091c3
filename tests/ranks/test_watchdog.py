"""The watchdog under the test's clock; messages made of ranks' records; no wait reads the time of day."""

from __future__ import annotations

import ast
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.ranks.environment import Environment
from meshwright.ranks.flight_recorder import DEVICE, Call, FlightRecorder, Waiting, Whereabouts
from meshwright.ranks.hang import Record, explain_hang, read_records
from meshwright.ranks.peers import Peer, Peers
from meshwright.ranks.timeouts import Timeouts
from meshwright.ranks.watchdog import EXIT_CODE, Watchdog
from tests.patience import PATIENCE_SECONDS

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"
SUM = Call("data", "all_reduce", 4000, (0, 1), 12)


class Rank:
    """A watchdog with a clock that the test moves, and with lists of exit codes and printed texts."""

    def __init__(self, folder: Path | None) -> None:
        self.now = 1000.0
        self.codes: list[int] = []
        self.said: list[str] = []
        self.recorder = FlightRecorder(clock=lambda: self.now)
        environment = Environment(0, 2, 0, 2, 0, "torchrun", folder)
        timeout = Timeouts(join=5, wait=30)
        self.watchdog = Watchdog(environment, self.recorder, timeout, self.codes.append, self.said.append)


def test_a_wait_is_ended_when_its_timeout_is_over_and_not_before() -> None:
    rank = Rank(None)
    rank.watchdog.joined(0)
    with rank.recorder.waiting(SUM):
        rank.now += 29.9
        rank.watchdog.look()
        assert rank.codes == []
        rank.now += 0.2
        rank.watchdog.look()
    assert rank.codes == [EXIT_CODE]
    assert "rank 1 did not come to all_reduce #12 on axis data (4.0 kB); rank 0 waits for 30 s" in rank.said[0]


def test_until_it_has_joined_a_rank_waits_less() -> None:
    rank = Rank(None)
    with rank.recorder.waiting(SUM):
        rank.now += 5.1
        rank.watchdog.look()
    assert rank.codes == [EXIT_CODE]


def test_a_clock_that_jumps_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day ahead and a day back, while a rank waits."""
    rank = Rank(None)
    with rank.recorder.waiting(SUM):
        for jump in (86400.0, -86400.0):
            today = time.time() + jump
            monkeypatch.setattr(time, "time", lambda today=today: today)
            rank.watchdog.look()
    assert rank.codes == []


def test_who_computes_is_not_ended_alone_but_answers_who_gave_up(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.now += 10**6
    rank.watchdog.look()
    assert rank.codes == []
    (tmp_path / "hung-1").touch()  # a mark of another attempt
    rank.watchdog.look()
    assert rank.codes == []
    (tmp_path / "hung-0").touch()
    rank.watchdog.look()
    assert rank.codes == [EXIT_CODE]
    (record,) = read_records(tmp_path)
    assert record.state == "hung"
    assert "test_watchdog.py" not in "".join(record.stacks.values())  # without the watchdog's thread


def test_a_rank_that_has_joined_has_the_number_of_its_job(tmp_path: Path) -> None:
    """The rank's launcher has counted no restart, another node's launcher two."""
    peers = Peers([Peer(0, "node0", attempt=0), Peer(1, "node1", attempt=2)], me=0)
    rank = Rank(tmp_path)
    (tmp_path / "hung-2").touch()
    rank.watchdog.joined(peers.attempt)
    (tmp_path / "hung-0").touch()
    rank.watchdog.look()
    assert rank.codes == []
    (tmp_path / "hung-2").write_text("again")
    os.utime(tmp_path / "hung-2", ns=(1, 1))
    rank.watchdog.look()
    assert rank.codes == [EXIT_CODE]
    assert [record.rank for record in read_records(tmp_path, 2)] == [0]


def test_a_mark_that_an_older_job_left_is_no_mark(tmp_path: Path) -> None:
    (tmp_path / "hung-0").touch()
    rank = Rank(tmp_path)
    rank.watchdog.look()
    assert rank.codes == []


def test_a_thread_leaves_records_and_a_rank_that_leaves_says_so(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    before = threading.active_count()
    with Watchdog(Environment(0, 1, 0, 1, 0, "none", tmp_path), recorder, Timeouts()):
        recorder.step, recorder.phase = 3, "optimizer"
        end = time.monotonic() + PATIENCE_SECONDS
        while read_records(tmp_path)[0].where.step != 3 and time.monotonic() < end:
            time.sleep(0.05)
        (record,) = read_records(tmp_path)
        assert (record.state, record.where.step, record.where.phase) == ("running", 3, "optimizer")
    assert read_records(tmp_path)[0].state == "ended"
    assert threading.active_count() == before


def record(
    rank: int, waiting: Waiting | None, state: str = "hung", begun: tuple[tuple[int, str, int], ...] = ()
) -> Record:
    where = Whereabouts(7, "pipeline", "F3", () if waiting is None else (waiting,), {"data": begun} if begun else {})
    return Record(rank, 3, 0, "here", 100 + rank, state, 50.0, 0.0, where, 30.0)  # type: ignore[arg-type]


def in_sum(number: int, seconds: float = 31.0) -> Waiting:
    return Waiting("data", "all_reduce", 4000, (0, 1, 2), number, seconds)


def begun(number: int, verb: str = "all_reduce", size: int = 4000) -> tuple[tuple[int, str, int], ...]:
    return ((number - 1, "all_reduce", 4000), (number, verb, size))


def test_nobody_is_accused_where_nobody_gave_up() -> None:
    assert explain_hang([record(0, None, "running"), record(1, None, "ended")]) is None


def test_of_two_who_do_not_come_both_are_named() -> None:
    records = [record(0, in_sum(12), begun=begun(12)), record(1, None, begun=begun(11)), record(2, None, "running")]
    message = explain_hang(records) or ""
    assert "rank 1 (here) did not come to all_reduce #12" in message
    assert "rank 2 (here) did not come to all_reduce #12" in message


def test_who_has_begun_it_and_gone_on_has_come() -> None:
    """Rank 1 is at #30 and has no record as old as #12."""
    records = [
        record(0, in_sum(12), begun=begun(12)),
        record(1, None, begun=begun(30)),
        record(2, None, begun=begun(11)),
    ]
    first = (explain_hang(records) or "").splitlines()[0]
    assert "rank 2 (here) did not come" in first
    assert "rank 1" not in first


def test_the_first_cause_is_named_and_not_who_waits_for_it() -> None:
    """Rank 0 waits for 1 in a collective, rank 1 for 2 by a message, and rank 2 computes."""
    message = Waiting("pipe", "receive", 64, (2,), 0, 31.0)
    records = [record(0, replace(in_sum(12), ranks=(0, 1))), record(1, message), record(2, None)]
    first = (explain_hang(records) or "").splitlines()[0]
    assert "rank 2 (here) sent nothing on axis pipe; rank 1 waits" in first
    assert "rank 1 (here) did not" not in first


def test_a_circle_is_named_whole() -> None:
    waits = [Waiting("pipe", "receive", 64, (1,), 0, 31.0), Waiting("pipe", "receive", 64, (0,), 0, 31.0)]
    message = explain_hang([record(0, waits[0]), record(1, waits[1])]) or ""
    assert "rank 0 (here) sent nothing on axis pipe; rank 1 waits" in message
    assert "rank 1 (here) sent nothing on axis pipe; rank 0 waits" in message


def test_a_rank_that_holds_up_devices_is_named() -> None:
    """Under NCCL a host waits only for its device. Rank 2 computes and is named; if no rank computes, none is named."""
    device = Waiting("world", DEVICE, 0, (0, 1, 2), 0, 31.0)
    message = explain_hang([record(0, device), record(1, device), record(2, None)]) or ""
    assert message.startswith("no progress: rank 2 (here) gives the devices of others nothing to go on with, on axis")
    assert "ranks 0, 1 wait for 31 s" in message
    message = explain_hang([record(rank, device) for rank in range(3)]) or ""
    assert message.startswith("no progress: all hosts wait for their devices")
    assert "rank 2 (here, process 102) waits in the end of a step on the device on axis world" in message


def test_a_wait_for_the_own_device_is_no_wait_for_others() -> None:
    rank = Rank(None)
    for call, waited in ((Call("world", DEVICE, 0, (0, 1)), 0.0), (SUM, 5.0)):
        with rank.recorder.waiting(call):
            rank.now += 5.0
        assert rank.recorder.waited_seconds == waited


def test_other_bytes_under_a_number_have_parted() -> None:
    mine = replace(in_sum(12), ranks=(0, 1))
    other = replace(mine, payload_bytes=8)
    records = [record(0, mine, begun=begun(12)), record(1, other, begun=begun(12, size=8))]
    message = explain_hang(records) or ""
    assert (
        "rank 0 is in all_reduce #12 on axis data (4.0 kB), and rank 1 in all_reduce #12 on axis data (8 B)" in message
    )


def test_a_thousand_ranks_make_a_message_that_can_be_read() -> None:
    ranks = tuple(range(1000))
    waits = replace(in_sum(12), ranks=ranks)
    message = explain_hang([record(rank, waits, begun=begun(12)) for rank in ranks[1:]]) or ""
    assert "rank 0 did not come" in message
    assert len(message) < 5000


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    written = record(1, in_sum(12), begun=begun(12))
    written.write(tmp_path)
    assert Record.read(tmp_path / "rank-1.json") == written
    assert json.loads((tmp_path / "rank-1.json").read_text())["where"]["task"] == "F3"


BY_THE_CALENDAR = {
    "planner/calibrate/job.py": 1, "strategies/pipeline/span.py": 1, "training/folder.py": 1,
    "training/status.py": 1, "ranks/watchdog.py": 1, "ranks/thread_world.py": 1, "planner/nodes.py": 1,
    "parity/report.py": 1, "parity/certificate.py": 1, "tools/compare/report.py": 1, "tools/certify.py": 1,
}  # fmt: skip
"""Uses of the time of day that are shown to a person or only name something."""


def test_nothing_waits_by_the_time_of_day() -> None:
    asked: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now"):
                name = str(path.relative_to(PACKAGE))
                asked[name] = asked.get(name, 0) + 1
    assert asked == BY_THE_CALENDAR
