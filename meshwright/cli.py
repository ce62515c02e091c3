"""The command line. Each command loads what it is given and calls one function; nothing heavy is imported before that."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from meshwright.errors import MeshwrightError

app = typer.Typer(
    help="Meshwright trains Transformers with any mixture of the published parallel strategies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value ...", help="e.g. layout.data.size=4")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


def main() -> None:
    """Run the command line. A user's mistake is its text on stderr and exit code 1, never a traceback."""
    try:
        app()
    except MeshwrightError as error:
        from meshwright.launch import Interrupted

        print(f"meshwright: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, Interrupted) else 1)


@contextmanager
def _progress() -> Iterator[object]:
    """A callback for long work that draws a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, done: float | None) -> None:
            bar.update(task, description=text, total=None if done is None else 1.0, completed=done or 0.0)

        yield show


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Where the run is written; out/NAME-OF-RUN.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest complete checkpoint in --out.")] = False,
) -> None:
    """Train, on local workers or as one rank of torchrun, srun or mpirun.

    Example: meshwright train run.yaml layout.data.size=2 optimizer.lr=1e-3 --out out/first
    """
    from meshwright.config import load_config

    config = load_config(run, overrides or ())
    from meshwright.train.job import train as run_training

    with _progress() as show:
        from meshwright.data.packed import corpus_for
        from meshwright.environment import cache_folder

        corpus_for(config.data, cache_folder(), show)  # drawn here; found ready by the job
    run_training(config, out or Path("out") / run.stem, resume=resume)


@app.command()
def verify(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 5,
    as_configured: Annotated[bool, typer.Option(help="In the run's own precision, not in float64.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that the run's layout computes what one device computes: losses, every gradient, weights after some steps.

    Exit code 1 where it does not. Dropout is off: no two layouts share its masks.

    Example: meshwright verify run.yaml layout.data.size=4 layout.data.sync=ring
    """
    from meshwright.config import load_config

    config = load_config(run, overrides or ())
    from meshwright.verify.job import verify as run_verification
    from meshwright.verify.table import as_dict, render

    with _progress() as show:
        verdict = run_verification(config, steps=steps, as_configured=as_configured, report=show)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(as_dict(verdict)))
    else:
        render(verdict)
    verdict.check()


data_app = typer.Typer(help="Corpora.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")


@data_app.command("prepare")
def data_prepare(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    source: Annotated[str, typer.Option(help="stdlib, a text/jsonl/parquet file, or a folder of these.")] = "stdlib",
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:SIZE, or a tokenizer.json file.")] = "bytes",
    validation: Annotated[float, typer.Option(help="The share of the text that is held out.")] = 0.05,
    as_json: AsJson = False,
) -> None:
    """Tokenize a corpus into packed files that runs read. The same corpus gives the same bytes.

    Example: meshwright data prepare --source wiki.train.txt --tokenizer bpe:8192 --out data/wiki
    """
    from dataclasses import asdict

    from meshwright.data.packed import prepare

    with _progress() as show:
        corpus = prepare(source, tokenizer, out, validation, show)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(asdict(corpus.header)))
        return
    for split in ("train", "validation"):
        facts = corpus.header.facts(split)
        print(f"{split}: {facts.tokens:,} tokens, {facts.documents:,} documents, {facts.words:,} words")
    print(f"{out}: vocabulary {corpus.tokenizer.vocabulary_size}; train on it with data.source={out}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What is installed, what this machine has, what is missing and the command that adds it.

    Example: meshwright doctor --json
    """
    from meshwright.doctor import examine

    report = examine()
    print(json.dumps(report.as_dict(), indent=1) if as_json else report)


if __name__ == "__main__":
    main()
