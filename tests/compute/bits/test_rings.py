"""`bits: layout-free` with `bits.attention=runs`: rings of sequences end with the bits of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.bits import runs
from meshwright.compute.bits.blocks import Blocks
from meshwright.compute.bits.heads import HeadParts
from meshwright.compute.bits.runs import RunsOfQueries, leaf_of, run_of
from meshwright.compute.context.spec import AttentionSpec
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from tests.compute.bits.cut_layouts import CUT, M2, RUNS, U2, config_of
from tests.compute.bits.runs import Ended, ended

RING = ("layout.context.kind=ring",)
R2 = (*U2, *RING)
R4 = ("layout.context=4", "bits.sequence=8", *RING)
WHOLE4 = ("layout.context=4", *RING)
"""One rank for each run of a sequence."""
DOCUMENTS = ("data.documents=separate",)


@cache
def on_one_device(model: str, precision: str, *words: str) -> Ended:
    return ended(config_of(model, precision, (*RUNS, *words, "batch.micro=4")))


@pytest.mark.parametrize(
    "model, precision, words",
    [
        ("gpt2", "float32", R2),
        pytest.param("gpt2", "O2", (*M2, *CUT, *R2), marks=pytest.mark.long),
        pytest.param(
            "gpt2",
            "float32",
            (*R2, *DOCUMENTS, "layout.data=2", "layout.data.sync=zero3", "batch.micro=1"),
            marks=pytest.mark.long,
        ),
        pytest.param("llama", "float32", R4, marks=pytest.mark.long),
        pytest.param("llama", "O1", (*M2, *R2, "memory.recompute=selective"), marks=pytest.mark.long),
        pytest.param("llama", "O2", (*R4, *DOCUMENTS, "layout.pipeline=2", "batch.micro=1"), marks=pytest.mark.long),
        ("llama", "float32", WHOLE4),
        pytest.param("gpt2", "float32", (*R2, "bits.sequence=2", *M2, *DOCUMENTS), marks=pytest.mark.long),
        ("llama", "float32", (*M2, *U2, *DOCUMENTS)),  # Ulysses, by runs of queries as well
        pytest.param("bert", "float32", (*M2, *CUT, *R2), marks=pytest.mark.long),
    ],
)
def test_a_ring_ends_with_the_bits_of_one_device(model: str, precision: str, words: tuple[str, ...]) -> None:
    said = tuple(word for word in words if word.startswith(("bits.", "data.")))
    run = ended(config_of(model, precision, (*RUNS, *words)))
    assert run.differing(on_one_device(model, precision, *said)) == []


def test_a_ring_over_gloo_ends_with_the_same_bits() -> None:
    run = ended(config_of("gpt2", "float32", (*RUNS, *R4)), transport="torch")
    assert run.differing(on_one_device("gpt2", "float32", "bits.sequence=8")) == []


def test_dropout_is_drawn_by_run_of_queries() -> None:
    words = ("bits.attention=runs",)
    alone = ended(config_of("gpt2", "float32", (*words, "batch.micro=4")))
    assert ended(config_of("gpt2", "float32", (*words, *U2, "layout.data=2"))).differing(alone) == []


def adds_as_they_lie(mesh: Mesh) -> None:
    """Order the leaves of a key's gradient as in the sequence: a ring's rank has no subtree of this order."""
    runs.leaf_of = lambda run, count: run


def attends_alone(mesh: Mesh) -> None:
    """All of a rank's queries are one run."""
    RunsOfQueries.attend_runs = lambda self, query, keys, values, runs, spec: HeadParts.attend(  # type: ignore
        self, query, keys[-1], values[-1], spec
    )


@pytest.mark.parametrize("plant, words", [(adds_as_they_lie, R2), (attends_alone, ("layout.data=2",))])
def test_a_planted_mistake_is_seen(plant: Any, words: tuple[str, ...]) -> None:
    wrong = ended(config_of("gpt2", "float32", (*RUNS, *words, "bits.sequence=8")), plant, transport="torch")
    assert wrong.differing(on_one_device("gpt2", "float32", "bits.sequence=8")) != []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [8, 2])
def test_runs_of_queries_are_attention(causal: bool, heads: int) -> None:
    """In float64, with fewer key-value heads than queries and a mask of padding."""
    generator = torch.Generator().manual_seed(1)
    query, key, value, gradient = (
        torch.randn(3, count, 16, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for count in (8, heads, heads, 8)
    )
    mask = None if causal else (torch.arange(16) < torch.tensor([[9], [16], [12]]))[:, None, None]

    def answers(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, (query, key, value), gradient)]

    whole = F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, enable_gqa=heads != 8)
    spec = AttentionSpec(causal, seen=mask)
    by_runs = RunsOfQueries(Blocks(head_parts=2, exact=True), 4).attend(query, key, value, spec)
    for one, other in zip(answers(by_runs), answers(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_each_rank_of_any_ring_has_a_subtree() -> None:
    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            share = 16 // (2 * ranks)
            chunks = (rank, 2 * ranks - 1 - rank)
            leaves = [leaf_of(run, 16) for chunk in chunks for run in range(chunk * share, (chunk + 1) * share)]
            assert sorted(leaves) == list(range(2 * rank * share, 2 * (rank + 1) * share))
    for count in (1, 2, 4, 8, 16):  # one rank a run
        assert [leaf_of(run_of(leaf, count), count) for leaf in range(count)] == list(range(count))


@pytest.mark.parametrize(
    "words, field",
    [
        (R2, "layout.context.kind"),
        ((*RUNS, "bits.sequence=2", *WHOLE4), "layout.context.size"),
        ((*RUNS, "bits.sequence=6", "data.sequence=48", "model.positions=48"), "bits.sequence"),
    ],
)
def test_what_no_ring_may_cut_is_refused_by_name(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("gpt2", "float32", ("model.dropout=0.0", *words))
    assert field in [problem.field for problem in refused.value.problems]
