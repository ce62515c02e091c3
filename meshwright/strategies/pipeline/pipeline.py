"""The driver on a rank: runs the tasks that the engine yields, sends their results, and waits for messages.

A GPU runs tasks later than the host starts them. If the schedule decided ahead, messages received during a task would
be unknown, and W would always follow its B. So the next task is chosen when the task before the last one has ended on
the device: one task runs and one is queued. A model on one device is a pipeline of one stage without messages. The
simulation (clock.py) drives the same engine without ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.compute.model import Batch, Crossing, Hidden, Scales
from meshwright.ranks.comm import NAP_SECONDS, Comm, size_bytes
from meshwright.ranks.flight_recorder import Call
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import CutForms, Mailbox, Message, MessageMeta, Side, TensorMeta
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.engine import stage_process
from meshwright.strategies.pipeline.pieces import PiecewiseChunks
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import FORWARD_ONLY, Schedule, ScheduleRule
from meshwright.strategies.pipeline.span import Moment, Span, Watch, task_span
from meshwright.strategies.pipeline.stage import Stage
from meshwright.strategies.pipeline.task import Arrival, Task, TaskKind, View

EVALUATED = 2
"""Evaluation with a head that is sharded over stages: microbatches for each stage between two synchronisations. At 2,
filling and draining the pipeline take a third of the time."""

Seed = Callable[[int, int], None]
"""seed(i, c): seeds the random numbers of microbatch i's forward pass in chunk c."""

Received = dict[Arrival, Hidden]
"""Received tensors, by the task that each message makes ready."""


class Synchronises(Protocol):
    """The part of a data-parallel strategy that a pipeline uses. `every_microbatch`: gradients are summed in each
    microbatch."""

    every_microbatch: bool

    def expect(self, final: bool) -> None:
        """Say whether the next gradients are the step's last of their parameters."""


class Pipeline:
    """A rank's chunks under a schedule.

    `stages`: this rank's chunks. `placement`: their positions in the chain; None: one chunk. `peers`: ranks of the same
    stage (the tensor kit's), which must run tasks in one order; no others if there is one stage, since without messages
    all decide equally. `mailbox`, `forms`: the messages to and from neighbouring stages, and their tensors. `pieces`:
    the chunks that training runs if rows are sent to experts as messages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        rule: ScheduleRule,
        mesh: Mesh,
        peers: Comm,
        mailbox: Mailbox,
        forms: MessageMeta,
        strategy: Synchronises,
        placement: ChunkPlacement | None = None,
        pieces: PiecewiseChunks | None = None,
    ) -> None:
        self.stages = stages
        self.rule = rule
        self.mesh = mesh
        self.row = mesh.comm(PIPE)
        self.placement = placement or ChunkPlacement(self.row.size)
        self.sides = sides_of(self.row.index, self.placement)
        self.peers = peers
        self.mailbox = mailbox
        self.forms = forms
        self.strategy = strategy
        self.pieces = pieces
        self.watch = Watch(mesh.device)
        self.done: list[tuple[Task, Moment, Moment]] = []
        self._epoch = -1

    @property
    def spans(self) -> list[Span]:
        """The tasks of the last step. Each begins when the previous one ended, or after a wait when a message was
        received."""
        return [task_span(self.row.index, task, start(), end()) for task, start, end in self.done]

    def train(self, batches: Sequence[Batch], scales: Scales, seed: Seed) -> Tensor:
        """Run the forward and backward passes of a step's microbatches; gradients accumulate.

        Returns the sum of the scaled losses, a float64 scalar; 0 on a rank that computes no loss.
        """
        if self.pieces is not None:
            return self._train_in_pieces(self.pieces, batches, scales, seed)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        received: Received = {}
        last = len(batches) - 1
        self.strategy.expect(False)

        def act(task: Task) -> Hidden:
            nonlocal total
            index, stage = task.microbatch, self.stages[task.chunk]
            if task.kind is TaskKind.FORWARD:
                # Before each forward pass: dropout then depends on the microbatch, not on the order of tasks.
                seed(index, task.chunk)
                outgoing = stage.forward(index, received.pop(task, ()), batches[index], scales)
                if stage.is_last:
                    total += outgoing[0]
                return outgoing
            if index == last or len(self.stages) > 1:  # another chunk's last may have run before
                self.strategy.expect(index == last)
            if task.kind is TaskKind.BACKWARD:
                return stage.backward(index, received.pop(task, ()), defers=self.rule.splits)
            # Final gradients are summed over replicas: in every microbatch by zero2 and zero3, else in the last.
            stage.weights(index, final=self.strategy.every_microbatch or index == last)
            return ()

        self._drive(self.rule, len(batches), act, received)
        return total

    def _train_in_pieces(self, pieces: PiecewiseChunks, batches: Sequence[Batch], scales: Scales, seed: Seed) -> Tensor:
        """Do as `train`, with rows sent to experts while other tasks run."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        received: Received = {}
        last = len(batches) - 1

        def act(task: Task) -> Hidden | Crossing:
            nonlocal total
            index, (chunk, piece_index) = task.microbatch, pieces.placement.places[self.row.index][task.chunk]
            stage = pieces.stages[chunk]
            if task.kind is TaskKind.FORWARD:
                seed(index, task.chunk)
                outgoing = stage.forward(index, piece_index, received.pop(task, ()), batches[index], scales)
                if isinstance(outgoing, tuple) and stage.stage.is_last:
                    total += outgoing[0]
                return outgoing
            self.strategy.expect(index == last)
            if task.kind is TaskKind.BACKWARD:
                return stage.backward(index, piece_index, received.pop(task, ()))
            stage.weights(index, piece_index, final=index == last)
            return ()

        self._drive(self.rule, len(batches), act, received, pieces)
        return total

    def evaluate(self, batches: Sequence[Batch], use: Callable[[Tensor, Batch], None]) -> None:
        """Run forward passes without gradients. On the last stage, call `use(h, batch)` with the normed hidden states h
        [B, T, H] of each microbatch, one at a time. If the head is sharded over stages, every stage calls `use` and
        holds a few."""
        states = None if self.pieces is None else self.pieces.states
        if states is None:
            self._evaluate(batches, use)
            return
        count, found = self.row.size, list[Tensor]()
        for start in range(0, len(batches), EVALUATED * count):
            window = batches[start : start + EVALUATED * count]
            self._evaluate(window, lambda h, batch: found.append(h))
            for batch in window:
                h = found.pop(0) if found else torch.empty(states.shape, dtype=states.dtype, device=self.mesh.device)
                self.row.broadcast(h, count - 1)
                use(h, batch)

    def _evaluate(self, batches: Sequence[Batch], use: Callable[[Tensor, Batch], None]) -> None:
        received: Received = {}

        def act(task: Task) -> Hidden:
            batch, stage = batches[task.microbatch], self.stages[task.chunk]
            outgoing = stage.evaluate(received.pop(task, ()), batch)
            if stage.is_last:
                use(outgoing[0], batch)
            return outgoing

        self._drive(FORWARD_ONLY, len(batches), act, received)

    def preview(self, batches: Sequence[Batch], scales: Scales, seed: Seed) -> None:
        """Run the forward passes of `train` without gradients: layers see their inputs beforehand."""
        received: Received = {}

        def act(task: Task) -> Hidden:
            index, stage = task.microbatch, self.stages[task.chunk]
            seed(index, task.chunk)
            return stage.preview(index, received.pop(task, ()), batches[index], scales)

        self._drive(FORWARD_ONLY, len(batches), act, received)

    def _drive(
        self,
        rule: ScheduleRule,
        num_batches: int,
        act: Callable[[Task], Hidden | Crossing],
        received: Received,
        pieces: PiecewiseChunks | None = None,
    ) -> None:
        """Run the rank's engine to its end. Received tensors stay in `received` until a task reads them."""
        recorder = self.mesh.recorder
        # A faster stage may send the next pass's first message before this pass ends: epochs separate passes.
        self._epoch += 1
        coming = {
            # Receives are posted ahead, so their number is counted here; an evaluation has no gradients to receive.
            side: num_batches * sum(forms.inward or TaskKind.BACKWARD in rule.kinds for forms in subjects.values())
            for side, subjects in self.forms.items()
        }
        self.mailbox.open(self._epoch, self.forms, coming["before"], coming["after"])
        self.done = []
        self.watch.start()
        schedule = agreed(rule, self.peers, planned=self.mesh.device.type == "meta")
        placement = self.placement if pieces is None else pieces.placement
        process = stage_process(rule.view(self.row.index, self.row.size, num_batches, placement), schedule)
        arrived: list[Arrival] | None = None
        start = self.watch.now()
        while True:
            try:
                action = next(process) if arrived is None else process.send(arrived)
            except StopIteration:
                break
            if isinstance(action, Task):
                recorder.task = action
                arrived = self._pass_on(action, act(action), received, pieces)
                end = self.watch.now()
                self.done.append((action, start, end))
                start = end
                arrived += self._polled(received, pieces)
                # One task runs on the device and one is queued. Deciding earlier would miss messages; deciding when the
                # last task has ended would leave the device idle.
                messages = self.row.size > 1 or pieces is not None
                while messages and len(self.done) > 1 and not self.done[-2][-1].is_past():
                    time.sleep(NAP_SECONDS)
                    arrived += self._polled(received, pieces)
            else:
                recorder.task = ""
                arrived = self._awaited(received, pieces)
                start = self.watch.now()
        recorder.task = ""
        self.mailbox.flush()
        self.row.assemble()  # stages end at different moments, and the next operation is a collective

    def _polled(self, received: Received, pieces: PiecewiseChunks | None) -> list[Arrival]:
        """Return the tasks made ready by messages and exchanges of rows since the last call."""
        arrived = [self._taken(message, received, pieces) for message in self.mailbox.poll()]
        for arrival, rows in pieces.exchanges.poll() if pieces is not None else ():
            received[arrival] = (rows,)
            arrived.append(arrival)
        return arrived

    def _awaited(self, received: Received, pieces: PiecewiseChunks | None) -> list[Arrival]:
        """Wait for at least one message, or for the rows of one exchange."""
        if pieces is None or pieces.exchanges.is_empty:
            return [self._taken(message, received, pieces) for message in self.mailbox.wait()]
        arrived: list[Arrival] = []

        def ready() -> bool:
            arrived.extend(self._polled(received, pieces))
            return bool(arrived)

        comm, trades = pieces.exchanges.comm, pieces.exchanges.under_way
        size = sum(size_bytes(trade.came) for trade in trades)
        with self.mesh.recorder.waiting(Call(comm.axis, "all_to_all", size, comm.ranks)):
            self.mesh.transport.wait_until(ready)
        return arrived

    def _taken(self, message: Message, received: Received, pieces: PiecewiseChunks | None) -> Arrival:
        """Store a message's tensors in `received`; return the task that the message makes ready."""
        # `subject` is the position before the cut between two chunks; activations cross the cut inward.
        inward = self.forms[message.side][message.subject].inward
        task_kind, to = (TaskKind.FORWARD, message.subject + 1) if inward else (TaskKind.BACKWARD, message.subject)
        placement = self.placement if pieces is None else pieces.placement
        numbers = placement.numbers[self.row.index][to // self.row.size]
        arrival = Arrival(task_kind, message.index, numbers[0] if inward else numbers[-1])
        received[arrival] = message.tensors
        return arrival

    def _pass_on(
        self, task: Task, outgoing: Hidden | Crossing, received: Received, pieces: PiecewiseChunks | None
    ) -> list[Arrival]:
        """Send a task's result. Return the arrival if the receiver is this rank's next chunk."""
        placement = self.placement if pieces is None else pieces.placement
        sent = placement.receiver(self.row.index, task)
        if sent is None:
            return []
        to, arrival = sent
        if isinstance(outgoing, Crossing):
            assert pieces is not None, f"rows of {task}, which nobody expects"
            pieces.exchanges.begin(arrival, outgoing)
            return []
        if to == self.row.index:
            received[arrival] = outgoing
            return [arrival]
        chunk, _ = placement.places[self.row.index][task.chunk]
        position = self.placement.positions[self.row.index][chunk]
        subject = position if task.kind is TaskKind.FORWARD else position - 1
        self.mailbox.send(self.sides[to], task.microbatch, outgoing, subject)
        return []


def sides_of(stage: int, placement: ChunkPlacement) -> dict[int, Side]:
    """Return the stages that a stage sends to, with the side of each."""
    count = placement.num_stages
    # Two stages are neighbours on both sides; as a line, each has one side.
    ring: dict[int, Side] = {(stage - 1) % count: "before", (stage + 1) % count: "after"} if placement.is_ring else {}
    line: dict[int, Side] = {stage - 1: "before", stage + 1: "after"}
    return ring or {neighbour: side for neighbour, side in line.items() if 0 <= neighbour < count}


def message_forms(stage: int, placement: ChunkPlacement, passing: Sequence[tuple[TensorMeta, ...]]) -> MessageMeta:
    """Return the messages between a stage and its neighbours. `passing[k]`: the tensors sent from position k
    to k + 1."""
    meta: dict[Side, dict[int, CutForms]] = {"before": {}, "after": {}}
    sides = sides_of(stage, placement)
    for position in placement.positions[stage]:
        for subject, neighbour in ((position - 1, position - 1), (position, position + 1)):
            if 0 <= neighbour < placement.num_positions and (there := placement.stage_of[neighbour]) != stage:
                meta[sides[there]][subject] = CutForms(passing[subject], inward=neighbour < position)
    return meta


def agreed(rule: ScheduleRule, peers: Comm, *, planned: bool) -> Schedule:
    """Return the schedule of a stage's ranks: the first decides and broadcasts, the others follow.

    Ranks that share layers wait for each other in the layers' collectives. So all must run the same tasks in the same
    order, though messages reach them at different moments. Sends one broadcast of 8 bytes a task, between hosts; a
    fixed order needs none. `planned`: there is no first rank to receive from, and each rank decides as the first would.
    """
    schedule, kinds = rule.schedule, rule.kinds
    if peers.size == 1 or rule.fixed:
        return schedule
    # Kept until the task's message is here: the first rank may receive a message earlier than this rank.
    told: Task | None = None

    def lead(view: View) -> Task | None:
        task = schedule(view)
        # A wait is not broadcast: the followers wait for the next broadcast anyway.
        if task is not None:
            peers.broadcast(torch.tensor(kinds.index(task.kind) + task.chunk * len(kinds)), 0)
        return task

    def follow(view: View) -> Task | None:
        nonlocal told
        if told is None:
            code = torch.empty((), dtype=torch.int64)
            peers.broadcast(code, 0)
            chunk, kind_index = divmod(int(code), len(kinds))
            told = view.next(kinds[kind_index], chunk)
        if not view.ready(told.kind, told.chunk):
            return None  # its message has reached the first rank, and will reach this one
        task, told = told, None
        return task

    return lead if peers.index == 0 or planned else follow
