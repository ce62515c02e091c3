"""Pages, tables, help, lessons and parity's checks, as a newcomer and a developer of parallel programs meet them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.people.case import Case, Outcome, last_line, meshwright

REPOSITORY = Path(__file__).resolve().parents[2]

PROGRAM = """\
from functools import partial
import torch
from meshwright import parity

def program(job, wrong=False):
    batch = lambda generator: {"x": torch.randn(8, 4, generator=generator)}
    loss = lambda model, batch: model(batch["x"]).square().mean()
    job.reference(torch.nn.Linear(4, 3), loss=loss, batch=batch)
    scaled = (lambda model, batch: 2 * loss(model, batch)) if wrong else loss
    job.parallel(torch.nn.parallel.DistributedDataParallel(job.copy()), loss=scaled, batch=job.rows("data"))

def make(wrong):
    def check(job):
        program(job, wrong)
    return check

"""
FACTORIES = {
    "a factory": (
        "right = parity.check(ranks=2)(make(False))\nwrong = parity.check(ranks=2)(make(True))\n", ["right", "wrong"]
    ),
    "partials in a list": (
        "CHECKS = [parity.check(ranks=2)(partial(program, wrong=w)) for w in (False, True)]\n",
        ["program", "program-2"],
    ),
}  # fmt: skip


def judged(body: str, names: list[str]) -> Callable[[Path], Outcome]:
    """Return a case that runs a file of two checks, the second wrong."""

    def run(folder: Path) -> Outcome:
        (folder / "checks.py").write_text(PROGRAM + body)
        code, text = meshwright(folder, "parity", "checks.py", "--json")
        if not text.startswith("{"):
            return Outcome(f"code {code}: {last_line(text)}", False)
        told = [(check["check"], check["holds"]) for check in json.loads(text)["checks"]]
        return Outcome(f"code {code}, {told}", code == 1 and told == list(zip(names, (True, False), strict=True)))

    return run


def training_script(folder: Path) -> Outcome:
    (folder / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\nopen('trained', 'w')\n")
    code, text = meshwright(folder, "parity", "train.py")
    told = "meshwright parity record --out FOLDER train.py" in text
    return Outcome(f"code {code}: {last_line(text)}", code == 2 and told and not (folder / "trained").exists())


def method(folder: Path) -> Outcome:
    (folder / "checks.py").write_text(
        PROGRAM + "class Group:\n    @parity.check(ranks=2)\n    def ddp(self, job): program(job)\n"
    )
    code, text = meshwright(folder, "parity", "checks.py")
    return Outcome(f"code {code}: {last_line(text)}", code == 2 and "is called with the job alone" in text)


def at_80_columns(*words: str, names: tuple[str, ...]) -> Callable[[Path], Outcome]:
    """Return a case that prints a command's tables in 80 columns, and looks for words that rich would break."""

    def run(folder: Path) -> Outcome:
        code, text = meshwright(folder, *words, env={"COLUMNS": "80"})
        missing = [name for name in names if name not in text]
        wide = max(map(len, text.splitlines()), default=0)
        return Outcome(f"code {code}, broken: {missing or 'none'}", code == 0 and not missing and wide <= 100)

    return run


def phases_and_mfu(folder: Path) -> Outcome:
    (folder / "r.yaml").write_text(
        "model: {layers: 1, hidden: 16, heads: 2, positions: 16, vocabulary: 257}\n"
        "data: {source: unicode, tokenizer: bytes, sequence: 16}\nbatch: {global: 4}\nsteps: 2\ndevice: cpu\n"
    )
    code, text = meshwright(folder, "train", "r.yaml", "--out", "o")
    lines = (folder / "o/metrics.jsonl").read_text().splitlines() if code == 0 else ["{}"]
    step = json.loads(lines[-1])
    got = (list(step.get("phase_seconds", {})), step.get("mfu", "missing"))
    return Outcome(f"{got}; {last_line(text)}", got == (["passes", "data_parallel", "optimizer"], None))


def help_has_examples(folder: Path) -> Outcome:
    words = [(), ("data",), ("data", "prepare"), ("convert",), ("convert", "import"), ("parity", "record"), ("train",)]
    lacking = []
    for command in words:
        code, text = meshwright(folder, *command, "--help")
        if code or not re.search(r"Example: meshwright |First:", text):
            lacking.append(" ".join(command))
    return Outcome(f"without an example: {lacking or 'none'}", not lacking)


def no_address(folder: Path) -> Outcome:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    found = [path.name for path in pages if "github.com/meshwright" in path.read_text()]
    return Outcome(f"pages with it: {found or 'none'}", not found)


def a_shell_without_activation(folder: Path) -> Outcome:
    """Each page activates the environment before the first `meshwright`."""
    lacking = []
    for name in ("README.md", "docs/index.md", "docs/guide.md", "docs/course/index.md"):
        text = (REPOSITORY / name).read_text()
        first = text.index("\nmeshwright ") if "\nmeshwright " in text else len(text)
        if not 0 <= text.find(". .venv/bin/activate") < first:
            lacking.append(name)
    return Outcome(f"not activated: {lacking or 'none'}{os.linesep if lacking else ''}", not lacking)


CASES: list[Case] = [
    *(
        Case(
            f"parity checks of {name}",
            "Two checks made by a factory had one __name__, and ended in KeyError after 44 s",
            "two names, the first equal and the second scaled, code 1",
            judged(*form),
            slow=True,
        )
        for name, form in FACTORIES.items()
    ),
    Case(
        "parity of a training script",
        "`meshwright parity train.py` printed the script's own argparse error",
        "code 2, names `parity record`, the script does not run",
        training_script,
    ),
    Case(
        "parity of a method",
        "A check that is a method ended in a traceback on the ranks",
        "code 2 before any rank starts, a function of one argument is asked for",
        method,
        slow=True,
    ),
    Case(
        "explain at 80 columns",
        "Names were broken in the middle of a word",
        "every word of the names on one line",
        at_80_columns(
            "explain",
            "quickstart",
            "layout.pipeline=2",
            "layout.tensor=megatron",
            "layout.tensor.size=2",
            names=("query_key_value.", "feed_forward_norm.", "message-driven", "microbatches"),
        ),
        slow=True,
    ),
    Case(
        "phases and mfu of a run on CPUs",
        "A run without stages had a phase `pipeline`, and mfu was a text among numbers",
        "passes, data_parallel, optimizer; mfu null",
        phases_and_mfu,
        slow=True,
    ),
    Case(
        "help has examples",
        "Not every --help had an example",
        "each has one",
        help_has_examples,
        slow=True,
    ),
    Case("no address that is not there", "Links went to a repository that does not exist", "none", no_address),
    Case(
        "activation before the first command",
        "README's second line was `command not found`",
        "each page activates .venv before the first meshwright",
        a_shell_without_activation,
    ),
]
