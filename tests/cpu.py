"""`make test PYTEST_ARGS="-p tests.cpu ..."`: processor seconds of each folder's tests, and of the longest files.

Counted are the process that runs a test and all descendants, also servers that go on and fork ranks. pytest's
durations are wall time, and `os.times` counts children only after their end. Linux alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plants.plant import room_of

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SPENT = pytest.StashKey[Counter[str]]()
FILES = 60
"""The number of longest files in the list."""


def tree_seconds() -> float:
    """Return the seconds computed by this process, the living descendants, and the ended children of each."""
    children, seconds = defaultdict(list), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        children[int(fields[1])].append(int(path.parent.name))
        seconds[int(path.parent.name)] = sum(map(int, fields[11:15])) / TICKS_A_SECOND
    total, left = 0.0, [os.getpid()]
    while left:
        process = left.pop()
        total += seconds.get(process, 0.0)
        left += children[process]
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = tree_seconds()
    result = yield
    spent = item.config.stash.setdefault(SPENT, Counter())
    spent[item.nodeid.partition("::")[0]] += tree_seconds() - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the seconds of a worker's files to xdist's controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = json.dumps(session.config.stash.get(SPENT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    spent = node.config.stash.setdefault(SPENT, Counter())
    spent.update(json.loads(getattr(node, "workeroutput", {}).get("cpu", "{}")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    files = config.stash.get(SPENT, Counter())
    rooms: Counter[str] = Counter()
    for file, seconds in files.items():
        rooms[room_of(file)] += seconds
    for title, spent in (("room", rooms.most_common()), ("file", files.most_common(FILES))):
        terminalreporter.section(f"processor seconds by {title}")
        for name, seconds in spent:
            terminalreporter.write_line(f"{seconds:9.1f}  {name}")
    terminalreporter.write_line(f"{sum(files.values()):9.1f}  in all files")
