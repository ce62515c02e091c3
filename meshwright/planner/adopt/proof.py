"""A check of a script: N processes against one, recorded and compared by `meshwright parity`.

The N processes run first. If each read rows of its own, the one process needs the rows of all: its batch is made as
many times as large, by the script's words or by an edit of a copy of the script.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.parity.check import ParityResult
from meshwright.parity.recorded import RecordedRun
from meshwright.parity.report import PageHead, write_page
from meshwright.parity.report import as_dict as results_as_dict
from meshwright.parity.report import render as render_results
from meshwright.parity.runs import compare_runs
from meshwright.planner.adopt.edits import batch_times
from meshwright.ranks.environment import enter_local_rank, go_offline, rank_variables
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.streams import say

SEED = 1
"""Seed of the run that is perturbed by one rounding, which gives the tolerances."""
STEPS = 2
"""Number of recorded steps."""
GRACE_SECONDS = {True: 600.0, False: 10.0}
"""Time for the other processes after the first has ended, by whether that one succeeded."""

Report = Callable[[str, float | None], None]

_CHECK = '''"""{ranks} processes of {script} against one, for pytest and as a script. Written by `meshwright adopt`."""

import sys
from pathlib import Path

from meshwright.planner.adopt.proof import prove_script, render

SCRIPT = Path({path!r})
WORDS = {words!r}
"""The script's words with {ranks} processes: give a small model."""
ONE = {one!r}
"""The script's words with one process. None: the same, with a batch of all processes' rows."""


def test_{ranks}_processes_equal_one(tmp_path):
    proof = prove_script(SCRIPT, WORDS, ONE, {ranks}, tmp_path / "proof")
    render(proof)
    assert proof.holds


if __name__ == "__main__":
    proof = prove_script(SCRIPT, WORDS, ONE, {ranks}, Path(sys.argv[1] if len(sys.argv) > 1 else "proof"))
    render(proof)
    sys.exit(not proof.holds)
'''


@dataclass(frozen=True)
class Proof:
    """The comparison of N processes with one."""

    ranks: int
    words: tuple[str, ...]
    """The script's words with N processes."""
    one: tuple[str, ...]
    """The script's words with one process."""
    times: int
    """Number of shares of a batch that the processes read."""
    edited: str
    """A constant of the script that the one process has in another size; empty if only words differ."""
    results: tuple[ParityResult, ...]
    """By recorded step."""
    copies: bool
    """True if all processes hold the whole model and read the same rows: then nothing is split."""
    notes: tuple[str, ...]
    page: Path

    @property
    def holds(self) -> bool:
        return all(result.holds for result in self.results)

    @property
    def verdict(self) -> str:
        """`PASS: ...`, or `FAIL: ...` with the first mistake and its module."""
        if self.holds:
            steps = ", ".join(result.check.name for result in self.results)
            copies = "; but nothing is split, each process is a copy of the one" if self.copies else ""
            return f"PASS: {self.ranks} processes equal one in {steps}{copies}"
        first = next(result for result in self.results if not result.holds)
        return f"FAIL: {self.ranks} processes differ from one, {first.check.name}: {first.error or first.verdict}"


def write_check(
    script: Path, words: Sequence[str], single_words: Sequence[str] | None, ranks: int, folder: Path
) -> Path:
    """Write test_adopted.py for pytest and CI, and return its path."""
    path = folder / "test_adopted.py"
    alone = None if single_words is None else list(single_words)
    path.write_text(
        _CHECK.format(ranks=ranks, script=script.name, path=str(script.resolve()), words=list(words), one=alone)
    )
    return path


def prove_script(
    script: Path, words: Sequence[str], single_words: Sequence[str] | None, ranks: int, folder: Path,
    report: Report = lambda text, share: None,
) -> Proof:  # fmt: skip
    """Run a script with N processes, with one, and with one and a rounding added; compare the records.

    Args:
        script: The script.
        words: Its words with N processes.
        single_words: Its words with one process; None: the same words, with a batch of all processes' rows.
        ranks: N.
        folder: A folder for the records and the outputs.
        report: Called with the running part.

    Returns:
        The comparison, step by step.

    Raises:
        LaunchError: A run failed; its output is in the folder.
        ParityError: The records cannot be compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report(f"recording {ranks} processes of {script.name}", 0.0)
    record_processes(script, words, ranks, folder / "many", folder / "many.txt")
    times, copies = shares_of(RecordedRun.read(folder / "many"))
    notes: list[str] = []
    alone, alone_words, edited = script, tuple(words if single_words is None else single_words), ""
    if single_words is None and times > 1:
        made = batch_times(script.read_text(encoding="utf-8"), words, times)
        if made is None:
            notes.append(f"each of {times} processes reads its own rows, and no batch size was found: give --one WORDS")
        else:
            text, alone_words, edited = made
            if text is not None:
                alone = folder / script.name
                alone.write_text(text, encoding="utf-8")
    for share, seed, name in ((0.3, "", "one"), (0.6, str(SEED), "perturbed")):
        report(f"recording one process of {script.name}{', one rounding added' if seed else ''}", share)
        record_processes(alone, alone_words, 1, folder / "one", folder / f"{name}.txt", seed, script.resolve().parent)
    report("comparing", 0.9)
    results = compare_runs(RecordedRun.read(folder / "one"), RecordedRun.read(folder / "many"))
    if any(result.finding is not None and result.finding.kind == "wrong data" for result in results):
        notes.append("the one process has to read the rows of all processes: give its words by --one")
    head = PageHead(
        f"{ranks} processes of {script.name} against one",
        shlex.join(["meshwright", "adopt", "--prove", str(ranks), str(script), *words]), recorded=True,
    )  # fmt: skip
    page = write_page(results, folder / "parity.html", head)
    return Proof(ranks, tuple(words), alone_words, times, edited, tuple(results), copies, tuple(notes), page)


def shares_of(run: RecordedRun) -> tuple[int, bool]:
    """Count the distinct batches that processes with the same part of the model read in the first step.

    Returns:
        (The number of batches, whether all processes hold the whole model and read the same rows.)
    """
    groups: dict[tuple[object, ...], list[list[torch.Tensor]]] = {}
    whole = True
    for rank in run.ranks:
        loose = [rank.first[name] for name in rank.facts.names if name not in rank.facts.boxes]
        whole &= not rank.facts.boxes
        tensors = rank.step(run.steps[0]).tensors if run.steps else {}
        rows = [tensors[key] for key in sorted(tensors) if key[0].startswith("sample:")]
        # Stages of a pipeline have different weights, and get activations in place of rows.
        key = tuple((tuple(x.shape), float(x.double().sum())) for x in loose)
        batches = groups.setdefault(key, [])
        if not any(len(x) == len(rows) and all(map(torch.equal, x, rows)) for x in batches):
            batches.append(rows)
    times = max(len(batches) for batches in groups.values())
    return times, times == len(groups) == 1 and whole


def record_processes(
    script: Path, words: Sequence[str], ranks: int, record: Path, output: Path, seed: str = "", beside: Path | str = ""
) -> None:
    """Run and record a script with some processes on this machine, as under torchrun.

    All processes end with this call, also after an interrupt.

    Args:
        script: The script.
        words: The script's words.
        ranks: The number of processes.
        record: The folder of the record.
        output: The file for the script's output.
        seed: Seed of an added rounding; empty without.
        beside: A further folder with modules that the script imports.

    Raises:
        LaunchError: A process failed before all steps were recorded.
    """
    with socket.socket() as probe:  # a free port for torch's store
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # -P: as `python SCRIPT`, which imports from the script's folder and not from the current one.
    command = [sys.executable, "-P", "-m", "meshwright.planner.adopt.rank", str(os.getpid()), str(STEPS), str(record),
               seed, str(script), *words]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    with output.open("wb") as file:
        try:
            for rank in range(ranks):
                variables = variables_of(rank, ranks, port, beside)
                started.append(
                    subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=file,
                                     stderr=subprocess.STDOUT, start_new_session=True)
                )  # fmt: skip
            end = float("inf")
            while None in (codes := [process.poll() for process in started]) and time.monotonic() < end:
                ended = [code for code in codes if code is not None]
                end = min([end, *(time.monotonic() + GRACE_SECONDS[code == 0] for code in ended)])
                time.sleep(0.05)
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the whole group: also the script's loader workers
                process.wait()
    folder = record / f"perturbed-{seed}" if seed else record
    complete = all((folder / f"rank-{rank}" / f"step-{STEPS}.json").is_file() for rank in range(ranks))
    if not complete and any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        raise LaunchError(
            f"{shlex.join([script.name, *words])} failed in the run `{output.stem}`: process {rank} of {ranks} ended "
            f"with code {codes[rank]}: {first_error(output, script)} ({output})"
        )
    if not complete and None in codes:
        raise LaunchError(
            f"{shlex.join([script.name, *words])} did not end in the run `{output.stem}`: process {codes.index(None)} "
            f"of {ranks} still ran {GRACE_SECONDS[True]:.0f} s after another one ended ({output})"
        )


def variables_of(rank: int, ranks: int, port: int, beside: Path | str) -> dict[str, str]:
    """Return the environment of a process of the script: a rank as under torchrun, one thread, offline.

    Args:
        rank: The process's rank.
        ranks: The number of processes.
        port: A free port, at which rank 0 opens torch's store.
        beside: A further folder with modules that the script imports; empty without.
    """
    environment: dict[str, str] = {}
    enter_local_rank(rank, ranks, 0, port, environment)
    go_offline(environment)
    variables = rank_variables(environment | {"TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": "1"})
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, [str(beside), variables["PYTHONPATH"]]))}


def first_error(output: Path, script: Path) -> str:
    """Return the script's line and the text of the first error in an output."""
    line = ""
    for text in output.read_text(errors="replace").splitlines():
        if found := re.search(rf'File ".*{re.escape(script.name)}", line (\d+)', text):
            line = f"{script.name}:{found[1]}: "
        elif re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b|meshwright parity: ", text):
            return line + text.strip()[:300]
    return "no error was printed"


def as_dict(proof: Proof) -> dict[str, object]:
    """Return the proof for JSON."""
    facts = {"verdict": proof.verdict, "holds": proof.holds, "ranks": proof.ranks, "words": list(proof.words)}
    facts |= {"one": list(proof.one), "times": proof.times, "edited": proof.edited, "copies": proof.copies}
    return {**facts, "notes": list(proof.notes), "comparison": results_as_dict(proof.results)}


def render(proof: Proof) -> None:
    """Print the comparison and the verdict, which is the last line."""
    say()
    render_results(proof.results)
    if proof.edited:
        say(f"changed for the one process, which reads the rows of all: {proof.edited}")
    for note in proof.notes:
        say(f"note: {note}")
    say(f"written: {proof.page}")
    say(proof.verdict)
