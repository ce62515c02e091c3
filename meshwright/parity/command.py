"""Parity's command line, shared by `meshwright parity` and the stand-alone package.

parity CHECKS.py                       run the checks of a file, each a parallel program against one process
parity record --out FOLDER SCRIPT ...  run an unchanged training script, and record modules' outputs in a folder
parity compare A B                     compare two records
parity register transformers           check the plans in a library's models, one check each
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parity.check import CHECK_PRECISIONS, PROGRAM, ParityResult, collect, run_check
from meshwright.ranks.errors import ConfigError, MeshwrightError
from meshwright.ranks.streams import escape_unknown_characters, say

if TYPE_CHECKING:
    from meshwright.parity.report import PageHead

SETTLED_SECONDS = 0.2
"""Time for threads that wait for Python's lock; each thread tries every 0.005 s."""


def run_words(words: Sequence[str]) -> int:
    """Run a command line and return the exit code.

    Raises:
        MeshwrightError: a mistake of the user, with a text for the user.
    """
    if words[:1] == ["record"]:
        return record_run(record_parser().parse_args(words[1:]))
    if words[:1] == ["compare"]:
        return compare_folders(compare_parser().parse_args(words[1:]), command_text(words))
    if words[:1] == ["register"]:
        # Imported here, since checks do not need the register.
        from meshwright.parity.register import register_parser, register_plans

        return register_plans(register_parser().parse_args(words[1:]), command_text(words))
    return check_file(check_parser().parse_args(words), command_text(words))


def command_text(words: Sequence[str]) -> str:
    return f"{PROGRAM} {shlex.join(words)}"


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Prove any parallel program equal to one process.",
        epilog=f"Example: {PROGRAM} checks.py --page parity.html\n"
        f"Two real runs: {PROGRAM} record --help, {PROGRAM} compare --help\n"
        f"All plans of a library: {PROGRAM} register --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="CHECKS.py", help="a file with functions under @parity.check")
    parser.add_argument("--precision", help="float64, float32, bf16 or own, instead of what each check says")
    parser.add_argument("--only", metavar="NAME", help="the checks whose name has this in it")
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE.yaml", help="write the proof's facts for a model's page, if all hold"
    )
    add_report(parser)
    return parser


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="write a page that shows every module")
    parser.add_argument("--json", action="store_true", help="print JSON for a script")
    parser.add_argument(
        "--summary", type=Path, metavar="FILE.md",
        help="append the verdicts to a file as markdown, and print GitHub's annotation of each that differs",
    )  # fmt: skip


def check_file(arguments: argparse.Namespace, command: str) -> int:
    from meshwright.parity import report

    precision, only = arguments.precision, arguments.only
    if precision is not None and precision not in CHECK_PRECISIONS:
        raise ConfigError.of("--precision", precision, "is not a precision of a check", ", ".join(CHECK_PRECISIONS))
    if arguments.certificate is not None and find_spec("yaml") is None:
        raise ConfigError.of("--certificate", arguments.certificate, "needs PyYAML", "pip install pyyaml")
    found = collect(arguments.file)
    checks = [check for check in found if only is None or only in check.title]
    if not checks:
        raise ConfigError.of("--only", only, "is in no check's name", ", ".join(check.title for check in found))
    results = []
    for index, check in enumerate(checks, 1):
        if sys.stderr.isatty():
            say(f"{index} of {len(checks)}: {check.title}", file=sys.stderr)
        # Every check runs even if another has failed, so that one run reports all mistakes.
        results.append(run_check(check, precision))
    code = tell(results, arguments, report.PageHead(arguments.file.name, command))
    if arguments.certificate is not None:
        # Imported here, since only certificates need the versions of libraries.
        from meshwright.parity.certificate import write_certificate

        written = write_certificate(results, arguments.certificate, command)
        say(f"written: {written}" if written else "no certificate: a check differs", file=sys.stderr)
    return code


def record_parser() -> argparse.ArgumentParser:
    """Return the parser of `record`: options before the script; all words after the script are the script's."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} record",
        description="Run a training script as it is, and keep what its modules gave. Under torchrun: "
        f"torchrun ... -m {__package__} record ...",
        epilog=f"Example: {PROGRAM} record --out one train.py --steps 3",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the record goes")
    parser.add_argument("--steps", default="1,2", help="numbers of the steps that are kept (1,2)")
    parser.add_argument("--perturb", type=int, metavar="SEED", help="move all by one rounding: what may differ")
    parser.add_argument("--axes", default="", metavar="data=2,tp=2", help="the ranks' axes, outermost first")
    parser.add_argument("--most", type=int, default=65536, metavar="N", help="elements kept of a tensor (65536)")
    parser.add_argument("--stop", action="store_true", help="end the script behind the last of the steps")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="the script's own words")
    return parser


def record_run(arguments: argparse.Namespace) -> int:
    """Run a script and record it."""
    from meshwright.parity.recorder import Recorder, RecordPlan

    try:
        steps = tuple(sorted({int(word) for word in arguments.steps.split(",")}))
        pairs = [word.split("=") for word in arguments.axes.split(",") if word]
        axes = tuple((name, int(size)) for name, size in pairs)
    except ValueError as error:
        raise ConfigError.of(
            "--steps, --axes", f"{arguments.steps}, {arguments.axes}", "cannot be read", "1,2 and data=2,tp=2"
        ) from error
    if min(steps) < 1 or arguments.most < 64:
        raise ConfigError.of("--steps, --most", f"{steps}, {arguments.most}", "are too small", "from 1, from 64")
    script: str = arguments.script
    if not arguments.is_module and not Path(script).is_file():
        raise ConfigError.of("SCRIPT", script, "is no file", "a Python script; a module behind -m")
    plan = RecordPlan(arguments.out, steps, arguments.most, axes, arguments.perturb, arguments.stop)
    sys.argv = [script, *arguments.words]
    # As with `python SCRIPT` and `python -m MODULE`: the user's modules are imported from the user's folder.
    sys.path.insert(0, str(Path.cwd() if arguments.is_module else Path(script).resolve().parent))
    run = partial(runpy.run_module, alter_sys=True) if arguments.is_module else runpy.run_path
    recorder = Recorder(plan)
    try:
        with recorder:
            # Kept until after the sleep, then freed; the recorder keeps the models as well.
            held = run(script, run_name="__main__")
    finally:
        # torch frees a DDP module with Python's lock held and joins gloo's threads. A thread may wait for this lock, to
        # free the gradients of the last backward pass: a deadlock. The sleep lets all threads run first.
        time.sleep(SETTLED_SECONDS)
    del held
    return 0


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of `compare`."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} compare",
        description="Compare two recorded runs: layouts, versions, or a run and one process. Exit code 1 if they "
        "differ.",
        epilog=f"Example: {PROGRAM} compare one two --page runs.html",
    )
    parser.add_argument("first", type=Path, metavar="A", help="the reference, recorded with --perturb as well")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--layout", type=Path, metavar="FILE.py", help="has part(name, rank): A's name, and slices")
    add_report(parser)
    return parser


def compare_folders(arguments: argparse.Namespace, command: str) -> int:
    """Compare two records."""
    from meshwright.parity import report
    from meshwright.parity.recorded import RecordedRun
    from meshwright.parity.runs import compare_runs
    from meshwright.ranks.launch.scripts import load_script

    slices_of = None
    if arguments.layout is not None:
        if not arguments.layout.is_file() or "part" not in (told := vars(load_script(arguments.layout))):
            raise ConfigError.of("--layout", arguments.layout, "has no part(name, rank)", "a Python file that has it")
        slices_of = told["part"]
    first, second = RecordedRun.read(arguments.first), RecordedRun.read(arguments.second)
    head = report.PageHead(f"{arguments.second.name} against {arguments.first.name}", command, recorded=True)
    return tell(compare_runs(first, second, slices_of), arguments, head)


def tell(results: Sequence[ParityResult], arguments: argparse.Namespace, head: PageHead) -> int:
    """Print results, write the page and the summary. Returns the exit code: 1 if something differs."""
    from meshwright.parity import report, summary

    written = None if arguments.page is None else str(report.write_page(results, arguments.page, head))
    if arguments.summary is not None:
        summary.append_summary(results, arguments.summary, head.command)
    if arguments.json:
        print(json.dumps(report.as_dict(results) | ({} if written is None else {"written": [written]})))
    else:
        report.render(results)
        if arguments.summary is not None:
            summary.annotate(results)
        if written is not None:
            say(f"written: {written}")
    return 0 if all(result.holds for result in results) else 1


def main() -> None:
    """Run the package's command. A user's mistake prints a text to stderr, never a traceback."""
    escape_unknown_characters()
    try:
        code = run_words(sys.argv[1:])
    except MeshwrightError as error:
        say(f"{PROGRAM}: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
