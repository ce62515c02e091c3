"""The search finds the layout that predictions rank first: no fixed field leads to a faster layout that fits.

python -m pytest --long tests/planner/plan/test_best.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.search import SearchResult, search
from meshwright.planner.plan.space import fixed_fields
from meshwright.ranks.errors import ConfigError


@dataclass(frozen=True)
class Question:
    """A model in bf16.

    Attributes:
        kept: Words that fix fields in all searches of the model.
        run: Values of the run file.
    """

    model: str
    sequence: int
    batch: int
    cluster: str
    devices: int
    kept: tuple[str, ...] = ()
    run: tuple[str, ...] = ()

    def ask(self, models: Estimates, words: Sequence[str] = (), top: int = 5) -> SearchResult:
        tree = {"model": self.model, "data": {"sequence": self.sequence}, "batch": {"global": self.batch}}
        config = parse_config(tree | {"precision": "bf16"}, (*self.run, *self.kept, *words))
        fixed = fixed_fields((*self.kept, *words))
        return search(config, models.planner.cluster, self.devices, top, fixed=fixed, models=models)


REPLICAS = ("layout.tensor.kind=none", "layout.pipeline.size=1", "layout.context.size=1")
EIGHT_B = ("llama-3.1-8b", 8192, 512, "dgx-h100", 64)

SPACES = {
    "8 B, replicas": Question(*EIGHT_B, kept=REPLICAS),
    "8 B": Question(*EIGHT_B, run=("layout.data.sync=zero3", "batch.micro=1")),
    "1 B": Question("llama-3.2-1b", 4096, 256, "dgx-a100", 8),
    "1.5 B": Question("gpt2-xl", 1024, 512, "dgx-a100", 8),
    "7 B": Question("mistral-7b", 8192, 256, "dgx-a100", 32),
    "8 B, 32 K, with context": Question("qwen3-8b", 32768, 64, "dgx-h100", 32),
    "12 B": Question("axonn-12b", 512, 2048, "dgx-a100", 64),
    "24 B": Question("axonn-24b", 512, 2048, "dgx-a100", 128),
    "experts": Question("mixtral-8x7b", 4096, 1024, "dgx-h100", 64, kept=("layout.context.size=1",)),
    "70 B": Question("llama-3.1-70b", 8192, 1024, "dgx-h100", 512),
    "70 B, 8 devices": Question("llama-3.1-70b", 4096, 64, "dgx-h200", 8),
}
WORDS = (
    "layout.data.sync=zero1", "layout.data.sync=zero2", "layout.data.sync=zero3", "layout.tensor.kind=none",
    "layout.pipeline.size=1", "layout.context.size=1", "batch.micro=1", "memory.recompute=none",
    "memory.offload.to=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Estimates]:
    """Return the estimates of each question. Searches of a question share recordings; questions do not."""
    return {name: Estimates(Planner(load_cluster(one.cluster))) for name, one in SPACES.items()}


def fastest_that_fits(found: SearchResult) -> Prediction | None:
    first = found.predictions[0]
    return first if verdict(first.fullest, first.cluster) == "fits" else None


# Long tests take minutes to half an hour each, more than the deadline of a test in `make test`.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "replicas" in name else (pytest.mark.long, pytest.mark.timeout(0)))
        for name in SPACES
    ],
)
def test_no_fixed_field_finds_what_a_free_search_does_not(name: str, models: dict[str, Estimates]) -> None:
    question = SPACES[name]
    known = models[name]
    free = fastest_that_fits(question.ask(known))
    kept = fixed_fields(question.kept)
    for word in WORDS[:3] if "replicas" in name else WORDS:
        if fixed_fields([word]) & kept:
            continue
        try:
            best = fastest_that_fits(question.ask(known, [word], top=1))
        except ConfigError:
            continue  # no layout with this word fits or is legal
        assert free is not None, word
        assert best is None or free.seconds <= best.seconds, word


def test_slices_are_found_where_activations_would_not_fit_beside_whole_states(models: dict[str, Estimates]) -> None:
    """On 64 H100, weights, gradients and states of zero1 leave llama-3.1-8b more than a third of the memory.
    Activations take more. Layouts that slice gradients and states fit without recomputation, with or without slices of
    weights. Gathers of weights hide under kernels and slow these kernels. Every strategy that fits is predicted."""
    question = SPACES["8 B, replicas"]
    found = question.ask(models["8 B, replicas"])
    best = found.predictions[0]
    assert (best.config.layout.data.sync, best.config.micro, best.config.memory.recompute) == ("zero2", 1, "none")
    assert found.tight == ()
    second = found.predictions[1]
    assert (second.config.layout.data.sync, second.config.micro, second.config.memory.recompute) == ("zero3", 1, "none")
    tax = load_cluster(question.cluster).links["torch"].tax
    assert best.seconds < second.seconds < (1 + tax) * best.seconds
    assert {runner_up.strategy: runner_up.prediction is not None for runner_up in found.runner_ups} == {
        "data": True,
        "zero3": True,
    }
    assert all(verdict(one.fullest, one.cluster) == "fits" for one in found.predictions)
