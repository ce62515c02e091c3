"""Seeds of a search: which pipelines they are, and that the answer is the same without them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

import meshwright.planner.plan.search as search_module
from meshwright.config import Config, parse_config
from meshwright.config.section import field_of
from meshwright.planner.plan.cells import Judge
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.memory import Memory, verdict
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.search import search
from meshwright.planner.plan.seeds import MOST_SEEDS, SEEDS, first_guesses, seeds_of
from meshwright.planner.plan.space import SearchJob, families, ranks_of_layer
from tests.planner.plan.clusters import NODES, with_room
from tests.planner.plan.questions import TREE, MadeUp, made_up, memory_of

HALF = "precision={level: O2, dtype: fp16}"


def judged(room: int, batch: int) -> tuple[Judge, list[Config]]:
    words = ("model=llama-3.1-8b", "data.sequence=8192", f"batch.global={batch}", HALF)
    job = SearchJob(parse_config({}, words), with_room(room), 16)
    return Judge(job, Estimates(Planner(job.cluster))), [*families(job, {})]


def test_seeds_are_pipelines_on_the_ranks_of_two_nodes() -> None:
    """Seeds slice nothing, have room by the lower bound, and are few for each number of stages and ranks of a layer."""
    judge, every = judged(80 * 10**9, 64)
    seeds = seeds_of(judge, every, math.inf)
    assert 1 < len(seeds) <= MOST_SEEDS
    alike = Counter((seed.layout.pipeline.size, ranks_of_layer(seed.layout)) for seed in seeds)
    assert max(alike.values()) <= SEEDS
    assert len({id(seed) for seed in seeds} & {id(family) for family in every}) == len(seeds), "the search's own"
    for seed in seeds:
        assert seed.layout.pipeline.size > 1
        assert ranks_of_layer(seed.layout) <= 2 * NODES.devices_per_node
        assert not seed.layout.data.strategy.slices
        assert seed.memory.offload.to == "none"


def test_a_guess_cuts_layers_over_a_node_and_fits() -> None:
    """By rule of thumb: tokens and widths over a node's ranks, as few stages as have room, replicas on the rest."""
    judge, _ = judged(80 * 10**9, 64)
    guess = next(first_guesses(judge))
    layout, sizes = guess.layout, []
    assert (layout.tensor.kind, layout.tensor.size) == ("megatron", NODES.devices_per_node)
    assert layout.tensor.sequence_parallel
    assert layout.data.sync == "zero1"
    assert guess.memory.offload.to == "none"
    assert judge.models.planner.predict(guess).fits
    for room in (80, 60, 30):
        guesses = [*first_guesses(judged(room * 10**9, 64)[0])]
        sizes.append(guesses[0].layout.pipeline.size)
        again = [each.memory.policy.recomputes for each in guesses]
        assert again == sorted(again), "layouts that recompute nothing are first"
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize(
    "name, word",
    [
        ("layout.tensor", "layout.tensor=none"),
        ("layout.tensor.kind", "layout.tensor={kind: tesseract, q: 2, d: 1}"),
        ("layout.data.sync", "layout.data.sync=allreduce"),
    ],
)
def test_a_guess_keeps_fixed_fields(name: str, word: str) -> None:
    run = parse_config({}, ("model=llama-3.1-8b", "data.sequence=8192", "batch.global=64", HALF, word))
    job = SearchJob(run, with_room(80 * 10**9), 16, frozenset({name}))
    guesses = [*first_guesses(Judge(job, Estimates(Planner(job.cluster))))]
    assert guesses
    assert {field_of(guess, name) for guess in guesses} == {field_of(run, name)}


def test_a_search_knows_a_guess_before_it_lists_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that fits is known, also if the run's own does not fit; a stopped search answers with this layout."""

    def stopped(job: SearchJob, refused: object) -> Iterator[Config]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(search_module, "families", stopped)
    words = ("model=llama-3.1-8b", "data.sequence=8192", "batch.global=64", HALF)
    run, cluster = parse_config({}, words), with_room(80 * 10**9)
    found = search(run, cluster, 16, partial=True)
    assert found.stopped
    assert [each.config.layout.tensor.kind for each in found.predictions] == ["megatron"]
    assert verdict(found.predictions[0].fullest, cluster) == "fits"


def test_no_seed_is_without_room_or_as_slow_as_the_cutoff() -> None:
    assert seeds_of(*judged(10**9, 16), math.inf) == []
    judge, every = judged(80 * 10**9, 16)
    counts = [len(seeds_of(judge, every, 0.9**power)) for power in range(-60, 60)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0 < counts[0]
    assert len(set(counts)) > 2, "some cutoffs leave some seeds out"


def test_the_answer_is_the_same_without_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a model whose whole layers do not fit on one stage."""
    asked: list[list[Config]] = []

    def noted(judge: Judge, every: Iterable[Config], cutoff: float) -> list[Config]:
        asked.append(seeds_of(judge, every, cutoff))
        return asked[-1]

    monkeypatch.setattr(search_module, "seeds_of", noted)
    words = ("model=gpt2-small", "data.sequence=512", "batch.global=16", HALF)
    run, models = parse_config({}, words), Estimates(Planner(with_room(18 * 10**8)))
    fixed = ("layout.data.sync", "layout.context", "memory")
    found = search(run, models.planner.cluster, 4, fixed=fixed, models=models)
    assert asked[0], "a pipeline is a seed"
    monkeypatch.setattr(search_module, "seeds_of", lambda judge, every, cutoff: [])
    without = search(run, models.planner.cluster, 4, fixed=fixed, models=models)
    assert [each.config for each in found.predictions] == [each.config for each in without.predictions]


@pytest.mark.parametrize("seed", range(4))
def test_layouts_with_tight_estimates_are_predicted_after_the_fastest(seed: int) -> None:
    """Once a layout fits, no tight estimate is predicted before the fastest layout is."""
    cluster, models = made_up(seed)
    run = parse_config({**TREE, "layout": {"pipeline": {"schedule": "1f1b"}}})
    fixed = ("layout.pipeline.schedule", "layout.pipeline.chunks", "memory.offload")
    found = search(run, cluster, 4, top=3, fixed=fixed, models=models)
    fits = [verdict(memory_of(models.bytes(config)), cluster) == "fits" for config in models.predicted]
    estimates = [verdict(models.estimated_memory(config), cluster) for config in models.predicted]
    fastest = models.predicted.index(found.predictions[0].config)
    assert "tight" not in estimates[fits.index(True) : fastest + 1]
    assert all(tight.seconds < found.predictions[0].seconds for tight in found.tight)


class OnlyTight(MadeUp):
    """Layouts whose weights leave a hundredth of the memory, which is less than the unpredicted share; replicas alone,
    such as the run's own, do not fit."""

    def weights_memory(self, config: Config) -> Memory:
        return memory_of(int((0.99 if config.layout.data.size < 4 else 2) * self.room))

    def activations(self, config: Config) -> int:
        return 0


def test_a_stopped_search_has_an_answer_if_all_that_fit_are_tight() -> None:
    """Ctrl-C with half of the families evaluated."""
    cluster, models = with_room(10**6), OnlyTight(with_room(10**6), 0, 10**6)

    def stop_half_way(line: str, share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    fixed = ("layout.pipeline.schedule", "layout.pipeline.chunks", "memory.offload")
    found = search(parse_config(TREE), cluster, 4, fixed=fixed, models=models, report=stop_half_way, partial=True)
    assert found.stopped
    assert found.predictions
    assert {verdict(prediction.fullest, cluster) for prediction in found.predictions} == {"tight"}
