"""What is written for Slurm and Kubernetes: it holds to their schemas, and its shells do what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import ConfigError, LaunchError
from meshwright.tools.submit import job
from tests.patience import PATIENCE_SECONDS

SCHEMAS = Path(__file__).parent / "schemas"
VOLUME = ("image=registry/meshwright:1", "volume=runs")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "My run.yaml"
    path.write_text("model: gpt2-mini\ndata: {source: stdlib}\nbatch: {global: 8}\nlayout: {data: {size: 4}}\n")
    return path


def text_of(engine: str, run: Path, settings: Sequence[str] = (), device: str = "cpu", nodes: int = 2) -> str:
    asked, name = job.engine_of(engine, settings)
    submission = job.submission_of(
        run, [f"device={device}"], asked.folder / "first", nodes, name, shares_folders=asked.shares_folders
    )
    return asked.text(submission)


def stub(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def with_stubs(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more}


def test_a_batch_script_asks_for_the_layout(run: Path) -> None:
    text = text_of("slurm", run, ["partition=gpu", "grace=300", "cpus=8", "mpi=pmix"], device="cuda")
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "job-name=my-run", "nodes=2", "ntasks-per-node=2", "distribution=block", "cpus-per-task=8", "gpus-per-node=2",
        "partition=gpu", "time=01:00:00", "signal=USR1@300", "requeue", "open-mode=append", "output=%x-%j.log",
    ]  # fmt: skip
    assert (
        f"srun --kill-on-bad-exit=0 --wait=60 --mpi=pmix {job.own_python()} -m meshwright train '{run}' device=cuda"
        in text
    )
    assert "gpus" not in text_of("slurm", run)


@pytest.mark.parametrize("code, requeued", [(75, True), (0, False), (1, False)])
def test_a_batch_script_queues_a_stopped_run_again(run: Path, tmp_path: Path, code: int, requeued: bool) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(text_of("slurm", run))
    stub(tmp_path, "srun", f"exit {code}")
    stub(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/asked')
    done = subprocess.run(["bash", str(script)], env=with_stubs(tmp_path, SLURM_JOB_ID="7"))
    assert done.returncode == code
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


def schema(name: str) -> Draft202012Validator:
    trees = {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    registry: Registry[Any] = Registry().with_resources(
        (key, Resource.from_contents(tree)) for key, tree in trees.items()
    )
    return Draft202012Validator(trees[f"{name}.json"], registry=registry)


def documents(kind: str, run: Path, *settings: str, **asked: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of("kubernetes", run, [*VOLUME, f"kind={kind}", *settings], **asked)))


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
@pytest.mark.parametrize("asked", [{}, {"device": "cuda"}, {"nodes": 1}, {"nodes": 4}], ids=str)
def test_manifests_hold_to_the_schemas(kind: str, run: Path, asked: dict[str, Any]) -> None:
    files, written = documents(kind, run, "namespace=team", **asked)
    schema(kind).validate(written)
    assert files["data"]["run.yaml"] == run.read_text()
    assert files["metadata"] == {"name": "my-run-run", "namespace": "team"}


def test_the_schemas_refuse_what_is_misspelt(run: Path) -> None:
    _, written = documents("jobset", run)
    written["spec"]["replicatedJobs"][0]["template"]["spec"]["backOffLimit"] = 0
    assert not schema("jobset").is_valid(written)


def pods(tree: Any) -> list[dict[str, Any]]:
    """All containers in a document."""
    if isinstance(tree, dict):
        return [*tree.get("containers", []), *(pod for value in tree.values() for pod in pods(value))]
    return [pod for value in tree for pod in pods(value)] if isinstance(tree, list) else []


def test_a_pod_asks_for_its_ranks_devices(run: Path) -> None:
    (pod,) = pods(documents("jobset", run, "cpus=4", device="cuda")[1])
    assert pod["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": 2}
    master, worker = pods(documents("pytorchjob", run, device="cuda")[1])
    assert master == worker
    assert len(pods(documents("pytorchjob", run, nodes=1)[1])) == 1


RANK = """
trap 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE: $MASTER_ADDR:$MASTER_PORT" >> out; exit {code}' TERM
touch started-$RANK
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    "kind, variables, address, code",
    [
        ("jobset", {"JOB_COMPLETION_INDEX": "1"}, "my-run-node-0-0.my-run:29500", 75),
        ("pytorchjob", {"RANK": "1", "MASTER_ADDR": "master", "MASTER_PORT": "23456"}, "master:23456", 138),
    ],
)
def test_a_pod_starts_its_ranks_passes_a_signal_on_and_ends_with_their_code(
    run: Path, tmp_path: Path, kind: str, variables: dict[str, str], address: str, code: int
) -> None:
    shell = pods(documents(kind, run)[1])[-1]["command"]
    stub(tmp_path, "python", RANK.format(code=75))
    pod = subprocess.Popen(shell, env=with_stubs(tmp_path, **variables), cwd=tmp_path)
    end = time.monotonic() + PATIENCE_SECONDS
    while len(list(tmp_path.glob("started-*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(PATIENCE_SECONDS) == code
    ranks = sorted((tmp_path / "out").read_text().splitlines())
    assert ranks == [f"{2 + local} of 4, {local} of 2: {address}" for local in (0, 1)]


def test_a_pod_ends_with_the_code_of_the_rank_that_failed(run: Path, tmp_path: Path) -> None:
    stub(tmp_path, "python", 'exit "$LOCAL_RANK"')
    shell = pods(documents("jobset", run)[1])[0]["command"]
    assert subprocess.run(shell, env=with_stubs(tmp_path, JOB_COMPLETION_INDEX="0")).returncode == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--on", "slrm"], "--on=slrm is no engine that we write for; valid: slurm, kubernetes, ray"),
        (["--on", "slurm", "--set", "tme=1"], "tme=1 is an unknown key (did you mean time?); valid: name, cpus, time"),
        (["--on", "slurm", "--set", "time=soon"], "time=soon is no limit of Slurm's, such as 90 (minutes)"),
        (["--on", "slurm", "--set", "time"], "--set=time is no key=value word; valid: account, cpus, grace"),
        (["--on", "kubernetes", "--set", "volume=v"], "image=nothing is missing; valid: a text"),
        (["--on", "slurm", "--nodes", "3"], "--nodes=3 does not divide the layout's 4 ranks; valid: 1, 2, 4"),
        (["--on", "kubernetes", *(f"--set={word}" for word in VOLUME), "--out", "/tmp/x"],
         "--out=/tmp/x does not lie on the volume, which the pods see at /runs; valid: /runs/my-run"),
    ],
)  # fmt: skip
def test_mistakes_are_said_with_what_would_work(run: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["submit", str(run), "device=cpu", *words])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)


def test_a_device_is_said_and_a_file_is_not_replaced(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    words = ["submit", str(run), "--on", "slurm", "--to", str(file)]
    result = CliRunner().invoke(app, words)
    assert str(result.exception).endswith("asked for its devices before; valid: device=cuda, device=cpu")
    assert not file.exists()
    assert CliRunner().invoke(app, [*words, "device=cpu"]).exit_code == 0
    result = CliRunner().invoke(app, [*words, "device=cpu"])
    assert str(result.exception) == f"--to={file} is there already; valid: another file, or remove it"


def test_go_hands_the_file_to_the_engine(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.sbatch"
    stub(tmp_path, "sbatch", 'echo "Submitted $1"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["submit", str(run), "device=cpu", "--on", "slurm", "--to", str(file), "--go", "--json"]
    result = CliRunner().invoke(app, words)
    assert json.loads(result.stdout) == {
        "written": str(file), "command": ["sbatch", str(file)], "answer": f"Submitted {file}",
    }  # fmt: skip


def test_an_engine_that_is_not_here_or_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"^no-such-engine is not on this machine: submit from one that has it"):
        job.submit(["no-such-engine", "x"])
    stub(tmp_path, "sbatch", "echo no such partition >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match=r"^`sbatch x` ended with code 3: no such partition$"):
        job.submit(["sbatch", "x"])


def test_data_need_not_be_here_for_a_cluster_of_other_folders(run: Path) -> None:
    run.write_text(run.read_text().replace("stdlib", "/nowhere/corpus"))
    assert "/nowhere/corpus" in text_of("kubernetes", run, VOLUME)
    with pytest.raises(ConfigError, match=r"data\.source=/nowhere/corpus is no such file or folder"):
        text_of("slurm", run)
