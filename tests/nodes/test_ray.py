"""Ranks placed on a real Ray cluster of the tests' nodes: Ray opens ports on the nodes' networks alone."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.nodes.conftest import Nodes
from tests.nodes.launchers import write_run
from tests.nodes.network import Network, Running
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import lines_of

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray here: pip install 'meshwright[ray]'")

SECONDS = PATIENCE_SECONDS


@pytest.fixture
def variables(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield Ray's settings. Ray's sockets need a folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="mw", dir="/tmp") as short:
        yield {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "of-no-cluster-but-the-tests-0000",
            "RAY_TMPDIR": short,
            "HOME": str(tmp_path),
        }


def write_script(folder: Path, corpus: Path, nodes: int) -> Path:
    """Write the script of submit, called in the folder, for a run of two ranks that does not end by itself."""
    from meshwright.tools.submit import job

    run = write_run(folder, corpus, 2, steps=100_000)
    engine = job.engine_of("ray", ["restarts=0"])
    submission = job.submission_of(engine, run, [], folder / "out", nodes)
    file = folder / "run_ray.py"
    job.write_script(engine.text(submission), file)
    return file


def stop_after(steps: int, started: Running, out: Path) -> list[float]:
    """Stop the script after `steps` steps. Return the losses of all steps that were made and saved."""
    end = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() or len(lines_of(out)) < steps:
        assert started.process.poll() is None, started.text
        assert time.monotonic() < end, started.text
        time.sleep(0.1)
    (script,) = (process for process in started.processes("run_ray.py") if process.name().startswith("python"))
    script.send_signal(signal.SIGTERM)
    assert started.wait(SECONDS) == 75, started.text
    losses = [line["loss"] for line in lines_of(out)]
    assert (out / "checkpoints" / f"step-{len(losses)}").exists()
    return losses


def test_a_local_cluster(
    nodes: Nodes,
    corpus: Path,
    tmp_path: Path,
    one_node: list[float],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses equal one rank's. SIGTERM saves, and ends the script with 75."""
    monkeypatch.chdir(tmp_path)
    inside = ("env", "--chdir", str(tmp_path))
    script = write_script(tmp_path, corpus, nodes=1)
    started = nodes(1)[0].start(*inside, sys.executable, str(script), variables={**variables, "RAY_ADDRESS": "local"})
    losses = stop_after(len(one_node), started, tmp_path / "out")
    assert losses[: len(one_node)] == pytest.approx(one_node, rel=1e-10, abs=0)


def start_cluster(network: Network, variables: dict[str, str]) -> str:
    """Start Ray on every node with one core each, and return the cluster's address."""
    address = f"{network[0].address}:6379"
    for node in network.nodes:
        way = ["--head", "--port=6379", "--include-dashboard=false"] if node is network[0] else [f"--address={address}"]
        words = [
            "start",
            *way,
            f"--node-ip-address={node.address}",
            "--num-cpus=1",
            f"--temp-dir={variables['RAY_TMPDIR']}/{node.name}",
        ]
        begun = node.start(sys.executable, "-m", "ray.scripts.scripts", *words, variables=variables)
        assert begun.wait(SECONDS) == 0, begun.text
    return address


@pytest.mark.long
def test_two_nodes(
    nodes: Nodes,
    corpus: Path,
    tmp_path: Path,
    one_node: list[float],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second node's ranks are on another host than the script, which alone reads the run file."""
    network = nodes(2)
    address = start_cluster(network, variables)
    monkeypatch.chdir(tmp_path)
    inside = ("env", "--chdir", str(tmp_path))
    script = write_script(tmp_path, corpus, nodes=2)
    started = network[0].start(*inside, sys.executable, str(script), variables={**variables, "RAY_ADDRESS": address})
    losses = stop_after(len(one_node), started, tmp_path / "out")
    assert losses[: len(one_node)] == pytest.approx(one_node, rel=1e-10, abs=0)
