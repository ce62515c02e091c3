"""Schedules: what a stage does next, as pure functions of its view.

| schedule | decides | backward | limit at stage i of p, n microbatches | with c chunks |
|---|---|---|---|---|
| GPipe (Huang et al. 2019) | F up to the limit, then B: in that order, whatever came first | whole | n | c n |
| 1F1B (PipeDream-Flush, Narayanan et al. 2021) | the same | whole | p - i | c p + p - 2 i - 1 |
| AxoNN (Singh and Bhatele 2022, algorithm 2) | on the message that came first | whole | p | |
| message-driven (ours) | B, else F below the limit, else W | B and W | 2p, or what memory allows | 2 c p, or the same |
| the same, a v of c = 2 with memory for little more than 2p | ZB-V's F and B, W in each wait | | | 2p to 5p/2 |
| ZB-V (Qi et al. 2024, section 6) | in an order of its own, whatever came first | B and W | | 2p, c = 2, as a v |
| forward only | F | none | 1 | 1 |

GPipe and 1F1B are one function: their limits make the difference. Sends never wait, under any of them. The static
order that breaks ties is that of the microbatches: F, B and W each run in it, in every chunk.

A limit counts a microbatch once for each chunk that holds it: with c chunks it takes a c-th of the stage's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from meshwright.strategies.pipeline.placement import ChunkPlacement, Shape
from meshwright.strategies.pipeline.spread_head import with_spread_head
from meshwright.strategies.pipeline.task import DONE, Counters, Task, TaskKind, View

Schedule = Callable[[View], Task | None]
"""The task to do next, which must be ready; None: wait for a message."""

Limit = Callable[[int, int, int], int]
"""limit(stage, num_stages, num_microbatches): the most microbatches in flight at a stage."""

ChunkedLimit = Callable[[int, ChunkPlacement, int], int]
"""limit(stage, placement, num_microbatches): the same for stages of several chunks, each of which counts its own."""

TaskOrder = Callable[[int, ChunkPlacement, int, int], tuple[Task, ...]]
"""order(stage, placement, num_microbatches, limit): all tasks of a stage."""


def forward_first(view: View) -> Task | None:
    """GPipe and 1F1B: forward passes up to the limit, then one backward pass for each. The order is fixed: a task whose
    message is late is waited for.

    Several chunks take turns of p microbatches each, the first chunk first in forward passes, the last in backward
    ones: 1F1B is then Megatron's interleaved schedule (arXiv 2104.04473, figure 4). Limits must not rise from a stage
    to the next, or the stages wait for each other.
    """
    forwards, last = view.total.forwards, len(view.chunks) - 1
    if forwards < view.num_microbatches * len(view.chunks) and view.in_flight < view.limit:
        task = view.next(TaskKind.FORWARD, _turn(view, forwards))
    else:
        task = view.next(TaskKind.BACKWARD, last - _turn(view, view.total.backwards))
    # A fixed order waits for its own next task, though another could be done.
    return task if view.ready(task.kind, task.chunk) else None


def _turn(view: View, done: int) -> int:
    """The chunk whose turn it is after so many tasks. Rounds are of p microbatches or, where these do not divide the
    step's, of a few more: a last round of fewer would wait for itself."""
    rounds = max(1, view.num_microbatches // view.num_stages)
    # Megatron's short last round deadlocks for remainders below about p / 2; rounds that are rounded up and down never
    # do, with a few more microbatches in flight.
    size, larger = divmod(view.num_microbatches, rounds)
    chunks = len(view.chunks)
    beyond = done - larger * chunks * (size + 1)  # the larger rounds come first
    return done // (size + 1) % chunks if beyond < 0 else beyond // size % chunks


def axonn(view: View) -> Task | None:
    """The paper's: act on what came first. The first stage injects up to the limit, and one more after each backward
    pass; the last stage goes backward at once.
    """
    if view.is_last and view.ready(TaskKind.BACKWARD):
        # The last stage waits for nobody, and what it sends back is what frees the others' memory.
        return view.next(TaskKind.BACKWARD)
    if view.is_first and view.ready(TaskKind.FORWARD):
        return view.next(TaskKind.FORWARD)
    for message in view.arrivals:
        if view.ready(message.kind):
            return view.next(message.kind)
    return None


def message_driven(view: View) -> Task | None:
    """Ours: the backward pass first, since a neighbour waits for it; then forward; weight gradients, which nobody
    waits for, fill every wait. Weight gradients also make room: a stage at its limit runs them before it sleeps.

    Of several chunks the deepest comes first: what it does is the nearest to its end, and makes room soonest. Where
    memory is so scarce that each place must be filled with what will soon be free again, the view has an order
    (`scarce_order`): F and B keep to it, and only weight gradients fill the waits.
    """
    if view.placement.spreads_head:
        return with_spread_head(view)
    if view.has_pieces:
        return _message_driven_in_pieces(view)
    deepest_first = range(len(view.chunks) - 1, -1, -1)
    if view.order:
        done = view.total.forwards + view.total.backwards
        rest = islice(view.order, done, None)  # all of the order's F and B that are done stand before
        task = next(task for task in rest if view.chunks[task.chunk][DONE[task.kind]] <= task.microbatch)
        if view.ready(task.kind, task.chunk):
            return task
        waiting = (chunk for chunk in deepest_first if view.ready(TaskKind.WEIGHT, chunk))
        return next((view.next(TaskKind.WEIGHT, chunk) for chunk in waiting), None)
    # Of the orders tried in the clock this one was the fastest: F before B took up to 12 % longer, a backward pass that
    # is not split up to 28 % (docs/decisions.md, Pipelines).
    for kind in (TaskKind.BACKWARD, TaskKind.FORWARD, TaskKind.WEIGHT):
        for chunk in deepest_first:
            if view.ready(kind, chunk) and (kind is not TaskKind.FORWARD or _leaves_room(view, chunk)):
                return view.next(kind, chunk)
    return None


def _message_driven_in_pieces(view: View) -> Task | None:
    """The same of chunks in pieces: while the rows of one are under way another runs. What has begun goes on first.

    At most one chunk goes forward and one backward at a time. Two microbatches that go forward by turns end as soon as
    one after the other would, and the stages after them wait for the first twice as long: by the clock up to 15 %.
    """
    pieces = view.placement.numbers[view.stage]
    deepest_first = range(len(view.chunks) - 1, -1, -1)
    first, last = [own[0] for own in pieces], [own[-1] for own in pieces]
    for kind, begins in ((TaskKind.BACKWARD, last), (TaskKind.FORWARD, first)):
        for piece in deepest_first:
            if piece not in begins and view.ready(kind, piece):
                return view.next(kind, piece)
    begun = [view.chunks[at].forwards for at in first], [view.chunks[at].backwards for at in last]
    goes_forward = sum(begun[0]) > sum(view.chunks[at].forwards for at in last)
    goes_back = sum(begun[1]) > sum(view.chunks[at].backwards for at in first)
    chosen: list[tuple[TaskKind, int]] = []
    if view.order:
        rest = islice(view.order, sum(begun[0]) + sum(begun[1]), None)
        counts = {TaskKind.FORWARD: begun[0], TaskKind.BACKWARD: begun[1]}
        ordered = (task for task in rest if task.kind in counts and counts[task.kind][task.chunk] <= task.microbatch)
        chosen = [(task.kind, task.chunk) for task in islice(ordered, 1)]
    else:
        chosen = [(kind, own) for kind in view.kinds[:2] for own in range(len(pieces) - 1, -1, -1)]
    for kind, own in chosen:
        forward = kind is TaskKind.FORWARD
        piece = first[own] if forward else last[own]
        # An order keeps memory's bounds by itself.
        room = not forward or bool(view.order) or _leaves_room(view, piece)
        if room and not (goes_forward if forward else goes_back) and view.ready(kind, piece):
            return view.next(kind, piece)
    waiting = (piece for piece in deepest_first if view.ready(TaskKind.WEIGHT, piece))
    return next((view.next(TaskKind.WEIGHT, piece) for piece in waiting), None)


def _leaves_room(view: View, chunk: int) -> bool:
    """Whether a forward pass of the chunk leaves the deeper chunks their places below the limit.

    With one place each no stage fills up with microbatches of which none can return. Where memory is scarce each chunk
    has its share, as long as a microbatch of it is under way: as many positions as are left to the chain's end.
    """
    left = [view.placement.num_positions - position for position in view.placement.positions[view.stage]]
    chunk, _ = view.placement.places[view.stage][chunk]
    # Never more than 2p units in reserve: shares of the whole limit were slower (56.8 for 53.0 at a limit of 23).
    spare = max(0, min(view.limit, view.placement.num_positions) - len(left))
    reserved = sum(1 + spare * way // sum(left) for way in left[chunk + 1 :])
    # A microbatch is in flight until its last task: a W that waits holds its activations, too.
    return sum(map(view.held, range(chunk + 1))) < view.limit - reserved


def forward_only(view: View) -> Task | None:
    """An evaluation: nothing comes back, and nothing is held."""
    for chunk in range(len(view.chunks) - 1, -1, -1):
        if view.ready(TaskKind.FORWARD, chunk):
            return view.next(TaskKind.FORWARD, chunk)
    return None


def in_order(view: View) -> Task | None:
    """The order that the rule gives the stage: a task whose message is late is waited for."""
    task = view.order[sum(view.total[DONE[kind]] for kind in view.kinds)]
    return task if view.ready(task.kind, task.chunk) else None


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
    shapes: tuple[Shape, ...] = ()
    """The placements in which it goes with several chunks a stage."""
    in_pieces: bool = False
    """Whether it goes with chunks in pieces, whose rows travel to experts under its other tasks."""
    tried_shape: Shape | None = None
    """The one of them that a planner tries; None: it tries one chunk."""
    chunked_limit: ChunkedLimit = lambda stage, placement, num_microbatches: num_microbatches * placement.num_chunks
    order: TaskOrder | None = None
    """The order of tasks, where it is written down as a whole; of no tasks where the schedule is free."""

    @property
    def splits(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return TaskKind.WEIGHT in self.kinds

    def limit_at(self, stage: int, placement: ChunkPlacement, num_microbatches: int) -> int:
        """The most microbatches in flight at a stage, counted once for each chunk that holds them."""
        if placement.num_chunks == 1:
            return self.limit(stage, placement.num_stages, num_microbatches)
        return self.chunked_limit(stage, placement, num_microbatches)

    def view(self, stage: int, num_stages: int, num_microbatches: int, placement: ChunkPlacement | None = None) -> View:
        """A stage before its first task."""
        placement = placement or ChunkPlacement(num_stages)
        limit = self.limit_at(stage, placement, num_microbatches)
        order = () if self.order is None else self.order(stage, placement, num_microbatches, limit)
        counts = (Counters(),) * sum(map(len, placement.numbers[stage]))
        return View(stage, placement, num_microbatches, limit, self.kinds, counts, order=order)

    def limited(self, limit: int) -> ScheduleRule:
        """This schedule with `limit` microbatches in flight at every stage."""
        return replace(
            self,
            # One number at every stage: limits that rise from a stage to the next would deadlock a fixed order.
            limit=lambda stage, num_stages, num_microbatches: limit,
            chunked_limit=lambda stage, placement, num_microbatches: limit,
        )


def interleaved_limit(stage: int, placement: ChunkPlacement, num_microbatches: int) -> int:
    """Megatron's warm-up, and one more: the chunks before the last have their first p microbatches behind them, and of
    the last one a stage is two microbatches ahead of the next stage."""
    stages, chunks = placement.num_stages, placement.num_chunks
    # The longest round, as `_turn` makes rounds.
    largest = -(-num_microbatches // max(1, num_microbatches // stages))
    return min(2 * (stages - stage - 1) + (chunks - 1) * largest + 1, num_microbatches * chunks)


def zb_v_order(stage: int, placement: ChunkPlacement, num_microbatches: int, limit: int) -> tuple[Task, ...]:
    """ZB-V's tasks (Qi et al., arXiv 2401.10241, section 6): at most 2 p microbatches in flight, W fills the end.
    `limit`: at least that, and no matter beyond.

    Written for 2 p - 1 microbatches or more; with fewer, the tasks of those that are missing are left out.
    """
    p, i = placement.num_stages, stage
    # Written for at least so many; tasks of microbatches that are not there are dropped at the end.
    least = max(num_microbatches, 2 * p - 1)
    order: list[Task] = []
    done = [dict.fromkeys(TaskKind, 0) for _ in range(2)]

    def do(letters: str, chunk: int) -> None:
        for kind in map(TaskKind, letters):
            order.append(Task(kind, done[chunk][kind], chunk))
            done[chunk][kind] += 1

    for _ in range(2 * (p - i) - 1):
        do("F", 0)
    for _ in range(i):
        do("F", 1)
        do("F", 0)
    for _ in range(p - i):
        do("FBW", 1)
    while done[1][TaskKind.FORWARD] < done[0][TaskKind.FORWARD] or done[0][TaskKind.FORWARD] < least:
        if done[0][TaskKind.FORWARD] < least:
            do("F", 0)
        do("BW", 0)
        do("FBW", 1)
    for _ in range(i):
        do("B", 0)
        do("B", 1)
    for _ in range(p - i):
        do("BW", 0)
    for chunk in (1, 0):
        while done[chunk][TaskKind.WEIGHT] < done[chunk][TaskKind.BACKWARD]:
            do("W", chunk)
    return tuple(task for task in order if task.microbatch < num_microbatches)


def scarce_order(stage: int, placement: ChunkPlacement, num_microbatches: int, limit: int) -> tuple[Task, ...]:
    """ZB-V's order on a v of two chunks, where memory is that of 2 p to 5/2 p microbatches and these are 2 p - 1 or
    more. With more memory, or fewer microbatches, a stage that takes what is there is faster by the clock."""
    p = placement.num_stages
    # Beyond 5/2 p the guide was up to a tenth slower than the free schedule.
    fits = placement.shape == "v" and placement.num_chunks == 2 and 2 * p <= limit < 5 * p / 2
    return zb_v_order(stage, placement, num_microbatches, limit) if fits and num_microbatches >= 2 * p - 1 else ()


WHOLE = (TaskKind.FORWARD, TaskKind.BACKWARD)
SPLIT = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT)

GPIPE = ScheduleRule(
    forward_first, WHOLE, lambda stage, num_stages, num_microbatches: num_microbatches,
    held=lambda stage, num_stages, limit: limit, fixed=True, shapes=("loop", "v"),
)  # fmt: skip
"""All forward passes, then all backward passes: holds every microbatch (Huang et al., 2019)."""
ONE_F_ONE_B = ScheduleRule(
    forward_first, WHOLE, lambda stage, num_stages, num_microbatches: num_stages - stage, fixed=True,
    shapes=("loop",), tried_shape="loop", chunked_limit=interleaved_limit,
)  # fmt: skip
"""One forward, one backward, in a fixed order; with chunks Megatron's interleaved schedule."""
AXONN = ScheduleRule(axonn, WHOLE, lambda stage, num_stages, num_microbatches: num_stages)
"""The task of the message that came first (Singh and Bhatele, 2022)."""
MESSAGE_DRIVEN = ScheduleRule(
    message_driven, SPLIT, lambda stage, num_stages, num_microbatches: 2 * num_stages,
    held=lambda stage, num_stages, limit: limit if stage == 0 else min(limit, num_stages - stage), by_memory=True,
    shapes=("loop", "v"), tried_shape="v", in_pieces=True,
    chunked_limit=lambda stage, placement, num_microbatches: 2 * placement.num_positions, order=scarce_order,
)  # fmt: skip
"""The gradient that a neighbour waits for, else forward; weight gradients fill every wait."""
ZB_V = ScheduleRule(
    in_order, SPLIT, lambda stage, num_stages, num_microbatches: 2 * num_stages, fixed=True,
    shapes=("v",), chunked_limit=lambda stage, placement, num_microbatches: 2 * placement.num_stages, order=zb_v_order,
)  # fmt: skip
FORWARD_ONLY = ScheduleRule(
    forward_only, (TaskKind.FORWARD,), lambda stage, num_stages, num_microbatches: 1,
    shapes=("loop", "v"), chunked_limit=lambda stage, placement, num_microbatches: 1,
)  # fmt: skip
