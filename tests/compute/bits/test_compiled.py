"""Compiled layers under `bits: layout-free`: layouts that cut no layer have one graph, and equal bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import Mesh
from meshwright.training.decisions import resolve_process
from tests.compute.bits.runs import Ended, ended
from tests.compute.tensor.in_graphs import WARNINGS, needs_inductor

pytestmark = WARNINGS

RUN: dict[str, Any] = {
    "model": {
        "family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "positions": 32, "vocabulary": 300, "dropout": 0.1,
    },
    "data": {"sequence": 32},
    "batch": {"global": 8, "micro": 4},
    "optimizer": {"lr": 1e-2, "clip": 0.5},
    "steps": 2,
    "bits": "layout-free",
    "compile": "blocks",
}  # fmt: skip
EXPERTS = {"family": "llama", "feed_forward": 48, "experts": {"count": 4, "per_token": 2, "balance": 0.3}}
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "float32": ({}, ()),
    "bf16": ({}, ("precision=bf16", "precision.level=O2")),
    "experts": (EXPERTS, ()),
    "frozen": ({}, ("model.frozen=[blocks.0]",)),
    "float64": ({}, ("precision=float64",)),
}
MIXED = (
    "layout.data=2", "layout.data.sync=zero3", "layout.pipeline=2", "layout.pipeline.schedule=1f1b", "batch.micro=1",
    "memory.recompute=1",
)  # fmt: skip
STAGES = "layout.pipeline=2", "layout.pipeline.schedule=1f1b", "batch.micro=2"
LAYOUTS: tuple[tuple[str, ...], ...] = (
    MIXED,
    STAGES,
    ("layout.data=2",),
    ("layout.data=4", "layout.data.sync=zero1", "batch.micro=2"),
    ("layout.data=2", "layout.data.sync=zero3"),
    ("batch.micro=1",),
    ("memory.recompute=1",),
    ("memory.recompute=offload", "batch.micro=2"),
)


def config_of(run: str, words: tuple[str, ...] = ()) -> Config:
    model, settings = RUNS[run]
    return parse_config(RUN | {"model": RUN["model"] | model}, (*settings, *words))


@cache
def on_one_device(run: str) -> Ended:
    return ended(config_of(run), forked=True)


def cases() -> list[Any]:
    found = [(run, words) for run in RUNS for words in LAYOUTS if run in ("float32", "bf16") or words == MIXED]
    return [pytest.param(*case, marks=() if case == ("bf16", STAGES) else pytest.mark.long) for case in found]


@needs_inductor
@pytest.mark.parametrize("run, words", cases())
def test_layouts_end_with_the_bits_of_one_device(run: str, words: tuple[str, ...]) -> None:
    assert ended(config_of(run, words), forked=True).differing(on_one_device(run)) == []


@needs_inductor
@pytest.mark.long
def test_ranks_of_two_threads_end_with_the_bits_of_one() -> None:
    config = config_of("float32", ("layout.data=2",))
    assert ended(config, threads=2, forked=True).differing(on_one_device("float32")) == []


@needs_inductor
@pytest.mark.long
def test_another_graph_in_a_rank_is_seen() -> None:
    """Attention outside of rank 1's graphs, as under selective recomputation, changes bits."""

    def plant(mesh: Mesh) -> None:
        from meshwright.compute.models import compiled

        compiled.attention_outside = lambda config: "planted" if mesh.rank else None  # type: ignore[assignment]

    config = config_of("float32", ("layout.data=2",))
    assert ended(config, plant, forked=True).differing(on_one_device("float32")) != []


@pytest.mark.parametrize(
    "words, field",
    [
        (("bits.tensor=2",), "bits.tensor"),
        (("bits.hidden=2",), "bits.hidden"),
        (("bits.sequence=2",), "bits.sequence"),
        (("memory.recompute=selective",), "memory.recompute"),
        (("compile=islands",), "compile"),
        (("compile=kernels",), "compile"),
        (("layout.tensor={kind: megatron, size: 2}",), "layout.tensor.size"),
    ],
)
def test_other_graphs_are_refused_by_name(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("float32", words)
    assert field in [problem.field for problem in refused.value.problems]


def test_the_word_alone_takes_whole_layers_and_says_so() -> None:
    config = config_of("float32")
    assert (config.bits.tensor, config.bits.hidden, config.bits.sequence) == (1, 1, 1)
    notes = resolve_process(config, Machine.here()).notes
    assert any("bits.tensor, bits.hidden and bits.sequence take 1" in note for note in notes), notes


def test_a_gpu_is_refused() -> None:
    machine = Machine(cores=4, memory=2**34, shared=False, gpus=1)
    with pytest.raises(ConfigError, match="Triton chooses by time"):
        resolve_process(config_of("float32", ("device=cuda",)), machine)
