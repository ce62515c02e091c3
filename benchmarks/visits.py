"""Many configs in one team of workers, visited in turn and built anew each time: fifty cost the start of one.

A visit is WARM_UPS untimed steps and some timed steps. The harness lets the team run one visit at a time, in the order
of the configs, and from the first again.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, Option, Place, Step
from benchmarks.ours import reference_config, steps_of
from benchmarks.team import Team
from meshwright.config import Config
from meshwright.ranks.environment import Rendezvous, read_environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import open_mesh
from meshwright.training.decisions import resolve_layout
from meshwright.training.parts import build

Options = dict[str, Option]

WARM_UPS = 3
"""Untimed steps of a visit: in the first the layout is connected and built, in the next two the heap still grows."""


class Visitor:
    """A team; each `run` visits the next config. All configs have `ranks` ranks on one `transport`."""

    def __init__(self, configs: Sequence[Options], transport: str, ranks: int, steps: int, folder: Path) -> None:
        self.steps = steps
        launcher: Any = "mpi" if transport == "mpi" and ranks > 1 else "torch"
        options: Options = {"configs": json.dumps(configs), "steps": steps}
        name = f"{ranks} ranks {transport}"
        self.team = Team(Contender(name, "benchmarks.visits:visits", options, ranks, launcher), folder)

    def run(self) -> float:
        """Return milliseconds of a step of the next config: the median of a visit's timed steps."""
        times, _ = self.team.run(WARM_UPS + self.steps)
        return statistics.median(times[WARM_UPS:])

    def close(self) -> None:
        self.team.close()


@contextmanager
def visits(place: Place, *, configs: str, steps: int) -> Iterator[Step]:
    """Yield steps of visits; `configs` is JSON, with options of the reference model's config for each visit."""
    made = [reference_config(options) for options in json.loads(configs)]
    tours = itertools.count()
    with ExitStack() as team:
        point = _meeting_point(place, made[0], team)
        visit = team.enter_context(ExitStack())
        left, turn = 0, _nothing

        def step() -> float:
            nonlocal left, turn
            if not left:
                visit.close()
                turn = _nothing
                gc.collect()  # the last layout's tensors, groups and threads
                tour = next(tours)
                turn, left = visit.enter_context(_built(made[tour % len(made)], tour, point)), WARM_UPS + steps
            left -= 1
            return turn()

        yield step


def _nothing() -> float:
    return 0.0


def _meeting_point(place: Place, config: Config, team: ExitStack) -> Rendezvous:
    """Return one store for all visits: ranks that are still in the last visit would connect to a new store."""
    point = rendezvous()
    if place.ranks == 1 or config.layout.transport == "mpi":
        return point
    if place.rank == 0:
        store = torch.distributed.TCPStore(point.address, point.port, None, True, wait_for_workers=False)
        team.callback(lambda: store)  # lives as long as the team
    return replace(point, hosted=True)


@contextmanager
def _built(config: Config, tour: int, point: Rendezvous) -> Iterator[Step]:
    layout, environment = config.layout, replace(read_environment(), attempt=tour)
    transport, device = layout.transport, torch.device("cpu")
    with (
        open_mesh(Grid(layout.axes), environment, transport, device, point, layout.token_axes) as mesh,
        steps_of(build(resolve_layout(config, Machine.here()).config, mesh)) as step,
    ):
        yield step
