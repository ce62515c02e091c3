"""`meshwright compare`: checks all layouts, predicts all, runs all in rounds, then writes the results.

OUT has comparison.html, .png and .json; and for each run a folder LAYOUT/round-R with config, metrics and ranks. A
round runs each layout once, from the initial weights. Every second round runs in reverse order, so that a machine that
becomes hot or busy favours no layout.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.data.files import ShowProgress, silent
from meshwright.output.drawing import require_matplotlib
from meshwright.planner.plan.cluster import CALIBRATED, Cluster, load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.errors import ConfigError, LaunchError, Problem
from meshwright.ranks.launch import Interrupted, joined
from meshwright.ranks.machine import Machine, usable_cores
from meshwright.tools.compare.layouts import Contender
from meshwright.tools.compare.report import as_dict, draw, html_of
from meshwright.tools.compare.result import WARMUP_STEPS, Comparison, Measurement
from meshwright.training.decisions import in_steps, resolve_process, this_machine
from meshwright.training.measured_run import measure_run

PAGE, PICTURE, NUMBERS = "comparison.html", "comparison.png", "comparison.json"
NO_CLUSTER = f"Nothing was predicted: no --cluster, and no {CALIBRATED} here, which `meshwright calibrate` writes."


@dataclass(frozen=True)
class Order:
    """Parameters of a comparison."""

    title: str
    """The run's name."""
    out: Path
    """The folder to write to."""
    steps: int
    """Steps of each run."""
    rounds: int
    """Number of rounds; a round runs every layout once."""
    command: str = ""
    """The command line, shown on the page; empty if a program called."""


def cluster_of(name: str | None) -> Cluster | None:
    """Load a cluster by name or file; for None the calibrated cluster, if the current folder has one.

    Raises ConfigError if there is no such cluster.
    """
    if name is None and CALIBRATED.is_file():
        name = str(CALIBRATED)
    return load_cluster(name) if name is not None else None


def compare_layouts(
    contenders: Sequence[Contender], order: Order, cluster: Cluster | None, report: ShowProgress = silent
) -> Comparison:
    """Run the layouts and write the results.

    A layout that fails is left out of later rounds, and the result has the reason. Without a cluster nothing is
    predicted. Raises ConfigError before any process starts; Interrupted, after the results of finished runs were
    written.
    """
    if joined():
        raise LaunchError("compare starts its own workers: run it outside of torchrun, srun and mpirun")
    require_matplotlib("compare's picture")
    contenders = on_one_device(contenders, this_machine())
    data = contenders[0].config.data.prepare(contenders[0].config, report)
    contenders = [replace(contender, config=in_steps(contender.config, data).config) for contender in contenders]
    processes = _checked(contenders, order)
    _make_folder(order.out)
    planner = Planner(cluster) if cluster is not None else None
    rows = []
    for contender, resolved in zip(contenders, processes, strict=True):
        report(f"predicting {contender.name}", None)
        predicted, reason = None, NO_CLUSTER
        if planner is not None:
            try:
                predicted, reason = planner.predict(contender.config), ""
            except ConfigError as error:
                reason = str(error)
        threads = resolved.threads if resolved.device == "cpu" and resolved.threads != "auto" else 1
        rows.append(Measurement(contender, predicted=predicted, unpredicted=reason, threads=threads))
    stopped = _measure(rows, order, data, report)
    comparison = Comparison(
        order.title,
        tuple(rows),
        order.steps,
        order.rounds,
        f"a CPU of {usable_cores()} cores" if processes[0].device == "cpu" else "GPUs",
        cluster=cluster.name if cluster is not None else "",
        unpredicted=NO_CLUSTER if cluster is None else "",
        interrupted=f"{stopped}, after {sum(len(row.runs) for row in rows)} of {order.rounds * len(rows)} runs"
        if stopped
        else "",
    )
    if comparison.measured:
        draw(comparison, order.out / PICTURE)
        (order.out / PAGE).write_text(
            html_of(comparison, (order.out / PICTURE).read_bytes(), order.command), encoding="utf-8"
        )
        (order.out / NUMBERS).write_text(json.dumps(as_dict(comparison), indent=1) + "\n", encoding="utf-8")
    if stopped is not None:
        stored = f"what was begun, in {order.out}"
        if comparison.measured:
            ended = [f"{row.name} ({len(row.runs)} of {order.rounds} rounds)" for row in comparison.measured]
            stored = f"{', '.join(ended)}, in {order.out / PAGE} and beside it"
        raise Interrupted(f"{comparison.interrupted}; kept: {stored}", stopped.signal)
    return comparison


def require_all(comparison: Comparison, out: Path) -> None:
    """Raise LaunchError if a layout did not finish."""
    failed = [row for row in comparison.rows if row.failure]
    if failed:
        causes = "\n".join(f"{row.name}: {row.failure}" for row in failed)
        raise LaunchError(f"{len(failed)} of {len(comparison.rows)} layouts failed; {out} has the others\n{causes}")


def _measure(rows: list[Measurement], order: Order, data: Path, report: ShowProgress) -> Interrupted | None:
    """Run all rounds and add each finished run, or the failure, to the layout's row.

    Returns the interruption that ended the rounds early, if any.
    """
    indices = range(len(rows))
    try:
        for turn in range(order.rounds):
            for index in indices if turn % 2 == 0 else reversed(indices):
                row = rows[index]
                if row.failure:
                    continue
                name = f"{index + 1}-" + re.sub(r"[^\w.-]+", "_", row.name)  # a layout's name may be no folder's
                folder = order.out / name / f"round-{turn + 1}"
                done = sum(len(each.runs) for each in rows)
                report(f"round {turn + 1} of {order.rounds}: {row.name}", done / (order.rounds * len(rows)))
                try:
                    finished = measure_run(_here(row.contender.config), data, folder, order.steps)
                    rows[index] = replace(row, runs=(*row.runs, finished))
                except Interrupted:
                    raise
                except LaunchError as error:
                    rows[index] = replace(row, failure=str(error))
    except Interrupted as error:
        return error
    except KeyboardInterrupt:  # between two jobs
        return Interrupted("stopped by SIGINT", signal.SIGINT)
    return None


def _here(config: Config) -> Config:
    """Return the config for a comparison: all ranks on this machine, no restarts."""
    # A layout that was planned for a cluster may ask for several nodes.
    layout = config.layout.model_copy(update={"ranks_per_node": "auto"})
    return with_field(config.model_copy(update={"layout": layout}), "restarts.times", 0)


def on_one_device(contenders: Sequence[Contender], machine: Machine) -> Sequence[Contender]:
    """Return the contenders, with device=cpu for device=auto unless the machine has enough GPUs for every layout."""
    most = max((contender.config.layout.world_size for contender in contenders), default=0)
    if machine.gpus >= most:
        return contenders
    host = {"device": "cpu"}
    return [
        replace(contender, config=contender.config.model_copy(update=host))
        if contender.config.device == "auto" else contender
        for contender in contenders
    ]  # fmt: skip


def _checked(contenders: Sequence[Contender], order: Order) -> list[Config]:
    """Return each layout's config with the device, threads and transport chosen for this machine.

    Raises ConfigError, under the layout's name, if this machine cannot run the layout.
    """
    names = [contender.name for contender in contenders]
    assert names, "nothing to compare"
    assert len(set(names)) == len(names), f"two layouts of one name: {names}"
    # The learning rate's schedule ends at config.steps.
    most = contenders[0].config.steps
    if not WARMUP_STEPS < order.steps <= most:
        rule = f"is no number of steps: the first {WARMUP_STEPS} are not timed"
        raise ConfigError.of("--steps", order.steps, rule, f"{WARMUP_STEPS + 1} to the run's {most}")
    machine = this_machine()
    processes: list[Config] = []
    problems: list[Problem] = []
    for contender in contenders:
        try:
            processes.append(resolve_process(_here(contender.config), machine).config)
        except ConfigError as error:
            problems += [replace(problem, field=f"{contender.origin}: {problem.field}") for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return processes


def _make_folder(out: Path) -> None:
    """Make the folder. Raises ConfigError if the folder is not empty, or cannot be made."""
    # The folder has runs, a page and a picture, which must not be mixed with older ones.
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError.of("--out", out, "is not empty", "a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be written to ({error.strerror})"
        raise ConfigError.of("--out", out, rule, "a folder that you may write to") from error
