"""Families with layers that no other test of equal bits has: each layout and number of threads ends with one
device's bits."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.compute.bits import arithmetic, blocks, experts, norms
from meshwright.compute.tensor import cross_entropy
from meshwright.ranks.mesh import Mesh
from tests.compute.bits.runs import ended
from tests.fuzz.bits import RUNS, config_of, differing, on_one_device, small_of

MEGATRON = ("layout.tensor=megatron", "layout.tensor.size=4", "layout.tensor.sequence_parallel=true")
TESSERACT = ("layout.tensor={kind: tesseract, q: 2}",)
RING = ("layout.context=2", "layout.context.kind=ring")
ZERO3 = ("layout.data=3", "layout.data.sync=zero3", "batch.micro=1")
STAGES = ("layout.data=3", "layout.pipeline=2", "batch.micro=2")
EXPERTS = ("layout.data=6", "layout.data.expert=3")


@pytest.mark.parametrize(
    "run, words",
    [
        ("gemma", (*MEGATRON, "layout.data=2", "layout.data.sync=zero3", "batch.micro=1")),
        pytest.param("gemma", TESSERACT, marks=pytest.mark.long),
        ("gemma, by runs of queries", RING),
        ("olmo", (*MEGATRON, "layout.pipeline=2")),
        pytest.param("olmo", TESSERACT, marks=pytest.mark.long),
        pytest.param("olmo, by runs of queries", RING, marks=pytest.mark.long),
        ("sinks", ZERO3),
        pytest.param("sinks", (*MEGATRON, "layout.data=3"), marks=pytest.mark.long),
        pytest.param("sinks", ("layout.context=2", "layout.pipeline=2", "batch.micro=2"), marks=pytest.mark.long),
        ("sinks, by runs of queries", (*RING, "layout.data=2", "layout.data.expert=2")),
        pytest.param("sinks", EXPERTS, marks=pytest.mark.long),
        pytest.param("delta nets", STAGES, marks=pytest.mark.long),
        ("delta nets", ZERO3),
        ("delta nets with experts", EXPERTS),
        ("experts, cut", (*MEGATRON, "layout.data=2", "layout.data.expert=2", "batch.micro=1")),
        pytest.param(
            "experts, by runs of queries", (*RING, "layout.data=3", "layout.data.expert=3"), marks=pytest.mark.long
        ),
        pytest.param("deepseek", (*MEGATRON, "layout.pipeline=2", "batch.micro=2"), marks=pytest.mark.long),
        ("deepseek", ("layout.context=2", "layout.data=2", "layout.data.expert=2", "layout.data.sync=zero1")),
    ],
)
def test_a_layout_ends_with_the_bits_of_one_device(run: str, words: tuple[str, ...]) -> None:
    """The covering set of tests/fuzz/test_bits.py has each of these runs under each axis: a layout here for each."""
    kind = run, "float32"
    assert differing(kind, small_of(kind, words, 2)) == []


UNDROPPED = ("model.dropout=0.0", "model.adapter.dropout=0.0")


@pytest.mark.parametrize(
    "run, words",
    [
        ("t5", ()), ("t5", ("layout.tensor={kind: subgraph, size: 2, common: all}",)),
        ("llama, adapters", ()), ("gpt2, DoRA", ()), ("gpt2, DoRA", ("layout.tensor={kind: megatron, size: 2}",)),
        ("llama", (*TESSERACT, "memory.summa=stream")), ("sinks", ()), ("experts with adapters", ()),
        ("experts with a capacity", ()), ("experts, cut", ()), ("gemma", ()), ("olmo", ()), ("deepseek", ()),
    ],
)  # fmt: skip
def test_equal_bits_are_the_usual_numbers(run: str, words: tuple[str, ...]) -> None:
    """A mistake of all layouts keeps bits equal: losses and norms of three steps must be the usual mode's."""
    undropped = UNDROPPED if "adapter" in RUNS[run]["model"] else UNDROPPED[:1]
    exact, usual = (
        ended(config_of((run, "float32"), (*undropped, *more), 3)).numbers for more in (words, ("bits={kind: usual}",))
    )
    both = [[float.fromhex(number) for line in numbers for number in line.split()] for numbers in (exact, usual)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    assert exact != usual


@pytest.mark.parametrize("parts", [3, pytest.param(5, marks=pytest.mark.long), pytest.param(6, marks=pytest.mark.long)])
def test_odd_parts_are_the_usual_numbers(parts: int) -> None:
    """A tree of 3, 5 or 6 addends adds each addend once."""
    shape = (f"model.heads={parts}", f"model.hidden={32 * parts}", f"model.vocabulary_multiple={16 * parts}")
    bits = f"bits={{kind: layout-free, tensor: {parts}, sequence: 2}}"
    exact, usual = (
        ended(config_of(("gpt2", "float32"), (*UNDROPPED[:1], *shape, mode), 3)).numbers
        for mode in (bits, "bits={kind: usual}")
    )
    both = [[float.fromhex(number) for line in numbers for number in line.split()] for numbers in (exact, usual)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    assert exact != usual


@pytest.mark.parametrize(
    "run", ["llama", "gpt2, DoRA", *(pytest.param(run, marks=pytest.mark.long) for run in ("t5", "gemma", "deepseek"))]
)
def test_float64_is_the_usual_float64(run: str) -> None:
    undropped = UNDROPPED if "adapter" in RUNS[run]["model"] else UNDROPPED[:1]
    exact, usual = (
        ended(config_of((run, "float64"), (*undropped, *more), 3)).numbers for more in ((), ("bits={kind: usual}",))
    )
    both = [[float.fromhex(number) for line in numbers for number in line.split()] for numbers in (exact, usual)]
    assert both[0] == pytest.approx(both[1], rel=1e-12, abs=0)
    assert exact != usual


@pytest.mark.parametrize("run", ["gemma", "olmo", "sinks", "delta nets"])
def test_ranks_of_two_threads_end_with_the_bits_of_one(run: str) -> None:
    kind = run, "float32"
    assert differing(kind, small_of(kind, ("layout.data=2",), 2), threads=2) == []


SYNCS = ("allreduce", "ring", "rooted", "server-gradient", "zero1", "zero2", "zero3")


@pytest.mark.parametrize(
    "words",
    [
        (*MEGATRON, "layout.pipeline=2"),
        *(
            pytest.param(
                ("layout.data=4", f"layout.data.sync={sync}", "batch.micro=1"),
                marks=() if sync in ("server-gradient", "zero3") else pytest.mark.long,
            )
            for sync in SYNCS
        ),
    ],
)
def test_pairs_of_integers_are_sent_by_processes(words: tuple[str, ...]) -> None:
    kind = "gpt2", "float64"
    assert ended(config_of(kind, words, 2), transport="torch").differing(on_one_device(kind, 2)) == []


def sums_squares_of_own_heads(mesh: Mesh) -> None:
    """A rank's norm over all heads is a norm over the heads of that rank."""
    norms.all_rows = lambda sums, comm: sums.unsqueeze(0).expand(comm.size, *sums.shape)


def forgets_the_cap(mesh: Mesh) -> None:
    """Rank 1 does not cap logits."""
    if mesh.rank:
        cross_entropy.Classes.capped = lambda self, logits: None  # type: ignore[method-assign]


def adds_parts_in_a_row(mesh: Mesh) -> None:
    """Add a rank's parts from the first to the last, and not by a tree."""
    experts._left = lambda x, boundary, dtype: boundary.start_leave(x.float().sum(0)).wait().to(dtype)


def scores_all_runs(mesh: Mesh) -> None:
    """A rank's tokens are one run of the router's losses."""
    experts.RouterByRuns.blocks = blocks.WHOLE  # type: ignore[method-assign, assignment]


def test_a_gradient_beyond_the_range_is_named() -> None:
    """Norms after sub-layers divide by the small outputs of first weights: the usual norm of this run is 317."""
    with pytest.raises(AssertionError, match="a gradient has an addend above 8, the most"):
        ended(config_of(("olmo", "float32"), ("model.biases=[output]",), 1))


def sums_sinks_of_runs(mesh: Mesh) -> None:
    """Add the gradients to sinks over a rank's runs of queries as floats, before the rounding to integers."""
    arithmetic.ExactArithmetic.query_runs = 1  # type: ignore[method-assign, assignment]


PLANTS = [
    (sums_sinks_of_runs, "sinks, by runs of queries", RING),
    (sums_squares_of_own_heads, "olmo", MEGATRON), (forgets_the_cap, "gemma", MEGATRON),
    (adds_parts_in_a_row, "experts, cut", ("layout.data=2",)), (scores_all_runs, "experts, cut", ("layout.context=2",)),
]  # fmt: skip


@pytest.mark.parametrize("plant, run, words", PLANTS)
def test_a_planted_mistake_is_seen(plant: Any, run: str, words: tuple[str, ...]) -> None:
    kind = run, "float32"
    assert differing(kind, small_of(kind, words, 2), plant, forked=True) != []
