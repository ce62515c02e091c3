"""Runs under a real Slurm on two nodes: srun, sbatch, requeue, placement. Skipped without Slurm's daemons."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.tools.submit import job
from tests.nodes.conftest import Nodes
from tests.nodes.launchers import train_words, write_run
from tests.nodes.network import Network
from tests.nodes.slurm import Slurm
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import lines_of

pytestmark = pytest.mark.long

SECONDS = PATIENCE_SECONDS
ENDED = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"]

Start = Callable[[Network], Slurm]


def test_srun(nodes: Nodes, slurm: Start, corpus: Path, one_node: list[float], tmp_path: Path) -> None:
    """Losses equal one rank's, without MASTER_ADDR. A cyclic distribution of ranks prints a warning."""
    cluster = slurm(nodes(2))
    out = tmp_path / "out"
    words = train_words(write_run(tmp_path, corpus, 4, batch={"global": 12, "micro": "auto"}), out)
    started = cluster.srun("-N2", "-n4", "--distribution=cyclic", sys.executable, *words)
    assert started.wait(SECONDS) == 0, started.text
    assert [line["loss"] for line in lines_of(out)] == pytest.approx(one_node, rel=1e-10, abs=0)
    assert (
        "warning: neighbouring ranks are on different hosts (0 on node0, 1 on node1, 2 on node0, ...)" in started.text
    )


ASK = """
import json, os
from dataclasses import asdict
from meshwright.ranks.environment import read_environment, rendezvous
place, point = read_environment(), rendezvous()
facts = [place.rank, place.world_size, place.local_rank, place.local_world_size, point.address]
print(json.dumps([*facts, os.environ["CUDA_VISIBLE_DEVICES"]]))
"""


def test_tasks_with_a_gpu_each(nodes: Nodes, slurm: Start, tmp_path: Path) -> None:
    """With --gpus-per-task, each rank has a place and sees a single GPU, as number 0 or by the GPU's own number."""
    cluster = slurm(nodes(2))
    started = cluster.srun("-N2", "-n4", "--gpus-per-task=1", sys.executable, "-c", ASK)
    assert started.wait(SECONDS) == 0, started.text
    answers = sorted(json.loads(line) for line in started.text.splitlines())
    assert [answer[:5] for answer in answers] == [[rank, 4, rank % 2, 2, "node0"] for rank in range(4)]
    assert [len(answer[5].split(",")) for answer in answers] == [1] * 4


def wait_for_steps(out: Path, steps: int) -> None:
    end = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() or len(lines_of(out)) < steps:
        assert time.monotonic() < end, "no step"
        time.sleep(0.1)


@pytest.mark.parametrize("stopped_by", ["signal", "requeue"])
def test_a_job_that_is_stopped_is_queued_again_and_goes_on(
    stopped_by: str, nodes: Nodes, slurm: Start, corpus: Path, tmp_path: Path, one_node: list[float]
) -> None:
    """The script is submit's. The job is stopped by a signal, as --signal sends, or by an operator's requeue; the
    second attempt continues."""
    cluster, out = slurm(nodes(2)), tmp_path / "out"
    steps = 600
    run = write_run(tmp_path, corpus, 2, steps=steps, timeout={"join": 60, "wait": 30})
    engine = job.engine_of("slurm", [f"python={sys.executable}"])
    submission = job.submission_of(engine, run, [], out, 2)
    script = tmp_path / "job.sbatch"
    script.write_text(engine.text(submission))
    number = cluster.sbatch(script, tmp_path)
    wait_for_steps(out, len(one_node))
    cluster.ask(*(["scancel", "--signal=USR1"] if stopped_by == "signal" else ["scontrol", "requeue"]), str(number))
    assert cluster.wait_for(number, ["PENDING", *ENDED], SECONDS) == "PENDING"
    saved = len(lines_of(out))
    assert saved < steps
    assert (out / "checkpoints" / f"step-{saved}").exists()
    cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
    assert cluster.wait_for(number, ENDED, SECONDS) == "COMPLETED"
    assert [line["step"] for line in lines_of(out)] == list(range(1, steps + 1))
    log = (tmp_path / f"run-{number}.log").read_text()
    assert f"going on from checkpoint step-{saved}" in log


def test_options_setup_lines_and_the_folder_of_logs(
    nodes: Nodes, slurm: Start, corpus: Path, tmp_path: Path, one_node: list[float]
) -> None:
    """sbatch refuses unknown options, and accepts the options that submit writes for `sbatch.KEY=VALUE`."""
    cluster, out, script = slurm(nodes(2)), tmp_path / "out", tmp_path / "job.sbatch"
    run = write_run(tmp_path, corpus, 2, timeout={"join": 60, "wait": 30})
    asked = ["comment=first", "gres=gpu:1", "exclusive=", "nice=7", "mem=0"]
    settings = [*(f"sbatch.{word}" for word in asked), f"logs={tmp_path}/logs", "setup=export FOUND=1", "grace=60"]

    def write(*more: str) -> Path:
        engine = job.engine_of("slurm", [*settings, f"python={sys.executable}", *more])
        script.unlink(missing_ok=True)
        job.write_script(engine.text(job.submission_of(engine, run, [], out, 2)), script)
        engine.prepare()
        return script

    assert "unrecognized option '--tme=5'" in cluster.ask("sbatch", "--test-only", str(write("sbatch.tme=5")))
    assert "to start at" in cluster.ask("sbatch", "--test-only", str(write()))
    number = cluster.sbatch(write("setup=echo found $FOUND"), tmp_path)
    shown = cluster.ask("scontrol", "show", "job", str(number))
    for field in (
        "Comment=first",
        "TresPerNode=gres:gpu:1",
        "OverSubscribe=NO",
        f"StdOut={tmp_path}/logs/run-{number}.log",
    ):
        assert field in shown, shown
    assert cluster.wait_for(number, ENDED, SECONDS) == "COMPLETED"
    assert "found 1" in (tmp_path / "logs" / f"run-{number}.log").read_text()
    assert [line["loss"] for line in lines_of(out)] == pytest.approx(one_node, rel=1e-10, abs=0)
