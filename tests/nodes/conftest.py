"""Networks of nodes, and the losses of one rank to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from meshwright.config import parse_config
from tests.nodes.launchers import write_run
from tests.nodes.network import Network, why_not
from tests.nodes.slurm import Slurm
from tests.nodes.slurm import why_not as why_no_slurm
from tests.training.runs import lines_of, make_corpus, run

Nodes = Callable[..., Network]


@pytest.fixture(scope="session")
def can_make_nodes() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def nodes(tmp_path: Path, can_make_nodes: None) -> Iterator[Nodes]:
    """Yield a function that makes a network of n nodes, closed at the test's end."""
    with ExitStack() as stack:

        def make(num_nodes: int, **options: str) -> Network:
            return stack.enter_context(Network(num_nodes, tmp_path / "nodes", **options))

        yield make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def losses_of_one(folder: Path, corpus: Path, **changes: object) -> list[float]:
    """Return the losses of one rank on this machine."""
    tree = yaml.safe_load(write_run(folder, corpus, 1, **changes).read_text())
    return [line["loss"] for line in lines_of(run(parse_config(tree), folder / "out"))]


@pytest.fixture(scope="session")
def one_node(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    return losses_of_one(tmp_path_factory.mktemp("one"), corpus)


@pytest.fixture
def slurm() -> Iterator[Callable[[Network], Slurm]]:
    """Yield a function that starts Slurm's daemons on the network's nodes; the daemons end with the nodes."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="mw", dir="/tmp") as short:

        def start(network: Network) -> Slurm:
            cluster = Slurm(network, Path(short))
            cluster.start()
            return cluster

        yield start
