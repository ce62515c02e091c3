"""Schedules: pure functions that choose a stage's next task from a `View` of the stage.

| schedule | decides | backward | limit at stage i of p, n microbatches | with c chunks |
|---|---|---|---|---|
| GPipe (Huang et al. 2019) | F up to the limit, then B: a fixed order | whole | n | c n |
| 1F1B (PipeDream-Flush, Narayanan et al. 2021) | the same | whole | p - i | c p + p - 2 i - 1 |
| AxoNN (Singh and Bhatele 2022, algorithm 2) | the task of the earliest message | whole | p | |
| message-driven (ours) | B, else F below the limit, else W | B and W | 2p, or by memory | 2 c p, or the same |
| the same, a v of c = 2 with memory for little more than 2p | ZB-V's F and B, W in each wait | | | 2p to 5p/2 |
| ZB-V (Qi et al. 2024, section 6) | a fixed order, whatever message arrives first | B and W | | 2p, c = 2, as a v |
| forward only | F | none | 1 | 1 |

GPipe and 1F1B have one order, `forward_first`, and two limits. Sends never wait. Under all schedules F, B and W each
run in the order of the microbatches, in every chunk.

A limit counts a microbatch once for each chunk that holds activations of the microbatch. With c chunks a stage, one
unit of the limit takes 1/c of the stage's memory for a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, zip_longest

from meshwright.strategies.pipeline.placement import ChunkPlacement, Shape
from meshwright.strategies.pipeline.spread_head import with_spread_head
from meshwright.strategies.pipeline.task import DONE, Counters, Task, TaskKind, View

Schedule = Callable[[View], Task | None]
"""schedule(view): the next task, which must be ready; None: wait for a message."""

Limit = Callable[[int, int, int], int]
"""limit(stage, num_stages, num_microbatches): the largest number of microbatches in flight at a stage."""

ChunkedLimit = Callable[[int, ChunkPlacement, int], int]
"""limit(stage, placement, num_microbatches): the same for stages of several chunks; a microbatch counts once
a chunk."""

TaskOrder = Callable[[int, ChunkPlacement, int, int], tuple[Task, ...]]
"""order(stage, placement, num_microbatches, limit): all tasks of a stage."""


def axonn(view: View) -> Task | None:
    """Run the task of the earliest message (AxoNN).

    The first stage starts microbatches up to the limit, and one more after each backward pass. The last stage runs a
    backward pass as soon as possible.
    """
    if view.is_last and view.ready(TaskKind.BACKWARD):
        # The last stage has the loss and needs no message. Its gradients let the other stages free memory.
        return view.next(TaskKind.BACKWARD)
    if view.is_first and view.ready(TaskKind.FORWARD):
        return view.next(TaskKind.FORWARD)
    for message in view.arrivals:
        if view.ready(message.kind):
            return view.next(message.kind)
    return None


def message_driven(view: View) -> Task | None:
    """Run B if ready, else F below the limit, else W (our schedule).

    A neighbour waits for the gradients of B. No stage waits for weight gradients, so W fills every wait. A stage at its
    limit runs W before waiting, which frees activations.

    Of several chunks the one nearest to the chain's end is first: its microbatches are finished, and freed, soonest. If
    the view has an order (`scarce_order`: little memory), F and B follow the order, and only W fills the waits.
    """
    if view.placement.spreads_head:
        return with_spread_head(view)
    if view.has_pieces:
        return _message_driven_in_pieces(view)
    deepest_first = range(len(view.chunks) - 1, -1, -1)
    if view.order:
        done = view.total.forwards + view.total.backwards
        rest = islice(view.order, done, None)  # all finished F and B are earlier in the order
        task = next(task for task in rest if view.chunks[task.chunk][DONE[task.kind]] <= task.microbatch)
        if view.ready(task.kind, task.chunk):
            return task
        waiting = (chunk for chunk in deepest_first if view.ready(TaskKind.WEIGHT, chunk))
        return next((view.next(TaskKind.WEIGHT, chunk) for chunk in waiting), None)
    # The fastest of the orders that were simulated. F before B took up to 12 % longer, an unsplit backward pass up to
    # 28 % (docs/decisions/stages.md).
    for task_kind in (TaskKind.BACKWARD, TaskKind.FORWARD, TaskKind.WEIGHT):
        for chunk in deepest_first:
            if view.ready(task_kind, chunk) and (task_kind is not TaskKind.FORWARD or _leaves_room(view, chunk)):
                return view.next(task_kind, chunk)
    return None


def _message_driven_in_pieces(view: View) -> Task | None:
    """Run chunks in pieces: while rows of one piece are in an all-to-all, another piece runs.

    Begun microbatches have priority. One chunk is in a forward pass and one in a backward pass at a time, at most. Of
    two alternating forward passes, neither would end earlier than the second of two consecutive ones. Later stages
    would wait twice as long for the first microbatch: simulated steps were up to 15 % longer.
    """
    pieces = view.placement.numbers[view.stage]
    deepest_first = range(len(view.chunks) - 1, -1, -1)
    first, last = [chunk[0] for chunk in pieces], [chunk[-1] for chunk in pieces]
    for task_kind, begins in ((TaskKind.BACKWARD, last), (TaskKind.FORWARD, first)):
        for piece in deepest_first:
            if piece not in begins and view.ready(task_kind, piece):
                return view.next(task_kind, piece)
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
        chosen = [(task_kind, chunk) for task_kind in view.kinds[:2] for chunk in range(len(pieces) - 1, -1, -1)]
    for task_kind, chunk in chosen:
        forward = task_kind is TaskKind.FORWARD
        piece = first[chunk] if forward else last[chunk]
        # An order stays below the limit by construction.
        room = not forward or bool(view.order) or _leaves_room(view, piece)
        if room and not (goes_forward if forward else goes_back) and view.ready(task_kind, piece):
            return view.next(task_kind, piece)
    waiting = (piece for piece in deepest_first if view.ready(TaskKind.WEIGHT, piece))
    return next((view.next(TaskKind.WEIGHT, piece) for piece in waiting), None)


def _leaves_room(view: View, chunk: int) -> bool:
    """Return whether a forward pass of the chunk leaves enough of the limit to the stage's later chunks.

    With at least one unit for each later chunk, no stage fills up with microbatches that cannot finish. If memory is
    scarce, each chunk's reserve is proportional to the number of positions from the chunk to the chain's end.
    """
    left = [view.placement.num_positions - position for position in view.placement.positions[view.stage]]
    chunk, _ = view.placement.places[view.stage][chunk]
    # At most c p units in reserve (2 p for a v): shares of the whole limit were slower (56.8 for 53.0 at a limit of
    # 23).
    spare = max(0, min(view.limit, view.placement.num_positions) - len(left))
    reserved = sum(1 + spare * way // sum(left) for way in left[chunk + 1 :])
    # A microbatch is in flight until its last task: a pending W holds activations, too.
    return sum(map(view.held, range(chunk + 1))) < view.limit - reserved


def forward_only(view: View) -> Task | None:
    """Return the ready forward pass nearest to the chain's end (evaluation). Nothing is sent back or kept."""
    for chunk in range(len(view.chunks) - 1, -1, -1):
        if view.ready(TaskKind.FORWARD, chunk):
            return view.next(TaskKind.FORWARD, chunk)
    return None


def in_order(view: View) -> Task | None:
    """Return the next task of the stage's fixed order, or None if its message is late."""
    task = view.order[sum(view.total[DONE[task_kind]] for task_kind in view.kinds)]
    return task if view.ready(task.kind, task.chunk) else None


@dataclass(frozen=True)
class ScheduleRule:
    """A schedule, the tasks of a microbatch, and the limits and placements of the schedule."""

    schedule: Schedule
    kinds: tuple[TaskKind, ...]
    """The tasks of a microbatch, in order."""
    limit: Limit
    """The limit of each stage of one chunk."""
    held: Limit = lambda stage, num_stages, limit: min(limit, num_stages - stage)
    """held(stage, num_stages, limit): peak number of microbatches in flight if no message is late. Default: a warm-up
    of one microbatch for each stage from this one to the last, up to the limit."""
    fixed: bool = False
    """Whether the order of tasks is fixed. The limit is then fixed, too: `layout.pipeline.limit` has no effect."""
    by_memory: bool = False
    """Whether the limit of a run that sets none is the number of microbatches that fit in memory."""
    shapes: tuple[Shape, ...] = ()
    """The placements that the schedule supports with several chunks a stage."""
    in_pieces: bool = False
    """Whether the schedule supports chunks in pieces, with rows sent to experts under other tasks."""
    tried_shape: Shape | None = None
    """The shape that a planner tries; None: the planner tries one chunk a stage."""
    chunked_limit: ChunkedLimit = lambda stage, placement, num_microbatches: num_microbatches * placement.num_chunks
    """The limit of each stage of several chunks."""
    order: TaskOrder | None = None
    """The order of a stage's tasks, if written down as a whole; an empty order leaves the schedule free."""

    @property
    def splits(self) -> bool:
        """Whether weight gradients are separate tasks (W)."""
        return TaskKind.WEIGHT in self.kinds

    def limit_at(self, stage: int, placement: ChunkPlacement, num_microbatches: int) -> int:
        """Return the largest number of microbatches in flight at a stage, each counted once for each chunk that holds
        activations."""
        if placement.num_chunks == 1:
            return self.limit(stage, placement.num_stages, num_microbatches)
        return self.chunked_limit(stage, placement, num_microbatches)

    def view(self, stage: int, num_stages: int, num_microbatches: int, placement: ChunkPlacement | None = None) -> View:
        """Return the view of a stage before the first task."""
        placement = placement or ChunkPlacement(num_stages)
        limit = self.limit_at(stage, placement, num_microbatches)
        order = () if self.order is None else self.order(stage, placement, num_microbatches, limit)
        counts = (Counters(),) * sum(map(len, placement.numbers[stage]))
        return View(stage, placement, num_microbatches, limit, self.kinds, counts, order=order)

    def limited(self, limit: int) -> ScheduleRule:
        """Return this schedule with `limit` microbatches in flight at every stage."""
        return replace(
            self,
            # The same limit at every stage: limits that rise from a stage to the next would deadlock a fixed order.
            limit=lambda stage, num_stages, num_microbatches: limit,
            chunked_limit=lambda stage, placement, num_microbatches: limit,
        )


def interleaved_limit(stage: int, placement: ChunkPlacement, num_microbatches: int) -> int:
    """Return the number of forward passes of Megatron's interleaved warm-up, plus one.

    In the warm-up all chunks but the last run their first round, of p microbatches or a few more. In the last chunk a
    stage is two microbatches ahead of the next stage.
    """
    stages, chunks = placement.num_stages, placement.num_chunks
    # The longest round of `forward_first`.
    largest = -(-num_microbatches // max(1, num_microbatches // stages))
    return min(2 * (stages - stage - 1) + (chunks - 1) * largest + 1, num_microbatches * chunks)


def forward_first(stage: int, placement: ChunkPlacement, num_microbatches: int, limit: int) -> tuple[Task, ...]:
    """Return forward passes up to the limit, then one backward pass for each forward pass (GPipe, 1F1B).

    Several chunks take turns of p microbatches each. In forward passes the first chunk begins, in backward passes the
    last. 1F1B is then Megatron's interleaved schedule (arXiv 2104.04473, figure 4). Limits must not rise from a stage
    to the next, or the stages deadlock.
    """
    chunks = range(len(placement.positions[stage]))
    rounds = max(1, num_microbatches // placement.num_stages)
    # Megatron's short last round deadlocks for remainders below about p / 2. Rounds of two nearly equal lengths, the
    # longer ones first, never do, with a few more microbatches in flight.
    size, longer = divmod(num_microbatches, rounds)
    ends = accumulate([size + 1] * longer + [size] * (rounds - longer), initial=0)
    turns = [(index, chunk) for begin, end in pairwise(ends) for chunk in chunks for index in range(begin, end)]
    forward = [Task(TaskKind.FORWARD, index, chunk) for index, chunk in turns]
    backward = [Task(TaskKind.BACKWARD, index, chunks[-1 - chunk]) for index, chunk in turns]
    pairs = zip_longest(backward, forward[limit:])
    return *forward[:limit], *(task for pair in pairs for task in pair if task is not None)


def zb_v_order(stage: int, placement: ChunkPlacement, num_microbatches: int, limit: int) -> tuple[Task, ...]:
    """Return ZB-V's tasks of a stage (Qi et al., arXiv 2401.10241, section 6): at most 2 p microbatches in flight.

    W tasks fill the end. The algorithm is for 2 p - 1 microbatches or more; for fewer, tasks of the missing
    microbatches are removed from the order. `limit` must be at least 2 p; larger values change nothing.
    """
    p, i = placement.num_stages, stage
    # The algorithm needs at least this number; tasks of microbatches that do not exist are removed below.
    least = max(num_microbatches, 2 * p - 1)
    order: list[Task] = []
    done = [dict.fromkeys(TaskKind, 0) for _ in range(2)]

    def do(letters: str, chunk: int) -> None:
        for task_kind in map(TaskKind, letters):
            order.append(Task(task_kind, done[chunk][task_kind], chunk))
            done[chunk][task_kind] += 1

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
    """Return ZB-V's order if memory is scarce, else no order.

    Memory is scarce if a v of two chunks has a limit from 2 p to below 5/2 p. The order also needs at least 2 p - 1
    microbatches. Otherwise the free schedule is faster in the simulation.
    """
    p = placement.num_stages
    # From 5/2 p on, this order was up to a tenth slower than the free schedule.
    fits = placement.shape == "v" and placement.num_chunks == 2 and 2 * p <= limit < 5 * p / 2
    return zb_v_order(stage, placement, num_microbatches, limit) if fits and num_microbatches >= 2 * p - 1 else ()


WHOLE = (TaskKind.FORWARD, TaskKind.BACKWARD)
SPLIT = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT)

GPIPE = ScheduleRule(
    in_order, WHOLE, lambda stage, num_stages, num_microbatches: num_microbatches,
    held=lambda stage, num_stages, limit: limit, fixed=True, shapes=("loop", "v"), order=forward_first,
)  # fmt: skip
"""All forward passes, then all backward passes: holds every microbatch (Huang et al., 2019)."""
ONE_F_ONE_B = ScheduleRule(
    in_order, WHOLE, lambda stage, num_stages, num_microbatches: num_stages - stage, fixed=True, shapes=("loop",),
    tried_shape="loop", chunked_limit=interleaved_limit, order=forward_first,
)  # fmt: skip
"""One forward, one backward, in a fixed order; with chunks Megatron's interleaved schedule."""
AXONN = ScheduleRule(axonn, WHOLE, lambda stage, num_stages, num_microbatches: num_stages)
"""The task of the earliest message (Singh and Bhatele, 2022)."""
MESSAGE_DRIVEN = ScheduleRule(
    message_driven, SPLIT, lambda stage, num_stages, num_microbatches: 2 * num_stages,
    held=lambda stage, num_stages, limit: limit if stage == 0 else min(limit, num_stages - stage), by_memory=True,
    shapes=("loop", "v"), tried_shape="v", in_pieces=True,
    chunked_limit=lambda stage, placement, num_microbatches: 2 * placement.num_positions, order=scarce_order,
)  # fmt: skip
"""The gradient that a neighbour waits for, else a forward pass; weight gradients fill every wait."""
ZB_V = ScheduleRule(
    in_order, SPLIT, lambda stage, num_stages, num_microbatches: 2 * num_stages, fixed=True,
    shapes=("v",), chunked_limit=lambda stage, placement, num_microbatches: 2 * placement.num_stages, order=zb_v_order,
)  # fmt: skip
FORWARD_ONLY = ScheduleRule(
    forward_only, (TaskKind.FORWARD,), lambda stage, num_stages, num_microbatches: 1,
    shapes=("loop", "v"), chunked_limit=lambda stage, placement, num_microbatches: 1,
)  # fmt: skip
