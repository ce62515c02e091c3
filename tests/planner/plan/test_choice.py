"""The answer of a search: the simplest of equals, sizes that divide, and no field that is better fixed than free."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.config import parse_config
from meshwright.planner.plan.cells import strategy_of
from meshwright.planner.plan.choice import REPLICAS_ALONE, answered, complexity, nearest_sizes, simplest_first
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.report import plan_sentences
from meshwright.planner.plan.search import SearchResult, layout_text, search
from meshwright.ranks.errors import ConfigError
from tests.planner.plan.questions import TREE, made_up

A100 = load_cluster("dgx-a100")
LAYOUTS = {
    "zero3": {"data": {"size": 4, "sync": "zero3"}},
    "zero1": {"data": {"size": 4, "sync": "zero1"}},
    "shard": {"data": {"size": 4, "sync": "zero1", "shard": 2}},
    "tensor": {"data": 2, "tensor": {"kind": "megatron", "size": 2}},
    "stages": {"data": 2, "pipeline": 2},
}


def result_of(seconds: dict[str, float], cluster: str = "dgx-a100") -> SearchResult:
    """Return a search result with layouts of these seconds, fastest first."""
    found = search(parse_config(TREE), A100, 4, 1)
    one = replace(found.predictions[0], cluster=load_cluster(cluster))
    made = [
        replace(one, config=parse_config(TREE | {"layout": LAYOUTS[name]}), seconds=each)
        for name, each in sorted(seconds.items(), key=lambda pair: pair[1])
    ]
    return replace(found, predictions=tuple(made), runner_ups=(), changes=())


def test_layouts_of_fewer_axes_and_less_sync_are_simpler() -> None:
    order = [complexity(parse_config(TREE | {"layout": layout})) for layout in LAYOUTS.values()]
    assert order[1] < order[0], "zero1 before zero3"
    assert order[1] < order[2], "whole before shards"
    assert max(order[0], order[1]) < min(order[3], order[4]), "replicas alone before other axes"
    again = complexity(parse_config(TREE | {"layout": LAYOUTS["zero1"], "memory": {"recompute": 1}}))
    assert order[1] < again < order[0]


def test_the_simplest_of_equals_is_the_answer() -> None:
    result = result_of({"zero3": 1.0, "tensor": 1.001, "zero1": 1.002, "stages": 1.5})
    first = simplest_first(result)
    assert [one.seconds for one in first.predictions] == [1.002, 1.0, 1.001, 1.5]
    assert first.predictions[0].config.layout.data.sync == "zero1"
    assert first.fastest.seconds == 1.0
    said = f"The first is the simplest; the fastest predicted, {layout_text(first.fastest.config)}, takes 0.2% less."
    assert said in plan_sentences(first)
    assert "Between the first 3" in " ".join(plan_sentences(first))


def test_a_difference_that_a_prediction_can_tell_decides() -> None:
    result = result_of({"tensor": 1.0, "zero1": 1.2})
    assert simplest_first(result).predictions == result.predictions
    unknown = result_of({"tensor": 1.0, "zero1": 1.001}, "summit")
    assert simplest_first(unknown).predictions == unknown.predictions, "nobody has measured there"


def test_another_strategy_may_be_the_simplest() -> None:
    """The simplest layout's strategy is then no runner-up, and the fastest layout's strategy is a runner-up."""
    result = search(parse_config(TREE), A100, 4, 1)
    fastest = replace(result.predictions[0], config=parse_config(TREE | {"layout": LAYOUTS["tensor"]}), seconds=1.0)
    simple = replace(fastest, config=parse_config(TREE | {"layout": LAYOUTS["zero1"]}), seconds=1.01)
    up = replace(result.runner_ups[0], config=simple.config, prediction=simple)
    first = simplest_first(replace(result, predictions=(fastest,), runner_ups=(up,)))
    assert first.predictions == (simple,)
    assert [each.strategy for each in first.runner_ups] == [strategy_of(fastest.config)]


def test_the_nearest_batch_and_number_of_devices_are_named() -> None:
    models = Estimates(Planner(A100))
    result = search(parse_config(TREE | {"batch": {"global": 10}}), A100, 3, 1, models=models)
    told = {change.what: change.seconds for change in answered(result, models, frozenset()).changes}
    nine = parse_config(TREE | {"batch": {"global": 9}})
    assert told["a batch of 9"] == search(nine, A100, 3, 1, fixed=set(REPLICAS_ALONE)).predictions[0].seconds
    assert "2 devices" in told
    assert nearest_sizes(search(parse_config(TREE), A100, 4, 1, models=models), models, frozenset()) == ()
    assert nearest_sizes(result, models, {"layout.tensor"}) == (), "the user has said what to keep"


FIELDS = (
    "layout.data.sync", "layout.pipeline.size", "layout.context", "layout.tensor.kind", "memory.recompute",
    "layout.pipeline.chunks", "batch.micro",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_free_is_never_slower_than_fixed(seed: int) -> None:
    cluster, models = made_up(seed)
    draw = random.Random(seed)
    run = parse_config(TREE | {"batch": {"global": draw.choice((8, 12)), "micro": draw.choice((1, 2))}})
    devices = draw.choice((2, 4))
    try:
        free = search(run, cluster, devices, 1, models=models).predictions[0]
    except ConfigError:
        free = None
    for fields in (draw.sample(FIELDS, 1), draw.sample(FIELDS, 2)):
        try:
            fixed = search(run, cluster, devices, 1, fixed=set(fields), models=models).predictions[0]
        except ConfigError:  # no layout is legal and fits
            continue
        assert free is not None, f"{fields}: fits, and nothing does if all is free"
        assert free.seconds <= fixed.seconds or free.fits > fixed.fits, fields
