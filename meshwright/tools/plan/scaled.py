"""Tasks of a microbatch of any size, from recordings of two sizes: good enough for an estimate, and dear only twice.

The operations of a link are the same whatever the microbatch's samples; each one's floating-point operations, bytes,
elements and payload are those of its samples plus those of its weights, which two recordings tell apart. So are its
repetitions, where it goes through samples in chunks. A product's side is as the cube root of its operations. Where two
recordings differ in more than that, nothing is told of the link.

Recomputation is left out here: it adds to a backward pass, and takes from what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from meshwright.config import Config
from meshwright.model import Stretch
from meshwright.pipeline.task import Kind
from meshwright.tools.plan.predict import Planner
from meshwright.tools.plan.program import Event, Kernel, Program, Start, Wait
from meshwright.tools.plan.recordings import Forms, Link
from meshwright.tools.plan.timing import Pace
from meshwright.tools.plan.wires import Wires

SIZES = 2, 4
"""Samples of the recordings, in those of the smallest microbatch that the tensor section can cut."""


@dataclass(frozen=True)
class Rough:
    """Of a link: seconds forward, backward, and of a backward pass that leaves weight gradients for later, when nothing
    is sent under them; of these; what a forward pass keeps, what it gives to the next; whether it is a layer."""

    forward: float
    backward: float
    inputs: float
    weights: float
    kept_bytes: float
    outgoing_bytes: int
    layer: bool


@dataclass(frozen=True)
class _Tasks:
    """Of a link: the programs of the places of a step, what a forward pass keeps, what it gives to the next."""

    programs: dict[Kind, tuple[Program, ...]]
    kept_bytes: float
    outgoing_bytes: int


class Scaled:
    """Of one run on one cluster."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._links: dict[Hashable, dict[int, tuple[Link, Link]]] = {}
        self._tasks: dict[Hashable, tuple[Pace, dict[int, _Tasks]]] = {}
        self._rough: dict[Hashable, dict[int, Rough]] = {}
        self._shares: dict[Hashable, float] = {}

    def links(self, config: Config) -> dict[int, Rough]:
        """The beginning under -1, the first of each layers that are alike, the end under their number."""
        key = config.layout.tensor, config.micro, self.strides(config)
        if key not in self._rough:
            wires = self.planner.wires(config)
            pace, links = self._tasks_of(config)
            ends = -1, config.model.num_blocks
            self._rough[key] = {
                place: _rough(pace, wires, tasks, layer=place not in ends) for place, tasks in links.items()
            }
        return self._rough[key]

    def kept_share(self, config: Config) -> float:
        """The part of what the first layer keeps that it keeps where attention is computed again."""
        tensor = config.layout.tensor
        if tensor not in self._shares:
            alone = _alone(config, SIZES[0] * smallest(config))
            again = alone.model_copy(update={"memory": alone.memory.model_copy(update={"recompute": "selective"})})
            recordings, device, layer = self.planner.recordings, self.planner.cluster.device, range(1)
            forms = recordings.link(alone, device, Stretch(range(0), True, False), ()).outgoing
            kept = [
                recordings.link(one, device, Stretch(layer, False, False), forms).programs[Kind.FORWARD][-1].kept_bytes
                for one in (alone, again)
            ]
            self._shares[tensor] = kept[1] / kept[0]
        return self._shares[tensor]

    def strides(self, config: Config, *more: str) -> Hashable:
        """How far apart the ranks are that share a layer, and those on more axes."""
        axes, names = config.layout.axes, {*(name for name, _ in config.layout.tensor.axes), *more}
        return tuple(
            (name, size, math.prod(after for _, after in axes[index + 1 :]))
            for index, (name, size) in enumerate(axes)
            if name in names
        )

    def _tasks_of(self, config: Config) -> tuple[Pace, dict[int, _Tasks]]:
        key = config.layout.tensor, config.micro
        if key not in self._tasks:
            share = (config.micro / smallest(config) - SIZES[0]) / (SIZES[1] - SIZES[0])
            links = {place: _scaled(*pair, share) for place, pair in self._recorded(config).items()}
            self._tasks[key] = Pace(self.planner.pace(config).kernels), links
        return self._tasks[key]

    def _recorded(self, config: Config) -> dict[int, tuple[Link, Link]]:
        tensor = config.layout.tensor
        fitted = tensor.by_size  # what stays, what travels: recorded for each size
        sizes = (config.micro,) * 2 if fitted else tuple(size * smallest(config) for size in SIZES)
        key = tensor, sizes
        if key not in self._links:
            small, large = (self._record(_alone(config, size)) for size in sizes)
            self._links[key] = {place: (small[place], large[place]) for place in small}
        return self._links[key]

    def _record(self, config: Config) -> dict[int, Link]:
        recordings, device = self.planner.recordings, self.planner.cluster.device
        forms: Forms = ()
        links: dict[int, Link] = {}
        links[-1] = recordings.link(config, device, Stretch(range(0), True, False), forms)
        forms = links[-1].outgoing
        for first in dict.fromkeys(recordings.outline(config).alike):
            links[first] = recordings.link(config, device, Stretch(range(first, first + 1), False, False), forms)
            forms = links[first].outgoing
        links[config.model.num_blocks] = recordings.link(config, device, Stretch(range(0), False, True), forms)
        return links


def _scaled(small: Link, large: Link, share: float) -> _Tasks:
    programs = {
        kind: tuple(
            between(one, other, share) for one, other in zip(small.programs[kind], large.programs[kind], strict=True)
        )
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    kept = [link.programs[Kind.FORWARD][-1].kept_bytes for link in (small, large)]
    given = [sum(form.size_bytes for form in link.outgoing) for link in (small, large)]
    return _Tasks(
        programs, max(0.0, kept[0] + share * (kept[1] - kept[0])), round(given[0] + share * (given[1] - given[0]))
    )


def _rough(pace: Pace, wires: Wires, tasks: _Tasks, *, layer: bool) -> Rough:
    """Half of a backward pass's kernels are for weights."""
    forward, backward = (
        min((pace.seconds(program, wires), place) for place, program in enumerate(tasks.programs[kind]))
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    program = tasks.programs[Kind.BACKWARD][backward[1]]
    weights = pace.computing(program) / 2
    inputs = pace.apart(program, wires) - weights
    return Rough(forward[0], backward[0], inputs, weights, tasks.kept_bytes, tasks.outgoing_bytes, layer)


def smallest(config: Config) -> int:
    """Samples that a microbatch must have for each rank to have one."""
    sizes = dict(config.layout.axes)
    return math.prod(sizes[axis] for axis in config.layout.tensor.batch_axes)


def _alone(config: Config, micro: int) -> Config:
    """One replica of one stage, with a step of few microbatches of so many samples."""
    one = {
        "data": config.layout.data.model_copy(update={"size": 1}),
        "pipeline": config.layout.pipeline.model_copy(update={"size": 1}),
    }
    count = 2 if config.layout.tensor.by_size else 1  # the first microbatch gathers weights
    batch = config.batch.model_copy(update={"global_": count * micro, "micro": micro})
    memory = config.memory.model_copy(update={"recompute": "none"})
    if memory.summa == "auto":
        memory = memory.model_copy(update={"summa": "gather"})
    return config.model_copy(update={"layout": config.layout.model_copy(update=one), "batch": batch, "memory": memory})


def between(small: Program, large: Program, share: float) -> Program:
    """The program of a microbatch at `share` of the way from the small one's to the large one's, or beyond."""
    if [_form(event) for event in small.events] != [_form(event) for event in large.events]:
        return Program()
    return Program(tuple(_between(one, other, share) for one, other in zip(small.events, large.events, strict=True)))


def _form(event: Event) -> tuple[str, ...]:
    match event:
        case Kernel():
            return event.kind, event.dtype
        case Start():
            return event.axes, event.verb
        case Wait():
            return ("wait",)


def _between(one: Event, other: Event, share: float) -> Event:
    def mixed(small: float, large: float) -> float:
        return max(0.0, small + share * (large - small))

    if isinstance(one, Kernel) and isinstance(other, Kernel):
        return Kernel(
            one.kind,
            mixed(one.flops, other.flops),
            round(mixed(one.touched_bytes, other.touched_bytes)),
            round(mixed(one.elements, other.elements)),
            one.dtype,
            mixed(one.side**3, other.side**3) ** (1 / 3),
            max(1, round(mixed(one.times, other.times))),
        )
    if isinstance(one, Start) and isinstance(other, Start):
        payload = round(mixed(one.payload_bytes, other.payload_bytes))
        return Start(one.number, one.axes, one.verb, payload, one.root, max(1, round(mixed(one.times, other.times))))
    return one
