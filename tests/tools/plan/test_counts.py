"""The planner counts what runs do: bytes sent and held exactly, activations within a tenth.

Every kit, every schedule, every sync that is planned, at 2 to 16 ranks; configs of one grid share a group of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.pipeline.task import Task
from meshwright.ranks.grid import PIPE, grid_of_run
from meshwright.tools.plan.buckets import held_of
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.recorder import place
from meshwright.tools.plan.timed_run import TimedRun
from tests.families.llama.test_experts_layouts import EXPERTS, MODEL, experts
from tests.pipeline.test_equality import LOOP, SCHEDULES, V, pipelined
from tests.pipeline.test_partition import laid_out
from tests.tensor.test_equality import config_for
from tests.tools.plan.clusters import FLAT as SWITCH
from tests.tools.plan.measured import Measured, measured
from tests.workers import run_ranks

DTYPES = ("float32", "float64", "bf16", "fp16")
DEVICE = {"kind": "cpu", "peak_flops_per_second": dict.fromkeys(DTYPES, 1e11)}
CPU = SWITCH.model_copy(update={"device": SWITCH.device.model_copy(update=DEVICE)})

SYNCS = ("allreduce", "ring", "rooted", "zero1", "zero2", "zero3")
HYBRID = {"size": 4, "sync": "zero3", "shard": 2}
WHOLE = {"kind": "none"}
MEGATRON = {"kind": "megatron", "size": 2}
MESSAGES = {"size": 2, "expert": 2, "exchange": "messages", "sync": "zero1", "bucket": 8192}
CUT = MEGATRON | {"sequence_parallel": True}
FLAT = {"kind": "tesseract", "q": 2, "d": 1}
DEEP = {"kind": "tesseract", "q": 2, "d": 2}
SUBGRAPHS = [
    {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
    for common, branch in product(("all", "one"), ("attention-core", "attention", "block"))
]
TOLERANCE = 0.1

HALVES = {"precision": {"level": "O2", "dtype": "bf16"}}
CASTS = {"precision": {"level": "O1", "dtype": "bf16"}}
GATHER = {"memory": {"summa": "gather"}}
"""Decided beforehand: ranks that decide when they begin tell each other how much memory they have."""


def batch(data: int) -> dict[str, int]:
    return {"global": 24 * data, "micro": 8}


def synced(sync: str, data: int = 2, tensor: dict[str, Any] = WHOLE, **changes: Any) -> Config:
    """Three microbatches a replica."""
    layout = {"data": {"size": data, "sync": sync, "bucket": 8192}, "tensor": tensor}
    return config_for("gpt2", tensor, data, **({"batch": batch(data), "layout": layout} | changes))


def sliced(sync: str, data: int, schedule: str = "message-driven", **changes: Any) -> Config:
    """Two stages of several chunks, each of which fills buckets of its own."""
    config = pipelined("gpt2", 2, schedule, WHOLE, data, **changes)
    return laid_out(config, data={"sync": sync, "shard": 2 if data > 2 else None})


def summa(tensor: dict[str, Any], form: str, samples: int = 8, microbatches: int = 2) -> Config:
    """A tied table's gradient is planned for, which a whole model has room for: it must be small beside the rest."""
    sizes = {"global": microbatches * samples, "micro": samples}
    return config_for("gpt2", tensor, memory={"summa": form}, batch=sizes)


OFFLOADED = {"offload": {"to": "host", "bucket": 4096, "chunk": 2}}

FEW = {
    "syncs": [synced(sync) for sync in SYNCS],
    "shard groups": [synced(sync, 4, layout={"data": HYBRID | {"sync": sync}}) for sync in ("zero2", "zero3")],
    "memory": [
        synced("allreduce", memory={"recompute": "auto"}),
        synced("zero1", memory={"recompute": "selective"}, **HALVES),
        synced("allreduce", memory={"recompute": "offload"}),
        synced("allreduce", memory=OFFLOADED, layout={"data": {"size": 2}}, **HALVES),
    ],
    "autocast": [
        synced("allreduce", **CASTS),
        synced("zero1", memory={"recompute": "auto"}, **CASTS),
        synced("zero1", memory={"recompute": "selective"}, **CASTS),
    ],
    "autocast, 1-D cut": [synced("allreduce", 1, CUT, **CASTS)],
    "autocast, 2-D": [config_for("gpt2", FLAT, batch={"global": 16, "micro": 8}, **GATHER, **CASTS)],
    "autocast, stages": [pipelined("gpt2", 2, "message-driven", WHOLE, **CASTS)],
    "1-D cut": [synced("allreduce", 1, CUT)],
    "llama": [config_for("llama", MEGATRON)],
    "shared heads": [
        config_for(
            "grouped",
            MEGATRON | {"size": 4},
            layout={"data": {"size": 2, "sync": sync}, "tensor": MEGATRON | {"size": 4}},
        )
        for sync in ("zero1", "zero3")
    ],
    "experts": [
        config_for("experts", WHOLE, 2, layout={"data": {"size": 2, "expert": 2, "sync": sync, "bucket": 8192}})
        for sync in ("zero1", "zero3")
    ],
    "deepseek": [
        config_for(
            "deepseek",
            CUT,
            2,
            batch={"global": 16, "micro": 4},
            layout={"data": {"size": 2, "expert": 2, "sync": "zero1", "bucket": 8192}, "tensor": CUT},
        )
    ],
    "2-D": [summa(FLAT, form) for form in ("gather", "stream")],
    "2.5-D": [summa(DEEP, "gather")],
    "sub-graphs": [synced("allreduce", 1, tensor) for tensor in (SUBGRAPHS[0], SUBGRAPHS[-1])],
    **{schedule: [pipelined("gpt2", 2, schedule, WHOLE)] for schedule in SCHEDULES},
    "inputs in host memory, stages": [pipelined("gpt2", 2, "1f1b", WHOLE, memory={"recompute": "offload"})],
    "1-D pipe": [pipelined("gpt2", 3, "1f1b", MEGATRON)],
    "loop": [pipelined("gpt2", 3, "1f1b", WHOLE, placed=LOOP)],
    "v": [pipelined("gpt2", 2, "message-driven", WHOLE, placed=V)],
    "states in groups": [synced("zero1", 4, layout={"data": HYBRID | {"sync": "zero1", "bucket": 8192}})],
    # Chunks of one layer, which go backward several times in a row, and gather each time.
    "v of slices, all forward first": [sliced("zero3", 2, "gpipe", placed=V)],
    "loop of slices": [sliced("zero3", 2, placed=LOOP, schedule="1f1b")],
}
"""Configs of one grid and the same token axes together; one with stages alone, for mailboxes are opened once."""

KITS = {"1-D": MEGATRON, "1-D cut": CUT, "2-D": FLAT, "2.5-D": DEEP}
KITS |= {f"sub-graphs {tensor['common']} {tensor['branch']}": tensor for tensor in SUBGRAPHS}

MANY = {
    "1-D": [synced("allreduce", 1, MEGATRON)],
    "2-D": [summa(FLAT, form, microbatches=3) for form in ("gather", "whole", "stream")],
    "2.5-D": [summa(DEEP, form, 16, 3) for form in ("gather", "stream")],
    "sub-graphs": [synced("allreduce", 1, tensor) for tensor in SUBGRAPHS],
    **{f"{name} x 2": [synced(sync, 2, tensor, **GATHER) for sync in SYNCS] for name, tensor in KITS.items()},
    **{f"{name} halves": [synced("zero1", 2, tensor, **GATHER, **HALVES)] for name, tensor in KITS.items()},
    **{f"{name} autocast": [synced("zero1", 2, tensor, **GATHER, **CASTS)] for name, tensor in KITS.items()},
    **{
        f"{name} {schedule}": [pipelined("gpt2", 2, schedule, tensor, batch={"global": 16, "micro": 4}, **GATHER)]
        for (name, tensor), schedule in product(KITS.items(), SCHEDULES)
    },
    **{
        f"{model} {name}": [config_for(model, tensor, batch=batch(1), **GATHER)]
        for model, name in product(
            ("untied", "bert", "vit", "transformer", "t5"), ("1-D", "2-D", "sub-graphs all block")
        )
        for tensor in (KITS[name],)
    },
    "shard groups x pipe 2 x 1-D": [pipelined("gpt2", 2, "1f1b", CUT, 4, layout={"data": HYBRID, "tensor": CUT})],
    **{
        f"shard groups x {kind}": [synced("zero3", 4, layout={"data": HYBRID, "context": {"size": 2, "kind": kind}})]
        for kind in ("ulysses", "ring")
    },
    "data 2 x pipe 2": [pipelined("gpt2", 2, "1f1b", WHOLE, 2)],
    "data 2 x pipe 2 x 1-D": [pipelined("gpt2", 2, "message-driven", CUT, 2)],
    "data 2 x pipe 2 x 2-D": [
        pipelined("gpt2", 2, "message-driven", FLAT, 2, batch={"global": 24, "micro": 4}, **GATHER)
    ],
    "loop message-driven": [pipelined("gpt2", 3, "message-driven", WHOLE, placed=LOOP)],
    "v of three": [pipelined("gpt2", 2, "message-driven", WHOLE, placed=V | {"chunks": 3})],
    "v gpipe": [pipelined("gpt2", 2, "gpipe", WHOLE, placed=V)],
    "v untied": [pipelined("untied", 2, "message-driven", WHOLE, placed=V)],
    "v of slices of gradients": [sliced("zero2", 2, placed=V)],
    "v of slices": [sliced("zero3", 2, placed=V)],
    "loop of slices, recomputed": [sliced("zero3", 2, placed=LOOP, schedule="1f1b", memory={"recompute": 1})],
    "v of shard groups": [sliced("zero2", 4, placed=V, batch={"global": 48, "micro": 3})],
    "v x data 2 x 1-D": [pipelined("gpt2", 2, "message-driven", CUT, 2, placed=V)],
    "loop x data 2 x 2-D": [
        pipelined("gpt2", 2, "1f1b", FLAT, 2, placed=LOOP, batch={"global": 24, "micro": 4}, **GATHER)
    ],
    **{f"bert pipe {schedule}": [pipelined("bert", 3, schedule, WHOLE)] for schedule in SCHEDULES},
}
"""The same; 16 ranks at most."""


@pytest.mark.few(12)
@pytest.mark.parametrize("name", FEW)
def test_counts_what_runs_do(name: str) -> None:
    check(FEW[name])


@pytest.mark.long
@pytest.mark.parametrize("name", MANY)
def test_counts_what_more_runs_do(name: str) -> None:
    check(MANY[name])


@pytest.mark.parametrize("recompute", ["none", pytest.param(1, marks=pytest.mark.long)])
def test_counts_what_experts_as_messages_send(recompute: str | int) -> None:
    """Bytes and weights; how much of two microbatches is alive at a time hangs on when rows come."""
    few = {"global": 16, "micro": 2}
    config = config_for("experts", WHOLE, 2, batch=few, layout={"data": MESSAGES}, memory={"recompute": recompute})
    axes = config.layout.token_axes
    ranks: list[list[Measured]] = run_ranks(measured, grid_of_run(config), [config], token_axes=axes, transport="torch")
    assert list(counts(Planner(CPU).predict(config), 0, ranks[0][0])) == []


def test_recomputed_layers_keep_the_rows_that_came_as_messages() -> None:
    """Two rows a token in and out of its experts, beside each layer's input; a layer that waits keeps that alone."""
    kept = {}
    for exchange, recompute in product(("blocking", "messages"), ("none", 1)):
        layout = {"data": MESSAGES | {"exchange": exchange}}
        few = {"global": 4, "micro": 2}
        config = config_for("experts", WHOLE, 2, batch=few, layout=layout, memory={"recompute": recompute})
        kept[exchange, recompute] = Planner(CPU).predict(config).fullest.activations / config.num_microbatches
    # 2 samples of 12 tokens, 24 numbers of 8 bytes; with capacity 1 as many rows as tokens take experts.
    rows = 2 * (2 * 12) * 24 * 8
    assert kept["messages", 1] - kept["blocking", 1] >= 2 * rows
    assert kept["messages", 1] < kept["messages", "none"]


@pytest.mark.parametrize(
    "layout",
    [
        {"data": {"size": 2, "expert": 2, "sync": "zero1", "bucket": 8192}, "pipeline": {"size": 2}},
        pytest.param({"data": {"size": 2, "sync": "zero3"}}, marks=pytest.mark.long),
        pytest.param({"data": {"size": 2, "expert": 2, "sync": "zero1"}, "tensor": CUT}, marks=pytest.mark.long),
        pytest.param({"data": {"size": 2, "sync": "zero3"}, "pipeline": {"size": 2}}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_counts_the_pass_that_counts_experts_loads(layout: dict[str, Any]) -> None:
    """A balance over the batch: forward once more, messages and gathers with it, and a sum of loads."""
    configs = [
        experts(layout, model=MODEL | {"experts": EXPERTS | {"balance_over": over}}, batch={"global": 16, "micro": 4})
        for over in ("batch", "microbatch")
    ]
    grid, axes = grid_of_run(configs[0]), configs[0].layout.token_axes
    ranks: list[list[Measured]] = run_ranks(measured, grid, configs[:1], token_axes=axes, transport="torch")
    predicted, without = (Planner(CPU).predict(config) for config in configs)
    for stage in range(configs[0].layout.pipeline.size):
        real = ranks[grid.rank(dict.fromkeys(grid.names, 0) | {PIPE: stage})][0]
        assert list(counts(predicted, stage, real)) == []
    assert 1.1 * without.seconds < predicted.seconds < 1.8 * without.seconds


def check(configs: Sequence[Config]) -> None:
    layout = configs[0].layout
    grid = grid_of_run(configs[0])
    ranks: list[list[Measured]] = run_ranks(measured, grid, configs, token_axes=layout.token_axes, transport="torch")
    planner = Planner(CPU)
    wrong: list[str] = []
    for index, config in enumerate(configs):
        predicted = planner.predict(config)
        for stage in range(layout.pipeline.size):
            real = ranks[grid.rank(dict.fromkeys(grid.names, 0) | {PIPE: stage})][index]
            lines = [*counts(predicted, stage, real), *held(planner, predicted, stage, real)]
            wrong += [f"{index} stage {stage}: {line}" for line in lines]
    assert not wrong, "\n".join(wrong)


def counts(predicted: Prediction, stage: int, real: Measured) -> Iterator[str]:
    """The differences where all must be equal."""
    sent = {key: (entry.calls, entry.sent_bytes) for key, entry in predicted.traffic[stage].items()}
    for key in sorted(sent.keys() | real.sent.keys()):
        if sent.get(key) != real.sent.get(key):
            yield f"sent {key}: predicted {sent.get(key)}, really {real.sent.get(key)}"
    memory = predicted.memory[stage]
    planned = memory.weights, memory.gradients, memory.states
    if planned != (real.weights, real.gradients, real.states):
        yield f"weights, gradients, states: predicted {planned}, really {real.weights, real.gradients, real.states}"


def held(planner: Planner, predicted: Prediction, stage: int, real: Measured) -> Iterator[str]:
    """Whether activations and what is made beside them are within the tolerance. A schedule that acts on messages does
    its tasks in an order that hangs on when they come: then in the real order."""
    memory, schedule = predicted.memory[stage], predicted.config.layout.pipeline.schedule
    planned = memory.activations + memory.temporaries
    if len(predicted.memory) > 1 and schedule in ("axonn", "message-driven"):
        planned = replayed(planner, predicted.config, stage, real.tasks)
    if abs(planned - real.peak) > TOLERANCE * real.peak:
        yield f"activations: predicted {planned}, really {real.peak} ({planned / real.peak - 1:+.1%})"


def replayed(planner: Planner, config: Config, stage: int, tasks: Sequence[Task]) -> int:
    """The most bytes that are alive if a stage does these tasks, beside the messages that it waits for and the buckets
    of which it keeps slices."""
    run = TimedRun(planner, config, planner.stages(config))
    plan, live, peak = run.stages[stage], 0, 0
    for task in tasks:
        cost = plan.chunks[task.chunk].cost(task.kind, place(task.microbatch, config.num_microbatches))
        live, peak = live + cost.kept_bytes, max(peak, live + cost.peak_bytes)
    whole = held_of(config, run.buckets[run.like[stage]]).passing
    return peak + run.awaited_bytes(stage) + plan.apart_bytes(config) + whole
