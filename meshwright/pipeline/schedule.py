"""Schedules: what a stage does next, as pure functions of its view.

| schedule | decides | backward | limit at stage i of p, n microbatches |
|---|---|---|---|
| GPipe (Huang et al. 2019) | F up to the limit, then B: in that order, whatever came first | whole | n |
| 1F1B (PipeDream-Flush, Narayanan et al. 2021) | the same | whole | p - i: p - i - 1 F to warm up, then F, B, ... |
| AxoNN (Singh and Bhatele 2022, algorithm 2) | on the message that came first | whole | p |
| message-driven (ours) | B, else F below the limit, else W | B and W | 2p, or what memory allows |
| forward only | F | none | 1 |

GPipe and 1F1B are one function: their limits make the difference. Sends never wait, under any of them. The static
order that breaks ties is that of the microbatches: F, B and W each run in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.pipeline.task import Task, TaskKind, View

Schedule = Callable[[View], Task | None]
"""The task to do next, which must be ready; None: wait for a message."""

Limit = Callable[[int, int, int], int]
"""limit(stage, num_stages, num_microbatches): the most microbatches in flight at a stage."""


def forward_first(view: View) -> Task | None:
    """GPipe and 1F1B: forward passes up to the limit, then one backward pass for each. The order is fixed: a task whose
    message is late is waited for.

    Limits must not rise from a stage to the next, or the stages wait for each other.
    """
    below = view.forwards < view.num_microbatches and view.in_flight < view.limit
    kind = TaskKind.FORWARD if below else TaskKind.BACKWARD
    return view.next(kind) if view.ready(kind) else None


def axonn(view: View) -> Task | None:
    """The paper's: act on what came first. The first stage injects up to the limit, and one more after each backward
    pass; the last stage goes backward at once.
    """
    if view.is_last and view.ready(TaskKind.BACKWARD):
        return view.next(TaskKind.BACKWARD)
    if view.is_first and view.ready(TaskKind.FORWARD):
        return view.next(TaskKind.FORWARD)
    for kind in view.arrivals:
        if view.ready(kind):
            return view.next(kind)
    return None


def message_driven(view: View) -> Task | None:
    """Ours: the backward pass first, since a neighbour waits for it; then forward; weight gradients, which nobody
    waits for, fill every wait. Weight gradients also make room: a stage at its limit runs them before it sleeps.
    """
    for kind in (TaskKind.BACKWARD, TaskKind.FORWARD, TaskKind.WEIGHT):
        if view.ready(kind):
            return view.next(kind)
    return None


def forward_only(view: View) -> Task | None:
    """An evaluation: nothing comes back, and nothing is held."""
    return view.next(TaskKind.FORWARD) if view.ready(TaskKind.FORWARD) else None


@dataclass(frozen=True)
class ScheduleRule:
    """A schedule and what it goes with: the tasks of a microbatch, and the limit of each stage.

    `held`: the most microbatches that a stage holds of its limit, where nothing is late: it warms up with as many as
    there are stages from it to the last.
    """

    schedule: Schedule
    kinds: tuple[TaskKind, ...]
    limit: Limit
    held: Limit = lambda stage, num_stages, limit: min(limit, num_stages - stage)
    """held(stage, num_stages, limit)."""
    fixed: bool = False
    """Whether the order of tasks is fixed, and with it the limit: `layout.pipeline.limit` has no effect."""
    by_memory: bool = False
    """Whether a run without a limit of its own takes as many microbatches as memory allows."""

    @property
    def splits(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return TaskKind.WEIGHT in self.kinds

    def view(self, stage: int, num_stages: int, num_microbatches: int) -> View:
        """A stage before its first task."""
        limit = self.limit(stage, num_stages, num_microbatches)
        return View(stage, num_stages, num_microbatches, limit, self.kinds)

    def limited(self, limit: int) -> ScheduleRule:
        """The same with `limit` microbatches in flight at every stage."""
        return replace(self, limit=lambda stage, num_stages, num_microbatches: limit)


WHOLE = (TaskKind.FORWARD, TaskKind.BACKWARD)
SPLIT = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT)

GPIPE = ScheduleRule(
    forward_first, WHOLE, lambda stage, num_stages, num_microbatches: num_microbatches,
    held=lambda stage, num_stages, limit: limit, fixed=True,
)  # fmt: skip
ONE_F_ONE_B = ScheduleRule(
    forward_first, WHOLE, lambda stage, num_stages, num_microbatches: num_stages - stage, fixed=True
)
AXONN = ScheduleRule(axonn, WHOLE, lambda stage, num_stages, num_microbatches: num_stages)
MESSAGE_DRIVEN = ScheduleRule(
    message_driven, SPLIT, lambda stage, num_stages, num_microbatches: 2 * num_stages,
    held=lambda stage, num_stages, limit: limit if stage == 0 else min(limit, num_stages - stage), by_memory=True,
)  # fmt: skip
FORWARD_ONLY = ScheduleRule(forward_only, (TaskKind.FORWARD,), lambda stage, num_stages, num_microbatches: 1)
