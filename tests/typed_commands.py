"""Commands on pages, read as a shell would."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.main import get_command

from meshwright.cli import app
from meshwright.config.load import parse_run, read_run
from meshwright.configs import shipped
from meshwright.parity.command import check_parser, compare_parser, record_parser

ROOT = Path(__file__).resolve().parent.parent


def read_as_typed(words: list[str]) -> None:
    """Read a command's words as the command line does, and the run with its fields. Raises if a word is wrong."""
    if words[0] == "parity":
        parsers = {"record": record_parser, "compare": compare_parser}
        made = parsers.get(words[1], check_parser)()
        made.parse_args(words[2:] if words[1] in parsers else words[1:])
        return
    command, names = get_command(app), list(words)
    while isinstance(command, typer.core.TyperGroup):
        assert names[0] in command.commands, f"no command {names[0]}: {' '.join(words)}"
        command = command.commands[names.pop(0)]
    told = command.make_context(words[0], names).params
    run = told.get("run")
    if run is None or "overrides" not in told:
        return
    overrides = list(told["overrides"] or ())
    if words[0] == "compare":  # further layouts are words after --layouts
        overrides = [word for word in overrides if "=" in word]
    if str(run) == "RUN.yaml":
        run = Path("quickstart")
        # A field of a file of the reader's, which is not here.
        overrides = [word for word in overrides if not word.startswith(("model={from:", "data={source:"))]
    # `plan` takes a model's name for the run as well.
    assert str(run) in shipped("runs") or (ROOT / run).is_file(), f"no run {run}: {' '.join(words)}"
    file = read_run(run if str(run) in shipped("runs") else ROOT / run, overrides)
    parse_run(file.tree, file.words)
