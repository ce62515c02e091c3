"""Statements that are checked and not believed; a process that dies is named; a launcher's variables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.people.case import PATIENCE_SECONDS, Case, Outcome, last_line, meshwright

RUN = """\
model: {layers: 2, hidden: 32, heads: 4, positions: 32, vocabulary: 257}
data: {source: unicode, tokenizer: bytes, sequence: 32}
batch: {global: 8}
checkpoint: {every: 2}
device: cpu
steps: 4
"""


def trained(folder: Path, *words: str) -> None:
    (folder / "r.yaml").write_text(RUN)
    code, text = meshwright(folder, "train", "r.yaml", "--out", "o", "layout.transport=threads", *words)
    assert code == 0, text


def flip(folder: Path, place: int) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[place] ^= 4
    shard.write_bytes(content)


def zero(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:8000] + bytes(len(content) - 8000))


def diffed(
    change: Callable[[Path], object], code: int, *texts: str, options: tuple[str, ...] = ()
) -> Callable[[Path], Outcome]:
    """Return a case that copies a run, changes the copy, and compares both."""

    def run(folder: Path) -> Outcome:
        trained(folder, "bits=layout-free")
        shutil.copytree(folder / "o", folder / "o2")
        change(folder / "o2" / "checkpoints")
        got, text = meshwright(folder, "diff", "o", "o2", *options)
        flat = " ".join(text.split())
        return Outcome(f"code {got}: {flat[-400:]}", got == code and all(each in flat for each in texts))

    return run


def replayed(*words: str, code: int, texts: tuple[str, ...], damaged: bool = True) -> Callable[[Path], Outcome]:
    """Return a case that replays step 4 of a run; the checkpoint before step 4 may be damaged."""

    def run(folder: Path) -> Outcome:
        trained(folder)
        if damaged:
            flip(folder / "o" / "checkpoints" / "step-2", -100)
        got, text = meshwright(folder, "replay", "o", "--step", "4", *words)
        flat = " ".join(text.split())
        fine = got == code and all(each in flat for each in texts) and "/tmp/meshwright-" not in flat
        return Outcome(f"code {got}: {flat[-400:]}", fine)

    return run


def other_data(folder: Path) -> Outcome:
    (folder / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(400)))
    trained(folder, "data.source=text.txt")
    with (folder / "text.txt").open("a") as stream:
        stream.write("one line more\n")
    refused, text = meshwright(folder, "replay", "o", "--step", "4")
    accepted, said = meshwright(folder, "replay", "o", "--step", "4", "--accept-changes", "--json")
    verdict = json.loads(last_line(said)) if said.lstrip().startswith("{") or "{" in said else {}
    fine = refused == 2 and "o/checkpoints/step-2" in text and "/meshwright-" not in text and accepted in (0, 1)
    return Outcome(
        f"{refused}: {last_line(text)}; {accepted}: {last_line(said)}",
        fine and "Traceback" not in said and bool(verdict),
    )


def with_variables(code: int, text: str, **variables: str) -> Callable[[Path], Outcome]:
    """Return a case that starts one process with a launcher's variables."""

    def run(folder: Path) -> Outcome:
        (folder / "r.yaml").write_text(RUN)
        words = ["train", "r.yaml", "--out", "o", "steps=1", "timeout.join=3"]
        got, said = meshwright(folder, *words, env=variables)
        return Outcome(f"code {got}: {last_line(said)}", got == code and text in " ".join(said.split()))

    return run


def two_nodes(folder: Path) -> Outcome:
    """Two processes with RANK and WORLD_SIZE, and no LOCAL_RANK, as on two hosts."""
    (folder / "r.yaml").write_text(RUN)
    repository = str(Path(__file__).resolve().parents[2])
    words = [sys.executable, "-m", "meshwright", "train", "r.yaml", "layout.data=2", "--out", "o"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "PYTHONPATH": repository}
    ranks = [
        subprocess.Popen(
            words, cwd=folder, env={**os.environ, **shared, "RANK": str(rank)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[0].decode() for rank in ranks]
    return Outcome(f"{[rank.returncode for rank in ranks]}: {last_line(said[0])}", not any(r.returncode for r in ranks))


def killed(who: str) -> Callable[[Path], Outcome]:
    """Return a case that kills the fork server or the store of a run three times, under `restarts: 60`."""

    def run(folder: Path) -> Outcome:
        (folder / "r.yaml").write_text(RUN)
        repository = str(Path(__file__).resolve().parents[2])
        words = ["layout={data: 2, transport: torch}", "restarts=60", "steps=60"]
        with (folder / "said").open("wb") as said:
            run = psutil.Popen(
                [sys.executable, "-m", "meshwright", "train", "r.yaml", "--out", "o", *words], cwd=folder,
                env={**os.environ, "PYTHONPATH": repository}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
        done, end = list[int](), time.monotonic() + PATIENCE_SECONDS
        while run.poll() is None and time.monotonic() < end:
            with suppress(psutil.Error):
                for server in run.children():
                    if len(done) < 3 and "multiprocessing.forkserver" in " ".join(server.cmdline()):
                        below = sorted(server.children(), key=lambda process: process.pid)
                        victim = below[0] if below and who == "store" else server
                        if len(below) == 3 and victim.pid not in done:
                            victim.send_signal(signal.SIGKILL)
                            done.append(victim.pid)
            time.sleep(0.01)
        text = (folder / "said").read_text(errors="replace")
        steps = len((folder / "o" / "metrics.jsonl").read_text().splitlines())
        fine = run.returncode == 0 and len(done) == 3 and steps == 60
        return Outcome(f"code {run.returncode} after {len(done)} kills, {steps} steps; {last_line(text)}", fine)

    return run


DIFF = {
    "a flipped bit": diffed(
        lambda checkpoints: flip(checkpoints / "step-4", -100), 1,
        "o2/checkpoints/step-4/rank-0.safetensors is damaged: ", "bytes 0 to ", "1 of ",
    ),
    "zeros": diffed(lambda checkpoints: zero(checkpoints / "step-4"), 1, "rank-0.safetensors is damaged"),
    "a sound copy": diffed(lambda checkpoints: None, 0, "equal to the bit: 4 steps", "tensors were read"),
    "roots alone": diffed(
        lambda checkpoints: flip(checkpoints / "step-4", -100), 0, "equal by their roots, nothing was read",
        options=("--roots",),
    ),
    "no common checkpoint": diffed(shutil.rmtree, 3, "not shown to be equal", "no checkpoint in common"),
}  # fmt: skip
REPLAY = {
    "a damaged checkpoint": replayed(
        code=1, texts=("o/checkpoints/step-2/rank-0.safetensors is damaged", "--from 0 repeats steps 1 to 4")
    ),
    "from the beginning by a word": replayed(
        "--from", "0", code=0, texts=("repeats steps 1 to 4 from the beginning of o: 4 steps", "equal: steps 1 to 4")
    ),
    "a sound checkpoint": replayed(
        code=0, texts=("repeats steps 3 to 4 from step-2 of o: 2 steps", "equal: steps 3 to 4"), damaged=False
    ),
    "changed data": other_data,
}
VARIABLES = {
    "LOCAL_RANK of nobody": with_variables(
        1, "LOCAL_RANK=7 is no rank of this host's 2", RANK="0", WORLD_SIZE="2", LOCAL_RANK="7", LOCAL_WORLD_SIZE="2"
    ),
    "a lone WORLD_SIZE": with_variables(1, "WORLD_SIZE=2 is set, and RANK is not", WORLD_SIZE="2"),
    "a lone RANK": with_variables(1, "RANK=0 is set, and WORLD_SIZE is not", RANK="0"),
    "a negative RANK": with_variables(1, "RANK=-1 is not a count", RANK="-1", WORLD_SIZE="2"),
    "RANK beyond WORLD_SIZE": with_variables(1, "rank 2 of 2 ranks", RANK="2", WORLD_SIZE="2"),
    "one rank of one": with_variables(0, "", RANK="0", WORLD_SIZE="1"),
    "RANK and WORLD_SIZE of two": two_nodes,
}
CASES: list[Case] = [
    *(
        Case(f"diff: {name}", "diff called destroyed checkpoints equal to the bit",
             "the bytes decide", run, slow=True)
        for name, run in DIFF.items()
    ),
    *(
        Case(f"replay: {name}", "replay passed over a damaged checkpoint without a word",
             "the checkpoint is named; the start and the steps are said first", run, slow=True)
        for name, run in REPLAY.items()
    ),
    *(
        Case(f"variables: {name}", "A wrong LOCAL_RANK was not noticed, a lone WORLD_SIZE was ignored",
             "derived if one value is possible, else named", run, slow=name == "one rank of one")
        for name, run in VARIABLES.items()
    ),
    *(
        Case(f"kills: the {who} three times", "With restarts: 60 a killed fork server or store ended the run",
             "the run ends with all its steps", killed(who), slow=True)
        for who in ("store", "fork server")
    ),
]  # fmt: skip
