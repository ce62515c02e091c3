"""`check_sums(config)`: a check of a layout's sums before ranks start, with an error that names a plug-in's wrong sum.

A rank's forward and backward passes run on meta tensors, as in a plan, with gradient reductions and publishing. A
parameter's spec names the axes that cut the parameter. Over all other axes the parameter is invariant, and the gradient
must be whole when the optimizer reads it. Pipeline stages are left out, since messages between stages sum nothing.

Found: missing sums, repeated sums and sums over the wrong axis. The symptom is that addends are combined with a whole
value, passed to a non-linear function or read by the optimizer. Not found: a wrong factor (a mean for a sum), the wrong
part of the right size, wrong data, masks or random numbers. Errors after point-to-point messages are not found either.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.compute.model import SAMPLES, Batch
from meshwright.compute.models.chain import chain_of
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.config import Config
from meshwright.config.layout import PipelineSection
from meshwright.config.registry import brought
from meshwright.config.schema import MemorySection, Precision
from meshwright.ranks.errors import SumError
from meshwright.ranks.grid import DATA_AXES, Grid
from meshwright.strategies.data_parallel.strategy import Synchroniser
from meshwright.training.on_device import AsOnDevice
from meshwright.training.parts import Parts, build
from meshwright.training.rank_model import rank_part
from meshwright.training.typed.operators import WrongSum
from meshwright.training.typed.sharding import Sharding, cut_at, uncut
from meshwright.training.typed.verbs import typed_mesh
from meshwright.training.typed.watch import Neighbour, Watch


def checked(config: Config) -> list[str]:
    """Check a resolved run's sums if `check.sums` asks for a check; return a note for the log. Raises SumError."""
    plugins = brought(config)
    if config.check.sums == "never" or (config.check.sums == "plugins" and not plugins):
        return []
    started = time.perf_counter()
    check_sums(config)
    who = f" of {', '.join(plugins)}" if plugins else ""
    return [f"the sums{who} fit on all axes: followed on meta tensors in {time.perf_counter() - started:.1f} s"]


def check_sums(config: Config) -> None:
    """Raise SumError, with the module, the axis and a remedy, if a resolved run has a wrong sum."""
    config = reduced(config)
    grid = config.grid
    axes = [name for name, size in grid.axes if size > 1]
    neighbours = []
    for axis in axes:
        recording = Watch(records=True)
        step(config, grid, grid.rank(grid.coordinates(0) | {axis: 1}), recording)
        neighbours.append(Neighbour(axis, recording.stretches))
    step(config, grid, 0, Watch(neighbours))


def reduced(config: Config) -> Config:
    """Return the config that is checked: one stage, no recomputation, no offload, float32. (`step` runs at most two
    microbatches.)"""
    layout = config.layout
    layout = layout.model_copy(update={"pipeline": PipelineSection()})
    changes = {"layout": layout, "memory": MemorySection(), "precision": Precision(level="O0", dtype="float32")}
    return config.model_copy(update=changes)


def step(config: Config, grid: Grid, rank: int, watch: Watch) -> None:
    """Run a rank's step on the meta device, followed by `watch`."""
    mesh = typed_mesh(grid, rank, config.layout.token_axes, watch)
    parts = build(config, mesh)
    strategy = parts.strategy
    named = dict(parts.model.named_parameters())
    for name, parameter in named.items():
        watch.declare(name, parameter, invariant_sharding(parts.specs[name], parameter, grid))
    for bucket_sum in strategy.sums:
        for region, view in zip(bucket_sum.bucket.places, bucket_sum.bucket.views.values(), strict=True):
            watch.declare(region.name, view, Sharding(uncut(view.shape), constant=True))
    shapes = chain_of(config).sample_shapes(config)
    whole = {name: torch.zeros(config.micro, *shape, dtype=torch.long, device="meta") for name, shape in shapes.items()}
    for x in whole.values():
        sharding = Sharding(uncut(x.shape))
        for axis in DATA_AXES:
            sharding = cut_at(sharding, 0, axis) if axis in grid.names and grid.size(axis) > 1 else sharding
        watch.say(x, sharding)
    with refused(), watch, watch.modules(parts.model), AsOnDevice("cpu", "fused"):
        batches: list[Batch] = [
            rank_part(whole, parts.kit, parts.model) for _ in range(min(2, config.num_microbatches))
        ]
        scales = dict.fromkeys((*parts.model.labels, SAMPLES), 1.0)
        parts.pipeline.train(batches, scales, lambda index, chunk: None)
        strategy.finish()
    if not watch.records:
        check_gradients(parts, strategy, watch)


def invariant_sharding(spec: ShardSpec, parameter: nn.Parameter, grid: Grid) -> Sharding:
    """Return the sharding declared by a parameter's spec: cut by the spec's axes, whole over all others."""
    sharding = Sharding(uncut(parameter.shape))
    cuts = {axis: shard.dim for axis, shard in spec.placements.items()}
    cuts |= {spec.owner[0]: 0} if spec.owner else {}
    for axis, dim in cuts.items():
        sharding = cut_at(sharding, dim, axis) if grid.size(axis) > 1 else sharding
    return sharding


@contextmanager
def refused() -> Iterator[None]:
    """Turn a WrongSum raised inside into a SumError that names the module."""
    try:
        yield
    except WrongSum as wrong:
        subject = f"what {', '.join(wrong.names)} gets" if wrong.names else wrong.module_path or "the model"
        since = f" made in {wrong.since}" if wrong.since not in ("", wrong.module_path) else ""
        shown = wrong.shown.replace("a partial sum", f"a partial sum{since}")
        raise SumError(f"{subject}: {shown} (axis {wrong.axis}): {wrong.remedy}") from None


def check_gradients(parts: Parts, strategy: Synchroniser, watch: Watch) -> None:
    """Raise SumError unless every gradient read by the optimizer is whole over axes that do not cut the parameter."""
    for bucket_sum in strategy.sums:
        for region in bucket_sum.slot.places:
            sharding, axes = watch.sharding(bucket_sum.total[region.start : region.stop]), parts.specs[region.name].axes
            check_sharding(region.name, axes, sharding, parts.mesh.grid, bucket_sum.slot.part_axes)


def check_sharding(
    name: str, cut: Collection[str], sharding: Sharding, grid: Grid, sliced: Collection[str] = ()
) -> None:
    """Raise SumError if ranks with the same parameter read different gradients. `cut`: the axes that cut the parameter;
    `sliced`: the axes that shard the optimizer's step."""
    for axis in grid.names:
        word = sharding.word(axis)
        wrong = ("partial",) if axis in sliced else ("partial", "varying", "cut")
        if axis in cut or sharding.constant or word not in wrong:
            continue
        held = "each rank's own addend" if word == "partial" else "another on each rank"
        raise SumError(
            f"{name}: its gradient is {held} when the optimizer reads it, and ranks of {axis} hold the parameter alike "
            f"(axis {axis}): sum it over the axis; in a kit or a model its spec says so (partial_over, where ranks "
            "feed it different heads), in a section the axes that split tokens (token_axes)"
        )
