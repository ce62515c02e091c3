"""Paced stages in real processes match the clock and return their spans; no message is early."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.paced import CONDITIONS, HeldMailbox, PacedPipeline, Run
from benchmarks.pipeline import ONE_CHUNK, Measured, planned, scaled, summed_up
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox, Message, TensorMeta, both_sides
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.task import Task, TaskKind
from tests.workers import run_ranks

FORWARD_SECONDS = 0.003
STAGES, MICROBATCHES = 3, 4
SCHEDULES = ("1f1b", "message-driven, limit 12")


def steps(mesh: Mesh, runs: list[Run]) -> list[Timeline | None]:
    rank = PacedPipeline(mesh, FORWARD_SECONDS, 1024)
    return [rank.step(run) for run in runs]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_task_once_on_every_rank_and_no_sooner_than_modelled(condition: str) -> None:
    """The two schedules run one after the other in the same processes."""
    runs = [Run(schedule, condition, STAGES, MICROBATCHES, seed=3) for schedule in SCHEDULES]
    first, *others = run_ranks(steps, Grid((("data", 1), ("pipe", STAGES))), runs)
    assert others == [[None, None]] * (STAGES - 1), "rank 0 alone has the spans"
    for run, timeline in zip(runs, first, strict=True):
        done = Counter((span.stage, span.name) for span in timeline.spans)
        names = [str(Task(kind, i)) for kind in run.rule.kinds for i in range(MICROBATCHES)]
        assert done == Counter((stage, name) for stage in range(STAGES) for name in names)
        check_times(run, scaled(timeline, 1 / FORWARD_SECONDS))


def check_times(run: Run, timeline: Timeline) -> None:
    """Check that a task takes at least its cost, and begins after the arrival of the needed message."""
    starts = {(span.stage, span.name): span.start_seconds for span in timeline.spans}
    for span in timeline.spans:
        task = Task(TaskKind(span.name[0]), int(span.name[1:]))
        cost = run.costs(span.stage, task)
        assert span.seconds >= cost - 1e-3
        to = span.stage + {TaskKind.FORWARD: 1, TaskKind.BACKWARD: -1, TaskKind.WEIGHT: STAGES}[task.kind]
        if 0 <= to < STAGES:
            assert starts[to, span.name] >= span.start_seconds + cost + run.latency(span.stage, to, task) - 1e-3


class Scripted(Mailbox):
    """A mailbox that returns one given message at each look; `wait` is for a rank without a message."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__("pipe")
        self.messages = messages

    def poll(self) -> list[Message]:
        return [self.messages.pop(0)] if self.messages else []

    def wait(self) -> list[Message]:
        assert self.messages, "asleep for ever"
        return self.poll()


def due(index: int, moment: float) -> Message:
    return Message("before", index, (torch.tensor([moment], dtype=torch.float64),))


def test_messages_are_held_back_until_their_moment_and_may_overtake() -> None:
    now = time.time()
    mailbox = HeldMailbox(Scripted([due(0, now + 0.4), due(1, now + 0.2), due(2, now - 1.0)]))
    assert mailbox.poll() == [], "the first is not due"
    came = []
    while len(came) < 3:
        came += [(message.index, time.time() - now) for message in mailbox.wait()]
    assert [index for index, _ in came] == [2, 1, 0]
    assert came[1][1] >= 0.2
    assert came[2][1] >= 0.4


def test_an_epoch_does_not_begin_while_messages_are_held() -> None:
    mailbox = HeldMailbox(Scripted([due(0, time.time() + 10)]))
    mailbox.poll()
    with pytest.raises(AssertionError, match="1 messages that nobody took"):
        mailbox.open(0, both_sides(TensorMeta((1,), torch.float64)), 0, 0)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_all_schedules_meet_the_same_troubles(condition: str) -> None:
    """B and W together take as long as the whole backward pass, and a link has the same latency."""
    whole, split = (Run(schedule, condition, 8, 16, seed=1) for schedule in SCHEDULES)
    for stage in range(8):
        forward, backward, weight = (Task(kind, 5) for kind in TaskKind)
        assert whole.costs(stage, forward) == split.costs(stage, forward)
        assert whole.costs(stage, backward) == split.costs(stage, backward) + split.costs(stage, weight)
        assert whole.latency(stage, stage + 1, forward) == split.latency(stage, stage + 1, forward)


def test_schedules_take_turns_and_equal_ones_run_once() -> None:
    runs = planned([16, 64], ["jitter"], ONE_CHUNK, rounds=2, repeats=3)
    assert len(runs) == 2 * 3 * (6 + 7)
    assert len(set(runs)) == 2 * (6 + 7)
    assert [runs[0].schedule, runs[13].schedule] == ONE_CHUNK[:2]


def test_ratios_are_taken_within_a_round() -> None:
    """The second round ran on a machine of half the speed: totals show the difference, ratios do not."""
    measured = []
    for run in planned([16], ["jitter"], SCHEDULES, rounds=2, repeats=1):
        clock = replace(run, seed=0).simulated()
        measured.append(Measured(run, scaled(clock, 1.0 + run.seed), clock))
    baseline, ours = summed_up(measured)
    assert baseline.real == pytest.approx(1.5 * baseline.clock)
    assert baseline.real_ratio == 1.0
    assert ours.real_ratio == pytest.approx(ours.clock_ratio)
    assert ours.ratio_error == pytest.approx(0.0)
    assert baseline.overrun == pytest.approx(0.5 * 1.5, rel=0.2), "tasks of 1.5 on average took half as long again"
    assert (baseline.target, ours.target) == (None, 0.90)
