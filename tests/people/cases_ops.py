"""An operator's day: scripts for clusters, a cluster of one's own, metrics, and files that stay."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import yaml

from tests.people.case import Case, Outcome, last_line, meshwright
from tests.tools.submit.asked import containers, pods, stub, with_stubs

RUN = "model: gpt2-mini\ndata: {source: stdlib}\nbatch: {global: 8}\nlayout: {data: {size: 4}}\n"
IMAGE = ("--set", "image=registry/meshwright:cuda", "--set", "volume=runs")


def submitted(folder: Path, on: str, *words: str, run: str = RUN, to: str = "script") -> tuple[int, str, str]:
    """Return submit's exit code and output, and the script."""
    (folder / "run.yaml").write_text(run)
    out = ("--out", "/shared/first") if on in ("slurm", "ray") else ()
    code, said = meshwright(folder, "submit", "run.yaml", "--on", on, *out, "--to", to, *words)
    script = folder / to
    return code, said, script.read_text() if script.exists() else ""


def cores(folder: Path) -> Outcome:
    _, _, script = submitted(folder, "slurm", "device=cuda", "--nodes", "2", "--set", "cpus=12")
    line = next((line for line in script.splitlines() if line.startswith("srun")), "")
    return Outcome(line, "--cpus-per-task=12 " in line and "#SBATCH --cpus-per-task=12\n" in script)


def default_cores(folder: Path) -> Outcome:
    _, _, script = submitted(folder, "slurm", "device=cuda")
    return Outcome(last_line(script), "srun --cpus-per-task=6 " in script)


def hostile(setting: str) -> Callable[[Path], Outcome]:
    def run(folder: Path) -> Outcome:
        code, said, script = submitted(folder, "slurm", "device=cpu", "--set", setting)
        if code:
            one_line = len(said.strip().splitlines()) == 1
            return Outcome(last_line(said), one_line and not script and "Traceback" not in said)
        stub(folder, "srun", "exit 0")
        stub(folder, "mkdir", "exit 0")
        local = script.replace("/shared/first", f"{folder}/first")
        subprocess.run(["bash", "-c", local], cwd=folder, env=with_stubs(folder), capture_output=True)
        directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
        split = [line for line in directives if len(shlex.split(line, comments=True)) > 2]
        return Outcome(str(split or "quoted"), not split and not list(folder.rglob("PWNED")))

    return run


def repeated(folder: Path) -> Outcome:
    """The script runs twice on this machine, with a stub of srun that starts one rank."""
    run = "model: {layers: 1, hidden: 16, heads: 2, positions: 16, vocabulary: 257}\n"
    run += "data: {source: corpus.txt, sequence: 16, tokenizer: bytes}\nbatch: {global: 4}\nsteps: 3\n"
    run += "checkpoint: {every: 1}\nmetrics: {sinks: []}\n"
    (folder / "corpus.txt").write_text("".join(f"a line of text, {number}\n" for number in range(400)))
    (folder / "run.yaml").write_text(run)
    python = ("--set", f"python={sys.executable}", "device=cpu")
    meshwright(folder, "submit", "run.yaml", "--on", "slurm", "--out", f"{folder}/first", "--to", "script", *python)
    (folder / "run.yaml").rename(folder / "gone.yaml")
    ranks = "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=1"
    stub(folder, "srun", f'while case "$1" in --*) true;; *) false;; esac; do shift; done; {ranks} "$@"')
    repository = str(Path(__file__).resolve().parents[2])
    environment = with_stubs(folder, PYTHONPATH=repository)
    ended = [subprocess.run(["bash", "script"], cwd=folder, env=environment, capture_output=True) for _ in range(2)]
    said = (ended[1].stdout + ended[1].stderr).decode()
    steps = [json.loads(line)["step"] for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    return Outcome(f"{[each.returncode for each in ended]}, steps {steps}", "step-3" in said and steps == [1, 2, 3])


def no_paths(folder: Path) -> Outcome:
    _, _, script = submitted(folder, "slurm", "device=cpu")
    found = [path for path in (str(folder), sys.executable, str(Path.home())) if path in script]
    return Outcome(str(found or "none"), not found and "python -m meshwright train /shared/first.run.yaml" in script)


def stays(folder: Path) -> Outcome:
    (folder / "run.yaml").write_text(RUN)
    code, said = meshwright(folder, "submit", "run.yaml", "device=cpu", "--on", "kubernetes", *IMAGE)
    return Outcome(
        said.splitlines()[0], code == 0 and (folder / "run.yaml").read_text() == RUN and "remove" not in said
    )


def volume(folder: Path) -> Outcome:
    _, _, script = submitted(folder, "kubernetes", "device=cuda", "--set", "rdma=rdma/ib", *IMAGE)
    (pod,) = pods(list(yaml.safe_load_all(script)))
    (container,) = containers(list(yaml.safe_load_all(script)))
    asked = pod.get("securityContext", {})
    locked = "meshwright-lock" in container["command"][2] and "ulimit -l" in container["command"][2]
    return Outcome(str(asked), asked.get("fsGroup") == 1000 and locked and "readinessProbe" in container)


def elsewhere(on: str) -> Callable[[Path], Outcome]:
    def run(folder: Path) -> Outcome:
        text = "model: {from: /cluster/model}\ndata: {source: /cluster/corpus, tokenizer: /cluster/tokenizer.json}\n"
        image = IMAGE if on in ("kubernetes", "skypilot") else ()
        code, said, _ = submitted(folder, on, "device=cpu", *image, run=text + "batch: {global: 8}\n", to="script.py")
        return Outcome(last_line(said), code == 0 and "not checked" in said and "/cluster/model" in said)

    return run


SHEET = "device: {kind: cuda, memory: 48e9, bandwidth: 864e9, peak: {bf16: 362e12}, host_link: 24e9}\n"
SHEET += "devices_per_node: 4\nlinks: {torch: {levels: [{joins: 4, bandwidth: 20e9}]}}\n"
ONE_LAYOUT = ("layout.data.size=4", "layout.data.sync=zero1", "batch.micro=1", "memory.recompute=none")


def planned(folder: Path, cluster: str) -> tuple[int, str]:
    words = ("--model", "gpt2-small", "--sequence", "1024", "--batch", "16", "--cluster", cluster, "--devices", "4")
    return meshwright(folder, "plan", *words, *ONE_LAYOUT, "layout.tensor.kind=none", "layout.pipeline.size=1")


def sheet(folder: Path) -> Outcome:
    (folder / "mine.yaml").write_text(SHEET)
    code, said = planned(folder, "mine.yaml")
    return Outcome(last_line(said), code == 0 and "dgx-a100's device" in " ".join(said.split()))


def numbered(folder: Path) -> Outcome:
    (folder / "plan.yaml").write_text("mine")
    code, said = planned(folder, "l40s")
    told = said.splitlines()[0] == "plan.yaml is there already: this command writes plan-2.yaml"
    kept = (folder / "plan.yaml").read_text() == "mine" and (folder / "plan-2.yaml").exists()
    return Outcome(said.splitlines()[0], code == 0 and told and kept)


def model_named(folder: Path) -> Outcome:
    words = ("llama-3.1-8b", "--sequence", "8192", "--batch", "512", "--cluster", "dgx-h100", "--devices", "64")
    code, said = meshwright(folder, "plan", *words)
    return Outcome(last_line(said), code == 2 and "--model llama-3.1-8b --sequence 8192 --batch 512" in said)


def fields(folder: Path) -> Outcome:
    code, said = meshwright(folder, "config", "cluster")
    return Outcome(f"{len(said.splitlines())} lines", code == 0 and "operations a second" in said.lower())


def page(folder: Path) -> Outcome:
    if find_spec("prometheus_client") is None:
        code, said = meshwright(folder, "train", "quickstart", "metrics.sinks=[prometheus]")
        return Outcome(last_line(said), code == 2 and "meshwright[prometheus]" in said)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["train", "quickstart", "steps=100000", "metrics.sinks=[prometheus]", f"metrics.port={port}", "device=cpu"]
    command = [sys.executable, "-c", "from meshwright.cli import main; main()", *words]
    repository = str(Path(__file__).resolve().parents[2])
    environment = with_stubs(folder, PYTHONPATH=":".join([repository, *filter(None, sys.path)]))
    run = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        end, text = time.monotonic() + 300, ""
        while "meshwright_loss{" not in text and time.monotonic() < end and run.poll() is None:
            time.sleep(0.5)
            try:
                text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            except OSError:
                continue
    finally:
        run.terminate()
        run.wait(120)
    loss = next((line for line in text.splitlines() if line.startswith("meshwright_loss{")), "no loss")
    return Outcome(loss, "meshwright_loss{" in text)


HOSTILE = (
    "partition=p\ntouch PWNED",
    "account=a\ntouch PWNED",
    "logs=my logs",
    "logs=a\ntouch PWNED",
    "mpi=pmix; touch PWNED",
    "sbatch.nodelist=n1 n2",
    "sbatch.comment=x; touch PWNED",
    "sbatch.qos=a\ntouch PWNED",
    "python=$(touch PWNED)",
    "python=a b",
    "sbatch.comment=#",
    "partition=$(touch PWNED)",
)

CASES = [
    Case("srun has its cores", "srun inherits no --cpus-per-task since Slurm 22.05", "12 on both", cores),
    Case("cores of a rank with a GPU", "the default left a GPU's rank one core", "6", default_cores),
    *(
        Case(
            f"slurm {setting!r}", "a portal's form fills a setting", "quoted or refused, not executed", hostile(setting)
        )
        for setting in HOSTILE
    ),
    Case(
        "sbatch twice",
        "the same script is submitted again",
        "goes on, or says that it has finished",
        repeated,
        slow=True,
    ),
    Case("no path of a laptop", "a script has the path of its writer's machine", "none", no_paths),
    Case("submit keeps the run file", "--to=run.yaml advised to remove it", "run.kubernetes.yaml", stays),
    Case(
        "a pod and its image", "a fresh volume, InfiniBand and a user of 1000", "fsGroup, locked memory, probes", volume
    ),
    *(
        Case(
            f"folders of the cluster, {on}",
            "submit wanted the cluster's files",
            "written, with a line",
            elsewhere(on),
            slow=True,
        )
        for on in ("slurm", "kubernetes", "ray", "skypilot")
    ),
    Case(
        "a data sheet is a cluster", "bandwidth=864e9 was refused", "planned, with the lender's error", sheet, slow=True
    ),
    Case("plan numbers its file", "plan.yaml is there", "plan-2.yaml, said first", numbered, slow=True),
    Case("plan a model by its name", "a model in place of a run file", "--model llama-3.1-8b", model_named, slow=True),
    Case("config cluster", "no command described a cluster file", "every field", fields),
    Case("a page for prometheus", "no metrics endpoint", "the loss, while the run is made", page, slow=True),
]
