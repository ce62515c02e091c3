"""The engine: one stage as a generator, without torch and without a clock. A driver runs tasks and waits for messages.

    process = stage_process(rule.view(stage, num_stages, num_microbatches), rule.schedule)
    action = next(process)
    while True:                                 # StopIteration: the stage is done
        if action is WAIT: wait for a message
        else: run action
        action = process.send(messages received since the last send)

The simulation (clock.py) drives all stages of a pipeline this way, a rank only its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from meshwright.strategies.pipeline.schedule import Schedule
from meshwright.strategies.pipeline.task import WAIT, Arrival, Task, View, Wait

StageProcess = Generator[Task | Wait, Sequence[Arrival], None]


def stage_process(view: View, schedule: Schedule) -> StageProcess:
    """Yield each task to run, or WAIT. The driver sends the messages received meanwhile: maybe none after a task, at
    least one after WAIT. A message from one chunk of a stage to another is among the messages after its task.

    Ends when all tasks are done. Raises AssertionError (our own bug) instead of hanging: a schedule waits though no
    message can arrive, a task is not ready, or a message arrives twice.
    """
    early: set[Arrival] = set()
    while not view.done:
        task = schedule(view)
        if task is None:
            assert view.outstanding > 0, f"deadlock: the schedule waits, and no message can come: {view}"
            arrived = yield WAIT
            assert arrived, f"woken without a message: {view}"
        else:
            # Checked before the task runs: a task that is not ready is refused before anything is sent.
            done = view.after(task)
            arrived = yield task
            view = done
        view = _take(view, arrived, early)
    assert not view.arrivals, f"messages that no task took: {view}"
    assert not early, f"messages that never had their turn: {sorted(map(str, early))}"


def _take(view: View, arrived: Iterable[Arrival], early: set[Arrival]) -> View:
    """Return the view with these messages; a message that overtook another stays in `early` until its turn."""
    for message in arrived:
        task_kind, chunk = message.kind, message.chunk
        expected = view.expects(task_kind, chunk)
        assert message.microbatch >= expected.microbatch, f"{message} came twice: {view}"
        assert message not in early, f"{message} came twice before its turn: {view}"
        early.add(message)
        # A message that closes a gap makes the messages after the gap visible at once.
        while expected in early:
            early.remove(expected)
            view = view.with_arrival(task_kind, chunk)
            expected = view.expects(task_kind, chunk)
    return view
