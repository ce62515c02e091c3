"""A stranger's folder: no code there runs, no file outside is written or read, and texts are texts."""

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

MODEL = "model: {layers: 2, hidden: 32, heads: 4, positions: 32, vocabulary: 257}"
RUN = f"""\
{MODEL}
data: {{source: unicode, tokenizer: bytes, sequence: 32}}
batch: {{global: 8}}
layout: {{data: 2, transport: torch}}
checkpoint: {{every: 2}}
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

    The command is a file, as written by an installer: `python -c` would put the folder first.
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
    """Return an empty folder inside of the case's, with a run file."""
    here = folder / "d"
    here.mkdir()
    (here / "r.yaml").write_text(run)
    return here


def plant(folder: Path, mark: Path) -> None:
    """Write files that a Python imports from the current folder by mistake, and that leave a line in `mark`."""
    for name in PLANTED_NAMES:
        target = folder / f"{name}.py" if name != "meshwright" else folder / name / "__init__.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(PLANTED.format(mark=str(mark)))


def planted(*words: str, before: Sequence[Sequence[str]] = (), start: Sequence[str] = ()) -> Callable[[Path], Outcome]:
    """Return a case that runs a command in a folder of planted modules, after `before` in the same folder without
    modules."""

    def run(folder: Path) -> Outcome:
        here, mark = inside(folder), folder / "mark"
        (here / "checks.py").write_text(CHECKS)
        (here / "l.yaml").write_text("layout: {data: {size: 2, sync: ring}}\n")
        for earlier in before:
            code, text = command(here, *earlier)
            if code:
                return Outcome(f"{' '.join(earlier)}: {last_line(text)}", False)
        plant(here, mark)
        if start:  # `python -m` asks for Meshwright's name in the current folder
            (here / "meshwright" / "__init__.py").unlink()
            (here / "meshwright").rmdir()
        if words[0] == "parity":  # the folder of the checks is imported by intent and has the checks alone
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


def listening(*words: str) -> Callable[[Path], Outcome]:
    """Return a case that collects the listening addresses of the processes of a run on one machine."""

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
    """Return a process's listening addresses; none of Open MPI's daemon, which takes all of the host's."""
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
            slow=name != "data",
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
        slow=name != "train",
    )
    for name, run in PLANTED_CASES.items()
]


def linked(
    name: str, *words: str, target: str = "../victim", before: Sequence[str] = TRAINED
) -> Callable[[Path], Outcome]:
    """Return a case of a run's folder with a link of a name, which a resume must neither empty nor overwrite."""

    def run(folder: Path) -> Outcome:
        here = inside(folder)
        if command(here, *TRAINED)[0]:
            return Outcome("the first run did not end", False)
        path, victim = here / "o" / name, here / "victim"
        victim.write_text("my thesis, only copy")
        (here / "elsewhere").mkdir()
        if path.is_dir():
            path.rename(here / "moved")
        path.unlink(missing_ok=True)
        path.symlink_to("../victim")
        code, text = command(here, "train", "r.yaml", "steps=6", "--accept-changes", "--resume", "--out", "o")
        kept = victim.read_text() == "my thesis, only copy" and not list((here / "elsewhere").iterdir())
        named = path.name in text and "is a link to" in text
        return Outcome(f"code {code}, kept: {kept}; {last_line(text)}", code == 2 and kept and named)

    return run


WRITTEN = (
    "run.lock", ".config.yaml.partial", ".run.json.partial", "metrics.jsonl", ".metrics.jsonl.partial", "loss.png",
    "run.json", "config.yaml", "checkpoints", "source", "checkpoints/step-4/manifest.json",
)  # fmt: skip


def stolen(name: str) -> Callable[[Path], Outcome]:
    """Return a case of a Hugging Face folder with a link to the reader's file, imported and exported."""

    def run(folder: Path) -> Outcome:
        here = inside(folder)
        (here / "id_rsa").write_text('{"sekrit": 1}')
        for words in (TRAINED, ("convert", "export", "o", "--out", "hf")):
            code, text = command(here, *words)
            if code:
                return Outcome(last_line(text), False)
        path = here / "hf" / name
        path.unlink(missing_ok=True)
        path.symlink_to("../id_rsa")
        code, text = command(here, "convert", "import", "hf", "--out", "hfi")
        read = any(b"sekrit" in file.read_bytes() for file in here.glob("hfi/*"))
        return Outcome(
            f"code {code}, read: {read}; {last_line(text)}", code != 0 and not read and "is a link to" in text
        )

    return run


def followed(name: str, *words: str) -> Callable[[Path], Outcome]:
    """Return a case of a run's folder that is read, with a link of a name to the same file or folder elsewhere."""

    def run(folder: Path) -> Outcome:
        here = inside(folder)
        if command(here, *TRAINED)[0]:
            return Outcome("the first run did not end", False)
        path = here / "o" / name
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
        code, text = command(here, *words)
        refused = code != 0 and f"{path.name} is a link to" in text and "Traceback" not in text
        return Outcome(f"code {code}: {last_line(text)}", refused)

    return run


FOLLOWED = {
    "eval": ("checkpoints", "eval", "o", "--task", "perplexity"),
    "generate": ("checkpoints/step-4/tokenizer.json", "generate", "o", "--prompt", "a"),
    "diff": ("metrics.jsonl", "diff", "o", "o"),
    "replay": ("checkpoints/step-2", "replay", "o", "--step", "3"),
    "export": ("checkpoints/step-4/manifest.json", "convert", "export", "o", "--out", "hf"),
}


def piped(folder: Path) -> Outcome:
    here = inside(folder, RUN.replace(MODEL, "model: {from: hf}"))
    (here / "hf").mkdir()
    os.mkfifo(here / "hf" / "config.json")
    code, text = command(here, "explain", "r.yaml")
    return Outcome(f"code {code}: {last_line(text)}", code != 0 and "is a pipe" in text and "Traceback" not in text)


DEEP = "[" * 100_000


def nested(name: str, *words: str) -> Callable[[Path], Outcome]:
    """Return a case of JSON that nests deep in a file of a run's or a corpus's folder."""

    def run(folder: Path) -> Outcome:
        here = inside(folder)
        code, text = command(here, *TRAINED)
        if code:
            return Outcome(last_line(text), False)
        if name.startswith("p/"):
            (here / "t.txt").write_text("a text of a line\n" * 400)
            code, text = command(here, "data", "prepare", "--source", "t.txt", "--tokenizer", "bytes", "--out", "p")
            if code:
                return Outcome(last_line(text), False)
        (here / name).write_text(DEEP + "\n")
        code, text = command(here, *words)
        holds = code != 0 and "Traceback" not in text and Path(name).name in text
        return Outcome(f"code {code}: {last_line(text)[:160]}", holds)

    return run


RESUMED = ("train", "r.yaml", "--resume", "--out", "o")
NESTED = {
    "o/metrics.jsonl": ("diff", "o", "o"),
    "o/run.json": RESUMED,
    "o/checkpoints/step-4/manifest.json": ("eval", "o", "--task", "perplexity"),
    "o/checkpoints/step-4/tokenizer.json": ("generate", "o", "--prompt", "a"),
    "p/header.json": ("train", "r.yaml", "data.source=p", "--out", "o2"),
}


def marked(name: str) -> Callable[[Path], Outcome]:
    """Return a case of a run's folder with a name of markup, compared with another."""

    def run(folder: Path) -> Outcome:
        here = inside(folder)
        for words in (TRAINED, ("train", "r.yaml", "seed=4", "--out", f"./{name}")):
            code, text = command(here, *words)
            if code:
                return Outcome(last_line(text), False)
        code, text = command(here, "diff", "o", f"./{name}", env={"COLUMNS": "160"})
        last = name.rpartition("/")[2]
        return Outcome(f"code {code}: {text[:300]}", code == 1 and "Traceback" not in text and last in text)

    return run


def ascii_only(*words: str) -> Callable[[Path], Outcome]:
    """Return a case of a stream that knows ASCII alone, and words outside of ASCII."""

    def run(folder: Path) -> Outcome:
        here, ascii_ = inside(folder), {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        code, text = command(here, "train", "r.yaml", "--out", "out_ü", env=ascii_)
        if code == 0 and words:
            code, text = command(here, *words, env=ascii_)
        return Outcome(f"code {code}: {last_line(text)}", code == 0 and "UnicodeEncodeError" not in text)

    return run


CASES += [
    Case(
        f"a link is not written: {name}",
        "A downloaded run's folder with a link to a file of the user's",
        "the resume is refused with code 2 by the link's name, and the file stays",
        linked(name),
        slow=name != "run.lock",
    )
    for name in WRITTEN
]
READ = ("chat_template.jinja", "tokenizer_config.json", "config.json", "tokenizer.json", "model.safetensors")
CASES += [
    Case(
        f"a link is not read: {name}",
        "A clone of a model's repository with a link to a file of the user's",
        "the import is refused by the link's name, and nothing of the file is written",
        stolen(name),
        slow=True,
    )
    for name in READ
]
CASES += [
    Case(
        f"a link in a run is not followed: {name}",
        "A downloaded run whose files are links",
        "refused by the link's name",
        followed(*words),
        slow=True,
    )
    for name, words in FOLLOWED.items()
]
CASES += [
    Case(
        f"deep JSON: {name}",
        "Five readers ended in a traceback",
        "a sentence that names the file",
        nested(name, *words),
        slow=True,
    )
    for name, words in NESTED.items()
]
CASES += [
    Case(
        f"a name that is markup: {name}",
        "MarkupError with its traceback, or a name shown in part",
        "the table has the whole name",
        marked(name),
        slow=True,
    )
    for name in ("o4[/x]", "o3[red]", "[bold]b")
]
CASES += [
    Case("a pipe in a model's folder", "explain waited for ever", "refused as a pipe", piped, slow=True),
    Case("ASCII alone: train", "UnicodeEncodeError, no step made", "the run ends with code 0", ascii_only(), slow=True),
    Case(
        "ASCII alone: generate",
        "UnicodeEncodeError instead of a text",
        "the text, with escapes",
        ascii_only("generate", "out_ü", "--prompt", "the é", "--tokens", "4"),
        slow=True,
    ),
]
