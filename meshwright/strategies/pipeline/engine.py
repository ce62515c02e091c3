"""The engine: one stage as a generator. No torch and no clock: its driver does the tasks and waits for the messages.

    process = stage_process(rule.view(stage, num_stages, num_microbatches), rule.schedule)
    action = next(process)
    while True:                                 # StopIteration: the stage is done
        if action is WAIT: sleep until a message comes
        else: do action
        action = process.send(what has come since)

The clock (clock.py) drives all stages of a pipeline this way, a rank its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from meshwright.strategies.pipeline.schedule import Schedule
from meshwright.strategies.pipeline.task import WAIT, Arrival, Task, TaskKind, View, Wait

StageProcess = Generator[Task | Wait, Sequence[Arrival], None]


def stage_process(view: View, schedule: Schedule) -> StageProcess:
    """Yield each task to do, or WAIT; be sent what has come meanwhile: after a task possibly nothing, after WAIT
    something. What a stage sends to itself, from one of its chunks to the next, has come with the task's end.

    Ends when all tasks are done. A schedule that waits though nothing can come any more is our own bug, and raises
    instead of hanging; so does a task that is not ready, and a message that comes twice.
    """
    early: set[Arrival] = set()
    while not view.done:
        task = schedule(view)
        if task is None:
            assert view.outstanding > 0, f"deadlock: the schedule waits, and no message can come: {view}"
            arrived = yield WAIT
            assert arrived, f"woken without a message: {view}"
        else:
            # Before the task is done, so that one that is not ready is refused while nothing has been sent.
            done = view.after(task)
            arrived = yield task
            view = done
        view = _take(view, arrived, early)
    assert not view.arrivals, f"messages that no task took: {view}"
    assert not early, f"messages that never had their turn: {sorted(map(str, early))}"


def fixed_order(view: View, schedule: Schedule) -> tuple[Task, ...]:
    """All tasks of a stage whose schedule keeps to one order, whatever comes when: each message comes when the stage
    waits for it."""
    stage, count, placement = view.stage, view.num_microbatches, view.placement
    senders = {
        (kind, chunk): placement.sender(stage, kind, chunk)
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        for chunk in range(placement.num_chunks)
    }
    # What a stage sends to itself comes with the end of its own task, and not while it waits.
    come = {message: 0 for message, sender in senders.items() if sender not in (None, stage)}
    done = {(kind, chunk): 0 for kind in TaskKind for chunk in range(placement.num_chunks)}
    order: list[Task] = []
    process = stage_process(view, schedule)
    action = next(process, None)
    while action is not None:
        if isinstance(action, Task):
            order.append(action)
            done[action.kind, action.chunk] += 1
            sent = placement.receiver(stage, action)
            arrived = [sent[1]] if sent is not None and sent[0] == stage else []
        else:
            arrived = []
            for (kind, chunk), number in come.items():
                # Gradients come of microbatches that were sent on, and of no others.
                most = count if kind is TaskKind.FORWARD else done[TaskKind.FORWARD, chunk]
                if number == done[kind, chunk] and number < most:
                    arrived.append(Arrival(kind, number, chunk))
                    come[kind, chunk] += 1
        try:
            action = process.send(arrived)
        except StopIteration:
            action = None
    return tuple(order)


def _take(view: View, arrived: Iterable[Arrival], early: set[Arrival]) -> View:
    """The view with these messages; one that overtook another stays in `early` until its turn."""
    for message in arrived:
        kind, chunk = message.kind, message.chunk
        expected = view.expects(kind, chunk)
        assert message.microbatch >= expected.microbatch, f"{message} came twice: {view}"
        assert message not in early, f"{message} came twice before its turn: {view}"
        early.add(message)
        # A message that closes a gap brings those behind it into view at once.
        while expected in early:
            early.remove(expected)
            view = view.with_arrival(kind, chunk)
            expected = view.expects(kind, chunk)
    return view
