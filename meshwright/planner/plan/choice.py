"""The choice of an answer: the simplest of layouts with equal predictions, and sizes that divide better."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from meshwright.config import Config
from meshwright.config.registry import entries
from meshwright.config.section import divisors, with_field
from meshwright.planner.plan.answer import Change, changes, is_difference
from meshwright.planner.plan.cells import strategy_of
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.evaluator import RunnerUp
from meshwright.planner.plan.logits import with_larger_chunks
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.search import SearchResult, search
from meshwright.planner.plan.space import is_fixed
from meshwright.ranks.errors import ConfigError

WORTH = 0.03
"""The most that a simpler layout may cost, as a share of a step, within the error of predictions."""
REPLICAS_ALONE = ("layout.tensor.kind", "layout.pipeline.size", "layout.context.size")
"""Fields that keep one replica a device by their defaults."""


def answered(result: SearchResult, models: Estimates, fixed: Collection[str]) -> SearchResult:
    """Return the result with the simplest layout first, which gets larger chunks of logits if these pay, and with
    changes of the run or the cluster that alter its seconds.

    Args:
        result: A search's result.
        models: The search's estimates.
        fixed: Fields of the run that keep their values.
    """
    result = simplest_first(result)
    if result.stopped:
        return result
    try:
        first, *others = result.predictions
        first = with_larger_chunks(first, models.planner, replace(result.job, fixed=fixed))
        result = replace(result, predictions=(first, *others))
        found = (*nearest_sizes(result, models, fixed), *changes(result.predictions[0], models))
    except KeyboardInterrupt:  # the answer is complete without changes
        return result
    return replace(result, changes=found)


def simplest_first(result: SearchResult) -> SearchResult:
    """Return the result with the simplest layout first.

    A candidate fits, takes at most WORTH longer than the fastest, and differs from the fastest by less than the
    cluster's measured error. Without measured rows of the cluster, the fastest layout stays first.
    """
    fastest = result.predictions[0]
    if fastest.cluster.checked is None:
        return result
    others = [each.prediction for each in result.runner_ups if each.prediction is not None]
    alike = [
        prediction
        for prediction in (*result.predictions, *others)
        if verdict(prediction.fullest, prediction.cluster) in ("fits", verdict(fastest.fullest, fastest.cluster))
        and prediction.seconds <= (1 + WORTH) * fastest.seconds
        and not is_difference(prediction.seconds / fastest.seconds - 1, prediction.cluster)
    ]
    first = min(alike, key=lambda prediction: (*complexity(prediction.config), prediction.seconds))
    rest = tuple(prediction for prediction in result.predictions if prediction is not first)
    ups = tuple(each for each in result.runner_ups if each.prediction is not first)
    if len(ups) < len(result.runner_ups):
        ups = (RunnerUp(strategy_of(fastest.config), fastest.config, fastest.fullest, True, fastest), *ups)
    return replace(result, predictions=(first, *rest)[: len(result.predictions)], runner_ups=ups)


def complexity(config: Config) -> tuple[int, int, int]:
    """Return a layout's complexity as a tuple to compare, the simplest least.

    Returns:
        The number of axes and parts besides replicas (tensor, stages, chunks, context, experts, shards); the index of
            the
        sync in the registry, which orders syncs by the state that replicas share; the number of recomputation and
            offload
        in use.
    """
    layout, memory = config.layout, config.memory
    sizes = [size for name, size in layout.axes if name not in ("data", "replicate")]
    extra = (layout.pipeline.chunks > 1, layout.data.expert > 1, layout.data.shard not in (None, layout.data.size))
    saves = memory.policy.recomputes + (memory.offload.to != "none")
    return sum(size > 1 for size in sizes) + sum(extra), list(entries("syncs")).index(layout.data.sync), saves


def nearest_sizes(result: SearchResult, models: Estimates, fixed: Collection[str]) -> tuple[Change, ...]:
    """Predict the nearest global batch that the devices divide, and the nearest smaller number of devices that divides
    the batch. Empty if the devices divide the batch, or if one replica a device does not fit."""
    best, job = result.predictions[0], result.job
    batch, devices = best.config.batch.global_, job.devices
    if batch % devices == 0 or any(is_fixed(field, fixed) for field in (*REPLICAS_ALONE, "layout.data.size")):
        return ()
    found = []
    near = {batch - batch % devices, batch - batch % devices + devices} - {0}
    for size in sorted(near, key=lambda size: abs(size - batch))[:1]:
        found.append((f"a batch of {size:,}", size, devices))
    fewer = max(size for size in divisors(batch) if size <= devices)
    found.append((f"{fewer} devices" if fewer > 1 else "one device", batch, fewer))
    others = []
    for what, size, num_devices in found:
        run = with_field(job.run, "batch.global_", size)
        try:
            answer = search(
                run, job.cluster, num_devices, 1, fixed={*fixed, *REPLICAS_ALONE}, models=models, program=result.program
            )
        except ConfigError:
            continue
        others.append(Change(what, answer.predictions[0].seconds))
    return tuple(others)
