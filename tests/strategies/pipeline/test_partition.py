"""The layers of each stage: the cheapest cut of all, and every cut computes as one device does."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.compute.model import Costs
from meshwright.config import Config, parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.strategies.pipeline.partition import balanced, fastest, long_step_seconds, ranges_of, step_seconds
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import GPIPE, MESSAGE_DRIVEN, ONE_F_ONE_B, ScheduleRule
from meshwright.training.stage_costs import counted_costs
from tests.harness import resolved
from tests.oracle.pipeline import SCHEDULES, WHOLE, laid_out, pipelined
from tests.oracle.run import check, run


def dearest(costs: Costs, partition: tuple[int, ...]) -> float:
    """Return the seconds of the most expensive stage."""
    stages = [sum(costs.layers[layer] for layer in layers) for layers in ranges_of(partition)]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return max(stages)


@given(
    st.builds(
        Costs,
        st.integers(0, 30),
        st.lists(st.integers(1, 9), min_size=1, max_size=7).map(tuple),
        st.integers(0, 30),
    ),
    st.integers(1, 5),
)
def test_no_cut_is_cheaper(costs: Costs, num_stages: int) -> None:
    num_layers = len(costs.layers)
    num_stages = min(num_stages, num_layers + 2)
    chosen = balanced(costs, num_stages)
    allowed = [
        partition
        for partition in product(range(num_layers + 1), repeat=num_stages)
        if sum(partition) == num_layers and 0 not in partition[1:-1]
    ]
    assert chosen in allowed
    assert dearest(costs, chosen) == min(dearest(costs, partition) for partition in allowed)


def test_the_clock_prefers_a_first_stage_that_is_the_bottleneck_to_a_last_one() -> None:
    """If the head costs 2.8 layers, 3 + 1 layers are better balanced, but 4 + 0 are done sooner."""
    costs, two = Costs(0.15, (1.0,) * 4, 2.8), ChunkPlacement(2)
    assert balanced(costs, 2) == (3, 1)
    assert fastest(costs, two, MESSAGE_DRIVEN, 4) == (4, 0)
    sooner, later = (step_seconds(costs, cut, two, MESSAGE_DRIVEN, 4) for cut in ((4, 0), (3, 1)))
    assert sooner < later


@pytest.mark.parametrize("rule", [GPIPE, ONE_F_ONE_B, MESSAGE_DRIVEN], ids=["gpipe", "1f1b", "message-driven"])
def test_a_long_step_goes_on_as_its_first_part_did(rule: ScheduleRule) -> None:
    """A cut with fast first stages may be slower in a long step, and is not taken."""
    costs, four = Costs(0.6, (1.0,) * 12, 5.0), ChunkPlacement(4)
    for cut in ((4, 4, 4, 0), (2, 6, 4, 0)):
        whole = step_seconds(costs, cut, four, rule, 64)
        assert long_step_seconds(costs, cut, four, rule, 64) == pytest.approx(whole, rel=0.01)
    chosen, even = fastest(costs, four, rule, 64), balanced(costs, 4)
    assert step_seconds(costs, chosen, four, rule, 64) <= step_seconds(costs, even, four, rule, 64)


def test_a_run_and_its_plan_are_cut_alike_by_the_clock() -> None:
    model = {"layers": 4, "hidden": 128, "heads": 4, "positions": 64, "vocabulary": 6000, "tied": False}
    tree = {"model": model, "data": {"sequence": 64}, "batch": {"global": 4, "micro": 1}, "steps": 1, "device": "cpu"}
    config = parse_config(tree | {"layout": {"pipeline": {"size": 2}, "transport": "torch"}})
    cut = resolved(config).layout.pipeline.partition
    assert cut == Planner(load_cluster("two-cores")).resolved(config).layout.pipeline.partition == (4, 0)
    assert balanced(counted_costs(config), 2) == (3, 1)


def test_the_clock_counts_all_chunks_of_a_stage() -> None:
    """In a v the first stage has the head as well: a balance of positions would add two layers to this stage."""
    costs, v = Costs(0.0, (1.0,) * 8, 2.0), ChunkPlacement(2, 2, "v")
    cut = fastest(costs, v, MESSAGE_DRIVEN, 8)
    assert cut[0] + cut[3] + 2 <= cut[1] + cut[2]


@pytest.mark.parametrize(
    "begin, end, partition",
    [
        (0, 0, (4, 4, 4)),
        (1, 1, (4, 5, 3)),
        (0, 4, (6, 5, 1)),  # 5 + 4: the cost of (5, 5, 2)
        (20, 0, (0, 6, 6)),
        (0, 20, (6, 6, 0)),  # the most even of equal cuts
    ],
)
def test_ends_weigh(begin: float, end: float, partition: tuple[int, ...]) -> None:
    costs = Costs(begin, (1.0,) * 12, end)
    assert dearest(costs, balanced(costs, 3)) == dearest(costs, partition)
    if begin == end == 0 or 20 in (begin, end):  # other ends have several best cuts
        assert balanced(costs, 3) == partition


def test_a_gpus_optimizer_weighs_more_beside_its_products() -> None:
    """A table has no product, only work on parameters. The step has few tokens, to show this work."""
    model = {"layers": 8, "hidden": 64, "heads": 4, "positions": 32, "vocabulary": 6_000, "tied": False}
    tree = {"model": model, "data": {"sequence": 32}, "batch": {"global": 8, "micro": 4}, "steps": 1}
    cuts = {
        device: resolved(parse_config(tree | {"layout": {"pipeline": {"size": 2}}, "device": device}))
        for device in ("cpu", "cuda")
    }
    on_cpu, on_gpu = (cuts[device].layout.pipeline.partition for device in ("cpu", "cuda"))
    assert on_gpu[0] < on_cpu[0], (on_cpu, on_gpu)


def test_ranges() -> None:
    assert ranges_of((0, 2, 1)) == (range(0), range(2), range(2, 3))


@cache
def serial(model: str, micro: int) -> Any:
    return run(pipelined(model, 1, "gpipe", WHOLE, batch={"global": 24, "micro": micro}))[0]


def check_against_serial(config: Config, model: str = "gpt2") -> None:
    check(run(config), serial(model, config.micro * config.layout.data.size))


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "axonn", "message-driven"])
@pytest.mark.parametrize("micro", [24, 12], ids=["one microbatch", "fewer than stages"])
def test_few_microbatches(micro: int, schedule: str) -> None:
    check_against_serial(pipelined("gpt2", 3, schedule, WHOLE, batch={"global": 24, "micro": micro}))


BY_HAND: list[tuple[str, int, Any]] = [
    ("gpt2", 2, (1, 3)),
    ("gpt2", 2, (0, 4)),
    ("gpt2", 2, (4, 0)),
    ("gpt2", 3, (3, 1, 0)),
    ("gpt2", 6, "auto"),  # layers + 2 stages: embedding and head alone
    ("gpt2", 3, "measured"),
    ("untied", 3, (0, 4, 0)),
    ("bert", 3, (0, 3, 0)),
    ("vit", 2, (0, 3)),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("model, stages, partition", BY_HAND, ids=str)
def test_any_cut_equals_serial(model: str, stages: int, partition: Any) -> None:
    config = pipelined(model, stages, "message-driven", WHOLE, batch={"global": 24, "micro": 6})
    cut = resolved(laid_out(config, pipeline={"partition": partition}))  # once: each rank would measure anew
    check_against_serial(cut, model)


SYNCS = ("allreduce", "zero1", "ring", "rooted", "server-gradient")


@pytest.mark.few(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sync", SYNCS)
def test_every_sync_of_replicas(sync: str, schedule: str) -> None:
    config = pipelined("gpt2", 2, schedule, WHOLE, 2, batch={"global": 24, "micro": 3})
    check_against_serial(laid_out(config, data={"sync": sync}))


LEAVES_EARLY: list[tuple[str, tuple[int, ...]]] = [("gpt2", (2, 2)), ("gpt2", (4, 0)), ("untied", (4, 0))]
"""Models and partitions with a full bucket on the last stage while the first stage still waits for a gradient. A table
is a separate bucket, and under message-driven a head alone has no weight gradient to defer."""


@pytest.mark.few(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sync", SYNCS)
def test_no_sum_keeps_a_stage_from_its_messages(sync: str, schedule: str) -> None:
    """A tied table is summed over the first and the last stage: a single replica is enough for a deadlock."""
    for model, partition in LEAVES_EARLY:
        config = pipelined(model, 2, schedule, WHOLE, batch={"global": 24, "micro": 6})
        check_against_serial(
            laid_out(config, pipeline={"partition": partition}, data={"sync": sync, "bucket": 1024}), model
        )
