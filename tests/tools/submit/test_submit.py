"""submit's directives and errors, and the written scripts at work: the batch script and a node's shell."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.config.registry import OURS, _group, _points
from meshwright.ranks.errors import ConfigError, LaunchError, PluginError
from meshwright.tools.submit import job
from tests.installed import install
from tests.patience import PATIENCE_SECONDS
from tests.tools.submit.asked import VOLUME, containers, documents, stub, task, text_of, with_stubs, written


def test_a_batch_script_asks_for_the_layout(run: Path) -> None:
    text = text_of("slurm", run, ["partition=gpu", "grace=300", "cpus=8", "mpi=pmix"], device="cuda")
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "job-name=my-run", "nodes=2", "ntasks-per-node=2", "distribution=block", "cpus-per-task=8", "gpus-per-node=2",
        "partition=gpu", "time=01:00:00", "signal=USR1@300", "requeue", "open-mode=append", "output=%x-%j.log",
    ]  # fmt: skip
    assert (
        "srun --cpus-per-task=8 --kill-on-bad-exit=0 --wait=60 --mpi=pmix python -m meshwright train "
        "out/first.run.yaml device=cuda --out out/first --resume\n" in text
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


def directives_of(text: str) -> dict[str, str | None]:
    """Return the options that sbatch reads; sbatch's rule of quotes and # is shlex's within double quotes."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    read = [shlex.split(line, comments=True) for line in lines]
    assert all(len(words) == 1 for words in read), read
    return {key: value if equals else None for key, equals, value in (words[0].partition("=") for words in read)}


def test_any_option_of_sbatch(run: Path) -> None:
    """An option that another setting sets is not written twice, and options that a stop needs are refused."""
    words = ["qos=high", "mem=0", "exclusive=", "gres=gpu:h100:2", "constraint=ib&h100", "reservation=mine"]
    text = text_of("slurm", run, [*(f"sbatch.{word}" for word in words), "logs=logs/mine"], device="cuda")
    directives = directives_of(text)
    wanted = {"qos": "high", "mem": "0", "exclusive": None, "gres": "gpu:h100:2", "constraint": "ib&h100"}
    assert wanted.items() <= directives.items()
    assert directives["output"] == "logs/mine/%x-%j.log"
    assert "gpus-per-node" not in directives
    assert directives_of(text_of("slurm", run, ["sbatch.time=5"]))["time"] == "5"
    for word, rule in {
        "nodes=3": "is not yours: the layout and --nodes decides it",
        "signal=TERM@9": "is not yours: how a stopped run is queued again decides it",
        "Qos=high": "is no long option of sbatch",
        "qos=a\n#SBATCH --x": "has a line end",
        "cpus-per-task=2": "--set cpus, of sbatch and of srun, decides it",
        "array=0-3": "one script for one run decides it",
    }.items():
        with pytest.raises(ConfigError, match=rule):
            text_of("slurm", run, [f"sbatch.{word}"])


def test_the_folder_of_logs_is_made(run: Path, tmp_path: Path) -> None:
    """Slurm does not make the folder of logs, and a job without this folder fails without a message."""
    words = ["submit", str(run), "device=cpu", "--on", "slurm", "--to", str(tmp_path / "job.sbatch")]
    assert CliRunner().invoke(app, [*words, "--set", f"logs={tmp_path}/logs/mine"]).exit_code == 0
    assert (tmp_path / "logs" / "mine").is_dir()


def test_setup_lines_come_before_the_ranks(run: Path, tmp_path: Path) -> None:
    """An environment's script may read unset variables, so `set -u` follows the script."""
    (tmp_path / "env.sh").write_text("echo $not_set\nexport FOUND=yes\n")
    script = tmp_path / "job.sbatch"
    script.write_text(text_of("slurm", run, [f"setup=source {tmp_path}/env.sh", "setup=export MORE=1"]))
    stub(tmp_path, "srun", f'echo "$FOUND $MORE $*" > {tmp_path}/asked')
    assert subprocess.run(["bash", str(script)], env=with_stubs(tmp_path)).returncode == 0
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["yes", "1"]
    assert "python" in asked  # python of the environment, not of this process
    assert sys.executable not in asked


@pytest.mark.parametrize(
    "runtime, device, wanted",
    [
        ("pyxis", "cuda", ["--container-image=nvcr.io#nvidia/pytorch:1", "--container-mounts={mounts}", "python"]),
        (
            "apptainer",
            "cuda",
            ["apptainer", "exec", "--nv", "--bind", "{mounts}", "nvcr.io#nvidia/pytorch:1", "python"],
        ),
        ("apptainer", "cpu", ["apptainer", "exec", "--bind", "{mounts}", "nvcr.io#nvidia/pytorch:1", "python"]),
    ],
)
def test_ranks_in_a_container(run: Path, tmp_path: Path, runtime: str, device: str, wanted: list[str]) -> None:
    """The container mounts the run's folder, the run file, and the mounts in the settings."""
    out = Path("/shared/runs/first")
    settings = [f"runtime={runtime}", "container=nvcr.io#nvidia/pytorch:1", "mounts=/data", "mounts=/a:/b"]
    text = written("slurm", run, settings, [f"device={device}"], out=out)
    mounts = f"{out.parent}:{out.parent},/data:/data,/a:/b"
    (ranks,) = (shlex.split(line) for line in text.splitlines() if line.startswith("srun"))
    assert ranks[4 : 4 + len(wanted)] == [word.format(mounts=mounts) for word in wanted]
    with pytest.raises(ConfigError, match=r"^--out=out/first is no folder that can be mounted in a container"):
        text_of("slurm", run, settings, device=device)
    for idle, said in {"mounts=/data": r"mounts=\[/data\]", "runtime=apptainer": "runtime=apptainer"}.items():
        with pytest.raises(ConfigError, match=f"^{said} has no effect without a container$"):
            text_of("slurm", run, [idle])


RANK = """
trap 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE: $MASTER_ADDR:$MASTER_PORT" >> out; exit {code}' TERM
touch started-$RANK
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    "kind, variables, address, code",
    [
        ("jobset", {"JOB_COMPLETION_INDEX": "1"}, "my-run-node-0-0.my-run:29500", 75),
        ("trainjob", {"JOB_COMPLETION_INDEX": "1"}, "my-run-node-0-0.my-run:29500", 75),
        ("pytorchjob", {"RANK": "1", "MASTER_ADDR": "master", "MASTER_PORT": "23456"}, "master:23456", 138),
        ("task", {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}, "10.0.0.7:29500", 75),
    ],
)
def test_a_pod_starts_its_ranks_passes_a_signal_on_and_ends_with_their_code(
    run: Path, tmp_path: Path, kind: str, variables: dict[str, str], address: str, code: int
) -> None:
    shell = ["sh", "-c", task(run)["run"]] if kind == "task" else containers(documents(kind, run)[1])[-1]["command"]
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
    shell = containers(documents("jobset", run)[1])[0]["command"]
    assert subprocess.run(shell, env=with_stubs(tmp_path, JOB_COMPLETION_INDEX="0")).returncode == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--on", "slrm"], "--on=slrm is no engine that we write for; valid: slurm, kubernetes, ray, skypilot"),
        (["--on", "slurm", "--set", "tme=1"], "tme=1 is an unknown key (did you mean time?); valid: \n  name=  "),
        (["--on", "slurm", "--set", "time=soon"], "time=soon is no limit of Slurm's, such as 90 (minutes)"),
        (["--on", "slurm", "--set", "time"], "--set=time is no key=value word; valid: \n  name=  "),
        (["--on", "kubernetes", "--set", "volume=v"], "image is missing; valid: a text"),
        (["--on", "slurm", "--nodes", "3"], "--nodes=3 does not divide the layout's 4 ranks; valid: 1, 2, 4"),
        (["--on", "kubernetes", *(f"--set={word}" for word in VOLUME), "--out", "/tmp/x"],
         "--out=/tmp/x does not lie on the volume, which the nodes see at /runs; valid: /runs/my-run"),
        (["--on", "kubernetes", *(f"--set={word}" for word in VOLUME), "--set", "tolerations=a b"],
         "tolerations=a b is no taint as kubectl writes it"),
        (["--on", "kubernetes", *(f"--set={word}" for word in VOLUME), "--set", "rdma=ib"],
         "rdma=ib is no device plugin's resource, such as rdma/ib"),
        (["--on", "kubernetes", "--set", "env=A"], "--set=env=A names no env; valid: env.KEY=VALUE"),
        (["--on", "ray", "--out", "first"], "--out=first lies in the folder that Ray ships, which is another for each"),
        (["--on", "skypilot"], "setup is missing: a new machine has no meshwright; valid: image=IMAGE, or"),
        (["--on", "skypilot", "--set", "image=i", "--nodes", "2"],
         "volume is missing: 2 nodes write to one folder, /runs"),
        (["--on", "skypilot", "--set", "image=i", "--set", "gpu=H100"], "gpu=H100 has no effect on device=cpu"),
        (["--on", "skypilot", "--set", "image=i", "device=cuda"], "gpu is missing: device=cuda needs GPUs"),
    ],
)  # fmt: skip
def test_mistakes_are_said_with_what_would_work(run: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["submit", str(run), "device=cpu", *words])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)


@pytest.mark.parametrize("on", OURS["submit"])
def test_help_has_a_line_for_each_setting(on: str, run: Path) -> None:
    result = CliRunner().invoke(app, ["submit", str(run), "--on", on, "--set", "help"])
    assert result.exit_code == 0
    fields = job.engine_class(on).model_fields
    lines = result.stdout.splitlines()
    assert [line.split("=")[0].split(".")[0].strip() for line in lines] == list(fields)
    assert all(line[24:].strip().endswith(".") for line in lines), "a setting without a meaning"


def test_the_page_has_every_setting() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "clusters.md").read_text()
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    sections = {part.partition("\n")[0].lower(): part for part in prose.split("\n## ")}
    for on in OURS["submit"]:
        named = {word.partition("=")[0].split(".")[0] for word in re.findall(r"`([^`\n]+)`", sections[on])}
        assert job.engine_class(on).model_fields.keys() - named == set(), on


def test_commands_are_printed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", str(run), "device=cpu", "--nodes", "2"]
    image = [word for setting in VOLUME for word in ("--set", setting)]
    for asked, printed in {
        ("--on", "ray", "--out", "/shared/first"): "ray job submit --no-wait --working-dir . --runtime-env-json"
        ' \'{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300", "PYTHONSAFEPATH": "1"}}\' -- python my-run_ray.py',
        ("--on", "kubernetes", *image): "kubectl apply --filename my-run.kubernetes.yaml",
        ("--on", "skypilot", *image, "--set", "secrets=HF_TOKEN"):
            "sky launch --yes --async --cluster my-run --secret HF_TOKEN my-run_sky.yaml",
    }.items():  # fmt: skip
        result = CliRunner().invoke(app, [*words, *asked])
        assert f"submit it with: {printed}\n" in result.stdout, result.exception
    assert "kubectl replace --force --cascade=foreground --timeout=360s" in Path("my-run.kubernetes.yaml").read_text()


PLUGIN = '''
from meshwright.tools.submit.job import Engine

class Batch(Engine):
    """One of another package."""
    suffix = ".batch"
    shares_folders = True
    queue: str = "small"
    """The queue."""

    def text(self, submission):
        return f"{self.queue}: {submission.nodes} nodes"

    def command(self, file, name):
        return ["batch", str(file)]
'''


def test_an_engine_of_another_package(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "batch.py").write_text(PLUGIN)
    install(tmp_path, {"meshwright.submit": {"batch": "toys.batch:Batch"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    _points.cache_clear()  # a process reads entry points once, and this process may have done so
    _group.cache_clear()
    assert text_of("batch", run, ["queue=large"]) == "large: 2 nodes"
    (tmp_path / "meshwright_toys-1.0.dist-info" / "entry_points.txt").write_text(
        "[meshwright.submit]\nbatch = nowhere:B\n"
    )
    importlib.invalidate_caches()
    _points.cache_clear()
    _group.cache_clear()
    with pytest.raises(PluginError, match=r"entry point batch of meshwright\.submit, nowhere:B, cannot be loaded"):
        text_of("slurm", run)
    monkeypatch.undo()
    _points.cache_clear()
    _group.cache_clear()


def test_a_device_is_said_and_a_file_is_not_replaced(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    words = ["submit", str(run), "--on", "slurm", "--to", str(file)]
    result = CliRunner().invoke(app, words)
    assert str(result.exception).endswith("asked for its devices before; valid: device=cuda, device=cpu")
    assert not file.exists()
    assert CliRunner().invoke(app, [*words, "device=cpu"]).exit_code == 0
    result = CliRunner().invoke(app, [*words, "device=cpu"])
    assert str(result.exception) == f"--to={file} is there already; valid: {tmp_path}/job-2.sbatch"


def test_go_hands_the_file_to_the_engine(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.sbatch"
    stub(tmp_path, "sbatch", 'echo "Submitted $1"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["submit", str(run), "device=cpu", "--on", "slurm", "--to", str(file), "--go", "--json"]
    result = CliRunner().invoke(app, words)
    assert json.loads(result.stdout) == {
        "written": str(file), "command": ["sbatch", str(file)], "answer": f"Submitted {file}",
        "notes": [],
    }  # fmt: skip


def test_an_engine_that_is_not_here_or_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"^no-such-engine is not on this machine: submit from one that has it"):
        job.submit(["no-such-engine", "x"])
    stub(tmp_path, "sbatch", "echo no such partition >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match=r"^`sbatch x` ended with code 3: no such partition$"):
        job.submit(["sbatch", "x"])


@pytest.mark.parametrize("on", OURS["submit"])
@pytest.mark.parametrize(
    "asked, absent",
    [
        ({"data": {"source": "/nowhere/corpus"}}, "data.source=/nowhere/corpus"),
        ({"data": {"tokenizer": "/nowhere/tokenizer.json"}}, "data.tokenizer=/nowhere/tokenizer.json"),
        (
            {"data": {"source": "/nowhere/corpus", "tokenizer": "/nowhere/tokenizer.json"}},
            "data.source=/nowhere/corpus, data.tokenizer=/nowhere/tokenizer.json",
        ),
        ({"model": {"from": "/nowhere/model"}}, "model.from=/nowhere/model; nor whether the layout fits the model"),
        (
            {"model": {"from": "/nowhere/model", "dropout": 0.1}},
            "model.from=/nowhere/model; nor whether the layout fits the model",
        ),
    ],
)
def test_folders_may_be_the_cluster_s(on: str, asked: dict[str, Any], absent: str, run: Path) -> None:
    """On a laptop without corpus, tokenizer and weights, the file is written, with a note of the unchecked paths."""
    tree = yaml.safe_load(run.read_text())
    tree["data"] |= asked.get("data", {})
    tree["model"] = asked.get("model", tree["model"])
    run.write_text(yaml.safe_dump(tree))
    engine = job.engine_of(on, VOLUME if on in ("kubernetes", "skypilot") else ())
    checked = job.submission_of(engine, run, ["device=cpu"], Path("/runs/first"), 2)
    assert checked.notes == (f"not checked, since no such path is on this machine: {absent}",)
    assert "/nowhere" in engine.text(checked) or on in ("ray", "skypilot")  # these two send the file


@pytest.mark.parametrize(
    "words, said",
    [
        (["data.source=/nowhere", "optimizer.lr=-1"], "optimizer.lr=-1"),
        (["data.source=/nowhere", "steps=many"], "steps=many"),
        (["model={from: /nowhere/m}", "batch.global=0"], "batch.global=0"),
        (["data.tokenizer=[]"], "data.tokenizer"),
    ],
)
def test_mistakes_are_refused_next_to_absent_folders(words: list[str], said: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        written("slurm", run, words=["device=cpu", *words])
    (run.parent / "here").mkdir()
    with pytest.raises(ConfigError, match=r"model\.from=.*here cannot be read"):
        written("slurm", run, words=["device=cpu", f"model={{from: {run.parent}/here}}"])


def test_the_default_file_is_never_the_run_s(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any name of a run file, and any number of submissions, the run file stays."""
    monkeypatch.chdir(tmp_path)
    image = [word for setting in VOLUME for word in ("--set", setting)]
    more = {"kubernetes": image, "skypilot": image, "ray": ["--out", "/shared/x"], "slurm": []}
    for name in ("run.yaml", "run.kubernetes.yaml", "a.sbatch", "a_sky.yaml", "a_ray.py", "run.yml"):
        Path(name).write_text(run.read_text())
        for on in OURS["submit"]:
            for _ in range(2):
                before = {path: path.read_text() for path in tmp_path.iterdir()}
                result = CliRunner().invoke(app, ["submit", name, "device=cpu", "--on", on, *more[on]])
                assert result.exit_code == 0, result.exception
                assert {path: path.read_text() for path in before} == before
    assert {"run.kubernetes-2.yaml", "run-2.sbatch", "run_ray-2.py"} <= {path.name for path in tmp_path.iterdir()}
