"""Commands on a run file: train it, prove it, plan it, compare its layouts; and the measuring of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Argument, Option

from meshwright.cli.app import AsJson, ClusterName, DeviceOption, Overrides, RunFile, app, print_result, progress
from meshwright.errors import ConfigError
from meshwright.machine import usable_cores

if TYPE_CHECKING:
    from meshwright.config import Config


def _load(run: Path, overrides: Sequence[str] | None) -> Config:
    """The checked run. Only `layout: auto` goes to the planner, which reports how far its search is."""
    words = overrides or ()
    from meshwright.config.load import parse_run, read_run

    file = read_run(run)
    if not file.auto:
        return parse_run(file.tree, words)
    from meshwright.tools.plan.auto import planned_config

    with progress() as show:
        return planned_config(file, words, show)


@app.command()
def train(
    run: Annotated[Path | None, Argument(metavar="RUN.yaml", help="The run file.", show_default=False)] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, Option(help="Where the run is written; out/NAME-OF-RUN.")] = None,
    resume: Annotated[bool, Option(help="Go on from the newest complete checkpoint in --out.")] = False,
    resume_from: Annotated[
        int | None, Option(metavar="STEP", min=0, help="Go on from that checkpoint; newer ones are set aside.")
    ] = None,
    accept_changes: Annotated[
        bool, Option(help="Go on also with another model, seed, data, sequence or global batch.")
    ] = False,
    explain: Annotated[bool, Option(help="Say what the layout makes of the model and sends; train nothing.")] = False,
    trace: Annotated[
        list[str] | None,
        Option(metavar="STEP", help="A step to trace into --out, for Perfetto; with --explain a file.json."),
    ] = None,
    status: Annotated[
        Path | None, Option(metavar="OUT", help="Say where each rank of the run in OUT is; train nothing.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Of --status: print JSON for a script.")] = False,
) -> None:
    """Train, on local workers or as one rank of torchrun, srun or mpirun.

    Example: meshwright train run.yaml layout.data.size=2 optimizer.lr=1e-3 --out out/first
    """
    if status is not None:
        _print_status(run, status, as_json)
    if as_json:
        raise ConfigError.of("--json", "true", "has no effect on training", "leave it out, or add --status OUT")
    if run is None:
        raise typer.BadParameter("Missing argument 'RUN.yaml' (or --status OUT).")
    config = _load(run, overrides)
    if explain:
        from meshwright.tools.plan.explain import explain as explain_run

        explain_run(config, planned_trace(trace or ()))
        return
    from meshwright.training.job import train as run_training

    traced = traced_steps(trace or (), config)
    resume = resume or resume_from is not None
    if accept_changes and not resume:
        raise ConfigError.of("--accept-changes", "true", "has no effect on a new run", "leave it out, or add --resume")
    with progress() as show:
        config.data.prepare(config, show)  # here with a bar; the job then finds it prepared
    run_training(
        config,
        out or Path("out") / run.stem,
        resume=resume,
        resume_from=resume_from,
        accept_changes=accept_changes,
        trace=traced,
    )


def traced_steps(words: Sequence[str], config: Config) -> tuple[int, ...]:
    """The steps that `--trace` names. Raises ConfigError where one is no step of the run."""
    for word in words:
        if not (word.isdecimal() and 1 <= int(word) <= config.steps):
            valid = f"1 to {config.steps}; with --explain a file, such as trace.json"
            raise ConfigError.of("--trace", word, "is not a step of the run", valid)
    return tuple(sorted({int(word) for word in words}))


def planned_trace(words: Sequence[str]) -> Path | None:
    """The file that `--explain --trace` names, if any. Raises ConfigError where it is none."""
    if not words:
        return None
    if len(words) > 1 or not words[0].endswith(".json"):
        raise ConfigError.of("--trace", ", ".join(words), "is not one file for the trace of a plan", "trace.json")
    return Path(words[0])


def _print_status(run: Path | None, out: Path, as_json: bool) -> NoReturn:
    """Exit code 1 where no run is alive and none has ended by itself."""
    from meshwright.training import status

    if run is not None:
        raise ConfigError.of("--status", out, f"trains nothing, and needs no run file ({run})", "--status OUT alone")
    run_status = status.status_of(out)
    print_result(status, run_status, as_json)
    sys.exit(run_status.exit_code)


@app.command()
def verify(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, Option(min=1, help="Optimizer steps to compare.")] = 5,
    as_configured: Annotated[bool, Option(help="In the run's own precision, not in float64.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that the run's layout computes what plain torch computes on one device: losses, every gradient, weights.

    Exit code 1 where it does not, and where a gradient is zero on both sides. Dropout is off: no two layouts share
    its masks.

    Example: meshwright verify run.yaml layout.data.size=4 layout.data.sync=ring
    """
    config = _load(run, overrides)
    from meshwright.tools.verify import table
    from meshwright.tools.verify.job import verify as run_verification

    with progress() as show:
        verdict = run_verification(config, steps=steps, as_configured=as_configured, report=show)
    print_result(table, verdict, as_json)
    verdict.check()


@app.command()
def branches(
    run: RunFile,
    overrides: Overrides = None,
    grids: Annotated[str, Option(help="Numbers of sub-grids to assign the branches to.")] = "2,4,8",
    as_json: AsJson = False,
) -> None:
    """Find what a sub-graph layout could cut: the model's branches, what each costs, and the most that dealing gains.

    Example: meshwright branches run.yaml model.heads=16 --grids 2,4
    """
    from meshwright.config import load_config

    config = load_config(run, overrides or ())
    from meshwright.section import parse_counts
    from meshwright.tools.branches import report
    from meshwright.tools.branches.findings import find_branches

    print_result(report, find_branches(config, parse_counts("--grids", grids, "sub-grids", least=2)), as_json)


@app.command()
def plan(
    cluster: ClusterName,
    devices: Annotated[int, Option(min=1, help="On how many of its devices.")],
    run: Annotated[Path | None, Argument(metavar="RUN.yaml", help="The run file.", show_default=False)] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, Option(metavar="NAME", help="Instead of a run file: a model.")] = None,
    sequence: Annotated[int | None, Option(min=1, help="With --model: tokens of a sequence.")] = None,
    batch: Annotated[int | None, Option(min=1, help="With --model: samples a step.")] = None,
    top: Annotated[int, Option(min=1, help="How many of the fastest are shown.")] = 5,
    out: Annotated[Path, Option(help="The run file to write, with the fastest; must be new.")] = Path("plan.yaml"),
    trace: Annotated[
        Path | None, Option(metavar="FILE.json", help="The fastest one's step for Perfetto, and as a picture.")
    ] = None,
    page: Annotated[
        Path | None, Option(metavar="FILE.html", help="The answer as a page, with what time and memory are made of.")
    ] = None,
    tokens: Annotated[
        str | None, Option(metavar="N", help="Tokens to train on, such as 100B: how long that is.")
    ] = None,
    price: Annotated[float | None, Option(min=0, help="Dollars a device and hour: what --tokens cost.")] = None,
    imbalance: Annotated[
        float, Option(metavar="X", help="Rows of the busiest rank's experts in those of an even router.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Find the layouts of a run that are the fastest on a cluster, of all that are legal and fit.

    The run file's layout, microbatch, recomputation and offload are free; what a key=value word sets stays. Its corpus
    and tokenizer need not be here. Ctrl-C, or SIGTERM, ends the search with the best so far.

    Example: meshwright plan --model llama-3.1-8b --sequence 8192 --batch 512 --cluster dgx-h100 --devices 64
    """
    from meshwright.tools.plan import answer, report
    from meshwright.tools.plan.cluster import load_cluster
    from meshwright.tools.plan.estimate import Estimates
    from meshwright.tools.plan.page import write_plan_page
    from meshwright.tools.plan.predict import Planner
    from meshwright.tools.plan.question import NamedRun, planned_run, stopped_by_signals
    from meshwright.tools.plan.search import search
    from meshwright.tools.plan.software import software_of
    from meshwright.tools.plan.space import fixed_fields

    training, described = answer.Training(answer.parse_tokens(tokens), price), load_cluster(cluster)
    config, words = planned_run(run, NamedRun(model, sequence, batch), overrides or (), described)
    report.check_new("--out", out)
    report.check_new("--page", page)
    models = Estimates(Planner(described, software_of(config, imbalance)))
    with progress() as show, stopped_by_signals(show) as tell:
        plans = search(
            config, described, devices, top,
            fixed=fixed_fields(words), models=models, report=tell, partial=True, processes=usable_cores(),
        )  # fmt: skip
        changes = () if plans.stopped else answer.changes(plans.predictions[0], models)
    plans = replace(plans, training=training, changes=changes)
    report.write_run(plans.predictions[0], out)
    written = [out] if trace is None else [out, trace, report.write_timeline(plans.predictions[0], trace)]
    if page is not None:
        write_plan_page(plans, page, model or (run.stem if run is not None else ""))
        written.append(page)
    print_result(report, plans, as_json, written)


@app.command()
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
    """Predict how strategies scale: the fastest layout of each that fits, on more and more devices.

    What a key=value word sets of a layout stays, in all of them.

    Example: meshwright scale run.yaml --cluster dgx-a100 --devices 4,16,64,256 --mode weak --out out/weak
    """
    from meshwright.config.load import load_undecided

    config = load_undecided(run, overrides or ())
    from meshwright.section import parse_counts
    from meshwright.tools.plan import report, scale
    from meshwright.tools.plan.cluster import load_cluster
    from meshwright.tools.plan.space import fixed_fields

    names = tuple(scale.STRATEGIES) if strategies is None else scale.parse_strategies(strategies)
    described, fixed = load_cluster(cluster), fixed_fields(overrides or ())
    question = scale.ScalingQuestion(
        config, described, parse_counts("--devices", devices, "devices", least=1), scale.parse_mode(mode), names, fixed
    )
    if out is not None:
        report.check_new("--out", out)
    with progress() as show:
        scaling = scale.scale(question, scale.searching(described, show))
    print_result(scale, scaling, as_json, [] if out is None else scale.write(scaling, out))


@app.command()
def submit(
    run: RunFile,
    on: Annotated[str, Option(help="slurm, kubernetes or ray.")],
    overrides: Overrides = None,
    nodes: Annotated[int, Option(min=1, help="Over how many nodes; each has as many ranks.")] = 1,
    out: Annotated[
        Path | None, Option(help="Where the run is written, as the nodes see it; NAME-OF-RUN in out or on the volume.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="key=value", help="A setting of the engine: time=04:00:00.")
    ] = None,
    to: Annotated[
        Path | None, Option(help="The file to write; must be new. NAME-OF-RUN.sbatch, .yaml or _ray.py.")
    ] = None,
    go: Annotated[bool, Option("--go", help="Hand it to the engine as well, by sbatch, kubectl or ray.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write what Slurm, Kubernetes or Ray needs to run this: a run that is stopped saves, and is queued again.

    Example: meshwright submit run.yaml device=cuda --on slurm --nodes 2 --set time=04:00:00 --go
    """
    from meshwright.tools.submit import job

    engine, name = job.engine_of(on, settings or ())
    where = (out.absolute() if engine.shares_folders else out) if out else engine.folder / run.stem
    submission = job.submission_of(run, overrides or (), where, nodes, name, shares_folders=engine.shares_folders)
    file = to or Path(f"{submission.name}{engine.suffix}")
    job.write_script(engine.text(submission), file)
    command = engine.command(file)
    answer = job.submit(command) if go else None
    if as_json:
        print(json.dumps({"written": str(file), "command": command, "answer": answer}))
        return
    print(f"written: {file}")
    print(answer if go else f"submit it with: {' '.join(command)}")


@app.command()
def calibrate(
    out: Annotated[Path, Option(help="The cluster file to write.")] = Path("cluster.yaml"),
    ranks: Annotated[str | None, Option(help="Between how many ranks links are timed; 2,4, or up to all GPUs.")] = None,
    device: DeviceOption = "auto",
    quick: Annotated[bool, Option("--quick", help="Half a minute instead of three: fewer sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, for `plan --cluster FILE`: products, memory, and the links of each transport.

    Nothing else should run meanwhile.

    Example: meshwright calibrate --out here.yaml --ranks 2,4
    """
    from meshwright.tools.calibrate import report
    from meshwright.tools.calibrate.job import calibrate as run_calibration
    from meshwright.tools.calibrate.job import measured_machine
    from meshwright.tools.calibrate.timing import effort_of

    machine = measured_machine(ranks, device)
    with progress() as show:
        cluster = run_calibration(out, machine, effort_of(machine.kind, quick=quick), show)
    if as_json:
        print(json.dumps(report.as_dict(cluster, out)))
    else:
        report.render(cluster, out)


@app.command()
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
    """Run layouts in turns on this machine: time, memory, bytes sent and losses, measured beside predicted.

    Example: meshwright compare run.yaml --layouts rows.yaml stages.yaml --cluster here.yaml --rounds 3
    """
    from meshwright.tools.compare import report
    from meshwright.tools.compare.job import PAGE, Order, cluster_of, require_all
    from meshwright.tools.compare.job import compare_layouts as run_comparison
    from meshwright.tools.compare.layouts import LayoutRequest, contenders_of, split_words

    words, files = split_words(overrides or (), layouts or ())
    facts = cluster_of(cluster)
    order = Order(run.stem, out or Path("out") / f"{run.stem}-compared", steps, rounds)
    with progress() as show:
        contenders = contenders_of(LayoutRequest(run, words, files, top, devices), facts, show)
        comparison = run_comparison(contenders, order, facts, show)
    print_result(report, comparison, as_json, [order.out / PAGE])
    require_all(comparison, order.out)
