"""`meshwright parity`: checks, records and comparisons of any program.

parity/command.py parses the arguments, because the separate parity package has the same command.
"""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Argument

from meshwright.cli.app import PROVE, app


@app.command(
    rich_help_panel=PROVE,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def parity(
    words: Annotated[list[str] | None, Argument(metavar="CHECKS.py | record | compare | register")] = None,
) -> None:
    """Prove any parallel program equal to one process.

    Any model, any framework, on CPU processes; or two recorded runs. Exit code 1 where one is not equal; names the
    first wrong module and the kind of mistake.

    Example: meshwright parity checks.py --page parity.html
    """
    from meshwright.parity.command import run_words

    sys.exit(run_words(words or ["--help"]))
