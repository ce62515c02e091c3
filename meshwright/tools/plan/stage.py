"""A stage of a layout, composed of its links' programs: what its tasks cost, and which parameters it holds.

Tasks run their links one after the other, forward from the first, backward from the last; memory is followed from link
to link. What a link gives to the next stays in memory, since the next one's backward pass reads it; what it gives to
another stage leaves, and what came from one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

from meshwright.build import recomputed_group
from meshwright.config import Config
from meshwright.memory.recompute import groups_of
from meshwright.model import Chunk
from meshwright.pipeline.task import Kind
from meshwright.ranks.ledger import Traffic
from meshwright.tools.plan.cluster import Device
from meshwright.tools.plan.program import Program
from meshwright.tools.plan.recordings import Forms, Link, Parameter, Recordings, place

Sent = dict[tuple[str, str], Traffic]
Seconds = Callable[[Program], float]


@dataclass(frozen=True)
class Cost:
    """Of a task or a part of one: memory as in program.py."""

    seconds: float = 0.0
    kept_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0

    def then(self, other: Cost) -> Cost:
        """This one, and after it the other."""
        return Cost(
            self.seconds + other.seconds,
            self.kept_bytes + other.kept_bytes,
            max(self.peak_bytes, self.kept_bytes + other.peak_bytes),
            self.flops + other.flops,
        )

    def freeing(self, freed_bytes: int) -> Cost:
        """With so much less kept at the end."""
        return replace(self, kept_bytes=self.kept_bytes - freed_bytes)

    def extended(self, step: Cost, times: int) -> Cost:
        """This one, plus so many times what it has more than `step`."""
        return Cost(
            self.seconds + times * (self.seconds - step.seconds),
            self.kept_bytes + times * (self.kept_bytes - step.kept_bytes),
            self.peak_bytes + times * (self.peak_bytes - step.peak_bytes),
            self.flops + times * (self.flops - step.flops),
        )


@dataclass(frozen=True)
class Unit:
    """Links that are run at once: one; or a group of `layers` like ones that are recomputed together, of which groups
    of two and of one are known.
    """

    link: Link
    parameters: tuple[Parameter, ...]
    smaller: Link | None = None
    layers: int = 1

    def cost(self, kind: Kind, which: int, seconds: Seconds) -> Cost:
        cost = _cost(self.link.programs[kind][which], seconds)
        if self.smaller is None:
            return cost
        return cost.extended(_cost(self.smaller.programs[kind][which], seconds), self.layers - 2)

    def sent(self, kind: Kind, which: int) -> Sent:
        total: Sent = {}
        include(total, self.link.programs[kind][which].traffic, 1 if self.smaller is None else self.layers - 1)
        if self.smaller is not None:
            include(total, self.smaller.programs[kind][which].traffic, 2 - self.layers)
        return total

    @property
    def names(self) -> list[str]:
        """Of its parameters."""
        return [parameter.name for parameter in self.parameters]

    def freed(self, kind: Kind, read_bytes: int) -> int:
        """After B, or where its W needs them after that: what it was given to read, so many bytes, and the gradient
        that came back from the next link."""
        gradient_bytes = sum(form.size_bytes for form in self.link.outgoing)
        waits = min(read_bytes, self.link.kept_input_bytes), min(gradient_bytes, self.link.kept_gradient_bytes)
        return sum(waits) if kind is Kind.WEIGHT else read_bytes + gradient_bytes - sum(waits)


@dataclass(frozen=True)
class StagePlan:
    """`units`: in the order of the forward pass; `incoming`: from the stage before."""

    units: tuple[Unit, ...]
    parameters: tuple[Parameter, ...]
    incoming: Forms
    outgoing: Forms

    @property
    def incoming_bytes(self) -> int:
        return sum(form.size_bytes for form in self.incoming)

    @property
    def outgoing_bytes(self) -> int:
        return sum(form.size_bytes for form in self.outgoing)

    def cost(self, kind: Kind, which: int, seconds: Seconds) -> Cost:
        """A task of a microbatch at a place of the step (recordings.place)."""
        return reduce(Cost.then, self.costs(kind, which, seconds), Cost())

    def costs(self, kind: Kind, which: int, seconds: Seconds) -> list[Cost]:
        """The same by unit, in the order in which they run; what comes and leaves counts at the ends."""
        order = self.units if kind is Kind.FORWARD else self.units[::-1]
        costs = [unit.cost(kind, which, seconds) for unit in order]
        if kind is Kind.FORWARD:
            costs[-1] = costs[-1].freeing(order[-1].link.output_bytes - self.incoming_bytes)
            dropped = [
                0,
                *(0 if unit.link.holds_input else before.link.output_bytes for before, unit in pairwise(order)),
            ]
            return [cost.freeing(input_bytes) for cost, input_bytes in zip(costs, dropped, strict=True)]
        given = [before.link.output_bytes if unit.link.holds_input else 0 for unit, before in pairwise(order)]
        given.append(self.incoming_bytes)
        costs = [cost.freeing(unit.freed(kind, read)) for cost, unit, read in zip(costs, order, given, strict=True)]
        if kind is Kind.BACKWARD:
            costs[0] = costs[0].freeing(-self.outgoing_bytes)  # came with a message, and is counted there
            costs[-1] = costs[-1].freeing(self.incoming_bytes)  # made here, and sent
        return costs

    def sent(self, kind: Kind, which: int) -> Sent:
        """What the kit sends in a task."""
        total: Sent = {}
        for unit in self.units:
            include(total, unit.sent(kind, which))
        return total


def plan_stretches(config: Config, device: Device, recordings: Recordings, chunks: Sequence[Chunk]) -> list[StagePlan]:
    """All stages, of which each is given what the one before gives."""
    stages: list[StagePlan] = []
    order = recordings.outline(config).order
    forms: Forms = ()
    for chunk in chunks:
        incoming = forms
        units: list[Unit] = []
        parameters: dict[str, Parameter] = {}
        for run in _runs(config, chunk):
            unit = _unit(config, device, recordings, run, forms)
            forms = unit.link.outgoing
            units.append(unit)
            parameters |= {parameter.name: parameter for parameter in unit.parameters}
        held = sorted(parameters.values(), key=lambda parameter: order[parameter.name])
        stages.append(StagePlan(tuple(units), tuple(held), incoming, () if chunk.last else forms))
    return stages


def include(total: Sent, more: Mapping[tuple[str, str], Traffic], times: int = 1) -> None:
    """Add so many times what is in `more`."""
    for key, entry in more.items():
        total.setdefault(key, Traffic()).include(entry.scaled(times))


def _runs(config: Config, chunk: Chunk) -> list[Chunk]:
    """The chunk's links: its beginning, its layers, in groups where they are recomputed, its end."""
    every = 1
    if config.memory.recompute not in ("none", "selective"):
        every = recomputed_group(config, len(chunk.layers))
    runs = [Chunk(range(0), True, False)] if chunk.first else []
    runs += [Chunk(group, False, False) for group in groups_of(chunk.layers, every)]
    return runs + ([Chunk(range(0), False, True)] if chunk.last else [])


def _unit(config: Config, device: Device, recordings: Recordings, run: Chunk, incoming: Forms) -> Unit:
    """A run of layers as a unit."""
    count, layers = len(run.layers), run.layers
    alike = {recordings.outline(config).alike[layer] for layer in layers}
    if count <= 2 or len(alike) > 1:
        link = recordings.link(config, device, run, incoming)
        return Unit(link, link.parameters)
    ones = [recordings.link(config, device, Chunk(range(layer, layer + 1), False, False), incoming) for layer in layers]
    two = recordings.link(config, device, Chunk(layers[:2], False, False), incoming)
    return Unit(two, tuple(parameter for one in ones for parameter in one.parameters), ones[0], count)


def _cost(program: Program, seconds: Seconds) -> Cost:
    return Cost(seconds(program), program.kept_bytes, program.peak_bytes, program.flops)


def microbatch_places(num_microbatches: int) -> list[int]:
    """How many microbatches there are at each place of the step."""
    places = [place(index, num_microbatches) for index in range(num_microbatches)]
    return [places.count(which) for which in range(max(places) + 1)]
