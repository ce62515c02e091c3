"""Layouts drawn along all axes under `bits: layout-free`: each ends with the bits of one device.

A run fixes the model, the precision and the parts for kernels. A layout is a word of each axis of AXES, if the config
allows the words together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle
from random import Random
from typing import Any

from meshwright.config import Config
from meshwright.config.load import parse_run
from meshwright.ranks.errors import ConfigError
from tests.compute.bits.runs import Ended, Plant, ended

Words = tuple[str, ...]
Layout = dict[str, Words]
"""The words of each axis."""

MODEL = {"layers": 2, "hidden": 64, "heads": 8, "positions": 32, "vocabulary": 301, "vocabulary_multiple": 64}
"""301 tokens in tables of 320 rows: of four ranks the last has fewer tokens."""
LLAMA = {"family": "llama", "key_value_heads": 2, "head_width": 8, "feed_forward": 256, "biases": ["query-key-value"]}
GEMMA = {
    "family": "gemma", "key_value_heads": 2, "head_width": 8, "query_scalar": 8, "feed_forward": 256, "window": 9,
    "window_layers": [True, False], "score_cap": 5.0, "logit_cap": 3.0,
}  # fmt: skip
OLMO = {"family": "llama", "head_width": 8, "feed_forward": 256, "whole_norms": True, "norms": "behind"}
SINKS = {
    "family": "gpt-oss", "key_value_heads": 2, "head_width": 8, "window": 9, "window_layers": [True, False],
    "experts": {"count": 6, "per_token": 2, "width": 48, "balance": 0.3},
}  # fmt: skip
DELTA_NETS = {
    "family": "qwen3-next", "key_value_heads": 2, "head_width": 16, "rotary_width": 8, "feed_forward": 48,
    "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_width": 16, "linear_value_width": 16,
    "attention_layers": [False, True],
}  # fmt: skip
EXPERTS = {"count": 6, "per_token": 2, "balance": 0.3}
ADAPTER = {"rank": 4, "begin": "random"}
T5 = {
    "family": "t5", "heads": 4, "head_width": 16, "feed_forward": 256, "distance_buckets": 8, "distance_max": 10,
    "vocabulary": 361,
    "positions": 128,
}  # fmt: skip
ALL_LOSSES = EXPERTS | {"per_token": 3, "router_z": 0.01, "shared": 64}
DEEPSEEK = {
    "family": "deepseek", "query_rank": 64, "key_value_rank": 64, "head_width": 8, "rotary_width": 8, "value_width": 8,
    "feed_forward": 64, "later_tokens": 1,
    "experts": EXPERTS | {"scores": "sigmoid", "bias_rate": 0.01, "groups": 3, "groups_per_token": 2, "shared": 64},
}  # fmt: skip
PARTS = {"tensor": 4, "hidden": 2, "sequence": 4}
BY_RUNS = {"tensor": 2, "hidden": 2, "sequence": 8, "attention": "runs"}
BY_FOUR_RUNS = BY_RUNS | {"sequence": 4}
"""A sequence has 4 parts, equal to the ranks of the largest ring."""

RUNS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": {"family": "gpt2", "dropout": 0.1}, "bits": PARTS},
    "gpt2, by runs of queries": {"model": {"family": "gpt2", "dropout": 0.0}, "bits": BY_RUNS},
    "llama": {"model": {**LLAMA, "head_norms": True, "dropout": 0.1}, "bits": PARTS},
    "llama, adapters": {
        "model": {**LLAMA, "adapter": {**ADAPTER, "dropout": 0.1}, "dropout": 0.1},
        "bits": PARTS,
    },
    "gpt2, DoRA": {
        "model": {"family": "gpt2", "adapter": ADAPTER | {"dora": True}, "dropout": 0.1},
        "bits": {"tensor": 4, "sequence": 4},
    },
    "t5": {"model": {**T5, "dropout": 0.1}, "bits": PARTS, "data": {"sequence": 128}},
    "llama, by runs of queries": {"model": {**LLAMA, "dropout": 0.0}, "bits": BY_RUNS},
    "llama, documents": {"model": {**LLAMA, "dropout": 0.0}, "bits": BY_FOUR_RUNS, "data": {"documents": "separate"}},
    "bert": {"model": {"family": "bert", "next_sentence": True, "dropout": 0.1}, "bits": PARTS},
    "bert, by runs of queries": {"model": {"family": "bert", "dropout": 0.0}, "bits": BY_RUNS},
    "gemma": {"model": {**GEMMA, "head_norms": True, "dropout": 0.1}, "bits": PARTS},
    "gemma, by runs of queries": {"model": {**GEMMA, "dropout": 0.0}, "bits": BY_RUNS},
    "olmo": {"model": {**OLMO, "dropout": 0.1}, "bits": PARTS},
    "olmo, by runs of queries": {"model": {**OLMO, "dropout": 0.0}, "bits": BY_RUNS},
    "sinks": {"model": {**SINKS, "dropout": 0.1}, "bits": {"tensor": 4, "sequence": 4}, "batch": 12},
    "sinks, by runs of queries": {
        "model": {**SINKS, "dropout": 0.0},
        "bits": {"tensor": 2, "sequence": 8, "attention": "runs"},
        "batch": 12,
    },
    "delta nets": {"model": {**DELTA_NETS, "dropout": 0.1}, "bits": {}, "batch": 12},
    "delta nets with experts": {"model": {**DELTA_NETS, "experts": EXPERTS, "dropout": 0.1}, "bits": {}, "batch": 12},
    "experts": {"model": {**LLAMA, "feed_forward": 48, "experts": EXPERTS, "dropout": 0.1}, "bits": {}, "batch": 12},
    "experts, cut": {
        "model": {**LLAMA, "feed_forward": 64, "experts": ALL_LOSSES, "dropout": 0.1},
        "bits": {"tensor": 4, "sequence": 4},
        "batch": 12,
    },
    "experts with a capacity": {
        "model": {**LLAMA, "feed_forward": 64, "experts": ALL_LOSSES | {"capacity": 0.75}, "dropout": 0.1},
        "bits": {"tensor": 4, "sequence": 4},
        "batch": 12,
    },
    "experts with adapters": {
        "model": {**LLAMA, "feed_forward": 64, "experts": ALL_LOSSES, "adapter": ADAPTER, "dropout": 0.1},
        "bits": {"tensor": 4, "sequence": 4},
        "batch": 12,
    },
    "experts, by runs of queries": {
        "model": {**LLAMA, "feed_forward": 64, "experts": ALL_LOSSES, "dropout": 0.0},
        "bits": {"tensor": 2, "sequence": 4, "attention": "runs"},
        "batch": 12,
    },
    "deepseek": {"model": {**DEEPSEEK, "dropout": 0.1}, "bits": {"tensor": 4, "sequence": 4}, "batch": 12},
    "deepseek, by runs of queries": {
        "model": {**DEEPSEEK, "dropout": 0.0},
        "bits": {"tensor": 2, "sequence": 4, "attention": "runs"},
        "batch": 12,
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {}, "O1": {"level": "O1", "dtype": "bf16"}, "O2": {"level": "O2", "dtype": "bf16"},
    "float32, moments in bf16": {}, "O2, moments and masters in bf16": {"level": "O2", "dtype": "bf16"},
    "float64": {"dtype": "float64"},
}  # fmt: skip
ROUNDED: dict[str, dict[str, str]] = {
    "float32, moments in bf16": {"states": "bf16"},
    "O2, moments and masters in bf16": {"states": "bf16", "masters": "bf16"},
}
"""The formats of states that are rounded at random, by precision.

The random bits are drawn by seed, name and index, so the bound is that of tests/compute/parameters/test_rounding.py:
the bits of one device.
"""
KINDS = [(run, precision) for precision in PRECISIONS for run in RUNS]


def _tensor(kind: str, **settings: object) -> Words:
    return (f"layout.tensor={kind}", *(f"layout.tensor.{name}={value}" for name, value in settings.items()))


MEGATRONS = [_tensor("megatron", size=size, sequence_parallel=cut) for size in (2, 4) for cut in ("false", "true")]
TESSERACTS = [
    _tensor("tesseract", q=2), _tensor("tesseract", q=2, d=2), (*_tensor("tesseract", q=2), "memory.summa=whole"),
    (*_tensor("tesseract", q=2), "memory.summa=stream"),
]  # fmt: skip
SUBGRAPHS = [
    _tensor("subgraph", size=size, common=common, branch=branch)
    for size in (2, 4)
    for common in ("all", "one")
    for branch in ("attention-core", "attention", "block")
]
CONTEXTS = [
    (f"layout.context={size}", f"layout.context.kind={kind}") for kind in ("ulysses", "ring") for size in (2, 4)
]
SYNCS = ("allreduce", "ring", "rooted", "server-gradient", "zero1", "zero2", "zero3")
STAGES = [("layout.pipeline=2", f"layout.pipeline.schedule={name}") for name in ("gpipe", "1f1b", "message-driven")]

AXES: dict[str, list[Words]] = {
    "tensor": [
        *[()] * 4, *MEGATRONS * 2, *SUBGRAPHS, *TESSERACTS * 4,
    ],
    "context": [(), (), (), *CONTEXTS],
    "data": [(), (), ("layout.data=2",), ("layout.data=3",), ("layout.data=4",), ("layout.data=6",)],
    "sync": [(), *((f"layout.data.sync={sync}",) for sync in SYNCS)],
    "shard": [(), (), (), ("layout.data.shard=2",)],
    "expert": [(), ("layout.data.expert=2",), ("layout.data.expert=3",)],
    "stages": [(), (), (), *STAGES, ("layout.pipeline=4",), ("layout.pipeline=2", "layout.pipeline.chunks=2")],
    "micro": [(), ("batch.micro=1",), ("batch.micro=2",), ("batch.micro=4",)],
    "recompute": [(), (), ("memory.recompute=1",), ("memory.recompute=2",), ("memory.recompute=selective",)],
    "offload": [(), (), (), ("memory.offload=host",)],
}  # fmt: skip
"""A value listed twice is drawn twice as often."""

MOST_RANKS = 8


def config_of(kind: tuple[str, str], words: Words, steps: int = 1) -> Config:
    run, precision = RUNS[kind[0]], PRECISIONS[kind[1]]
    tree = {
        "seed": 3, "model": MODEL | run["model"], "data": {"sequence": 32} | run.get("data", {}),
        "batch": {"global": run.get("batch", 4)}, "precision": precision, "steps": steps,
        "optimizer": {"lr": 1e-2, "clip": 0.5} | ROUNDED.get(kind[1], {}),
        "bits": {"kind": "layout-free"} | run["bits"],
    }  # fmt: skip
    return parse_run(tree, words)


def drawn(random: Random, kind: tuple[str, str], fixed: Layout, most: int = 1000) -> tuple[Layout, Config] | None:
    """Return a layout of several ranks for the run's parts, with the fixed words, or None after `most` refusals."""
    run = RUNS[kind[0]]
    idle = (*(() if run["bits"] else ("tensor", "context")), *(() if "experts" in run["model"] else ("expert",)))
    for _ in range(most):
        layout = {axis: random.choice(values) for axis, values in AXES.items()} | dict.fromkeys(idle, ())
        if not layout["data"]:  # words without an effect are refused
            layout |= {"sync": (), "shard": (), "expert": ()}
        layout |= fixed
        try:
            config = config_of(kind, words_of(layout))
        except ConfigError:
            continue
        if 1 < config.layout.world_size <= MOST_RANKS:
            return layout, config
    return None


def numbered(number: int) -> tuple[tuple[str, str], Config]:
    """Return the run and the layout of a number; the runs take turns."""
    kind = KINDS[number % len(KINDS)]
    found = drawn(Random(f"bits/{number}"), kind, {})
    assert found is not None, kind
    return kind, config_of(kind, words_of(found[0]), steps=3)


def words_of(layout: Layout) -> Words:
    return tuple(word for words in layout.values() for word in words)


def covering(seed: int) -> Iterator[tuple[tuple[str, str], Layout]]:
    """Yield layouts that have every value of every axis, then some of each run with states rounded at random.

    The runs take turns.
    """
    random, missing = Random(seed), [(axis, value) for axis, values in AXES.items() for value in values]
    turns = cycle(kind for kind in KINDS if kind[1] not in ROUNDED)
    while missing:
        axis, value = missing[0]
        found = None
        while found is None:
            kind = next(turns)
            found = drawn(random, kind, {axis: value}, 60)
        yield kind, found[0]
        missing = [(axis, value) for axis, value in missing if found[0][axis] != value]
    for kind in KINDS:
        if kind[1] in ROUNDED:
            found = drawn(random, kind, {})
            assert found is not None, kind
            yield kind, found[0]


def small_of(kind: tuple[str, str], words: Words, steps: int = 1) -> Config:
    """Return a run with the fewest samples that its layout allows: two or more for each replica, as a sample's
    products take most of the time."""
    full = config_of(kind, words, steps)
    for samples in (4, 6, 8):
        if 2 * full.layout.data.size <= samples < full.batch.global_:
            with suppress(ConfigError):
                return config_of(kind, (*words, f"batch.global={samples}"), steps)
    return full


@cache
def on_one_device(kind: tuple[str, str], steps: int, samples: int | None = None) -> Ended:
    """Return the run on one device. `samples`: of a batch; None: the run's own number."""
    return ended(config_of(kind, () if samples is None else (f"batch.global={samples}",), steps))


def differing(kind: tuple[str, str], config: Config, plant: Plant | None = None, **how: Any) -> list[str]:
    """Return the steps and tensors in which a run's layout does not end with the bits of one device."""
    return ended(config, plant, **how).differing(on_one_device(kind, config.steps, config.batch.global_))
