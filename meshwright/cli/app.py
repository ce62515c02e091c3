"""Shared parts of the commands: command groups, common options, errors, a progress bar, the printing of results."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO, cast

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from meshwright.cli.completion import complete_shipped, complete_word
from meshwright.ranks.errors import ConfigError, MeshwrightError, Problem
from meshwright.ranks.imports import leave_unnamed_folder
from meshwright.ranks.streams import PatientStream, escape_unknown_characters, flush, open_closed_streams, say, visible
from meshwright.version import __version__

HELP = "Meshwright trains Transformers with any mixture of the published parallel strategies."
FIRST = """\b
First:
  meshwright train quickstart                           a small GPT-2, here
  meshwright verify quickstart layout.data.sync=ring    is the layout right?
  meshwright plan gpt2 --cluster dgx-h100 --devices 64  the fastest layouts
What a run can say: meshwright config, meshwright config optimizer.lr
"""
FIELDS_HELP = "Fields, such as layout.data.size=4; meshwright config lists them."

RUN, PROVE, PREDICT, OPERATE = "Run", "Prove", "Predict", "Operate"
"""The parts of the list of commands in the help, in this order."""


LINE_SECONDS = 10

FOLDERS = ("--out", "--data", "--to", "--status", "--source")
"""Options with a file or folder as the value."""


class _Commands(TyperGroup):
    """A group that lists commands under the headings of the help, and answers other tools' options with ours."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        for panel in (RUN, PROVE, PREDICT, OPERATE, None):
            rows = [
                (f"{name:<9}", command.get_short_help_str(formatter.width))
                for name, command in commands.items()
                if cast(TyperCommand, command).rich_help_panel == panel
            ]
            if rows:
                with formatter.section(panel or "Commands"):
                    formatter.write_dl(rows, col_max=12)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing and not command.ignore_unknown_options:
            refuse_foreign(rest)
        if (
            command is not None
            and not ctx.resilient_parsing
            and any(param.name == "overrides" for param in command.params)
        ):
            known = {option for param in command.get_params(ctx) for option in (*param.opts, *param.secondary_opts)}
            _refuse_options(rest, known)
        return name, command, rest


def refuse_foreign(words: Sequence[str]) -> None:
    """Raise ConfigError for options and addresses of features that we lack: `--push-to-hub`, `--out s3://b`."""
    if not any(word.startswith("--") or "://" in word for word in words):
        return
    from meshwright.config.scope import PAGE, topic_of_address, topic_of_key

    problems = []
    for before, word in pairwise(["", *words]):
        option, _, value = word.partition("=")
        option_name = option if value else before if before.startswith("--") else "argument"
        if option.startswith("--") and option not in FOLDERS and (topic := topic_of_key(option)):
            problems.append(Problem(option, value or "true", f"is no option: {topic.sentence} ({PAGE})", topic.remedy))
        elif option_name in (*FOLDERS, "argument") and (topic := topic_of_address(value or word)):
            problems.append(
                Problem(option_name, value or word, f"is no folder: {topic.sentence} ({PAGE})", topic.remedy)
            )
    if problems:
        raise ConfigError(problems)


def _refuse_options(words: Sequence[str], known: Collection[str]) -> None:
    """Raise ConfigError for options that are our fields, or other tools' words for fields: `--steps 5`, `--tp 2`."""
    problems = []
    for word, after in pairwise([*words, "--"]):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option in (*known, "--"):
            continue
        from meshwright.config.messages import word_for_option

        # The next word is the option's value, unless that word is an option or a field.
        if not equals:
            value = "true" if after.startswith("--") or "=" in after else after
        if answer := word_for_option(option, value):
            problems.append(Problem(option, value, "is no option: fields are written key=value", answer))
    if problems:
        raise ConfigError(problems)


def _group(text: str, epilog: str | None = None) -> typer.Typer:
    return typer.Typer(
        cls=_Commands, help=text, epilog=epilog, no_args_is_help=True, add_completion=epilog is not None,
        pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip


app, data_app = (
    _group(HELP, FIRST),
    _group("Prepare corpora.\n\nExample: meshwright data prepare quickstart --out data/names"),
)
convert_app = _group(
    "Read and write Hugging Face's folders.\n\nExample: meshwright convert export out/first --out first-hf"
)

_RUNS, _CLUSTERS, _PROGRAMS = map(complete_shipped, ("runs", "clusters", "software"))
RUN_METAVAR, RUN_HELP = "RUN", "A run file, or one of our runs by its name, such as quickstart."
RunFile = Annotated[Path, Argument(metavar=RUN_METAVAR, help=RUN_HELP, autocompletion=_RUNS)]
OptionalRun = Annotated[
    Path | None,
    Argument(metavar=RUN_METAVAR, help=RUN_HELP, show_default=False, autocompletion=_RUNS),
]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="key=value ...", help=FIELDS_HELP, autocompletion=complete_word),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for a script.")]
DeviceOption = Annotated[str, Option(help="auto, cpu or cuda.")]
ClusterName = Annotated[
    str, Option(metavar="NAME|FILE", help="A cluster that we know, or a file of calibrate.", autocompletion=_CLUSTERS)
]
SoftwareName = Annotated[
    str | None,
    Option(metavar="NAME", help="Whose program runs: facts of our own or of another.", autocompletion=_PROGRAMS),
]
CheckpointFolder = Annotated[Path, Argument(metavar="CHECKPOINT", help="A step folder, or a run's (its newest step).")]
NewFolder = Annotated[Path, Option(help="The folder to make.")]
Beams = Annotated[int | None, Option(help="An encoder-decoder's hypotheses; 4. 1: greedy.")]
LengthPenalty = Annotated[float | None, Option(help="Its exponent in beam search; 0.6. 0: none.")]
Context = Annotated[int | None, Option(help="Tokens seen at once; the sequence length it was trained with.")]


def main() -> None:
    """Run the command line. A mistake is printed on stderr without a traceback; one in the words or the run: code 2."""
    leave_unnamed_folder()
    open_closed_streams()
    escape_unknown_characters()
    try:
        app()
    except MeshwrightError as error:
        text = str(error)
        if isinstance(error, ConfigError) and len(error.problems) > 1:
            # One line for each mistake, so that a user corrects all of them before the next start.
            text = "\n  ".join([f"{len(error.problems)} mistakes", *map(str, error.problems)])
        say(f"meshwright: {text}", file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        flush(sys.stdout, sys.stderr)


def progress_lines(stream: TextIO, now: Callable[[], float]) -> Callable[[str, float | None], None]:
    """Return a callback for long work without a terminal. It prints the current task at most every LINE_SECONDS."""
    start = last = now()

    def show(text: str, done: float | None) -> None:
        nonlocal last
        if now() - last >= LINE_SECONDS:
            last = now()
            say(f"{last - start:.0f} s: {text}", file=stream, flush=True)

    return show


@contextmanager
def progress() -> Iterator[Callable[[str, float | None], None]]:
    """Yield a callback for long work, called with the current task and the finished share (None: unknown).

    On a terminal the callback draws a bar on stderr; else it prints a line at most every LINE_SECONDS.
    """
    if not sys.stderr.isatty():
        yield progress_lines(cast(TextIO, PatientStream(sys.stderr)), time.monotonic)
        return
    # Imported only to draw a bar: help and completion must answer at once.
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from meshwright.output import terminal

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=terminal.console(sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, done: float | None) -> None:
            bar.update(task, description=visible(text), total=None if done is None else 1.0, completed=done or 0.0)

        yield show


class _ResultModule(Protocol):
    """A tool's module that shows a result: `render` prints for a person, `as_dict` is for a script."""

    def render(self, result: Any, /) -> None: ...
    def as_dict(self, result: Any, /) -> dict[str, Any]: ...


def print_result(report: _ResultModule, result: object, as_json: bool, written: Sequence[Path] | None = None) -> None:
    """Print a result with `report`, the tool's module, and list the files that were written."""
    if as_json:
        print(json.dumps(report.as_dict(result) | ({} if written is None else {"written": list(map(str, written))})))
        return
    report.render(result)
    if written:
        say("written: " + ", ".join(map(str, written)))


def print_version(asked: bool) -> None:
    """Print the versions of Meshwright, torch and Python and exit, if `--version` is given."""
    if asked:
        print(f"meshwright {__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback(help=HELP)
def options(
    version: Annotated[
        bool, Option("--version", help="Say which version this is.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that precede any command."""
