"""A stranger's folder: no code of it runs, nothing is written or read outside of it, and its texts are texts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.people.case import PATIENCE_SECONDS, Case, Outcome, last_line

REPOSITORY = Path(__file__).resolve().parents[2]

RUN = """\
model: {layers: 2, hidden: 32, heads: 4, positions: 32, vocabulary: 257}
data: {source: unicode, tokenizer: bytes, sequence: 32}
batch: {global: 8}
layout: {data: 2, transport: torch}
checkpoint: {every: 2}
bits: layout-free
steps: 4
"""
CHECKS = """\
import torch
from meshwright import parity

@parity.check(ranks=2)
def ddp(job):
    def loss_of(model, batch):
        return model(batch["x"]).square().mean()
    job.reference(torch.nn.Linear(4, 4), loss=loss_of, batch=lambda g: {"x": torch.rand(4, 4, generator=g)})
    model = torch.nn.parallel.DistributedDataParallel(job.copy())
    job.parallel(model, batch=job.rows("data"))
"""
PLANTED = """\
open({mark!r}, "a").write(__file__ + "\\n")
raise SystemExit("planted")
"""
PLANTED_NAMES = (
    "random",
    "statistics",
    "torch",
    "queue",
    "secrets",
    "tempfile",
    "numpy",
    "ctypes",
    "uuid",
    "meshwright",
)


def command(
    folder: Path, *words: str, env: Mapping[str, str] | None = None, start: Sequence[str] = ()
) -> tuple[int, str]:
    """Run the installed command in a folder, or `start` with the words: the exit code, and stdout with stderr.

    The command is a file, as an installer writes it: `python -c` would put the folder first by itself.
    """
    installed = folder.parent / "bin" / "meshwright"
    installed.parent.mkdir(exist_ok=True)
    installed.write_text(
        "import sys\nfrom meshwright.cli import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, *(start or [str(installed)]), *words], cwd=folder, timeout=PATIENCE_SECONDS, check=False,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return ended.returncode, ended.stdout.decode(errors="replace")


def inside(folder: Path, run: str = RUN) -> Path:
    """An empty folder inside of the case's, with a run file."""
    here = folder / "d"
    here.mkdir()
    (here / "r.yaml").write_text(run)
    return here


def plant(folder: Path, mark: Path) -> None:
    """Files that a Python imports from the current folder by mistake, and that say so in `mark`."""
    for name in PLANTED_NAMES:
        target = folder / f"{name}.py" if name != "meshwright" else folder / name / "__init__.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(PLANTED.format(mark=str(mark)))


def planted(*words: str, before: Sequence[Sequence[str]] = (), start: Sequence[str] = ()) -> Callable[[Path], Outcome]:
    """A case that runs a command in a folder of planted modules, after `before` in the same folder without them."""

    def run(folder: Path) -> Outcome:
        here, mark = inside(folder), folder / "mark"
        (here / "checks.py").write_text(CHECKS)
        (here / "l.yaml").write_text("layout: {data: {size: 2, sync: ring}}\n")
        for earlier in before:
            code, text = command(here, *earlier)
            if code:
                return Outcome(f"{' '.join(earlier)}: {last_line(text)}", False)
        plant(here, mark)
        if start:  # our own name in the current folder is what `python -m` asks for
            (here / "meshwright" / "__init__.py").unlink()
            (here / "meshwright").rmdir()
        if words[0] == "parity":  # the folder of the checks is imported by intent: it has the checks alone
            (folder / "named").mkdir()
            (here / "checks.py").rename(folder / "named" / "checks.py")
        code, text = command(here, *words, start=start)
        ran = mark.read_text().split() if mark.exists() else []
        return Outcome(f"code {code}, ran: {', '.join(ran) or 'nothing'}; {last_line(text)}", code == 0 and not ran)

    return run


TRAINED = ("train", "r.yaml", "--out", "o")
PLANTED_CASES = {
    "train": planted(*TRAINED),
    "train over mpi": planted(*TRAINED, "layout.transport=mpi"),
    "train on threads": planted(*TRAINED, "layout.transport=threads"),
    "python -m": planted(*TRAINED, start=["-m", "meshwright"]),
    "verify": planted("verify", "r.yaml", "bits=usual", "layout.transport=torch"),
    "compare": planted("compare", "r.yaml", "--layouts", "l.yaml", "--steps", "4", "--rounds", "1", "--out", "c"),
    "parity": planted("parity", "../named/checks.py"),
    "generate": planted("generate", "o", "--prompt", "a", "--tokens", "4", before=[TRAINED]),
    "eval": planted("eval", "o", "--task", "perplexity", before=[TRAINED]),
    "replay": planted("replay", "o", "--step", "3", before=[TRAINED]),
    "resume": planted(*TRAINED, "steps=6", "--resume", "--accept-changes", before=[TRAINED]),
    "doctor": planted("doctor"),
}
SLOW = {"verify", "compare", "generate", "eval", "replay", "resume", "parity", "train over mpi"}


def listening(*words: str) -> Callable[[Path], Outcome]:
    """A case that looks, while a run of one machine goes on, at which addresses its processes listen."""

    def run(folder: Path) -> Outcome:
        here = inside(folder)
        started = psutil.Popen(
            [sys.executable, "-m", "meshwright", *TRAINED, *words], cwd=here, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        found: set[str] = set()
        while started.poll() is None:
            with suppress(psutil.Error):
                for process in [started, *started.children(recursive=True)]:
                    found |= addresses_of(process)
            time.sleep(0.05)
        outside = {address for address in found if not ip_address(address).is_loopback}
        return Outcome(f"code {started.returncode}, listens at {sorted(found)}", not started.returncode and not outside)

    return run


def addresses_of(process: psutil.Process) -> set[str]:
    """The addresses at which a process listens; none of Open MPI's daemon, which takes all of the host's."""
    with suppress(psutil.Error):
        if process.name() != "prterun":
            kept = process.net_connections("inet")
            return {each.laddr.ip for each in kept if each.status == psutil.CONN_LISTEN}
    return set()


LISTENING = {
    "data": (),
    "pipeline": ("layout.data=1", "layout.pipeline=2", "bits=usual"),
    "mpi": ("layout.transport=mpi",),
}

CASES: list[Case] = [
    *(
        Case(
            f"listens on loopback: {name}",
            "The store of a run on one machine listened on all interfaces, and asked nobody for a secret",
            "every listening socket of the run is at loopback",
            listening(*words),
        )
        for name, words in LISTENING.items()
    ),
]
CASES += [
    Case(
        f"planted modules: {name}",
        "A folder with a random.py, torch.py, meshwright/ of its own, and a command started there",
        "the command ends with code 0 and imports none of them",
        run,
        slow=name in SLOW,
    )
    for name, run in PLANTED_CASES.items()
]
