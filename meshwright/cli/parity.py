"""`meshwright parity`: the checks of a Python file of anybody's, on processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from meshwright.cli.app import PROVE, AsJson, app, print_result, progress
from meshwright.errors import ConfigError


@app.command(rich_help_panel=PROVE)
def parity(
    file: Annotated[Path, Argument(metavar="CHECKS.py", help="A file with functions under @parity.check.")],
    precision: Annotated[
        str | None, Option(help="float64, float32, bf16 or own, instead of what each check says.")
    ] = None,
    only: Annotated[str | None, Option(metavar="NAME", help="The checks whose name has this in it.")] = None,
    page: Annotated[Path | None, Option(metavar="FILE.html", help="Write a page that shows every module.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove any parallel program equal to one process.

    Any model, any framework, on CPU processes. Exit code 1 where one is not equal; names the first wrong module and
    the kind of mistake.

    Example: meshwright parity checks.py --page parity.html
    """
    from meshwright.parity.check import CHECK_PRECISIONS, collect, run_check

    if precision is not None and precision not in CHECK_PRECISIONS:
        raise ConfigError.of("--precision", precision, "is not a precision of a check", ", ".join(CHECK_PRECISIONS))
    all_checks = collect(file)
    checks = [check for check in all_checks if only is None or only in check.title]
    if not checks:
        raise ConfigError.of("--only", only, "is in no check's name", ", ".join(check.title for check in all_checks))
    results = []
    with progress() as show:
        for number, check in enumerate(checks):
            # Each check runs to its end, also where another has failed: one run tells all that is wrong.
            show(check.title, number / len(checks))
            results.append(run_check(check, precision))
    from meshwright.parity import report

    written = None if page is None else [report.write_page(results, page)]
    print_result(report, results, as_json, written)
    if not all(result.holds for result in results):
        sys.exit(1)
