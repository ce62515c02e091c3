"""Faults between nodes: each run ends by itself, within the timeout, with a message that names rank and host."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.nodes.conftest import Nodes
from tests.nodes.faults import FOR_EVER, START_SECONDS, wait_for_steps
from tests.nodes.launchers import by_hand, torchrun, train_words, write_run
from tests.nodes.network import Network, Running
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import lines_of, make_corpus

WAIT_SECONDS = 5.0
"""`timeout.wait` of these runs."""
MARGIN_SECONDS = PATIENCE_SECONDS


def text_after(fault: Callable[[], object], survivor: Running, seconds: float) -> str:
    """Return the survivor's output. The survivor must have ended within `seconds` of the fault."""
    fault()
    code = survivor.wait(seconds)
    assert code not in (0, -999), survivor.text
    return survivor.text


def trains_on(process: psutil.Process) -> bool:
    """Return whether the process runs and is no zombie: a node's first process, a `sleep`, reaps none."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def pair(nodes: Nodes, corpus: Path, tmp_path: Path) -> tuple[Network, list[Running]]:
    """Start two training nodes with a rank each."""
    network = nodes(2)
    words = train_words(write_run(tmp_path, corpus, 2, steps=FOR_EVER), tmp_path / "out")
    started = by_hand(network, words)
    wait_for_steps(tmp_path / "out", started)
    return network, started


def test_a_node_dies(pair: tuple[Network, list[Running]]) -> None:
    network, started = pair
    text = text_after(network[1].die, started[0], MARGIN_SECONDS)
    assert re.search(r"^rank 0 on node0 failed: lost rank 1 on node1 \(10\.77\.0\.2: connection ", text, re.MULTILINE)
    assert "Traceback" not in text


@pytest.mark.long
def test_a_cable_is_pulled(pair: tuple[Network, list[Running]]) -> None:
    """No connection breaks, but no data arrives. The run's folder is shared, so one message names both ranks."""
    network, started = pair
    text = text_after(lambda: network.set_link(1, "down"), started[0], WAIT_SECONDS + MARGIN_SECONDS)
    either = (
        r"no progress: rank \d \(node\d\) did not come to .* waits? for 5 s \(timeout: 5 s\)",
        r"a wait took 5 s; .*: the network between node0, node1 carries nothing, or was too slow",
    )
    assert re.search(f"^meshwright: ({'|'.join(either)})$", text, re.MULTILINE), text
    assert "rank 0 (node0, process " in text
    assert "rank 1 (node1, process " in text
    assert started[1].wait(MARGIN_SECONDS) == 124


def test_a_cable_is_pulled_and_put_back(nodes: Nodes, corpus: Path, tmp_path: Path, one_node: list[float]) -> None:
    """Within the timeout, the run continues with unchanged losses."""
    network = nodes(2)
    run = write_run(tmp_path, corpus, 2, steps=100, timeout={"join": 60, "wait": 30})
    started = by_hand(network, train_words(run, tmp_path / "out"))
    wait_for_steps(tmp_path / "out", started)
    network.set_link(1, "down")
    time.sleep(1.5)
    stood = len(lines_of(tmp_path / "out"))
    network.set_link(1, "up")
    assert stood < 100
    assert [one.wait(START_SECONDS) for one in started] == [0, 0], started[0].text
    losses = [line["loss"] for line in lines_of(tmp_path / "out")]
    assert len(losses) == 100
    assert losses[: len(one_node)] == pytest.approx(one_node, rel=1e-10, abs=0)


def test_an_agent_of_torchrun_dies(nodes: Nodes, corpus: Path, tmp_path: Path, one_node: list[float]) -> None:
    """Until the kill, the losses equal one node's, though the nodes call themselves loopback. Then the agent's rank
    ends with the agent, the other node reports the loss, and no orphan continues."""
    network = nodes(2)
    network.name_as_debian_does()
    words = train_words(write_run(tmp_path, corpus, 2, steps=FOR_EVER), tmp_path / "out")
    started = torchrun(network, 1, words)
    wait_for_steps(tmp_path / "out", started, len(one_node))
    losses = [line["loss"] for line in lines_of(tmp_path / "out")]
    assert losses[: len(one_node)] == pytest.approx(one_node, rel=1e-10, abs=0)
    ranks = started[1].processes("meshwright")
    agent = next(process for process in ranks if "torch.distributed.run" in process.cmdline())
    text = text_after(agent.kill, started[0], MARGIN_SECONDS)
    assert "rank 0 on node0 failed: lost rank 1 on node1" in text
    end = time.monotonic() + MARGIN_SECONDS
    while any(map(trains_on, ranks)):
        assert time.monotonic() < end, "an orphan trains on"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "differs", ["the run file", *(pytest.param(other, marks=pytest.mark.long) for other in ("the corpus", "--out"))]
)
def test_what_differs_on_the_second_node_is_said_before_the_first_step(
    differs: str, nodes: Nodes, corpus: Path, tmp_path: Path
) -> None:
    network, other, out = nodes(2), tmp_path / "other", tmp_path / "out"
    run = write_run(tmp_path, corpus, 2)
    other.mkdir()
    out.mkdir()
    if differs == "the run file":
        network[1].mount(write_run(other, corpus, 2, steps=9), run)
        rule = "rank 1 on node1 differs from rank 0 on node0: steps is 9, not 8; no step was made"
    elif differs == "the corpus":
        network[1].mount(make_corpus(other, seed=2), corpus)
        rule = r"rank 1 on node1 differs from rank 0 on node0: data is \w+, not \w+; no step was made"
    else:
        network[1].mount(other, out)
        rule = rf"rank 1 on node1 does not see what rank 0 writes to {out}: --out must be a folder that all"
    started = by_hand(network, train_words(run, out))
    assert [one.wait(START_SECONDS) for one in started] == [1, 1], started[0].text
    for one, name in zip(started, ("rank 0 on node0 failed: ", ""), strict=True):  # a rank is named once
        assert re.search(rf"^{name}{rule}", one.text, re.MULTILINE), one.text
    assert not (out / "metrics.jsonl").exists()


A_DAY_AHEAD = """
import time
print("a day ahead", flush=True)
now, nanoseconds = time.time, time.time_ns
time.time, time.time_ns = (lambda: now() + 86400), (lambda: nanoseconds() + 86400 * 10**9)
"""


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1])
def test_two_clocks_apart(ahead: int, nodes: Nodes, corpus: Path, tmp_path: Path, one_node: list[float]) -> None:
    """A run, and the run's end resumed from a checkpoint, have one node's losses with one rank's clock a day ahead."""
    network, out, clock, plain = nodes(2), tmp_path / "out", tmp_path / "clock", tmp_path / "plain"
    clock.mkdir()
    plain.mkdir()
    (clock / "sitecustomize.py").write_text(A_DAY_AHEAD)
    network[ahead].mount(clock, plain)
    run, path = write_run(tmp_path, corpus, 2), os.pathsep.join([str(plain), *filter(None, sys.path)])
    for words in ([], ["--resume", "--resume-from", "6"]):
        started = by_hand(network, train_words(run, out, *words), {"PYTHONPATH": path})
        assert [one.wait(START_SECONDS) for one in started] == [0, 0], "\n".join(one.text for one in started)
        assert ["a day ahead" in one.text for one in started] == [ahead == 0, ahead == 1]
    assert [line["loss"] for line in lines_of(out)] == pytest.approx(one_node, rel=1e-10, abs=0)
