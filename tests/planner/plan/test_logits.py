"""Sizes of chunks of logits that a plan chooses: smaller ones for a layout that would not fit, larger ones that pay."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.config import Config, load_config
from meshwright.config.section import with_field
from meshwright.planner.plan.choice import answered
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.gate import gate_of
from meshwright.planner.plan.logits import FIELD, LARGER, SMALLER, WORTH, with_smaller_chunks
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.report import words_to_paste
from meshwright.planner.plan.search import SearchResult, layout_text, search
from meshwright.planner.plan.space import SearchJob

H100 = load_cluster("dgx-h100")
FIXED = ("batch.micro", "memory.recompute", "memory.offload.to")
WORDS = "model.layers=2 data.tokenizer=bytes precision=bf16 batch.micro=32 batch.global=64"


@cache
def run() -> Config:
    """Two layers of GPT-2 small, whose logits of a microbatch have 3.3 GB."""
    return load_config("gpt2", WORDS.split())


@cache
def planned(size: int | str = "auto") -> Prediction:
    return Planner(H100).predict(with_field(run(), FIELD, size))


def with_memory(size: float, share: float = 0.0) -> Cluster:
    """A dgx-h100 with this memory, of which processes hold `share` more than is predicted."""
    device = H100.device.model_copy(update={"memory_bytes": int(size), "unpredicted_share": share})
    return H100.model_copy(update={"device": device})


def found(cluster: Cluster, config: Config | None = None, fixed: tuple[str, ...] = FIXED) -> SearchResult:
    models = Estimates(Planner(cluster))
    return answered(search(config or run(), cluster, 1, 1, fixed=fixed, models=models), models, fixed)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_layout_that_lacks_little_gets_the_largest_chunks_that_fit(share: float) -> None:
    """Also a layout that fits only tightly, which the search would list behind slower ones."""
    for size, larger in zip(SMALLER[:2], ("auto", *SMALLER), strict=False):
        memory = (1 + share) * (planned(size).worst_memory + planned(larger).worst_memory) / 2
        cluster = with_memory(memory, share)
        best = found(cluster).predictions[0]
        assert best.config.memory.logits == size
        assert verdict(best.fullest, cluster) == "fits"
        assert best.seconds >= planned(larger).seconds, "smaller chunks are no faster"
        assert f"{FIELD}={size}" in words_to_paste(best.config, run()).split()
        assert "logits " in layout_text(best.config)


def test_a_gate_offers_smaller_chunks() -> None:
    """A run that lacks 0.3 GB is not refused without a remedy that costs so little."""
    gate = gate_of(run(), with_memory(planned().worst_memory - 3e8))
    assert not gate.fits
    assert gate.remedy


def test_chunks_grow_where_memory_allows() -> None:
    """By WORTH of the step's seconds or more; else auto stays."""
    best = found(with_memory(80e9)).predictions[0]
    assert best.config.memory.logits in LARGER
    assert best.seconds <= (1 - WORTH) * planned().seconds
    full = found(with_memory(planned().worst_memory + 1e8)).predictions[0]
    assert full.config.memory.logits == "auto"
    deep = with_field(run(), "model.layers", 48)
    assert found(with_memory(160e9), deep).predictions[0].config.memory.logits == "auto", "less than WORTH of a step"


def test_a_size_of_the_user_of_equal_bits_and_of_other_programs_stays() -> None:
    cluster = with_memory(planned().worst_memory - 3e8)
    memory = planned().fullest
    exact = with_field(run(), "bits.kind", "layout-free")
    known = {"memory.recompute": ("none",)}
    on_cpu = cluster.device.model_copy(update={"kind": "cpu"})
    for job in (
        SearchJob(run(), cluster, 1, frozenset({FIELD})),
        SearchJob(run(), cluster, 1, frozenset({"memory"})),
        SearchJob(with_field(run(), FIELD, 2**28), cluster, 1),
        SearchJob(exact, cluster, 1),
        SearchJob(run(), cluster, 1, known=known),
        SearchJob(run(), cluster.model_copy(update={"device": on_cpu}), 1),
    ):
        assert not [*with_smaller_chunks(job.run, memory, job)]
    job = SearchJob(run(), cluster, 1)
    assert [each.memory.logits for each in with_smaller_chunks(run(), memory, job)] == [*SMALLER]
    assert not [*with_smaller_chunks(run(), memory, SearchJob(run(), with_memory(1e9), 1))], "chunks free too little"
