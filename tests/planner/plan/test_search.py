"""The search finds the layouts of predicting everything, writes a run, and says why nothing is found."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import jsonschema
import pytest
from markupsafe import escape

from meshwright.compute.tensor.section import Megatron, Whole
from meshwright.config import Config, dump_config, load_config, parse_config
from meshwright.config.layout import ContextParallel, Layout
from meshwright.config.section import with_field
from meshwright.config.yaml_text import plain_values
from meshwright.configs import SCHEMA
from meshwright.data.files import ShowProgress
from meshwright.output.outputs import refuse_existing
from meshwright.planner.plan.answer import answer
from meshwright.planner.plan.cells import Cell, Family, Judge, strategy_of
from meshwright.planner.plan.estimate import MIN_RECOMPUTED_SHARE, Estimates
from meshwright.planner.plan.evaluator import Evaluator, SearchState, cuts_within, round_of
from meshwright.planner.plan.memory import HeldStage, Memory, fits, least_total, verdict
from meshwright.planner.plan.page import write_plan_page
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.report import as_dict, render, write_run
from meshwright.planner.plan.search import SearchResult, layout_text, search, without_savings
from meshwright.planner.plan.software import Software, load_program
from meshwright.planner.plan.space import SearchJob, families, fixed_fields, legal_layouts, ranks_of_layer, sizes_of
from meshwright.ranks.errors import ConfigError
from tests.planner.plan.clusters import NODES, with_room
from tests.planner.plan.questions import TREE, made_up, memory_of


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_predicting_everything_finds(seed: int) -> None:
    cluster, models = made_up(seed)
    run = parse_config(TREE)
    fixed = ("layout.pipeline.schedule", "layout.pipeline.chunks", "memory.offload")
    config = run.model_copy(
        update={"layout": run.layout.model_copy(
            update={"pipeline": run.layout.pipeline.model_copy(update={"schedule": "1f1b"})}
        )}
    )  # fmt: skip
    everything = list(legal_layouts(SearchJob(config, cluster, 4, fixed)))
    fits = {one for one in everything if verdict(memory_of(models.bytes(one)), cluster) == "fits"}
    fitting = [models.seconds(one) for one in fits if fits.isdisjoint(without_savings(one))]  # others gain nothing
    found = search(config, cluster, 4, top=7, fixed=fixed, models=models)
    assert [made.seconds for made in found.predictions] == sorted(fitting)[:7]
    counts = found.counts
    assert counts.legal < len(everything), "a family that is too full is one"
    assert counts.too_full + counts.unfit + counts.dominated + counts.too_slow + counts.predicted == counts.legal
    assert len(models.predicted) < len(everything) / 3, "bounds save predictions"
    assert min(counts.too_full, counts.too_slow, counts.unfit, counts.dominated) > 0
    assert {runner_up.strategy for runner_up in found.runner_ups} | {strategy_of(found.predictions[0].config)} == {
        strategy_of(one) for one in everything
    }


def test_a_layout_that_does_not_fit_is_predicted_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are far too low here, so each order of a full layout would be predicted."""
    cluster, models = made_up(1, 500_000)
    asked, least_memory = list[Config](), models.least_memory

    def noted(config: Config) -> Memory:
        asked.append(config)
        return least_memory(config)

    monkeypatch.setattr(models, "least_memory", noted)
    monkeypatch.setattr(models, "held_activations", lambda config: (HeldStage(0.0, 0.0, 1.0),))
    search(parse_config(TREE), cluster, 8, top=50, models=models, keep=few)
    full = [with_field(config, "layout.order", "auto") for config in asked if not fits(least_memory(config), cluster)]
    assert len(full) == len(set(full)) > 3


def test_a_cut_is_judged_after_the_cuts_in_it() -> None:
    model = TREE["model"] | {"positions": 8192}
    run = parse_config(TREE | {"model": model, "data": {"sequence": 8192}, "batch": {"global": 64}})
    every = [family.layout for family in families(SearchJob(run, NODES, 16), {})]
    first: dict[object, tuple[object, ...]] = {}
    for layout in every:
        first[layout.layer] = min(round_of(layout), first.get(layout.layer, round_of(layout)))
    compared = [(first[cut], round_of(layout)) for layout in every for cut in cuts_within(layout) if cut in first]
    assert len(compared) > 100
    assert all(before < now for before, now in compared)


def test_a_bound_over_links_is_the_least_and_below_the_estimate() -> None:
    models = Estimates(Planner(NODES))
    for stages, chunks, schedule, micro in (
        (1, 1, "1f1b", 2),
        (2, 1, "1f1b", 1),
        (2, 2, "1f1b", 1),
        (4, 1, "gpipe", 2),
    ):
        pipeline = {"size": stages, "chunks": chunks, "schedule": schedule}
        layout = {"tensor": {"kind": "megatron", "size": 2}, "pipeline": pipeline, "data": {"size": 8 // stages}}
        run = parse_config(
            TREE
            | {
                "model": TREE["model"] | {"layers": 8},
                "layout": layout | {"ranks_per_node": 4},
                "batch": {"global": 32, "micro": micro},
            }
        )
        inner, outer = run, with_field(run, "layout.order", ("tensor", "data", "pipe"))
        both = tuple(map(models.links_of_layer, (inner, outer)))
        assert len(set(both)) == 2
        alone = [models.phase_seconds(each) for each in (inner, outer)]
        assert alone[0] < alone[1]
        assert models.phase_seconds(run, both) == min(alone)
        assert models.least_seconds(run, both) == min(map(models.least_seconds, (inner, outer)))
        assert models.least_seconds(run, both, layers=True) < models.least_seconds(run, both) <= min(alone)
        assert all(models.phase_seconds(each) <= models.estimated_seconds(each) for each in (inner, outer))


@pytest.mark.parametrize("tensor", ["{kind: megatron, size: 2}", "{kind: tesseract, q: 2, d: 1}"])
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_two_cuts_are_bounded_by_each_alone(tensor: str, context: str) -> None:
    """On the same links."""
    words = (
        "model={hidden: 512, heads: 8, positions: 2048, dropout: 0.0}", "data.sequence=2048", "layout.ranks_per_node=4",
        f"layout.tensor={tensor}", f"layout.context={{kind: {context}, size: 2}}", "batch={global: 32, micro: 4}",
        "precision={level: O2, dtype: fp16}",
    )  # fmt: skip
    config, models = parse_config(TREE, words), Estimates(Planner(NODES))
    inside = with_field(config, "layout.context", ContextParallel())
    tensor_axes = tuple(name for name, _ in config.layout.tensor.axes)
    outer = with_field(config, "layout.order", (*tensor_axes, "context"))
    for every in [(models.links_of_layer(each),) for each in (config, outer)]:
        bound = models.least_of_cuts(config, every)
        assert 0.5 * (whole := models.least_seconds(config, every)) < bound <= whole
    # One cut: an equal share of a whole layer.
    assert 0.4 * (whole := models.least_seconds(inside, every)) < models.least_of_cuts(inside, every) <= whole
    assert models.least_of_cuts(with_field(inside, "layout.tensor", Whole()), every) == 0.0


DRAWN = {
    "tied, long rows": (
        "model={hidden: 64, heads: 8, layers: 4, positions: 8192, vocabulary: 4096, dropout: 0.0}",
        "data.sequence=8192", "batch.global=32",
    ),
    "untied, key-value heads": ("model=llama-3.2-1b", "data.sequence=1024", "batch.global=32"),
    "experts": ("model=mixtral-8x7b", "data.sequence=1024", "batch.global=32"),
    "attention in latents, experts": ("model=deepseek-v3", "data.sequence=1024", "batch.global=64"),
    "matrices stepped whole": ("model=gpt2-small", "data.sequence=512", "batch.global=32", "optimizer.name=muon"),
}  # fmt: skip


@pytest.mark.parametrize("words", DRAWN.values(), ids=DRAWN)
def test_bounds_without_recordings_are_below_estimates(words: tuple[str, ...]) -> None:
    """Of weights, of activations and of seconds, for layouts drawn from the whole space: each kind of cut, order,
    schedule, recomputation, sync and offload."""
    half = "precision={level: O2, dtype: fp16}"
    job = SearchJob(parse_config({}, (*words, half)), with_room(10**15), 8)
    models, cuts = Estimates(Planner(job.cluster)), set()
    judge = Judge(job, models)
    every = list(families(job, {}))
    for family in random.Random(5).sample(every, min(24, len(every))):
        sizes, _ = judge.sizes(family)
        cell = Cell(Family(judge, family), random.Random(1).choice(sizes))
        config = random.Random(2).choice(cell.bounds.tails[0]).of(cell.config)
        cuts.add(config.layout.layer)
        assert models.least_alone(config) <= models.alone_memory(config)[0].total, layout_text(config)
        held = models.held_activations(config)
        for least, stage in zip(models.least_activations(config), held, strict=True):
            assert least.peak_bytes <= 1.0001 * stage.peak_bytes, layout_text(config)
        assert least_total(models.least_alone(config), held) <= 1.0001 * models.estimated_memory(config).total, config
        links = cell.bounds.links
        whole, of_cuts = models.least_of_whole(config, links), models.least_of_cuts(config, links)
        assert max(whole, of_cuts) <= 1.0001 * models.least_seconds(config, links), layout_text(config)
        if config.layout.pipeline.size == 1 and ranks_of_layer(config.layout) > 1:
            with_sums = models.least_with_sums(config, links, math.inf)
            assert with_sums <= 1.0001 * models.estimated_seconds(config), layout_text(config)
    assert len(cuts) >= min(6, len({family.layout.layer for family in every}))


def test_a_layer_is_not_recorded_if_memory_or_recomputation_rules_it_out() -> None:
    """Large microbatches need recomputation, and are too slow with it: their layers are not recorded."""
    words = ("model=llama-3.1-8b", "data.sequence=8192", "batch.global=64", "precision={level: O2, dtype: fp16}")
    job, found = SearchJob(parse_config({}, words), with_room(100 * 10**9), 8), SearchState()
    models = Estimates(Planner(job.cluster))
    evaluator = Evaluator(job, models, lambda layout: True)
    by_size = {
        each.layout.tensor.size: each
        for each in families(job, {})
        if each.layout.pipeline.size == 1 and isinstance(each.layout.tensor, Megatron)
        and (each.layout.data.sync, each.layout.context.size, each.memory.offload.to) == ("zero1", 1, "none")
    }  # fmt: skip
    half, eighth = by_size[2], by_size[4]
    evaluator.evaluate_family(half, found)
    cutoff = 1.05 * min(queued.seconds for queued in found.queue)
    evaluator.evaluate_family(eighth, found, cutoff)
    left_out = [sized.micro for sized in sizes_of(eighth, job, {}) if 0 not in models.recorded_parts(sized)]
    assert left_out
    judge = Judge(job, Estimates(Planner(job.cluster)))
    family = Family(judge, eighth)
    for cell in (Cell(family, bounds) for bounds in judge.sizes(eighth)[0] if bounds.config.micro in left_out):
        bounds, fitting = cell.bounds, filter(cell.fits, cell.bounds.tails[0])
        assert not any(
            bounds.least(tail, cutoff) < cutoff and bounds.is_fast_phase(tail, cutoff) for tail in fitting
        ), cell.config.micro


def test_a_layout_without_a_recording_may_nearly_fit() -> None:
    """A layout that memory rules out without a recording is judged at the end, if it may be the fastest."""
    words = ("model=gpt2-small", "data.sequence=512", "batch.global=32", "precision={level: O2, dtype: fp16}")
    job = SearchJob(parse_config({}, words), with_room(10**15), 8)
    judge = Judge(job, Estimates(Planner(job.cluster)))
    family = next(each for each in families(job, {}) if each.layout.tensor.axes and not each.layout.context.axes)
    bounds = judge.sizes(family)[0][-1]
    cell, tail = Cell(Family(judge, family), bounds), bounds.tails[0][0]
    room = int(0.8 * cell.memory(tail).total)
    small = SearchJob(job.run, with_room(room), 8)
    evaluator = Evaluator(small, judge.models, lambda layout: True)
    found = SearchState(unrecorded=[(bounds.seconds(tail, "cuts"), cell, tail)])
    evaluator.find_nearly(found, 0.0)
    assert found.nearly_fits is None
    evaluator.find_nearly(found, 10**9)
    assert found.nearly_fits is not None
    assert found.nearly_fits[1:] == (tail.of(cell.config), cell.memory(tail))


@pytest.mark.parametrize("words", [DRAWN["untied, key-value heads"], DRAWN["experts"]])
def test_estimates_count_communicators_without_recordings(words: tuple[str, ...]) -> None:
    """The estimate is a lower bound of a prediction's communicators, and at least half of the bytes for most."""
    nodes = with_room(10**15)
    links = {name: each.model_copy(update={"channels": 24}) for name, each in nodes.links.items()}
    job = SearchJob(parse_config({}, (*words, "precision={level: O2, dtype: fp16}")), NODES, 8)
    job = replace(job, cluster=nodes.model_copy(update={"links": links}))
    models, shares = Estimates(Planner(job.cluster)), []
    for config in random.Random(3).sample(list(legal_layouts(job)), 12):
        least = models.estimated_memory(config).communicators
        shares.append(least / models.planner.predict(config).fullest.communicators)
    assert median(shares) > 0.5, shares
    assert max(shares) <= 1.0, shares


def test_ctrl_c_ends_a_search_with_the_best_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, models = made_up(5)  # the run's own layout fits, and none of the first three is refused by seconds

    def press(text: str, share: float | None) -> None:
        if "predicting number 4" in text:
            raise KeyboardInterrupt

    found = search(parse_config(TREE), cluster, 2, models=models, report=press, partial=True)
    assert found.stopped
    assert 1 <= len(found.predictions) <= 3
    assert len(models.predicted) == 3
    render(found)
    assert "stopped by Ctrl-C" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_while_layouts_are_gathered_ends_the_search() -> None:
    """The answer has the run's own layout, known by then; nothing more is predicted, and other layouts are not
    mentioned."""
    cluster, models = made_up(5)  # the run's own layout fits, and none of the first three is refused by seconds
    told: list[str] = []

    def press(text: str, share: float | None) -> None:
        told.append(text)
        if "predicting" not in text:
            raise KeyboardInterrupt

    run = parse_config(TREE)
    found = search(run, cluster, 2, models=models, report=press, partial=True)
    assert found.stopped
    assert [one.config.layout.data for one in found.predictions] == [run.layout.data.model_copy(update={"size": 2})]
    assert "predicting" in told[-2]
    assert "now" in told[-1]
    assert len(told) == 2
    assert found.runner_ups == ()
    assert set(found.not_reached) == {"zero2", "zero3", "pipeline", "megatron", "subgraph"}


def test_ctrl_c_among_the_losers_keeps_the_best() -> None:
    """Ctrl-C before the first prediction ends the command."""
    cluster, models = made_up(5)  # the run's own layout fits, and none of the first three is refused by seconds
    run = parse_config(TREE)

    def pressing(number: int, told: list[str]) -> ShowProgress:
        """Return a report that presses Ctrl-C at the prediction of this number."""

        def press(text: str, share: float | None) -> None:
            told.extend([text] * ("predicting" in text))
            if len(told) == number:
                raise KeyboardInterrupt

        return press

    told: list[str] = []
    whole = search(run, cluster, 2, models=models, report=pressing(-1, told))
    assert len(whole.runner_ups) > 1, "its last prediction is for a loser"
    last = pressing(len(told), [])
    found = search(run, cluster, 2, models=models, report=last, partial=True)
    assert found.stopped
    assert [one.config for one in found.predictions] == [one.config for one in whole.predictions]

    def at_once(layout: Layout) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(run, cluster, 2, models=models, keep=at_once, partial=True)


def few(layout: Layout) -> bool:
    return layout.tensor.kind == "none" or layout.tensor in (Megatron(kind="megatron", size=2),)


Small = tuple[SearchResult, Estimates, tuple[str, ...]]


@pytest.fixture(scope="module")
def small() -> Small:
    """Search with the planner's own models, for two devices."""
    words = ("layout.pipeline.schedule=1f1b", "memory.offload.to=none", "memory.recompute=none", "batch.micro=2")
    estimates = Estimates(Planner(NODES))
    fixed = fixed_fields(words)
    found = search(
        parse_config(TREE, words), NODES, 2, top=3, fixed=fixed, models=estimates,
        keep=few,
    )  # fmt: skip
    return found, estimates, words


def test_the_real_estimates_hold(small: Small) -> None:
    found, estimates, _ = small
    all_of_them = []
    for config in legal_layouts(found.job):
        if not few(config.layout):
            continue
        made = estimates.planner.predict(config)
        seconds = estimates.estimated_seconds(config)
        assert seconds <= made.seconds * 1.0001, config.layout.summary
        assert seconds >= made.seconds * 0.8, config.layout.summary
        assert estimates.weights_memory(config).total <= made.worst_memory
        assert estimates.estimated_memory(config).total <= made.worst_memory, config.layout.summary
        all_of_them.append(made.seconds)
    assert [made.seconds for made in found.predictions] == pytest.approx(sorted(all_of_them)[:3])


@pytest.mark.parametrize("stages, limit", [(2, 4), (2, 8), (4, 4), (4, 16)])
def test_an_estimate_counts_what_waits_for_weight_gradients(stages: int, limit: int) -> None:
    """Recomputed layers are counted whole while W waits, and each microbatch widens the gradients."""
    words = (
        "model.layers=8", "model.hidden=256", "batch.global=32", "batch.micro=1", "memory.recompute=auto",
        "precision={level: O2, dtype: fp16}", "layout.pipeline.schedule=message-driven",
        f"layout.pipeline.size={stages}", f"layout.pipeline.limit={limit}",
    )  # fmt: skip
    config, estimates = parse_config(TREE, words), Estimates(Planner(NODES))
    made = estimates.planner.predict(config)
    kept, whole = (one.activations + one.temporaries for one in (estimates.estimated_memory(config), made.fullest))
    assert 0.35 * whole <= kept <= whole
    assert 0.8 * made.seconds <= estimates.estimated_seconds(config) <= 1.0001 * made.seconds


def test_a_limit_that_is_asked_of_memory_counts_nothing_that_waits() -> None:
    words = (
        "memory.recompute=auto",
        "layout.pipeline.schedule=message-driven",
        "layout.pipeline.size=2",
        "batch.micro=1",
    )
    estimates = Estimates(Planner(NODES))
    by_memory, by_user = (
        estimates.estimated_memory(parse_config(TREE, (*words, f"layout.pipeline.limit={limit}"))).total
        for limit in ("auto", "2")
    )
    assert by_memory <= by_user


@pytest.mark.parametrize("seed", [9, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(9))])
def test_estimates_of_drawn_layouts_are_below_their_predictions(seed: int) -> None:
    """GPT-2 in half precision, with recomputation, offload and slices. For slices summed in each microbatch an estimate
    may exceed the prediction, by less than 80 predictions look past."""
    words = ("precision={level: O2, dtype: fp16}", "model=gpt2-small", "data.sequence=512")
    job = SearchJob(parse_config(TREE | {"batch": {"global": 32}}, words), NODES, 4)
    estimates, shares = Estimates(Planner(NODES)), []
    for config in random.Random(seed).sample(list(legal_layouts(job)), 40):
        shares.append(estimates.estimated_seconds(config) / estimates.planner.predict(config).seconds)
    assert max(shares) <= 1.25
    assert sum(share > 1.0001 for share in shares) <= 4


@pytest.mark.parametrize("words", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.long)])
def test_estimates_of_memory_are_near_predictions(words: tuple[str, ...], count: int) -> None:
    """Of layouts drawn from the whole space, with recomputation, experts and heads of several layers. No estimate
    of one stage exceeds its prediction by more than 1 %."""
    job = SearchJob(parse_config({}, (*words, "precision={level: O2, dtype: fp16}")), with_room(10**15), 8)
    models, shares = Estimates(Planner(job.cluster)), {}
    judge, every = Judge(job, models), list(families(job, {}))
    for family in random.Random(count).sample(every, min(count, len(every))):
        cell = Cell(Family(judge, family), random.Random(1).choice(judge.sizes(family)[0]))
        config = random.Random(2).choice(cell.bounds.tails[0]).of(cell.config)
        # The run's clock may put other numbers of layers on the stages than the estimate: both get the clock's.
        if config.layout.pipeline.size > 1:
            config = with_field(config, "layout.pipeline.partition", models.planner.partition(config))
        predicted = models.planner.predict(config).fullest.allocated
        shares[layout_text(config)] = models.estimated_memory(config).allocated / predicted
        assert shares[layout_text(config)] <= (1.01 if config.layout.pipeline.size == 1 else 1.2), shares
    assert median(shares.values()) >= 0.9, shares


@pytest.mark.parametrize("software", ["fsdp", "automodel", "torchtitan-eager"])
def test_estimates_of_programs_that_sum_once_are_below_predictions(software: str) -> None:
    """Seconds and memory of slices that are summed once a step, with one microbatch and with several. Of twelve layouts
    one may be above, as with sums in every microbatch."""
    program = load_program(software)
    words = ("model=gpt2-small", "data.sequence=512", "precision={level: O2, dtype: fp16}", "batch={global: 64}")
    job = SearchJob(parse_config({}, words), with_room(10**15), 8, known=program.layouts)
    models, shares, times, seen = Estimates(Planner(job.cluster, program.software)), [], [], set()
    sliced = [each for each in legal_layouts(job) if each.layout.data.strategy.slices and each.layout.data.size > 2]
    for config in random.Random(0).sample(sliced, 12):
        predicted = models.planner.predict(config)
        times.append(models.estimated_seconds(config) / predicted.seconds)
        shares.append(models.estimated_memory(config).allocated / predicted.fullest.allocated)
        assert shares[-1] <= (1.01 if config.layout.pipeline.size == 1 else 1.2), layout_text(config)
        seen.add(config.accumulates)
    assert seen == {False, True}
    assert sum(time > 1.001 for time in times) <= (software == "torchtitan-eager")
    assert max(times) <= 1.25
    assert median(shares) >= 0.9, shares


def test_a_middle_stage_may_hold_the_most_activations() -> None:
    """Rows of experts are not cut by tensor parallelism, as dense layers are. DeepSeek-V3's second stage holds more
    than the first, which has as many parameters."""
    words = (
        *DRAWN["attention in latents, experts"], "precision={level: O2, dtype: fp16}", "batch={global: 1024, micro: 1}",
        "layout.tensor={kind: megatron, size: 8, sequence_parallel: true}", "layout.data={size: 16, expert: 16}",
        "layout.pipeline={size: 16, schedule: 1f1b}",
    )  # fmt: skip
    config, models = parse_config({}, words), Estimates(Planner(with_room(10**15)))
    predicted = models.planner.predict(config).memory
    assert predicted[1].activations > 1.2 * predicted[0].activations
    share = models.estimated_memory(config).activations / predicted[1].activations
    assert 0.9 <= share <= 1


def test_attention_that_keeps_nothing_is_not_recomputed() -> None:
    """Attention in a fused kernel is little next to a layer's other memory and is not recomputed; attention in steps
    may be."""
    words = ("model.positions=1024", "data.sequence=1024", "memory.recompute=selective", "batch.micro=1")
    config, fused = parse_config(TREE, words), Planner(NODES)
    in_steps = Planner(NODES, Software(attention="torch"))
    assert [Estimates(one).recomputes_for_nothing(config) for one in (fused, in_steps)] == [True, False]
    assert not Estimates(fused).recomputes_for_nothing(parse_config(TREE, ("memory.recompute=none",)))


def test_recomputed_attention_is_estimated_for_each_kind_of_layer() -> None:
    """One layer sees all tokens, the others a window: recomputed attention takes other seconds in these."""
    model = {
        "family": "llama", "layers": 4, "hidden": 64, "heads": 4, "positions": 2048, "vocabulary": 512, "window": 64,
        "window_layers": [False, True, True, True],
    }  # fmt: skip
    config = parse_config(
        {"model": model, "data": {"sequence": 2048}, "batch": {"global": 8, "micro": 4}},
        ("precision={level: O2, dtype: fp16}", "memory.recompute=selective"),
    )
    models = Estimates(Planner(NODES, Software(attention="torch")))
    links = models.planner.site.links(config)
    assert models.parts.layers(config) == [0, 1]
    whole, windowed = (models.parts.attention_again(config, links, position) for position in (0, 1))
    assert whole != windowed
    every = [with_field(config, "memory.recompute", setting) for setting in ("selective", "none")]
    again, once = (models.whole_seconds(each, (links,), True)[0][1] for each in every)
    assert again - once == pytest.approx(MIN_RECOMPUTED_SHARE * (whole + 3 * windowed))
    assert models.estimated_seconds(config) <= models.planner.predict(config).seconds


def test_what_is_written_is_the_run(small: Small, tmp_path: Path) -> None:
    found, estimates, _ = small
    best = found.predictions[0]
    write_run(best, tmp_path / "deep" / "plan.yaml")
    again = load_config(tmp_path / "deep" / "plan.yaml")
    first, *_, written = (tmp_path / "deep" / "plan.yaml").read_text().partition("\n")
    assert first == f"# yaml-language-server: $schema={SCHEMA.as_uri()}"
    jsonschema.validate(plain_values(written), json.loads(SCHEMA.read_text()))
    assert dump_config(again) == dump_config(best.config)  # fields without an effect are not written
    assert estimates.planner.predict(again).seconds == best.seconds
    with pytest.raises(ConfigError, match="is there already"):
        refuse_existing("--out", tmp_path / "deep" / "plan.yaml")


def test_the_page_has_the_answer_and_the_parts(small: Small, tmp_path: Path) -> None:
    found, _, _ = small
    page = tmp_path / "plan.html"
    write_plan_page(found, page)
    text, best = page.read_text(), found.predictions[0]
    assert escape(answer(best, layout_text(best.config), found.training)) in text
    for part in (*best.fullest.parts, "optimizer", "a device's memory"):
        assert part in text, part
    widths = [float(width) for width in re.findall(r"width: ([\d.]+)%; background", text)]
    assert len(widths) > 3 * len(found.predictions)
    assert all(0 <= width <= 100 for width in widths)
    assert all(re.findall(r"width: [\d.]+%; background: (#\w{6})?", text)), "a part without a colour"


def test_it_is_shown(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    found, _, _ = small
    told = as_dict(found)
    assert told["layouts"][0]["seconds"] == found.predictions[0].seconds
    assert sum(told["layouts"][0]["memory"].values()) == found.predictions[0].worst_memory
    held = told["layouts"][0]["held"]
    assert held["allocated"] <= held["reserved"] <= held["process"] == found.predictions[0].worst_memory
    assert told["absent"] == {}
    render(found)
    shown = capsys.readouterr().out
    assert "reserved (torch.cuda.max_memory_reserved)" in shown
    assert f"{found.counts.legal:,} legal layouts" in shown
    for runner_up in found.runner_ups:
        assert runner_up.strategy in shown


def test_kinds_without_a_legal_layout_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, models = made_up(5)  # the run's own layout fits, and none of the first three is refused by seconds
    run = parse_config(TREE | {"model": TREE["model"] | {"heads": 3, "hidden": 33}})
    found = search(run, cluster, 2, models=models)
    why = "layout.tensor.size=2 does not divide model.heads=3; valid: 1, 3"
    assert as_dict(found)["absent"] == {"megatron": why, "subgraph": why}
    render(found)
    assert f"no legal layout of kind megatron: {why}" in " ".join(capsys.readouterr().out.split())


def test_slices_are_found_where_a_model_does_not_fit() -> None:
    """`plan` and `layout: auto` find slices. Strategies that do not fit are named; if all fit, one layout of each is
    predicted."""
    words = (
        "layout.tensor.kind=none", "layout.pipeline.size=1", "memory.offload.to=none", "precision.level=O2",
        "precision.dtype=fp16",
    )  # fmt: skip
    model = TREE["model"] | {"layers": 8, "hidden": 256}
    run, fixed = parse_config(TREE | {"model": model, "batch": {"global": 32}}, words), fixed_fields(words)
    parameters, chosen = 8 * 12 * 256**2, {}
    for room in (5, 16):  # bytes a parameter; weights, gradients and states of one device take 16
        device = NODES.device.model_copy(update={"memory_bytes": room * parameters})
        found = search(run, NODES.model_copy(update={"device": device}), 8, fixed=fixed)
        chosen[room] = found.predictions[0].config.layout.data.sync
        predicted = {runner_up.strategy: runner_up.prediction for runner_up in found.runner_ups}
        assert predicted.keys() | {strategy_of(found.predictions[0].config)} == {"data", "zero2", "zero3"}
        for other in predicted.values():
            assert (other is None) == (room == 5)
            assert other is None or found.predictions[0].seconds <= other.seconds
    assert chosen[5] == "zero3"


def test_nothing_fits() -> None:
    cluster, models = made_up(5)  # the run's own layout fits, and none of the first three is refused by seconds
    small = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_bytes": models.room // 10})})
    with pytest.raises(ConfigError, match=r"--cluster=made-up has 0.1 MB a device, and none of \d+ legal layouts on 2"):
        search(parse_config(TREE), small, 2, models=models)


def test_nothing_is_legal() -> None:
    cluster, models = made_up(5)  # the run's own layout fits, and none of the first three is refused by seconds
    words = ["layout.data.size=4"]
    with pytest.raises(ConfigError, match="--devices=3 leaves the run no legal layout"):
        search(parse_config(TREE, words), cluster, 3, fixed=fixed_fields(words), models=models)


def test_an_estimate_counts_a_head_whose_chunks_differ_with_the_microbatch() -> None:
    """On a GPU the slices of a large vocabulary's logits depend on the number of rows: the head is not interpolated."""
    words = ("model.vocabulary=50304", "model.hidden=64", "batch.micro=8", "data.sequence=512", "model.positions=512")
    config, estimates = parse_config(TREE | {"batch": {"global": 8}}, words), Estimates(Planner(NODES))
    made, seconds = estimates.planner.predict(config), estimates.estimated_seconds(config)
    assert 0.8 * made.seconds <= seconds <= 1.0001 * made.seconds


def test_rows_to_experts_are_tried_as_messages() -> None:
    """The fastest layouts that share experts are also predicted with rows as messages, with stages and without; a
    foreign program keeps a dispatch of rows."""
    model = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "feed_forward": 64, "positions": 32,
             "vocabulary": 300, "experts": {"count": 4, "per_token": 2}}  # fmt: skip
    run = parse_config({"model": model, "data": {"sequence": 16}, "batch": {"global": 16, "micro": 2},
                        "layout": {"data": {"size": 2, "sync": "zero1", "expert": 2}}})  # fmt: skip
    fixed = {"layout.tensor", "layout.data.sync", "layout.data.expert", "memory", "batch.micro", "layout.order"}
    found = search(run, NODES, 4, 3, fixed=fixed)
    tried = [one.config for one in found.predicted if one.config.layout.data.in_pieces]
    assert tried
    assert all("rows to experts as messages" in layout_text(config) for config in tried)
    kept = search(run, NODES, 4, 3, fixed={*fixed, "layout.data.exchange"})
    assert not any(one.config.layout.data.in_pieces for one in kept.predicted)
    assert found.predictions[0].seconds <= kept.predictions[0].seconds
