"""The command line. Each command loads what it is given and calls one function; nothing heavy is imported before."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from meshwright import __version__, cli_plan
from meshwright.cli_options import AsJson, Overrides, RunFile, progress
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.launch.output import PatientStream, flush, open_closed_streams

app = typer.Typer(
    help="Meshwright trains Transformers with any mixture of the published parallel strategies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line. A user's mistake is its text on stderr, never a traceback; in what was asked, code 2."""
    open_closed_streams()
    try:
        app()
    except MeshwrightError as error:
        print(f"meshwright: {_headed(error)}", file=PatientStream(sys.stderr))
        sys.exit(error.exit_code)
    finally:
        flush(sys.stdout)
        flush(sys.stderr)


def _headed(error: MeshwrightError) -> str:
    """The error's text; several mistakes stand under their number."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        return "\n  ".join([f"{len(error.problems)} mistakes", *map(str, error.problems)])
    return str(error)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"meshwright {__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Meshwright trains Transformers with any mixture of the published parallel strategies."""


@app.command()
def train(
    run: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Where the run is written; out/NAME-OF-RUN.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest complete checkpoint in --out.")] = False,
    resume_from: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="Go on from that checkpoint; newer ones are set aside.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option(help="Go on also with another model, seed, data, sequence or global batch.")
    ] = False,
    explain: Annotated[
        bool, typer.Option(help="Say what the layout makes of the model and what it sends; train nothing.")
    ] = False,
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="STEP", help="A step to trace into --out, for Perfetto; with --explain a file.json."),
    ] = None,
    status: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Say where each rank of the run in OUT is; train nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Of --status: print JSON for a script.")] = False,
) -> None:
    """Train, on local workers or as one rank of torchrun, srun or mpirun.

    Example: meshwright train run.yaml layout.data.size=2 optimizer.lr=1e-3 --out out/first
    """
    if status is not None:
        _show_status(run, status, as_json)
    if as_json:
        raise ConfigError.of("--json", "true", "has no effect on training", "leave it out, or add --status OUT")
    if run is None:
        raise typer.BadParameter("Missing argument 'RUN.yaml' (or --status OUT).")
    from meshwright.tools.plan.auto import load_run

    config = load_run(run, overrides or (), progress)
    from meshwright.train.trace import planned_trace, traced_steps

    if explain:
        from meshwright.tools.plan.explain import explain as explain_run

        explain_run(config, planned_trace(trace or ()))
        return
    from meshwright.train.job import train as run_training

    traced = traced_steps(trace or (), config)
    resume = resume or resume_from is not None
    if accept_changes and not resume:
        raise ConfigError.of("--accept-changes", "true", "has no effect on a new run", "leave it out, or add --resume")
    with progress() as show:
        from meshwright.families import dataset_of

        dataset_of(config).prepare(config, show)  # drawn here; found ready by the job
    run_training(
        config,
        out or Path("out") / run.stem,
        resume=resume,
        resume_from=resume_from,
        accept_changes=accept_changes,
        trace=traced,
    )


def _show_status(run: Path | None, out: Path, as_json: bool) -> NoReturn:
    """Exit code 1 where no run is alive and none has ended by itself."""
    from meshwright.train.status import as_dict, render, status_of

    if run is not None:
        raise ConfigError.of("--status", out, f"trains nothing, and needs no run file ({run})", "--status OUT alone")
    found = status_of(out)
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        render(found)
    sys.exit(found.exit_code)


@app.command()
def verify(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 5,
    as_configured: Annotated[bool, typer.Option(help="In the run's own precision, not in float64.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that the run's layout computes what plain torch computes on one device: losses, every gradient, weights.

    Exit code 1 where it does not, and where a gradient is zero on both sides. Dropout is off: no two layouts share
    its masks.

    Example: meshwright verify run.yaml layout.data.size=4 layout.data.sync=ring
    """
    from meshwright.tools.plan.auto import load_run

    config = load_run(run, overrides or (), progress)
    from meshwright.tools.verify.job import verify as run_verification
    from meshwright.tools.verify.table import as_dict, render

    with progress() as show:
        verdict = run_verification(config, steps=steps, as_configured=as_configured, report=show)
    if as_json:
        print(json.dumps(as_dict(verdict)))
    else:
        render(verdict)
    verdict.check()


@app.command()
def branches(
    run: RunFile,
    overrides: Overrides = None,
    grids: Annotated[str, typer.Option(help="Numbers of sub-grids to deal the branches over.")] = "2,4,8",
    as_json: AsJson = False,
) -> None:
    """Find what a sub-graph layout could cut: the model's branches, what each costs, and the most that dealing gains.

    Example: meshwright branches run.yaml model.heads=16 --grids 2,4
    """
    from meshwright.config import load_config

    config = load_config(run, overrides or ())
    from meshwright.tools.branches.findings import find_branches, parse_grids
    from meshwright.tools.branches.report import as_dict, render

    found = find_branches(config, parse_grids(grids))
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        render(found)


for command in cli_plan.COMMANDS:
    app.command()(command)


data_app = typer.Typer(help="Corpora.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")


@data_app.command("prepare")
def data_prepare(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    source: Annotated[str, typer.Option(help="stdlib, a text/jsonl/parquet file, or a folder of these.")] = "stdlib",
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:SIZE, or a tokenizer.json file.")] = "bytes",
    validation: Annotated[float, typer.Option(help="The share of the text that is held out.")] = 0.05,
    pairs: Annotated[bool, typer.Option(help="Pairs of texts: a tsv or jsonl file, two files, or stdlib's.")] = False,
    target: Annotated[str | None, typer.Option(metavar="FILE", help="The second file of pairs, line by line.")] = None,
    languages: Annotated[
        tuple[str, str] | None, typer.Option(metavar="FROM TO", help="The keys of a jsonl file's pairs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a corpus into packed files that runs read. The same corpus gives the same bytes.

    Example: meshwright data prepare --source wiki.train.txt --tokenizer bpe:8192 --out data/wiki
    """
    from meshwright.config.schema import Data
    from meshwright.data.corpus import text_corpus
    from meshwright.data.packing import pack
    from meshwright.data.pairs import pair_corpus

    with progress() as show:
        if pairs or target is not None or languages is not None:
            found = pair_corpus(Data(source=source, target=target, languages=languages))
        else:
            found = text_corpus(source)
        corpus = pack(found, tokenizer, out, validation, show)
    if as_json:
        print(json.dumps(corpus.header.model_dump()))
        return
    for split in ("train", "validation"):
        facts = corpus.header.facts(split)
        paired = corpus.header.kind == "pairs"
        count = f"{facts.documents // 2:,} pairs" if paired else f"{facts.documents:,} documents"
        print(f"{split}: {facts.tokens:,} tokens, {count}, {facts.words:,} words")
    print(f"{out}: vocabulary {corpus.tokenizer.vocabulary_size}; train on it with data.source={out}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What is installed, what this machine has, what is missing and the command that adds it.

    Example: meshwright doctor --json
    """
    from rich.console import Console

    from meshwright.tools.doctor import examine, render

    report = examine()
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        Console(highlight=False).print(render(report))


Source = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A step folder, or a run's (its newest step).")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Beams = Annotated[int | None, typer.Option(help="An encoder-decoder's hypotheses; 4. 1: greedy.")]
LengthPenalty = Annotated[float | None, typer.Option(help="Its exponent in beam search; 0.6. 0: none.")]
Context = Annotated[int | None, typer.Option(help="Tokens seen at once; the sequence length it was trained with.")]


@app.command("eval")
def evaluate(
    checkpoint: Source,
    task: Annotated[str, typer.Option(help="perplexity, bleu, lambada, masked-lm or images.")] = "perplexity",
    data: Annotated[str | None, typer.Option(help="Text, pairs, images, prepared folder; held-out split.")] = None,
    target: Annotated[str | None, typer.Option(help="Of two text files of pairs, the other; --data is one.")] = None,
    stride: Annotated[int | None, typer.Option(help="Between windows of perplexity; half the context.")] = None,
    context: Context = None,
    samples: Annotated[int | None, typer.Option(help="BLEU of so many pairs; of all.")] = None,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Perplexity of a text per token and per word; an encoder-decoder's of targets, and BLEU of its answers; LAMBADA's
    accuracy in naming the last word of a passage; a BERT's in naming masked tokens; a ViT's in naming an image's class.

    Example: meshwright eval out/first --data wiki.test.txt --stride 64
    """
    from meshwright.tools.evaluate.tasks import Question, facts_of, measure, table_of

    question = Question(checkpoint, device, data, target, stride, context, samples, beams, length_penalty)
    with progress() as show:
        folder, result = measure(task, question, show)
    facts = {"checkpoint": str(folder), "task": task, **facts_of(result)}
    print(json.dumps(facts) if as_json else table_of(facts))


@app.command()
def generate(
    checkpoint: Source,
    prompt: Annotated[str, typer.Option(help="The text to go on from, may be empty; or what is to be answered.")],
    tokens: Annotated[int | None, typer.Option(help="At most so many; 100, or 50 more than the prompt's.")] = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K most likely; from all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; 1.")] = None,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    context: Context = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt, by a GPT-2: the same seed gives the same text. Or answer it, by an encoder-decoder.

    A T5 that learned spans fills in those that <extra_id_0>, <extra_id_1>, ... stand for.

    Example: meshwright generate out/first --prompt "def main" --temperature 0.8 --top-k 40
    """
    from meshwright.tools.generate import Request, Sampling
    from meshwright.tools.generate import generate as generate_from

    request = Request(prompt, tokens, Sampling(temperature, top_k, seed), beams, length_penalty)
    made = generate_from(checkpoint, request, device, context)
    if as_json:
        print(json.dumps({"checkpoint": str(made.folder), "prompt": prompt, "text": "".join(made.parts)}))
        return
    print(made.begun, end="", flush=True)
    for part in made.parts:
        print(part, end="", flush=True)
    print()


convert_app = typer.Typer(help="Hugging Face folders in and out.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(convert_app, name="convert")

OutFolder = Annotated[Path, typer.Option(help="The folder to make.")]


@convert_app.command("import")
def convert_import(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Holds config.json and model.safetensors.")],
    out: OutFolder,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint from a Hugging Face folder. As RUN/checkpoints/step-0, `train --resume` goes on from it.

    Example: meshwright convert import gpt2 --out out/tuned/checkpoints/step-0
    """
    from meshwright.tools.convert import import_folder

    with progress() as show:
        made = import_folder(source, out, show)
    model = made.model.model_dump()
    facts = {"checkpoint": str(out), "parameters": made.parameters, "tokenizer": made.has_tokenizer, "model": model}
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{out}: {made.parameters:,} parameters")
    if made.reads_text and not made.has_tokenizer:
        print(f"{source} has no tokenizer.json: copy the model's into {out}, or eval and generate will refuse it")
    print("to fine-tune it, import it as RUN/checkpoints/step-0 and `meshwright train ... --out RUN --resume` with:")
    print("model: {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in model.items()) + "}")


@convert_app.command("export")
def convert_export(checkpoint: Source, out: OutFolder, as_json: AsJson = False) -> None:
    """Make a Hugging Face folder, which transformers' from_pretrained reads, from a checkpoint.

    Example: meshwright convert export out/first --out first-hf
    """
    from meshwright.tools.convert import export_folder

    with progress() as show:
        folder = export_folder(checkpoint, out, show)
    print(json.dumps({"checkpoint": str(folder), "out": str(out)}) if as_json else f"{out}: exported from {folder}")


if __name__ == "__main__":
    main()
