"""The planner's commands: one function each, which cli.py registers; nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli_options import AsJson, progress


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
    from meshwright.calibrate.job import calibrate as run_calibration
    from meshwright.calibrate.job import this_machine
    from meshwright.calibrate.report import as_dict, render
    from meshwright.calibrate.timing import effort_of

    machine = this_machine(ranks, device)
    with progress() as show:
        cluster = run_calibration(out, machine, effort_of(machine.kind, quick=quick), show)
    if as_json:
        print(json.dumps(as_dict(cluster, out)))
    else:
        render(cluster, out)


COMMANDS: tuple[Callable[..., None], ...] = (calibrate,)
"""In the order in which the help lists them."""
