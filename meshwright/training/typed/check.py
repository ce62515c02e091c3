"""`check_sums(config)` checks a layout's sums before its ranks start and refuses a plug-in's wrong one in a sentence.

A rank's forward and backward passes run on meta tensors, as in a plan, with the sums of gradients and the publishing of
new values. A parameter's spec says which axes cut it; over the others the parameter is invariant, and its gradient must
be whole where the optimizer reads it. Pipeline stages are left out: their messages sum nothing.

Found: sums that are missing, made twice or over the wrong axis, where addends meet a whole value, a non-linear function
or the optimizer. Not found: a wrong factor (a mean for a sum), the wrong part of the right size, wrong data, masks or
random numbers, and errors behind point-to-point messages.
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
from meshwright.training.typed.kinds import Kind, cut_at, uncut
from meshwright.training.typed.operators import WrongSum
from meshwright.training.typed.verbs import typed_mesh
from meshwright.training.typed.watch import Neighbour, Watch


def checked(config: Config) -> list[str]:
    """Check a resolved run's sums where `check.sums` asks for it; returns a note for the log. Raises SumError."""
    plugins = brought(config)
    if config.check.sums == "never" or (config.check.sums == "plugins" and not plugins):
        return []
    started = time.perf_counter()
    check_sums(config)
    who = f" of {', '.join(plugins)}" if plugins else ""
    return [f"the sums{who} fit on all axes: followed on meta tensors in {time.perf_counter() - started:.1f} s"]


def check_sums(config: Config) -> None:
    """Raises SumError, with the module, the axis and a remedy, where a resolved run sums wrongly."""
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
    """The run as it is checked: one stage, two microbatches at most, no recomputation, no offload, in float32."""
    layout = config.layout
    layout = layout.model_copy(update={"pipeline": PipelineSection()})
    changes = {"layout": layout, "memory": MemorySection(), "precision": Precision(level="O0", dtype="float32")}
    return config.model_copy(update=changes)


def step(config: Config, grid: Grid, rank: int, watch: Watch) -> None:
    """A rank's step on the meta device, followed by `watch`."""
    mesh = typed_mesh(grid, rank, config.layout.token_axes, watch)
    parts = build(config, mesh)
    strategy = parts.strategy
    named = dict(parts.model.named_parameters())
    for name, parameter in named.items():
        watch.declare(name, parameter, invariant_kind(parts.specs[name], parameter, grid))
    for one in strategy.sums:
        for place, view in zip(one.bucket.places, one.bucket.views.values(), strict=True):
            watch.declare(place.name, view, Kind(uncut(view.shape), constant=True))
    shapes = chain_of(config).sample_shapes(config)
    whole = {name: torch.zeros(config.micro, *shape, dtype=torch.long, device="meta") for name, shape in shapes.items()}
    for x in whole.values():
        kind = Kind(uncut(x.shape))
        for axis in DATA_AXES:
            kind = cut_at(kind, 0, axis) if axis in grid.names and grid.size(axis) > 1 else kind
        watch.say(x, kind)
    with refused(), watch, watch.modules(parts.model), AsOnDevice("cpu", "fused"):
        batches: list[Batch] = [
            rank_part(whole, parts.kit, parts.model) for _ in range(min(2, config.num_microbatches))
        ]
        scales = dict.fromkeys((*parts.model.labels, SAMPLES), 1.0)
        parts.pipeline.train(batches, scales, lambda index, chunk: None)
        strategy.finish()
    if not watch.records:
        check_gradients(parts, strategy, watch)


def invariant_kind(spec: ShardSpec, parameter: nn.Parameter, grid: Grid) -> Kind:
    """The kind that a parameter's spec says: cut by its axes, whole over all others."""
    kind = Kind(uncut(parameter.shape))
    cuts = {axis: shard.dim for axis, shard in spec.placements.items()}
    cuts |= {spec.owner[0]: 0} if spec.owner else {}
    for axis, dim in cuts.items():
        kind = cut_at(kind, dim, axis) if grid.size(axis) > 1 else kind
    return kind


@contextmanager
def refused() -> Iterator[None]:
    """Turn a WrongSum raised inside into a SumError that names the module."""
    try:
        yield
    except WrongSum as wrong:
        place = f"what {', '.join(wrong.names)} gets" if wrong.names else wrong.place or "the model"
        since = f" made in {wrong.since}" if wrong.since not in ("", wrong.place) else ""
        shown = wrong.shown.replace("a partial sum", f"a partial sum{since}")
        raise SumError(f"{place}: {shown} (axis {wrong.axis}): {wrong.remedy}") from None


def check_gradients(parts: Parts, strategy: Synchroniser, watch: Watch) -> None:
    """Raises SumError unless every gradient that the optimizer reads is whole over the axes that do not cut it."""
    for one in strategy.sums:
        for place in one.slot.places:
            kind, axes = watch.kind(one.total[place.start : place.stop]), parts.specs[place.name].axes
            check_kind(place.name, axes, kind, parts.mesh.grid, one.slot.part_axes)


def check_kind(name: str, cut: Collection[str], kind: Kind, grid: Grid, sliced: Collection[str] = ()) -> None:
    """Raises SumError where ranks that hold the same parameter read different gradients. `cut`: the axes that cut the
    parameter; `sliced`: the axes over which the optimizer's step is sharded."""
    for axis in grid.names:
        word = kind.word(axis)
        wrong = ("partial",) if axis in sliced else ("partial", "own", "cut")
        if axis in cut or kind.constant or word not in wrong:
            continue
        held = "each rank's own addend" if word == "partial" else "another on each rank"
        raise SumError(
            f"{name}: its gradient is {held} when the optimizer reads it, and ranks of {axis} hold the parameter alike "
            f"(axis {axis}): sum it over the axis; in a kit or a model its spec says so (partial_over, where ranks "
            "feed it different heads), in a section the axes that split tokens (token_axes)"
        )
