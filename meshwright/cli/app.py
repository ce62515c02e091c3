"""Commands share these: the groups that list them, options that several of them take, errors, a bar for long work,
the printing of results."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO, cast

import typer
from typer import Argument, Option

from meshwright import __version__
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.streams import PatientStream, flush, open_closed_streams

HELP = "Meshwright trains Transformers with any mixture of the published parallel strategies."


LINE_SECONDS = 10


def _group(text: str) -> typer.Typer:
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )


app, data_app, convert_app = _group(HELP), _group("Corpora."), _group("Hugging Face folders in and out.")

RunFile = Annotated[Path, Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[list[str] | None, Argument(metavar="key=value ...", help="e.g. layout.data.size=4")]
AsJson = Annotated[bool, Option("--json", help="Print JSON for a script.")]
DeviceOption = Annotated[str, Option(help="auto, cpu or cuda.")]
ClusterName = Annotated[
    str, Option(metavar="NAME|FILE", help="One of meshwright/configs/clusters, or a file of calibrate.")
]
CheckpointFolder = Annotated[Path, Argument(metavar="CHECKPOINT", help="A step folder, or a run's (its newest step).")]
NewFolder = Annotated[Path, Option(help="The folder to make.")]
Beams = Annotated[int | None, Option(help="An encoder-decoder's hypotheses; 4. 1: greedy.")]
LengthPenalty = Annotated[float | None, Option(help="Its exponent in beam search; 0.6. 0: none.")]
Context = Annotated[int | None, Option(help="Tokens seen at once; the sequence length it was trained with.")]


def main() -> None:
    """Run the command line. A user's mistake is its text on stderr, never a traceback; in what was asked, code 2."""
    open_closed_streams()
    try:
        app()
    except MeshwrightError as error:
        text = str(error)
        if isinstance(error, ConfigError) and len(error.problems) > 1:
            text = "\n  ".join([f"{len(error.problems)} mistakes", *map(str, error.problems)])
        print(f"meshwright: {text}", file=PatientStream(sys.stderr))
        sys.exit(error.exit_code)
    finally:
        flush(sys.stdout)
        flush(sys.stderr)


def progress_lines(stream: TextIO, now: Callable[[], float]) -> Callable[[str, float | None], None]:
    """A callback for long work without a terminal: a line with what is being done, once LINE_SECONDS have passed since
    the last one."""
    start = last = now()

    def show(text: str, done: float | None) -> None:
        nonlocal last
        if now() - last >= LINE_SECONDS:
            last = now()
            print(f"{last - start:.0f} s: {text}", file=stream, flush=True)

    return show


@contextmanager
def progress() -> Iterator[Callable[[str, float | None], None]]:
    """A callback for long work that draws a bar on stderr: what is being done, and its part (None: unknown). Where
    stderr is no terminal, it prints a line every LINE_SECONDS."""
    if not sys.stderr.isatty():
        yield progress_lines(cast(TextIO, PatientStream(sys.stderr)), time.monotonic)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=cast(TextIO, PatientStream(sys.stderr))), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, done: float | None) -> None:
            bar.update(task, description=text, total=None if done is None else 1.0, completed=done or 0.0)

        yield show


class _ResultModule(Protocol):
    """The module of a tool that says its result: to a person, and to a script."""

    def render(self, result: Any, /) -> None: ...
    def as_dict(self, result: Any, /) -> dict[str, Any]: ...


def print_result(report: _ResultModule, result: object, as_json: bool, written: Sequence[Path] | None = None) -> None:
    """Print a result by the module of its tool that has `render` and `as_dict`, and the files that were written."""
    if as_json:
        print(json.dumps(report.as_dict(result) | ({} if written is None else {"written": list(map(str, written))})))
        return
    report.render(result)
    if written:
        print("written: " + ", ".join(map(str, written)))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"meshwright {__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback(help=HELP)
def options(
    version: Annotated[
        bool, Option("--version", help="Say which version this is.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before any command."""
