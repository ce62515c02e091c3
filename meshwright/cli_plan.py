"""The planner's commands: one function each, which cli.py registers; nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli_options import AsJson, Overrides, RunFile, progress


def calibrate(
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.yaml"),
    ranks: Annotated[
        str | None, typer.Option(help="Between how many ranks links are timed; 2,4, or up to all GPUs.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute instead of three: fewer sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, for `plan --cluster FILE`: products, memory, and the links of each transport.

    Nothing else should run meanwhile.

    Example: meshwright calibrate --out here.yaml --ranks 2,4
    """
    from meshwright.tools.calibrate.job import calibrate as run_calibration
    from meshwright.tools.calibrate.job import this_machine
    from meshwright.tools.calibrate.report import as_dict, render
    from meshwright.tools.calibrate.timing import effort_of

    machine = this_machine(ranks, device)
    with progress() as show:
        cluster = run_calibration(out, machine, effort_of(machine.kind, quick=quick), show)
    if as_json:
        print(json.dumps(as_dict(cluster, out)))
    else:
        render(cluster, out)


def compare(
    run: RunFile,
    overrides: Overrides = None,
    layouts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE ...", help="Layouts that lie over the run's: YAML files, whole run files too."),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="The planner's so many fastest layouts that fit.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Predict with its facts: a name or a file; cluster.yaml, if it is here.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="With --top: ranks to plan for; all devices here.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run; the first two are not timed.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each layout is run, in turns.")] = 2,
    out: Annotated[Path | None, typer.Option(help="A new folder for the page; out/NAME-OF-RUN-compared.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run layouts in turns on this machine: time, memory, bytes sent and losses, measured beside predicted.

    Example: meshwright compare run.yaml --layouts rows.yaml stages.yaml --cluster here.yaml --rounds 3
    """
    from meshwright.tools.compare.ask import Asked, Foresight, entries_of, split_words
    from meshwright.tools.compare.job import PAGE, Order, check
    from meshwright.tools.compare.job import compare as run_comparison
    from meshwright.tools.compare.table import as_dict, render

    words, files = split_words(overrides or (), layouts or ())
    foresight = Foresight.on(cluster)
    order = Order(run.stem, out or Path("out") / f"{run.stem}-compared", steps, rounds)
    with progress() as show:
        entries = entries_of(Asked(run, words, files, top, devices), foresight, show)
        made = run_comparison(entries, order, foresight, show)
    if as_json:
        print(json.dumps(as_dict(made)))
    else:
        render(made)
        print(f"written: {order.out / PAGE}")
    check(made, order.out)


def plan(
    run: RunFile,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="One of meshwright/configs/clusters, or a file of calibrate.")
    ],
    devices: Annotated[int, typer.Option(min=1, help="On how many of its devices.")],
    overrides: Overrides = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the fastest are shown.")] = 5,
    out: Annotated[Path, typer.Option(help="The run file to write, with the fastest; must be new.")] = Path(
        "plan.yaml"
    ),
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="The fastest one's step for Perfetto, and as a picture.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the layouts of a run that are the fastest on a cluster, of all that are legal and fit.

    The run file's layout, microbatch, recomputation and offload are free; what a key=value word sets stays.

    Example: meshwright plan run.yaml layout.data.sync=zero1 --cluster dgx-a100 --devices 64 --out best.yaml
    """
    from meshwright.tools.plan.auto import load_free

    config = load_free(run, overrides or ())
    from meshwright.tools.plan.cluster import load_cluster
    from meshwright.tools.plan.output import check_new, write_run, write_timeline
    from meshwright.tools.plan.report import as_dict, render
    from meshwright.tools.plan.search import search
    from meshwright.tools.plan.space import fixed_fields

    described = load_cluster(cluster)
    check_new(out)
    with progress() as show:
        found = search(config, described, devices, top, fixed=fixed_fields(overrides or ()), report=show)
    write_run(found.predictions[0], out)
    written = [out] if trace is None else [out, trace, write_timeline(found.predictions[0], trace)]
    if as_json:
        print(json.dumps(as_dict(found) | {"written": list(map(str, written))}))
    else:
        render(found)
        print("written: " + ", ".join(map(str, written)))


def scale(
    run: RunFile,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="One of meshwright/configs/clusters, or a file of calibrate.")
    ],
    devices: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of devices.")],
    overrides: Overrides = None,
    mode: Annotated[
        str, typer.Option(help="strong: the run's global batch; weak: that of the fewest devices, growing with them.")
    ] = "strong",
    strategies: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="data, zero1, megatron, tesseract, subgraph, pipeline, best.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the curves: PNG, CSV, JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how strategies scale: the fastest layout of each that fits, on more and more devices.

    What a key=value word sets of a layout stays, in all of them.

    Example: meshwright scale run.yaml --cluster dgx-a100 --devices 4,16,64,256 --mode weak --out out/weak
    """
    from meshwright.tools.plan.auto import load_free

    config = load_free(run, overrides or ())
    from meshwright.tools.plan.cluster import load_cluster
    from meshwright.tools.plan.output import check_new
    from meshwright.tools.plan.scale import STRATEGIES, Question, Search, parse_devices, parse_mode, parse_strategies
    from meshwright.tools.plan.scale import scale as find_scaling
    from meshwright.tools.plan.scale_report import as_dict, render, write
    from meshwright.tools.plan.space import fixed_fields

    names = tuple(STRATEGIES) if strategies is None else parse_strategies(strategies)
    described, given = load_cluster(cluster), fixed_fields(overrides or ())
    question = Question(config, described, parse_devices(devices), parse_mode(mode), names, given)
    if out is not None:
        check_new(out)
    with progress() as show:
        made = find_scaling(question, Search(described, show))
    written = [] if out is None else write(made, out)
    if as_json:
        print(json.dumps(as_dict(made) | {"written": list(map(str, written))}))
        return
    render(made)
    if written:
        print("written: " + ", ".join(map(str, written)))


COMMANDS: tuple[Callable[..., None], ...] = (plan, scale, calibrate, compare)
"""In the order in which the help lists them."""
