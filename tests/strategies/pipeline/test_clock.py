"""The computed clock: totals that are counted by hand, and the gain of message-driven under troubles."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from meshwright.strategies.pipeline.clock import MessageSeconds, TaskSeconds, _in_order, _Simulation, simulate
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import (
    AXONN,
    FORWARD_ONLY,
    GPIPE,
    MESSAGE_DRIVEN,
    ONE_F_ONE_B,
    SPLIT,
    ZB_V,
    ScheduleRule,
)
from meshwright.strategies.pipeline.task import Task, TaskKind

SLOW_STAGE = 3


def work(split: bool, factor: Callable[[int, str], float]) -> TaskSeconds:
    """Return F, B and W of one second each, times factor(stage, F3); an unsplit backward pass is B and W together."""

    def costs(stage: int, task: Task) -> float:
        if split or task.kind is TaskKind.FORWARD:
            return factor(stage, str(task))
        return factor(stage, f"B{task.microbatch}") + factor(stage, f"W{task.microbatch}")

    return costs


def cell(name: str, split: bool, seed: int = 0) -> tuple[TaskSeconds, MessageSeconds]:
    """Return one of the benchmark's four conditions; the same seed gives every schedule the same troubles."""

    def uniform(*key: object) -> float:
        return random.Random(repr((seed, *key))).random()

    def late(a: int, b: int, message: Task) -> float:
        return 0.1 + uniform(a, b, str(message))

    def prompt(a: int, b: int, message: Task) -> float:
        return 0.1

    return {
        "no jitter": (work(split, lambda stage, name: 1.0), prompt),
        "jitter": (work(split, lambda stage, name: 0.7 + 0.6 * uniform(stage, name)), prompt),
        "slow stage": (work(split, lambda stage, name: 1.3 if stage == SLOW_STAGE else 1.0), prompt),
        "late messages": (work(split, lambda stage, name: 1.0), late),
    }[name]


def total(rule: ScheduleRule, name: str, num_microbatches: int) -> float:
    return simulate(8, num_microbatches, rule, *cell(name, rule.splits)).total_seconds


@pytest.mark.parametrize(
    "num_microbatches, name, bound",
    [
        (16, "no jitter", 0.92), (16, "jitter", 0.90), (16, "slow stage", 0.95), (16, "late messages", 0.85),
        (64, "no jitter", 0.97), (64, "jitter", 0.94), (64, "slow stage", 0.97), (64, "late messages", 0.82),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [12, 16])
def test_message_driven_against_1f1b(num_microbatches: int, name: str, bound: float, limit: int) -> None:
    ours, theirs = (
        total(MESSAGE_DRIVEN.limited(limit), name, num_microbatches),
        total(ONE_F_ONE_B, name, num_microbatches),
    )
    assert ours <= bound * theirs


@pytest.mark.parametrize("name", ["no jitter", "jitter", "slow stage", "late messages"])
def test_message_driven_with_the_memory_of_1f1b(name: str) -> None:
    """At the limit of 1F1B's first stage, message-driven is faster than 1F1B and AxoNN as well."""
    ours = total(MESSAGE_DRIVEN.limited(8), name, 16)
    assert ours < 0.9 * total(ONE_F_ONE_B, name, 16)
    assert ours < 0.9 * total(AXONN, name, 16)


@pytest.mark.parametrize("rule", [GPIPE, ONE_F_ONE_B, AXONN, MESSAGE_DRIVEN, FORWARD_ONLY])
def test_no_total_below_the_work(rule: ScheduleRule) -> None:
    timeline = simulate(4, 6, rule, *cell("jitter", rule.splits))
    busy = [sum(span.seconds for span in timeline.spans if span.stage == stage) for stage in range(4)]
    assert max(busy) < timeline.total_seconds
    assert timeline.idle_shares == pytest.approx([1 - seconds / timeline.total_seconds for seconds in busy])


def test_latency_counts_on_every_link() -> None:
    """One microbatch: four stages forward, three messages, and the same backward."""
    timeline = simulate(4, 1, ONE_F_ONE_B, work(False, lambda stage, name: 1.0), lambda a, b, message: 0.25)
    assert timeline.total_seconds == 4 * 1 + 4 * 2 + 6 * 0.25


def test_weight_gradients_run_while_messages_are_under_way() -> None:
    """Two stages, two microbatches, links of 3 seconds: W0 of the first stage fills the wait for B1's gradient."""
    timeline = simulate(
        2, 2, ScheduleRule(MESSAGE_DRIVEN.schedule, SPLIT, lambda *_: 2), lambda *_: 1.0, lambda *_: 3.0
    )
    first = [(span.name, span.start_seconds) for span in timeline.spans if span.stage == 0]
    assert first == [("F0", 0), ("F1", 1), ("B0", 9), ("W0", 10), ("B1", 11), ("W1", 12)]


def test_the_same_run_twice() -> None:
    one, two = (simulate(5, 7, MESSAGE_DRIVEN, *cell("late messages", True)) for _ in range(2))
    assert one == two


def test_each_cost_and_latency_is_asked_once() -> None:
    costs: list[tuple[int, Task]] = []
    sent: list[tuple[int, int, Task]] = []
    simulate(3, 4, MESSAGE_DRIVEN, lambda *a: costs.append(a) or 1.0, lambda *a: sent.append(a) or 0.5)
    assert len(costs) == len(set(costs)) == 3 * 4 * 3
    assert len(sent) == len(set(sent)) == 2 * 4 * 2


def test_stages_that_share_a_core_take_turns() -> None:
    """On one core, a step takes the sum of the tasks; a lone stage waits for no core."""
    costs = work(True, lambda stage, name: 1.0 + stage)
    timeline = simulate(3, 4, MESSAGE_DRIVEN, costs, lambda a, b, message: 0.0, lambda busy: 1 / max(1, busy))
    assert timeline.total_seconds == pytest.approx(3 * 4 * (1 + 2 + 3))


def test_a_task_goes_faster_while_its_neighbour_waits() -> None:
    """Two stages on one core: F0 of the first stage is alone for 1 s. Then F1 of the first and F0 of the second, of 1 s
    each, take 2 s."""
    timeline = simulate(
        2, 2, FORWARD_ONLY, lambda stage, task: 1.0, lambda a, b, message: 0.0, lambda busy: 1 / max(1, busy)
    )
    ends = {(span.stage, span.name): span.end_seconds for span in timeline.spans}
    assert ends == pytest.approx({(0, "F0"): 1.0, (0, "F1"): 3.0, (1, "F0"): 3.0, (1, "F1"): 4.0})


@pytest.mark.parametrize("num_microbatches", [16, 64])
def test_a_v_with_little_memory_has_less_bubble_than_zb_v(num_microbatches: int) -> None:
    """With ZB-V's memory, F and B run in ZB-V's order, and weight gradients fill the waits."""
    v, bubbles = ChunkPlacement(8, 2, "v"), {}
    for rule in (ZB_V, MESSAGE_DRIVEN.limited(16)):
        timeline = simulate(8, num_microbatches, rule, *cell("no jitter", True), placement=v)
        bubbles[rule.fixed] = timeline.total_seconds - 6 * num_microbatches  # each chunk's tasks take a second
    assert bubbles[False] <= 0.95 * bubbles[True]


@pytest.mark.parametrize(
    "rule, placement",
    [
        (GPIPE, ChunkPlacement(5)),
        (GPIPE, ChunkPlacement(3, 2, "v")),
        (ONE_F_ONE_B, ChunkPlacement(5)),
        (ONE_F_ONE_B, ChunkPlacement(3, 2)),
        (ZB_V, ChunkPlacement(4, 2, "v")),
    ],
    ids=lambda value: value.schedule.__name__ if isinstance(value, ScheduleRule) else f"{value.num_chunks}",
)
@pytest.mark.parametrize("seed", range(8))
def test_fixed_orders_need_no_events(rule: ScheduleRule, placement: ChunkPlacement, seed: int) -> None:
    """Spans along the orders equal the spans of the events, to the bit, also if stages begin at the same moment."""
    rng = random.Random(seed)
    seconds = [rng.choice((0.5, 1.0, rng.random())) for _ in range(40)]

    def costs(stage: int, task: Task) -> float:
        return seconds[hash((stage, "FBW".index(task.kind), task.microbatch, task.chunk)) % len(seconds)]

    def latency(start: int, end: int, message: Task) -> float:
        return seconds[hash((start, end, message.microbatch)) % len(seconds)] / 4

    count = rng.randrange(1, 15)
    events = _Simulation(placement, count, rule, costs, latency, None).run()
    assert simulate(placement.num_stages, count, rule, costs, latency, placement=placement) == events


def test_a_fixed_order_that_waits_for_ever_is_told() -> None:
    order = [[Task(TaskKind.BACKWARD, 0)], [Task(TaskKind.FORWARD, 0), Task(TaskKind.BACKWARD, 0)]]
    with pytest.raises(AssertionError, match="deadlock: all wait, and no message is under way: stage 0, stage 1"):
        _in_order(ChunkPlacement(2), order, lambda stage, task: 1.0, lambda start, end, task: 0.0)
