"""`meshwright adopt`: run the script in a child process, read the facts, plan the step, try edits, write the page.

One process is run for each rank that differs: rank 0, and the other stages of a pipeline, which its messages name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.output.outputs import refuse_existing
from meshwright.planner.adopt.adopted import Adopted, read
from meshwright.planner.adopt.child import FAILED
from meshwright.planner.adopt.edits import Edit, edits_of
from meshwright.planner.adopt.planned import Planned, plan
from meshwright.planner.adopt.recorder import Collective
from meshwright.planner.plan.cluster import Cluster
from meshwright.ranks.errors import ConfigError, MeshwrightError
from meshwright.ranks.foreign import read_json
from meshwright.ranks.ledger import MESSAGE

MOST_STAGES = 16
"""The most ranks of a pipeline that are run."""


class AdoptError(MeshwrightError):
    """A script that failed, or that took no step."""


@dataclass(frozen=True)
class Question:
    """A script, and the machine for the plan."""

    script: Path
    words: tuple[str, ...]
    cluster: Cluster
    ranks: int
    device: str = "cuda"
    folder: Path = Path("adopted")


@dataclass(frozen=True)
class Tried:
    """An edit of the script, with the plan of the edited script or the reason for none."""

    edit: Edit
    planned: Planned | None
    failure: str = ""


@dataclass(frozen=True)
class Answer:
    """The result of `meshwright adopt`."""

    question: Question
    ranks: dict[int, Adopted]
    """By rank, the facts; rank 0 first."""
    planned: Planned
    tried: tuple[Tried, ...]

    @property
    def first(self) -> Adopted:
        return next(iter(self.ranks.values()))


def checked_device(name: str) -> str:
    """Return the device's name. Raises ConfigError for another one."""
    if name not in ("cuda", "cpu"):
        raise ConfigError.of("--device", name, "is no device of a script", "cuda, cpu")
    return name


def run_rank(question: Question, rank: int, folder: Path, edit: Edit | None = None) -> Adopted:
    """Run the script in a child process as one rank. Raises AdoptError with the script's error."""
    device = question.cluster.device
    folder.mkdir(parents=True, exist_ok=True)
    per_node = question.cluster.devices_per_node
    order = {
        "script": str(question.script), "words": [*(edit.words if edit else question.words)], "folder": str(folder),
        "gpu": {"name": f"{question.cluster.name} GPU", "memory_bytes": device.memory_bytes,
                "count": min(question.ranks, per_node), "index": rank % per_node},
        "capability": device.capability or (9, 0), "ranks": question.ranks, "rank": rank,
        "source": edit.source if edit else None, "files": edit.files if edit else {},
        "device": question.device, "parent": os.getpid(),
    }  # fmt: skip
    (folder / "order.json").write_text(json.dumps(order))
    (folder / FAILED).unlink(missing_ok=True)
    with (folder / "output.txt").open("w") as output:
        # -P: as `python SCRIPT`, which imports from the script's folder and not from the current one.
        command = [sys.executable, "-P", "-m", "meshwright.planner.adopt.child", str(folder / "order.json")]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            code = process.wait()
        finally:
            process.kill()  # also after an interrupt, which may have ended this process's wait alone
            process.wait()
    if code:
        raise AdoptError(failure_text(question, folder, code))
    return read(folder)


def failure_text(question: Question, folder: Path, code: int) -> str:
    """Return the text of a failed run: the script's line and error, the host that it asked, or the lacking step."""
    shown = f"the script's output is in {folder / 'output.txt'}"
    if not (folder / FAILED).is_file():
        return f"{question.script} ended its process with code {code}: {shown}"
    failed = read_json(folder / FAILED)
    notes = [f"\n  {where}: {text}" for subject, where, text in failed["notes"] if subject == "network"]
    if failed["kind"]:
        first = failed["text"].strip().splitlines() or [""]
        line = f"\n  {failed['line']}" if failed["line"] else ""
        return f"{failed['where']}: {failed['kind']}: {first[0][:300]}{line}{''.join(notes)}\n  {shown}"
    lacks = (
        "no torch optimizer was made" if not failed["optimizers"]
        else "no model with trained parameters was called with gradients" if not failed["models"]
        else "no optimizer stepped"
    )  # fmt: skip
    return f"{question.script.name} took no step: {lacks} before the script ended; {shown}"


def run_ranks(question: Question, folder: Path, edit: Edit | None = None) -> dict[int, Adopted]:
    """Run rank 0, and the ranks that exchange messages with it."""
    first = run_rank(question, 0, folder, edit)
    ranks, found = {0: first}, [0]
    while found and len(ranks) < MOST_STAGES:
        for entry in ranks[found.pop()].entries:
            event = entry.event
            if not isinstance(event, Collective) or event.sending.verb != MESSAGE or event.sending.root in ranks:
                continue
            assert event.sending.root is not None
            ranks[event.sending.root] = run_rank(
                question, event.sending.root, folder / f"rank-{event.sending.root}", edit
            )
            found.append(event.sending.root)
    return dict(sorted(ranks.items()))


def adopt(question: Question, tries: int, report: Callable[[str, float | None], None]) -> Answer:
    """Adopt a script: record, plan, and try edits. `tries`: the most edits that are run."""
    if not question.script.is_file():
        rule = "is no option of this command" if str(question.script).startswith("-") else "is no file"
        raise ConfigError.of("SCRIPT", question.script, rule, "a Python script; meshwright adopt --help lists options")
    refuse_existing("--out", question.folder)
    report(f"running {question.script.name} without values", None)
    ranks = run_ranks(question, question.folder)
    planned = plan(ranks, question.cluster, question.ranks)
    tried: list[Tried] = []
    edits = edits_of(question.script, question.words, ranks[0], question.ranks)[:tries]
    for index, edit in enumerate(edits):
        report(f"trying: {edit.title}", index / len(edits))
        folder = question.folder / "edits" / re.sub(r"\W+", "-", edit.title).strip("-")
        try:
            tried.append(Tried(edit, plan(run_ranks(question, folder, edit), question.cluster, question.ranks)))
        except MeshwrightError as error:
            tried.append(Tried(edit, None, str(error).splitlines()[0]))
    tried.sort(key=lambda candidate: candidate.planned.rank if candidate.planned else (2, 0.0))
    return Answer(question, ranks, planned, tuple(tried))


def as_dict(answer: Answer) -> dict[str, object]:
    """Return the answer for JSON, without programs."""
    from meshwright.planner.adopt.adopted import as_dict as facts_of

    return {
        "adopted": {str(rank): facts_of(result) for rank, result in answer.ranks.items()},
        "planned": planned_as_dict(answer.planned),
        "edits": [
            {"title": result.edit.title, "diff": result.edit.diff, "words": list(result.edit.words),
             "planned": result.planned and planned_as_dict(result.planned), "failure": result.failure}
            for result in answer.tried
        ],
    }  # fmt: skip


def planned_as_dict(planned: Planned) -> dict[str, object]:
    tree = asdict(planned)
    for step in tree["steps"].values():
        step.pop("spans")
    return tree


def chosen(tried: Sequence[Tried], planned: Planned, most: int = 5) -> list[Tried]:
    """Return the best edits that could be run: those that fit and are faster, or that fit at all if the script does
    not."""
    return [
        candidate for candidate in tried if candidate.planned is not None and candidate.planned.rank < planned.rank
    ][:most]
