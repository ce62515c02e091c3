"""What the commands share: their arguments, and a bar for long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO, cast

import typer

from meshwright.launch.output import PatientStream

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value ...", help="e.g. layout.data.size=4")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


@contextmanager
def progress() -> Iterator[Callable[[str, float | None], None]]:
    """A callback for long work that draws a bar on stderr: what is being done, and its part (None: unknown)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=cast(TextIO, PatientStream(sys.stderr))), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, done: float | None) -> None:
            bar.update(task, description=text, total=None if done is None else 1.0, completed=done or 0.0)

        yield show
