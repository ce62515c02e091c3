"""The planner's counts equal runs' counts: bytes sent and held exactly, activations within a tenth.

Every kit, every schedule, every planned sync, at 2 to 16 ranks; configs of one grid share a group of ranks.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.grid import PIPE
from tests.families.llama.experts import EXPERTS, MODEL, OSS, experts
from tests.oracle.pipeline import LOOP, SCHEDULES, V, laid_out, pipelined
from tests.oracle.tensor import config_for
from tests.planner.plan.checked import check
from tests.planner.plan.counted import (
    CPU,
    CUT,
    DEEP,
    FLAT,
    GATHER,
    HALVES,
    MEGATRON,
    OFFLOADED,
    SUBGRAPHS,
    WHOLE,
    batch,
    counts,
    summa,
    synced,
)
from tests.planner.plan.measured import Measured, measured
from tests.workers import run_ranks

SYNCS = ("allreduce", "ring", "rooted", "zero1", "zero2", "zero3")
HYBRID = {"size": 4, "sync": "zero3", "shard": 2}
MESSAGES = {"size": 2, "expert": 2, "exchange": "messages", "sync": "zero1", "bucket": 8192}

CASTS = {"precision": {"level": "O1", "dtype": "bf16"}}


def sliced(sync: str, data: int, schedule: str = "message-driven", **changes: Any) -> Config:
    """Return two stages of several chunks, with separate buckets for each chunk."""
    config = pipelined("gpt2", 2, schedule, WHOLE, data, **changes)
    return laid_out(config, data={"sync": sync, "shard": 2 if data > 2 else None})


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
    "gpt-oss": [
        experts(
            {"data": {"size": 2, "expert": 2, "sync": "zero1", "bucket": 8192}, "tensor": CUT},
            model=OSS | {"experts": OSS["experts"] | {"capacity": 1.0}},
            batch={"global": 16, "micro": 4},
        )
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
    "qwen3-next": [config_for("qwen3-next", CUT, batch={"global": 16, "micro": 8})],
    "qwen3-next, ring": [
        config_for("qwen3-next", WHOLE, batch={"global": 16, "micro": 8}, layout={"context": {"size": 2, "kind": kind}})
        for kind in ("ring", "ulysses")
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
    # Chunks of one layer run backward several times in a row, and gather each time.
    "v of slices, all forward first": [sliced("zero3", 2, "gpipe", placed=V)],
    "loop of slices": [sliced("zero3", 2, placed=LOOP, schedule="1f1b")],
}
"""Configs in groups of one grid and equal token axes; configs with stages alone, for mailboxes are opened once."""

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
"""Configs in groups as in FEW, with at most 16 ranks."""


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
    """Sent bytes and weights are exact; the live bytes of two microbatches depend on the arrival of rows."""
    few = {"global": 16, "micro": 2}
    config = config_for("experts", WHOLE, 2, batch=few, layout={"data": MESSAGES}, memory={"recompute": recompute})
    axes = config.layout.token_axes
    ranks: list[list[Measured]] = run_ranks(measured, config.grid, [config], token_axes=axes, transport="torch")
    assert list(counts(Planner(CPU).predict(config), 0, ranks[0][0])) == []


def test_recomputed_layers_keep_the_rows_that_came_as_messages() -> None:
    """A recomputed layer keeps two rows a token into and out of experts, and the layer's input. A blocking layer keeps
    the input alone."""
    kept = {}
    for exchange, recompute in product(("blocking", "messages"), ("none", 1)):
        layout = {"data": MESSAGES | {"exchange": exchange}}
        few = {"global": 4, "micro": 2}
        config = config_for("experts", WHOLE, 2, batch=few, layout=layout, memory={"recompute": recompute})
        kept[exchange, recompute] = Planner(CPU).predict(config).fullest.activations / config.num_microbatches
    # 2 samples of 12 tokens, 24 numbers of 8 bytes; with capacity 1 the rows are the tokens' choices of experts.
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
    """A balance over the batch adds a forward pass with messages and gathers, and a sum of loads."""
    configs = [
        experts(layout, model=MODEL | {"experts": EXPERTS | {"balance_over": over}}, batch={"global": 16, "micro": 4})
        for over in ("batch", "microbatch")
    ]
    grid, axes = configs[0].grid, configs[0].layout.token_axes
    ranks: list[list[Measured]] = run_ranks(measured, grid, configs[:1], token_axes=axes, transport="torch")
    predicted, without = (Planner(CPU).predict(config) for config in configs)
    for stage in range(configs[0].layout.pipeline.size):
        real = ranks[grid.rank(dict.fromkeys(grid.names, 0) | {PIPE: stage})][0]
        assert list(counts(predicted, stage, real)) == []
    assert 1.1 * without.seconds < predicted.seconds < 1.8 * without.seconds
