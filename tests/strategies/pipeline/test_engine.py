"""One stage's engine, driven by hand."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.strategies.pipeline.engine import stage_process
from meshwright.strategies.pipeline.placement import ChunkPlacement, Shape
from meshwright.strategies.pipeline.schedule import (
    AXONN,
    FORWARD_ONLY,
    GPIPE,
    MESSAGE_DRIVEN,
    ONE_F_ONE_B,
    ZB_V,
    Schedule,
    ScheduleRule,
)
from meshwright.strategies.pipeline.task import WAIT, Arrival, Task, TaskKind, View

RULES = {
    "gpipe": GPIPE,
    "1f1b": ONE_F_ONE_B,
    "axonn": AXONN,
    "message-driven": MESSAGE_DRIVEN,
    "message-driven, limit 1": MESSAGE_DRIVEN.limited(1),
    "forward only": FORWARD_ONLY,
    "zb-v": ZB_V,
}


def middle(schedule: Schedule, num_microbatches: int = 4, rule: ScheduleRule = MESSAGE_DRIVEN) -> list[View]:
    """Run the middle stage of three, with all messages sent in order, one at a time. Return the views of the
    schedule."""
    views: list[View] = []

    def seen(view: View) -> Task | None:
        views.append(view)
        return schedule(view)

    process = stage_process(rule.view(1, 3, num_microbatches), seen)
    action, activations = next(process), iter(range(num_microbatches))
    gradients: list[int] = []
    while True:
        if action is WAIT:
            message = (
                Arrival(TaskKind.BACKWARD, gradients.pop(0))
                if gradients
                else Arrival(TaskKind.FORWARD, next(activations))
            )
        elif action.kind is TaskKind.FORWARD:
            gradients.append(action.microbatch)
        try:
            action = process.send([message] if action is WAIT else [])
        except StopIteration:
            return views


def test_a_stage_acts_and_waits() -> None:
    views = middle(MESSAGE_DRIVEN.schedule, 2)
    assert [(view.total.forwards, view.total.backwards, view.total.weights) for view in views] == [
        (0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1), (2, 2, 1),
    ]  # fmt: skip


def test_an_overtaking_message_waits_for_its_turn() -> None:
    process = stage_process(FORWARD_ONLY.view(1, 2, 3), FORWARD_ONLY.schedule)
    assert next(process) is WAIT
    assert process.send([Arrival(TaskKind.FORWARD, 2)]) is WAIT
    assert process.send([Arrival(TaskKind.FORWARD, 1)]) is WAIT
    assert process.send([Arrival(TaskKind.FORWARD, 0)]) == Task(TaskKind.FORWARD, 0)
    assert process.send([]) == Task(TaskKind.FORWARD, 1)
    assert process.send([]) == Task(TaskKind.FORWARD, 2)
    with pytest.raises(StopIteration):
        process.send([])


def test_arrivals_are_seen_in_their_order() -> None:
    view = MESSAGE_DRIVEN.view(1, 3, 3).with_arrival(TaskKind.FORWARD).with_arrival(TaskKind.FORWARD)
    view = view.after(Task(TaskKind.FORWARD, 0)).with_arrival(TaskKind.BACKWARD).with_arrival(TaskKind.FORWARD)
    assert [str(message) for message in view.arrivals] == ["F1", "B0", "F2"]
    assert [str(message) for message in view.after(Task(TaskKind.BACKWARD, 0)).arrivals] == ["F1", "F2"]


def test_in_flight_counts_until_the_last_task_of_a_microbatch() -> None:
    split, whole = MESSAGE_DRIVEN.view(0, 1, 3), ONE_F_ONE_B.view(0, 1, 3)
    for kind, held, held_whole in ((TaskKind.FORWARD, 1, 1), (TaskKind.BACKWARD, 1, 0)):
        split, whole = split.after(Task(kind, 0)), whole.after(Task(kind, 0))
        assert (split.in_flight, whole.in_flight) == (held, held_whole)
    assert split.after(Task(TaskKind.WEIGHT, 0)).in_flight == 0


def test_a_schedule_that_waits_for_nothing_raises() -> None:
    process = stage_process(GPIPE.view(0, 2, 2), lambda view: None)
    with pytest.raises(AssertionError, match="deadlock: the schedule waits, and no message can come"):
        next(process)


def test_a_task_that_is_not_ready_raises() -> None:
    process = stage_process(GPIPE.view(1, 2, 2), lambda view: Task(TaskKind.FORWARD, 0))
    with pytest.raises(AssertionError, match="F0 is not ready"):
        next(process)


def test_a_task_out_of_turn_raises() -> None:
    process = stage_process(GPIPE.view(0, 2, 2), lambda view: Task(TaskKind.FORWARD, 1))
    with pytest.raises(AssertionError, match="F1 out of turn"):
        next(process)


@pytest.mark.parametrize("again", [0, 2])
def test_a_message_that_comes_twice_raises(again: int) -> None:
    process = stage_process(FORWARD_ONLY.view(1, 2, 4), lambda view: None)
    next(process)
    process.send([Arrival(TaskKind.FORWARD, 0), Arrival(TaskKind.FORWARD, 2)])
    with pytest.raises(AssertionError, match=f"F{again} came twice"):
        process.send([Arrival(TaskKind.FORWARD, again)])


def test_a_gradient_of_what_was_never_sent_raises() -> None:
    process = stage_process(MESSAGE_DRIVEN.view(0, 2, 4), MESSAGE_DRIVEN.schedule)
    assert next(process) == Task(TaskKind.FORWARD, 0)
    with pytest.raises(AssertionError, match="a gradient of a microbatch that was not sent on"):
        process.send([Arrival(TaskKind.BACKWARD, 0), Arrival(TaskKind.BACKWARD, 1)])


def test_no_stage_begins_below_a_limit_of_one() -> None:
    with pytest.raises(AssertionError, match="a limit of 0"):
        MESSAGE_DRIVEN.limited(0).view(0, 2, 2)


@given(
    rule=st.sampled_from([*sorted(RULES), "scarce"]),
    num_stages=st.integers(1, 5),
    num_chunks=st.integers(1, 3),
    shape=st.sampled_from(["loop", "v"]),
    num_microbatches=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_arrival(
    rule: str, num_stages: int, num_chunks: int, shape: Shape, num_microbatches: int, seed: int
) -> None:
    """Without a clock, stages take turns at random, and messages of a link arrive in any order, many at once or one by
    one."""
    chosen, draw = RULES.get(rule, MESSAGE_DRIVEN.limited(2 * num_stages)), random.Random(seed)
    if "limit" in rule:
        chosen = chosen.limited(num_chunks)  # the least that lets every chunk begin
    if rule in ("zb-v", "scarce"):
        num_chunks, shape = 2, "v"
    placement = ChunkPlacement(num_stages, num_chunks if shape in chosen.shapes else 1, shape)
    processes = [
        stage_process(chosen.view(stage, num_stages, num_microbatches, placement), chosen.schedule)
        for stage in range(num_stages)
    ]
    actions = {stage: next(process) for stage, process in enumerate(processes)}
    under_way: list[list[Arrival]] = [[] for _ in range(num_stages)]
    done: list[list[Task]] = [[] for _ in range(num_stages)]
    while actions:
        able = [stage for stage, action in actions.items() if action is not WAIT or under_way[stage]]
        assert able, "all wait, and no message is under way"
        stage = draw.choice(able)
        action = actions[stage]
        if isinstance(action, Task):
            done[stage].append(action)
            sent = placement.receiver(stage, action)
            if sent is not None and sent[0] != stage:
                under_way[sent[0]].append(sent[1])
        draw.shuffle(under_way[stage])
        count = draw.randint(int(action is WAIT), len(under_way[stage]))
        came, under_way[stage] = under_way[stage][:count], under_way[stage][count:]
        if isinstance(action, Task) and sent is not None and sent[0] == stage:
            came.insert(0, sent[1])
        try:
            actions[stage] = processes[stage].send(came)
        except StopIteration:
            del actions[stage]
    for tasks in done:
        for kind, chunk in product(chosen.kinds, range(placement.num_chunks)):
            ran = [task.microbatch for task in tasks if (task.kind, task.chunk) == (kind, chunk)]
            assert ran == list(range(num_microbatches))
        assert len(tasks) == len(chosen.kinds) * num_microbatches * placement.num_chunks
