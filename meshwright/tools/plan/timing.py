"""How long a program takes: kernels one after the other, collectives under them as far as the links allow.

A rank has two lanes: it computes, and collectives go on one after the other. One that is waited for at once takes its
whole time; of one that is begun earlier, the part `Links.overlaps` goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshwright.ranks.topology import FROM_ROOT, TO_ROOT
from meshwright.tools.plan.kernels import Kernels
from meshwright.tools.plan.program import Kernel, Program, Start, Wait
from meshwright.tools.plan.wires import Wires

Step = float | Start | Wait
"""Seconds of kernels, or what is begun or waited for."""


@dataclass
class Pace:
    """How fast the ranks of a cluster go; remembers what it has added up of each program."""

    kernels: Kernels
    _steps: dict[int, tuple[Program, tuple[Step, ...]]] = field(default_factory=dict)

    def seconds(self, program: Program, wires: Wires) -> float:
        """Of a program from its beginning to its last kernel or wait."""
        return self._played(program, wires, wires.overlaps)

    def apart(self, program: Program, wires: Wires) -> float:
        """The same where nothing is sent under kernels."""
        return self._played(program, wires, 0.0)

    def computing(self, program: Program) -> float:
        """Its kernels alone."""
        return sum(step for step in self._condensed(program) if isinstance(step, float))

    def _played(self, program: Program, wires: Wires, overlaps: float) -> float:
        return play(
            self._condensed(program),
            lambda start: start.times * wires.collective(start.axes, start.verb, start.payload_bytes),
            overlaps,
            self.kernels.gain(self.kernels.ranks_per_node // program.leads) if program.leads > 1 else 1.0,
        )

    def _condensed(self, program: Program) -> tuple[Step, ...]:
        if id(program) not in self._steps:
            self._steps[id(program)] = program, tuple(self._condense(program))  # held, so that no other has its id
        return self._steps[id(program)][1]

    def _condense(self, program: Program) -> Iterable[Step]:
        """Kernels in a row as one number."""
        seconds = 0.0
        for event in program.events:
            if isinstance(event, Kernel):
                seconds += event.times * self.kernels.seconds(event)
            else:
                yield seconds
                yield event
                seconds = 0.0
        yield seconds


def play(steps: Iterable[Step], collective: Callable[[Start], float], overlaps: float, alone: float = 1.0) -> float:
    """The moment at which the rank is done with all steps, from 0. `collective`: seconds of one that is waited for;
    `alone`: how much faster a rank is while those wait that it leads (Program.leads)."""
    now, free, pace = 0.0, 0.0, alone
    under_way: dict[int, tuple[float, float, str]] = {}
    for step in steps:
        if isinstance(step, float):
            now += step / pace
        elif isinstance(step, Start):
            seconds = collective(step)
            free = max(now, free) + overlaps * seconds
            under_way[step.number] = free, (1 - overlaps) * seconds, step.verb
            pace = 1.0 if step.verb in FROM_ROOT else pace
        else:
            hidden, rest, verb = under_way.pop(step.number)
            now = max(now, hidden) + rest
            free = max(free, now if rest else free)
            pace = alone if verb in TO_ROOT else pace
    return now
