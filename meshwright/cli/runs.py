"""Commands on a run file: train, verify, plan, compare layouts; and the command that measures this machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Argument, Option

from meshwright.cli.app import (
    OPERATE,
    PREDICT,
    PROVE,
    RUN,
    AsJson,
    ClusterName,
    DeviceOption,
    OptionalRun,
    Overrides,
    RunFile,
    SoftwareName,
    app,
    print_result,
    progress,
)
from meshwright.output.drawing import require_matplotlib
from meshwright.output.outputs import new_path, refuse_existing
from meshwright.ranks.environment import read_environment
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.streams import say

if TYPE_CHECKING:
    from meshwright.config import Config


def _load_with_remarks(run: Path, overrides: Sequence[str] | None) -> Config:
    """Return the checked run, and print oddities (legal, but senseless settings) on stderr.

    `train` prints the oddities itself, once the data is known.
    """
    from meshwright.config.sense import remarks

    config = _load(run, overrides)
    for line in remarks(config):
        say(line, file=sys.stderr)
    return config


def _load(run: Path, overrides: Sequence[str] | None) -> Config:
    """Return the checked run. With `layout: auto` the planner finds the layout and reports its progress."""
    from meshwright.config.load import parse_run, read_run

    file = read_run(run, overrides or ())
    if read_environment().rank == 0:
        from meshwright.config.sense import lost_by_braces

        for line in lost_by_braces(file.tree, file.words):
            say(line, file=sys.stderr)
    # A run with a written layout must not wait for the planner's imports.
    if not file.auto:
        return parse_run(file.tree, file.words)
    from meshwright.planner.plan.question import planned_config

    with progress() as show:
        return planned_config(file, file.words, show)


@app.command(rich_help_panel=RUN)
def train(
    run: OptionalRun = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, Option(help="Where the run is written; out/NAME-OF-RUN.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest complete checkpoint in --out.")] = False,
    resume_from: Annotated[
        int | None, Option(metavar="STEP", min=0, help="Go on from that checkpoint; newer ones are set aside.")
    ] = None,
    accept_changes: Annotated[
        bool, Option("--accept-changes", help="Go on also with another seed, data, sequence or global batch.")
    ] = False,
    explain: Annotated[
        bool, Option("--explain", help="As the command explain: what the layout makes of the model; train nothing.")
    ] = False,
    trace: Annotated[
        list[str] | None,
        Option(metavar="STEP", help="A step to trace into --out, for Perfetto; with --explain a file.json."),
    ] = None,
    status: Annotated[
        Path | None, Option(metavar="OUT", help="Say where each rank of the run in OUT is; train nothing.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Of --status: print JSON for a script.")] = False,
) -> None:
    """Train a run, on workers here or as a rank of a launcher.

    Launchers are torchrun, srun and mpirun. Any field of the run is set by key=value: `meshwright config` lists them
    all, `meshwright config optimizer` those of a section.

    Example: meshwright train quickstart layout.data.size=2 optimizer.lr=1e-3 --out out/first
    """
    if status is not None:
        _print_status(run, status, as_json)
    if as_json:
        raise ConfigError.of("--json", "true", "has no effect on training", "leave it out, or add --status OUT")
    if run is None:
        raise typer.BadParameter("Missing argument 'RUN' (or --status OUT).")
    config = _load(run, overrides)
    if explain:
        from meshwright.planner.explain.tables import explain as explain_run

        explain_run(config, planned_trace(trace or ()))
        return
    from meshwright.training.decisions import in_steps
    from meshwright.training.job import train as run_training

    resume = resume or resume_from is not None
    if accept_changes and not resume:
        raise ConfigError.of("--accept-changes", "true", "has no effect on a new run", "leave it out, or add --resume")
    if config.epochs is None:
        traced_steps(trace or (), config)  # preparing the data may take long: report a mistake before
    with progress() as show:
        data = config.data.prepare(config, show)  # prepared here, with a bar, and reused by the job
    traced = traced_steps(trace or (), in_steps(config, data).config)
    folder = out or Path("out") / run.stem
    run_training(config, folder, resume=resume, resume_from=resume_from, accept_changes=accept_changes, trace=traced)


def traced_steps(words: Sequence[str], config: Config) -> tuple[int, ...]:
    """Return the steps that `--trace` names. Raises ConfigError if one is no step of the run."""
    for word in words:
        if not (word.isdecimal() and 1 <= int(word) <= config.steps):
            valid = f"1 to {config.steps}; with --explain a file, such as trace.json"
            raise ConfigError.of("--trace", word, "is not a step of the run", valid)
    return tuple(sorted({int(word) for word in words}))


def planned_trace(words: Sequence[str]) -> Path | None:
    """Return the file that `--explain --trace` names, if any. Raises ConfigError unless it is one .json file."""
    if not words:
        return None
    if len(words) > 1 or not words[0].endswith(".json"):
        raise ConfigError.of("--trace", ", ".join(words), "is not one file for the trace of a plan", "trace.json")
    return Path(words[0])


def _print_status(run: Path | None, out: Path, as_json: bool) -> NoReturn:
    """Print the status of the run in `out` and exit: code 0 if the run is alive or has ended by itself, else 1."""
    from meshwright.training import status

    if run is not None:
        raise ConfigError.of("--status", out, f"trains nothing, and needs no run file ({run})", "--status OUT alone")
    run_status = status.status_of(out)
    print_result(status, run_status, as_json)
    sys.exit(0 if run_status.state in ("alive", "ended") else 1)


@app.command(rich_help_panel=PREDICT)
def explain(
    run: RunFile,
    overrides: Overrides = None,
    trace: Annotated[
        Path | None, Option(metavar="FILE.json", help="A step of the pipeline for Perfetto, and as a picture.")
    ] = None,
    page: Annotated[
        Path | None, Option(metavar="FILE.html", help="The layout as a page to play with; needs no network.")
    ] = None,
) -> None:
    """Show how a layout shards the model and what it sends.

    Shows parameters and the axes that shard each one, a step's collectives with bytes, the pipeline's stages and the
    idle time of the schedule. The page shows the contents and messages of every rank, and sliders to recompute a step.

    Example: meshwright explain quickstart layout.tensor=megatron layout.tensor.size=2 --page layout.html
    """
    config = _load_with_remarks(run, overrides)
    from meshwright.planner.explain.page import write_page
    from meshwright.planner.explain.tables import explain as explain_run
    from meshwright.planner.explain.tables import forecast

    explained = explain_run(config, None if trace is None else planned_trace([str(trace)]))
    if page is not None:
        write_page(explained, forecast(explained), page, run.stem)
        say(f"written: {page}")


VERIFIED_STEPS = 5
"""The default number of steps that verify compares; fewer for a shorter run."""


@app.command(rich_help_panel=PROVE)
def verify(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, Option(min=1, help="Optimizer steps to compare; 5, or all of a shorter run.", show_default=False)
    ] = None,
    as_configured: Annotated[
        bool, Option("--as-configured", help="In the run's own precision, not in float64.")
    ] = False,
    generates: Annotated[
        bool, Option("--generate", help="Compare generation's bits with training's; bits=layout-free.")
    ] = False,
    tokens: Annotated[
        int | None, Option(min=1, help="Of --generate: the number of tokens; 1000.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove a run's layout equal to plain torch on one device.

    Losses, every gradient and weights are compared. Exit code 1 if any differ, or if a gradient is zero on both sides.
    Dropout is off: no two layouts share its masks. With bits=layout-free the layout's bits are also compared with one
    device's, with dropout.

    --generate compares log-probabilities of generated tokens, with and without a cache, with training's forward pass
    under six layouts, and the exported weights in transformers. Exit code 1 if a bit differs.

    Example: meshwright verify run.yaml layout.data.size=4 layout.data.sync=ring
    """
    if generates and as_configured:
        raise ConfigError.of("--as-configured", True, "has no effect with --generate, which always is", "leave it out")
    if tokens is not None and not generates:
        raise ConfigError.of("--tokens", tokens, "has no effect on a verification of steps", "with --generate")
    config = _load_with_remarks(run, overrides)
    compared = steps if steps is not None else min(VERIFIED_STEPS, config.steps)
    if generates:
        from meshwright.tools.verify import generated, generated_table

        with progress() as show:
            many = tokens or generated.TOKENS
            found = generated.verify_generated(config, steps=compared, tokens=many, report=show)
        print_result(generated_table, found, as_json)
        found.check()
        return
    from meshwright.tools.verify import table
    from meshwright.tools.verify.job import verify as run_verification

    with progress() as show:
        verdict = run_verification(config, steps=compared, as_configured=as_configured, report=show)
    # Printed before check() raises: the table lists the differences that the error counts.
    print_result(table, verdict, as_json)
    verdict.check()


@app.command(rich_help_panel=PROVE)
def diff(
    first_run: Annotated[Path, Argument(metavar="OUT", help="A run's folder.")],
    second_run: Annotated[Path, Argument(metavar="OUT", help="Another run's folder.")],
    roots: Annotated[
        bool, Option("--roots", help="The quick way: compare recorded roots alone, and read no shard.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find where two runs part: step, parameter, box.

    Compares losses, norms and roots of each step, and every byte of common checkpoints. Exit code 1 if the runs differ
    or a checkpoint is damaged, 3 if no common checkpoint shows that they are equal. Layouts do not matter: runs with
    bits=layout-free should be equal under all layouts.

    Example: meshwright diff out/two-gpus out/eight-gpus
    """
    from meshwright.tools import diff as tool

    found = tool.difference(first_run, second_run, roots=roots)
    print_result(tool, found, as_json)
    found.check()


@app.command(rich_help_panel=PROVE)
def replay(
    out: Annotated[Path, Argument(metavar="OUT", help="A run's folder.")],
    step: Annotated[int, Option(min=1, help="The step to make again.")],
    overrides: Overrides = None,
    start: Annotated[
        int | None, Option("--from", metavar="STEP", min=0, help="From that checkpoint, not the last before; 0: all.")
    ] = None,
    accept_changes: Annotated[
        bool, Option("--accept-changes", help="Also with another seed, data, sequence or global batch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a step again: tell the program from the machine.

    Starts from the checkpoint before the step, here, with the run's layout or another one (bits=layout-free). Equal
    numbers: program and machine are sound. Otherwise the step is made a second time, to tell the machine from the
    program, and the exit code is 1. A damaged checkpoint before the step is refused; --from names another one.

    Example: meshwright replay out/first --step 1200 layout.data=2
    """
    from meshwright.tools import replay as tool

    def tell(text: str) -> None:
        say(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    found = tool.replay(out, step, overrides or (), start=start, accept_changes=accept_changes, say=tell)
    print_result(tool, found, as_json)
    found.check()


@app.command(rich_help_panel=PROVE)
def certify(
    out: Annotated[Path | None, Argument(metavar="OUT", help="A run's folder.", show_default=False)] = None,
    overrides: Overrides = None,
    file: Annotated[
        Path | None, Option("--check", metavar="FILE", help="Check that certificate; words: another layout.")
    ] = None,
    step: Annotated[int | None, Option(min=1, help="With --check: a step to compute again.")] = None,
    key: Annotated[
        Path | None, Option(metavar="FILE", help="The private key that signs; your own in ~/.config/meshwright.")
    ] = None,
    new_key: Annotated[Path | None, Option("--make-key", metavar="FILE", help="Only make a key, and FILE.pub.")] = None,
    trusted: Annotated[
        Path | None, Option(metavar="KEY.pub", help="With --check: one of these keys must have signed.")
    ] = None,
    run: Annotated[
        Path | None, Option(metavar="OUT", help="With --check: the run's folder, if FILE is elsewhere.")
    ] = None,
    trace: Annotated[bool, Option("--trace", help="Record each module call of one step: names the operation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Certify a run, so that a stranger can check any step.

    Writes OUT/certificate.json, signed, and a summary in YAML. --check reads all that was certified, and computes the
    step again from the checkpoint before it, here, under another layout (bits=layout-free): equal, program or machine,
    with tensor and box, and of a certificate with --trace the first operation. Exit code 0 only if all is as certified.

    Example: meshwright certify --check out/first/certificate.json --step 30 layout.data=1
    """
    for option, value in {"--step": step, "--trusted": trusted, "--run": run}.items():
        if value is not None and file is None:
            raise ConfigError.of(option, value, "has no effect here", "with --check FILE")
    for option, value in {"--key": key, "--trace": trace or None}.items():
        if value is not None and (file is not None or new_key is not None):
            raise ConfigError.of(option, value, "has no effect here", "with OUT")

    def tell(text: str) -> None:
        say(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    if new_key is not None:
        from meshwright.tools.keys import make_key

        tell(f"written: {new_key}, readable by you alone, and {make_key(new_key)} for others")
        return
    words = [*([] if out is None else [str(out)]), *(overrides or ())]
    if file is not None:
        from meshwright.tools import check_certificate as tool

        checked = tool.check(file, step, words, trusted=trusted, out=run, say=tell)
        print_result(tool, checked, as_json)
        checked.check()
        return
    if out is None:
        raise typer.BadParameter("Missing argument 'OUT' (or --check FILE, or --make-key FILE).")
    if len(words) > 1:
        raise ConfigError.of("key=value", words[1], "changes nothing in a run that was made", "with --check FILE")
    from meshwright.tools import certify as certifying

    certificate, written = certifying.certify(out, key, tell, trace=trace)
    print_result(certifying, certificate, as_json, written)


@app.command(rich_help_panel=PREDICT)
def branches(
    run: RunFile,
    overrides: Overrides = None,
    grids: Annotated[str, Option(help="Numbers of sub-grids to assign the branches to.")] = "2,4,8",
    as_json: AsJson = False,
) -> None:
    """Find a model's branches, and what dealing them out gains.

    A sub-graph layout can deal branches out to ranks. Shows the cost of each branch, and the largest possible gain.

    Example: meshwright branches run.yaml model.heads=16 --grids 2,4
    """
    from meshwright.config import load_config

    config = load_config(run, overrides or ())
    from meshwright.config.section import parse_counts
    from meshwright.tools.branches import findings, report

    counts = parse_counts("--grids", grids, "sub-grids", least=2)
    print_result(report, findings.findings_of(findings.trace_model(config), counts), as_json)


TraceFile = Annotated[
    Path | None, Option(metavar="FILE.json", help="The fastest one's step for Perfetto, and as a picture.")
]
PageFile = Annotated[
    Path | None, Option(metavar="FILE.html", help="The answer as a page, with what time and memory are made of.")
]
PlannedFile = Annotated[
    Path | None, Option(help="The run file to write, with the fastest; must be new. plan.yaml, or plan-2.yaml, ....")
]
Imbalance = Annotated[float, Option(metavar="X", help="Rows of the busiest rank's experts in those of an even router.")]
Facts = Annotated[
    list[str] | None, Option("--fact", metavar="NAME=VALUE", help="A fact of it that is another; several times.")
]


ForeignFile = Annotated[
    Path | None,
    Option("--from", metavar="FILE", help="Instead of a run file: another program's job; FILE.py:FUNCTION."),
]


@app.command(rich_help_panel=PREDICT)
def plan(
    cluster: ClusterName,
    devices: Annotated[int, Option(min=1, help="On how many of its devices.")],
    run: OptionalRun = None,
    overrides: Overrides = None,
    model: Annotated[str | None, Option(metavar="NAME", help="Instead of a run file: a model.")] = None,
    sequence: Annotated[int | None, Option(min=1, help="With --model: tokens of a sequence.")] = None,
    batch: Annotated[int | None, Option(min=1, help="With --model: samples a step.")] = None,
    top: Annotated[int, Option(min=1, help="How many of the fastest are shown.")] = 5,
    out: PlannedFile = None,
    trace: TraceFile = None,
    page: PageFile = None,
    tokens: Annotated[
        str | None, Option(metavar="N", help="Tokens to train on, such as 100B: how long that is.")
    ] = None,
    price: Annotated[float | None, Option(min=0, help="Dollars a device and hour: what --tokens cost.")] = None,
    imbalance: Imbalance = 1.0,
    software: SoftwareName = None,
    facts: Facts = None,
    source: ForeignFile = None,
    strict: Annotated[bool, Option("--strict", help="With --from: refuse a file with fields left out.")] = False,
    anew: Annotated[bool, Option("--anew", help="Neither read nor keep recordings in the cache folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest layouts that fit a cluster.

    The run file's layout, microbatch, recomputation and offload are free; a field set by a key=value word stays. The
    corpus and tokenizer may be missing here. Ctrl-C, or SIGTERM, ends the search with the best so far. --from reads a
    job of torchtitan, Megatron-LM, Megatron-Bridge, Accelerate, DeepSpeed, axolotl, AutoModel or nanotron, prints
    what of it is read, assumed and left out, predicts it as written, and answers in the program's words.

    Example: meshwright plan --model llama-3.1-8b --sequence 8192 --batch 512 --cluster dgx-h100 --devices 64
    """
    from meshwright.planner.plan import answer, report
    from meshwright.planner.plan.choice import answered
    from meshwright.planner.plan.cluster import load_cluster
    from meshwright.planner.plan.page import write_plan_page
    from meshwright.planner.plan.question import NamedRun, as_written, asked_run, models_of, stopped_by_signals
    from meshwright.planner.plan.search import search
    from meshwright.planner.plan.software import OWN, load_program, with_imbalance
    from meshwright.planner.plan.space import fixed_fields

    described, named = load_cluster(cluster), NamedRun(model, sequence, batch)
    training = answer.Training(answer.parse_tokens(tokens), price)
    config, words, job = asked_run(source, run, named, overrides or (), described, devices, strict=strict)
    out = report.checked_output(out, page, trace)
    program = load_program(software or (job.program if job else OWN), [*(job.facts if job else ()), *(facts or ())])
    models = models_of(program.on(described), with_imbalance(program.software, config, imbalance), anew=anew)
    with progress() as show, stopped_by_signals(show) as tell:
        plans = search(config, models.planner.cluster, devices, top, program=program, improved=report.BestSoFar(),
                       fixed=fixed_fields(words), models=models, report=tell, partial=True)  # fmt: skip
        plans, foreign_answer = answered(plans, models, fixed_fields(words)), as_written(job, words, models, devices)
    plans = replace(plans, training=training, foreign=job, written=foreign_answer)
    report.write_run(plans.predictions[0], out)
    written = [out] if trace is None else [out, trace, report.write_timeline(plans.predictions[0], trace)]
    if page is not None:
        write_plan_page(plans, page, model or (run.stem if run is not None else ""))
        written.append(page)
    print_result(report, plans, as_json, written)


@app.command(rich_help_panel=PREDICT)
def answer(
    cluster: ClusterName,
    questions: Annotated[
        Path | None, Argument(metavar="[FILE]", help="Lines of JSON; without it, those of stdin.")
    ] = None,
    software: SoftwareName = None,
    facts: Facts = None,
) -> None:
    """Answer questions about plans, a line of JSON each.

    Estimates are kept in between. {"model": NAME, "sequence": N, "batch": N, "devices": N} and {"run": TREE,
    "devices": N} are questions; "words" has key=value words, "ask": "layout" asks for the figures of the run's own
    layout. An answer is plan --json's object, or {"error": TEXT}.

    Example: meshwright answer questions.jsonl --cluster dgx-h100
    """
    from meshwright.planner.plan.cluster import load_cluster
    from meshwright.planner.plan.kept import KeptRecordings
    from meshwright.planner.plan.service import PlanService
    from meshwright.planner.plan.software import OWN, load_program

    service = PlanService(load_cluster(cluster), load_program(software or OWN, facts or ()), KeptRecordings.here())
    if questions is not None and not questions.is_file():
        raise ConfigError.of("FILE", questions, "is no file", "lines of JSON, or stdin")
    with nullcontext(sys.stdin) if questions is None else questions.open(encoding="utf-8") as lines:
        for line in service.serve(lines):
            say(line, flush=True)


@app.command(rich_help_panel=PREDICT)
def scale(
    run: RunFile,
    cluster: ClusterName,
    devices: Annotated[str, Option(metavar="N,N,...", help="Numbers of devices.")],
    overrides: Overrides = None,
    mode: Annotated[
        str, Option(help="strong: the run's global batch; weak: that of the fewest devices, growing with them.")
    ] = "strong",
    strategies: Annotated[
        str | None, Option(metavar="NAME,...", help="data, zero1, megatron, tesseract, subgraph, pipeline, best.")
    ] = None,
    out: Annotated[Path | None, Option(help="A new folder for the curves: PNG, CSV, JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how strategies scale over devices.

    Finds the fastest layout of each strategy that fits, for each number of devices. A field of the layout set by a
    key=value word stays in all of these.

    Example: meshwright scale run.yaml --cluster dgx-a100 --devices 4,16,64,256 --mode weak --out out/weak
    """
    from meshwright.config.load import load_undecided

    config = load_undecided(run, overrides or (), elsewhere=True)
    from meshwright.config.section import parse_counts
    from meshwright.planner.plan import scale
    from meshwright.planner.plan.cluster import load_cluster
    from meshwright.planner.plan.space import fixed_fields

    names = tuple(scale.STRATEGIES) if strategies is None else scale.parse_strategies(strategies)
    described, fixed = load_cluster(cluster), fixed_fields(overrides or ())
    question = scale.ScalingQuestion(
        config, described, parse_counts("--devices", devices, "devices", least=1), scale.parse_mode(mode), names, fixed
    )
    refuse_existing("--out", out)
    if out is not None:
        require_matplotlib("--out")
    if out is not None and out.suffix:
        raise ConfigError.of("--out", out, "is a file's name, and curves are three files", f"a folder: {out.stem}")
    with progress() as show:
        scaling = scale.scale(question, scale.searching(described, show))
    print_result(scale, scaling, as_json, [] if out is None else scale.write(scaling, out))


@app.command(rich_help_panel=OPERATE)
def submit(
    run: RunFile,
    on: Annotated[str, Option(help="slurm, kubernetes, ray or skypilot.")],
    overrides: Overrides = None,
    nodes: Annotated[int, Option(min=1, help="Over how many nodes; each has as many ranks.")] = 1,
    out: Annotated[
        Path | None, Option(help="Where the run is written, as the nodes see it; NAME-OF-RUN in out or on the volume.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="key=value", help="A setting of the engine; --set help lists them.")
    ] = None,
    to: Annotated[
        Path | None, Option(help="The file to write; must be new. NAME-OF-RUN with the engine's ending, or -2, ....")
    ] = None,
    go: Annotated[bool, Option("--go", help="Hand it to the engine as well, by its own command.")] = False,
    cluster: Annotated[
        str | None, Option(metavar="NAME", help="Plan the run on this cluster, and refuse a run that does not fit.")
    ] = None,
    anyway: Annotated[bool, Option("--anyway", help="Write it although the run does not fit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a job file for Slurm, Kubernetes, Ray or SkyPilot.

    A run that the engine stops saves a checkpoint, and is started again. With --cluster the run is planned first.

    Example: meshwright submit run.yaml device=cuda --on slurm --nodes 2 --set time=04:00:00 --go
    """
    from meshwright.tools.submit import job

    # Before any check: the table also lists required settings, and a check would refuse a command without them.
    if job.HELP in (settings or ()):
        say(job.settings_table(job.engine_class(on)))
        return
    engine = job.engine_of(on, settings or ())
    submission = job.submission_of(engine, run, overrides or (), engine.out_of(out, run), nodes)
    planned = job.planned_line(submission.config, cluster, anyway)
    file = to or new_path(Path(f"{submission.name}{engine.suffix}"))
    text, command, again = engine.text(submission), engine.command(file, submission.name), engine.command_again(file)
    job.write_script(text, file)
    notes = [*planned, *submission.notes, *engine.prepare()]
    answer = job.submit(command) if go else None
    if as_json:
        print(json.dumps({"written": str(file), "command": command, "answer": answer, "notes": notes}))
        return
    say("\n".join([f"written: {file}", *notes]))
    say(answer if go else f"submit it with: {shlex.join(command)}")
    if again:
        say(f"a changed run of the same name: {shlex.join(again)}")


@app.command(rich_help_panel=PREDICT)
def calibrate(
    out: Annotated[Path, Option(help="The cluster file to write.")] = Path("cluster.yaml"),
    ranks: Annotated[str | None, Option(help="Between how many ranks links are timed; 2,4, or up to all GPUs.")] = None,
    device: DeviceOption = "auto",
    quick: Annotated[bool, Option("--quick", help="Half a minute instead of three: fewer sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine as a cluster file for the planner.

    Measures products, memory, and the links of each transport, for `plan --cluster FILE`. Run nothing else meanwhile.

    Example: meshwright calibrate --out here.yaml --ranks 2,4
    """
    from meshwright.planner.calibrate import report
    from meshwright.planner.calibrate.job import calibrate as run_calibration
    from meshwright.planner.calibrate.job import measured_machine
    from meshwright.planner.calibrate.timing import effort_of

    machine = measured_machine(ranks, device)
    with progress() as show:
        cluster = run_calibration(out, machine, effort_of(machine.kind, quick=quick), show)
    if as_json:
        print(json.dumps(report.as_dict(cluster, out)))
    else:
        report.render(cluster, out)


@app.command(rich_help_panel=PREDICT)
def compare(
    run: RunFile,
    overrides: Overrides = None,
    layouts: Annotated[
        list[Path] | None,
        Option(metavar="FILE ...", help="Layouts that lie over the run's: YAML files, whole run files too."),
    ] = None,
    top: Annotated[int | None, Option(min=1, help="The planner's so many fastest layouts that fit.")] = None,
    cluster: Annotated[
        str | None, Option(help="Predict with its facts: a name or a file; cluster.yaml, if it is here.")
    ] = None,
    devices: Annotated[int | None, Option(min=1, help="With --top: ranks to plan for; all devices here.")] = None,
    steps: Annotated[int, Option(help="Steps of each run; the first two are not timed.")] = 8,
    rounds: Annotated[int, Option(min=1, help="How often each layout is run, in turns.")] = 2,
    out: Annotated[Path | None, Option(help="A new folder for the page; out/NAME-OF-RUN-compared.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run layouts here in turns; compare with predictions.

    Shows time, memory, bytes sent and losses of each layout, and writes a page.

    Example: meshwright compare run.yaml --layouts rows.yaml stages.yaml --cluster here.yaml --rounds 3
    """
    from meshwright.tools.compare import report
    from meshwright.tools.compare.job import PAGE, Order, cluster_of, require_all
    from meshwright.tools.compare.job import compare_layouts as run_comparison
    from meshwright.tools.compare.layouts import LayoutRequest, contenders_of, split_words

    words, files = split_words(overrides or (), layouts or ())
    facts = cluster_of(cluster)
    folder = out or new_path(Path("out") / f"{run.stem}-compared")
    order = Order(run.stem, folder, steps, rounds, shlex.join(["meshwright", *sys.argv[1:]]))
    with progress() as show:
        contenders = contenders_of(LayoutRequest(run, words, files, top, devices), facts, show)
        comparison = run_comparison(contenders, order, facts, show)
    print_result(report, comparison, as_json, [order.out / PAGE])
    require_all(comparison, order.out)
