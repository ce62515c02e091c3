"""The command line of parity, which `meshwright parity` and the package of parity alone share.

parity CHECKS.py                       checks of a file, each a parallel program against one process
parity record --out FOLDER SCRIPT ...  a training script run as it is, and what its modules gave, in a folder
parity compare A B                     two such folders
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.parity.check import CHECK_PRECISIONS, ParityResult, collect, run_check

PROGRAM = __package__.replace(".", " ").replace("_", "-")
"""How a user calls it: `meshwright parity`."""


def run_words(words: Sequence[str]) -> int:
    """Run the command that some words ask for; its exit code. Raises MeshwrightError, whose text is the user's."""
    parser = check_parser()
    arguments = parser.parse_args(words)
    return check_file(arguments)


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Prove any parallel program equal to one process.", epilog="Example: checks.py"
    )
    parser.add_argument("file", type=Path, metavar="CHECKS.py", help="a file with functions under @parity.check")
    parser.add_argument("--precision", help="float64, float32, bf16 or own, instead of what each check says")
    parser.add_argument("--only", metavar="NAME", help="the checks whose name has this in it")
    add_report(parser)
    return parser


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="write a page that shows every module")
    parser.add_argument("--json", action="store_true", help="print JSON for a script")


def check_file(arguments: argparse.Namespace) -> int:
    precision, only = arguments.precision, arguments.only
    if precision is not None and precision not in CHECK_PRECISIONS:
        raise ConfigError.of("--precision", precision, "is not a precision of a check", ", ".join(CHECK_PRECISIONS))
    found = collect(arguments.file)
    checks = [check for check in found if only is None or only in check.title]
    if not checks:
        raise ConfigError.of("--only", only, "is in no check's name", ", ".join(check.title for check in found))
    results = []
    for number, check in enumerate(checks, 1):
        if sys.stderr.isatty():
            print(f"{number} of {len(checks)}: {check.title}", file=sys.stderr)
        # Each check runs to its end, also where another has failed: one run tells all that is wrong.
        results.append(run_check(check, precision))
    return tell(results, arguments.json, arguments.page)


def tell(results: Sequence[ParityResult], as_json: bool, page: Path | None) -> int:
    """Print results, and write their page; the exit code, 1 where something differs."""
    from meshwright.parity import report

    written = None if page is None else str(report.write_page(results, page))
    if as_json:
        print(json.dumps(report.as_dict(results) | ({} if written is None else {"written": [written]})))
    else:
        report.render(results)
        if written is not None:
            print(f"written: {written}")
    return 0 if all(result.holds for result in results) else 1


def main() -> None:
    """The package's own command. A user's mistake is its text on stderr, never a traceback."""
    try:
        code = run_words(sys.argv[1:])
    except MeshwrightError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
