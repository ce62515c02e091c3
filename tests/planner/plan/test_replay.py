"""Replayed allocations equal a run's: without rounding, the sums equal the prediction, step after step."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.allocator import Allocator, CachingAllocator, Heap, MemoryBlock
from meshwright.planner.plan.memory import Footprint
from meshwright.planner.plan.passes import tasks_of_stages
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.process import StageReplay
from meshwright.planner.plan.software import OWN_SOFTWARE
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.ranks.mailbox import AHEAD
from meshwright.strategies.memory.section import FIELD as RECOMPUTE
from tests.oracle.pipeline import LOOP, V, pipelined
from tests.planner.plan.counted import CPU, CUT, FLAT, HALVES, MEGATRON, OFFLOADED, WHOLE, summa, synced

CASES = {
    **{sync: synced(sync) for sync in ("allreduce", "ring", "zero1", "zero2", "zero3")},
    "recomputed": synced("allreduce", memory={"recompute": "auto"}),
    "halves": synced("zero1", **HALVES),
    "offloaded": synced("allreduce", memory=OFFLOADED, layout={"data": {"size": 2}}, **HALVES),
    "1-D": synced("allreduce", 1, CUT),
    "2-D": summa(FLAT, "gather"),
    **{schedule: pipelined("gpt2", 2, schedule, WHOLE) for schedule in ("gpipe", "1f1b", "message-driven")},
    "1-D pipe": pipelined("gpt2", 3, "1f1b", MEGATRON),
    "loop": pipelined("gpt2", 3, "1f1b", WHOLE, placed=LOOP),
    "v": pipelined("gpt2", 2, "message-driven", WHOLE, placed=V),
}


class Counting(Allocator):
    """Memory in pieces of any size."""

    def allocate(self, size: int) -> MemoryBlock:
        return self._used(MemoryBlock(0, size, is_small=False), size, size)

    def free(self, block: MemoryBlock) -> None:
        self.allocated -= block.size


@pytest.mark.parametrize("name", CASES)
def test_replay_holds_what_is_predicted(name: str) -> None:
    """Replayed bytes equal predicted bytes except for messages: a composed stage has all awaited messages until the
    last task."""
    predicted, replayed = held(CASES[name], Counting)
    for memory, footprint in zip(predicted.memory, replayed, strict=True):
        assert footprint.allocated == pytest.approx(memory.allocated, rel=0.03)


@pytest.mark.parametrize("make", [CachingAllocator, Heap])
def test_a_longer_step_holds_no_more(make: Any) -> None:
    few, many = (held(pipelined("gpt2", 2, "1f1b", WHOLE, batch={"global": 4 * n, "micro": 4}), make) for n in (6, 24))
    assert few[1] == many[1]


@pytest.mark.parametrize("make", [CachingAllocator, Heap])
@pytest.mark.parametrize("setting", ["none", "auto"])
def test_three_microbatches_of_one_stage_hold_as_many_bytes_as_more(make: Any, setting: str) -> None:
    """The first, the last, and one for all between (process.held_by_processes)."""
    config = with_field(pipelined("gpt2", 1, "1f1b", WHOLE, batch={"global": 32, "micro": 4}), RECOMPUTE, setting)
    planner = Planner(CPU)
    run = planner.run(config)
    footprints = []
    for some in (3, 4, 8):
        [tasks] = tasks_of_stages(run.config, run.cost, run.latency, some)
        footprints.append(StageReplay(run, 0, AHEAD["cpu"], make(), OWN_SOFTWARE).run(tasks, some))
    assert footprints[0] == footprints[1] == footprints[2]


def held(config: Config, make: Any) -> tuple[Prediction, list[Footprint]]:
    """Return the prediction, and each stage's replay."""
    planner = Planner(CPU)
    prediction = planner.predict(config)
    run = TimedRun(planner.site, planner.buckets, prediction.config, planner.stages(prediction.config))
    some = min(prediction.config.num_microbatches, len(run.stages) + 3)
    tasks = tasks_of_stages(prediction.config, run.cost, run.latency, some)
    return prediction, [
        StageReplay(run, stage, AHEAD["cpu"], make(), OWN_SOFTWARE).run(tasks[stage], some)
        for stage in range(len(run.stages))
    ]
