"""Fields that have an effect only in some runs. A field written in any other run is a mistake.

A field that is not in this table has an effect in every run (tests/config/test_effects.py names them). A field counts
if the user wrote it, even with the default value: `optimizer.momentum: 0.9` with adamw is refused, although 0.9 is the
default. Values that decide nothing (auto, none, null, false) are allowed everywhere.

A word on the command line may leave fields of the run file without effect: with `layout.pipeline.size=1` the file's
schedule is idle, so that one file serves a sweep over sizes. A word without effect is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from meshwright.config.registry import entries
from meshwright.config.schema import Config
from meshwright.config.section import Section, decides_nothing, fields_meet, shown
from meshwright.ranks.errors import Problem
from meshwright.strategies.optim.section import OWN_FIELDS


@dataclass(frozen=True)
class Effect:
    """The condition under which `fields` have an effect.

    decided_by: the fields that `holds` reads.
    holds: True if the fields have an effect.
    because: the end of the sentence "has no effect ...".
    instead: a remedy in addition to leaving the field out.
    """

    fields: tuple[str, ...]
    decided_by: tuple[str, ...]
    holds: Callable[[Config], bool]
    because: Callable[[Config], str]
    instead: str | Callable[[Config], str] = ""


def _by_layers(config: Config) -> bool:
    """True if gradients are reduced layer by layer, so that the bucket size does not matter."""
    return config.layout.data.strategy.gathers


def _optimizer_effect(field: str) -> Effect:
    """Return the effect of a field that only some optimizers read."""
    readers = [name for name, update in entries("optimizers").items() if field in update.fields]
    return Effect(
        (f"optimizer.{field}",),
        ("optimizer.name",),
        lambda config: field in config.optimizer.update.fields,
        lambda config: f"with optimizer.name={config.optimizer.name}",
        f"optimizer.name={', '.join(readers)}",
    )


TENSOR = "layout.tensor"
_SIZES = ("layout.data.size", "layout.pipeline.size", "layout.context.size", TENSOR)

EFFECTS = (
    # No row for data.validation: `eval` measures on the held-out documents, so a run without validation must not train
    # on them. No row for check.every: even with one replica, hashes are compared at a resume and at the end.
    Effect(
        ("data.source",),
        ("data.mixture",),
        lambda config: not config.data.mixed,
        lambda config: "beside data.mixture, which names the sources",
    ),
    Effect(
        ("steps",),
        ("epochs",),
        lambda config: config.epochs is None,
        lambda config: "beside epochs, which become steps when the data is known",
        "epochs=null",
    ),
    Effect(
        ("layout.data.sync",),
        _SIZES,
        # Two ranks add to one gradient: replicas, ranks with different tokens, or stages with a tied table.
        lambda config: (
            config.layout.pipeline.size > 1
            or math.prod(size for axis, size in config.layout.axes if axis in config.layout.token_axes) > 1
        ),
        lambda config: "where no two ranks have parts of one gradient",
        "layout.data.size=2 or more",
    ),
    Effect(
        ("layout.data.shard",),
        ("layout.data.sync", "layout.data.size"),
        lambda config: config.layout.data.strategy.grouped and config.layout.data.size > 1,
        lambda config: (
            "with layout.data.size=1"
            if config.layout.data.size == 1
            else f"with layout.data.sync={config.layout.data.sync}, which keeps no slices in groups of ranks"
        ),
        "layout.data.size=2 or more and layout.data.sync="
        + ", ".join(name for name, sync in entries("syncs").items() if sync.grouped),
    ),
    Effect(
        ("layout.data.expert",),
        ("model.family", "layout.data.size"),
        lambda config: (
            (config.model.routing.num_experts > 0 and config.layout.data.size > 1) or config.layout.data.expert == 1
        ),
        lambda config: (
            "with layout.data.size=1" if config.layout.data.size == 1 else "with a model that has no experts"
        ),
        "layout.data.size=2 or more and a model with experts",
    ),
    Effect(
        ("layout.data.exchange",),
        ("layout.data.expert",),
        lambda config: config.layout.data.expert > 1,
        lambda config: "with layout.data.expert=1",
        "layout.data.expert=2 or more",
    ),
    Effect(
        ("layout.data.bucket",),
        ("layout.data.sync", "memory.offload.to"),
        lambda config: not _by_layers(config) and config.memory.offload.to == "none",
        lambda config: (
            f"with layout.data.sync={config.layout.data.sync}, which sums a layer at once"
            if _by_layers(config)
            else f"with memory.offload.to={config.memory.offload.to}, which sums chunk x bucket elements at once"
        ),
        "another layout.data.sync; with an offload memory.offload.chunk",
    ),
    Effect(
        (
            "layout.pipeline.schedule",
            "layout.pipeline.limit",
            "layout.pipeline.partition",
            "layout.pipeline.chunks",
            "layout.pipeline.head",
        ),
        ("layout.pipeline.size",),
        lambda config: config.layout.pipeline.size > 1,
        lambda config: "with layout.pipeline.size=1",
        "layout.pipeline.size=2 or more",
    ),
    Effect(
        ("layout.pipeline.placement",),
        ("layout.pipeline.size", "layout.pipeline.chunks"),
        lambda config: config.layout.pipeline.size > 1 and config.layout.pipeline.chunks > 1,
        lambda config: "where every stage has one chunk",
        lambda config: (
            "layout.pipeline.chunks=2 or more"
            if config.layout.pipeline.size > 1
            else "layout.pipeline.size=2 or more and layout.pipeline.chunks=2 or more"
        ),
    ),
    Effect(
        ("layout.context.kind",),
        ("layout.context.size",),
        lambda config: config.layout.context.size > 1,
        lambda config: "with layout.context.size=1",
        "layout.context.size=2 or more",
    ),
    Effect(
        tuple(f"{TENSOR}.{name}" for section in entries("tensor").values() for name in section.idle_alone),
        (TENSOR,),
        lambda config: math.prod(size for _, size in config.layout.tensor.axes) > 1,
        lambda config: "with layout.tensor.size=1",
        "layout.tensor.size=2 or more",
    ),
    Effect(
        ("layout.order",),
        _SIZES,
        lambda config: sum(size > 1 for _, size in config.layout.axes) > 1,
        lambda config: "on a layout that has one axis of more than one rank, or none",
        "auto",
    ),
    Effect(
        ("precision.loss_scale.initial", "precision.loss_scale.interval", "precision.loss_scale.max_skips"),
        ("precision.dtype",),
        lambda config: config.precision.dtype == "fp16",
        lambda config: f"with precision.dtype={config.precision.dtype}",
        "precision.dtype=fp16",
    ),
    Effect(
        ("precision.accumulate",),
        ("precision.level", "batch.global", "batch.micro", "layout.data.size"),
        lambda config: config.precision.level == "O2" and config.num_microbatches > 1,
        lambda config: "where no half-precision gradients of several microbatches are added up",
        "precision.level=O2 and a smaller batch.micro",
    ),
    Effect(
        ("precision.products",),
        ("precision.dtype", "device"),
        lambda config: (
            config.precision.in_fp8 or (config.precision.dtype in ("bf16", "fp16") and config.device != "cuda")
        ),
        lambda config: f"with precision.dtype={config.precision.dtype} and device={config.device}",
        "precision.dtype=bf16 on a CPU, or precision.products=fp8",
    ),
    Effect(
        ("precision.tf32",),
        ("precision.dtype", "device"),
        lambda config: config.precision.dtype == "float32" and config.device != "cpu",
        lambda config: f"with precision.dtype={config.precision.dtype} and device={config.device}",
        "precision.dtype=float32 on a GPU",
    ),
    Effect(
        ("memory.summa",),
        (TENSOR,),
        lambda config: "memory.summa" in config.layout.tensor.gives_effect_to,
        lambda config: f"with layout.tensor.kind={config.layout.tensor.kind}",
        "layout.tensor.kind="
        + ", ".join(
            strategy for strategy, section in entries("tensor").items() if "memory.summa" in section.gives_effect_to
        ),
    ),
    Effect(
        ("memory.logits",),
        ("bits.kind",),
        lambda config: not config.bits.layout_free,
        lambda config: "with bits.kind=layout-free, whose chunks of logits are the same in every run",
        "bits.kind=usual",
    ),
    Effect(
        ("memory.offload.bucket",),
        ("memory.offload.to",),
        lambda config: config.memory.offload.to != "none",
        lambda config: "with memory.offload.to=none",
        "memory.offload.to=host, disk",
    ),
    Effect(
        ("memory.offload.chunk",),
        ("memory.offload.to", "layout.data.sync"),
        lambda config: config.memory.offload.to != "none" and not _by_layers(config),
        lambda config: (
            "with memory.offload.to=none"
            if config.memory.offload.to == "none"
            else f"with layout.data.sync={config.layout.data.sync}, which sums a layer at once"
        ),
        "memory.offload.to=host, disk, and a layout.data.sync that sums buckets",
    ),
    *map(_optimizer_effect, OWN_FIELDS),
    Effect(
        ("optimizer.states",),
        ("optimizer.name",),
        lambda config: any(spec.dtype == "master" for spec in config.optimizer.update.states),
        lambda config: f"with optimizer.name={config.optimizer.name}, which has no states that follow the weights",
        "optimizer.name="
        + ", ".join(
            name
            for name, update in entries("optimizers").items()
            if any(spec.dtype == "master" for spec in update.states)
        ),
    ),
    Effect(
        ("optimizer.schedule.floor",),
        ("optimizer.schedule.decay",),
        lambda config: config.optimizer.schedule.decay != "constant",
        lambda config: "with optimizer.schedule.decay=constant",
        "optimizer.schedule.decay=linear, cosine, sqrt, inverse-sqrt",
    ),
    Effect(
        ("optimizer.schedule.stable",),
        ("optimizer.schedule.decay",),
        lambda config: config.optimizer.schedule.decay not in ("constant", "inverse-sqrt"),
        lambda config: f"with optimizer.schedule.decay={config.optimizer.schedule.decay}",
        "optimizer.schedule.decay=linear, cosine, sqrt",
    ),
    Effect(
        ("metrics.project",),
        ("metrics.sinks",),
        lambda config: any(entries("sinks")[name].projects for name in config.metrics.sinks),
        lambda config: "without a tracker that has projects",
        "metrics.sinks=[" + ", ".join(name for name, sink in entries("sinks").items() if sink.projects) + "]",
    ),
    Effect(
        ("metrics.offline",),
        ("metrics.sinks",),
        lambda config: any(entries("sinks")[name].remote for name in config.metrics.sinks),
        lambda config: "without a tracker that sends",
        "metrics.sinks=[" + ", ".join(name for name, sink in entries("sinks").items() if sink.remote) + "]",
    ),
    Effect(
        ("metrics.address", "metrics.port"),
        ("metrics.sinks",),
        lambda config: any(entries("sinks")[name].answers for name in config.metrics.sinks),
        lambda config: "without a sink that is asked",
        "metrics.sinks=[" + ", ".join(name for name, sink in entries("sinks").items() if sink.answers) + "]",
    ),
    Effect(
        ("validation.metric",),
        ("validation.every", "validation.patience", "checkpoint.best"),
        lambda config: config.validation.every > 0 and (config.checkpoint.best or config.validation.patience > 0),
        lambda config: "where nothing depends on the best validation",
        "validation.every=100 and checkpoint.best=true or validation.patience=3",
    ),
    Effect(
        ("validation.batches", "validation.patience", "checkpoint.best"),
        ("validation.every",),
        lambda config: config.validation.every > 0,
        lambda config: "with validation.every=0",
        "validation.every=100",
    ),
    Effect(
        ("bits.samples", "bits.tensor", "bits.hidden", "bits.sequence"),
        ("bits.kind",),
        lambda config: config.bits.layout_free,
        lambda config: "with bits.kind=usual, where kernels get whole microbatches",
        "bits.kind=layout-free",
    ),
    Effect(
        ("bits.attention",),
        ("bits.kind", "bits.sequence"),
        lambda config: config.bits.layout_free and config.bits.sequence > 1,
        lambda config: "where a sequence is one run",
        "bits.kind=layout-free and bits.sequence=2",
    ),
)


def without_effect(
    config: Config, mistaken: Collection[str], words: Collection[str], undecided: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem for each field that the user wrote and that has no effect.

    Args:
        mistaken: fields without a legal value.
        words: fields that were set on top of the file.
        undecided: sections that the planner will decide; fields that depend on these sections are not refused yet.
    """
    written = dict(_written(config))
    for effect in EFFECTS:
        if (
            effect.holds(config)
            or fields_meet(effect.decided_by, mistaken)
            or fields_meet(effect.decided_by, undecided)
        ):
            continue
        switched = fields_meet(effect.decided_by, words)
        for field in effect.fields:
            excused = field in mistaken or (switched and not fields_meet([field], words))
            if field in written and not decides_nothing(written[field]) and not excused:
                instead = effect.instead if isinstance(effect.instead, str) else effect.instead(config)
                valid = "leave it out" + (f", or {instead}" if instead else "")
                yield Problem(field, shown(written[field]), f"has no effect {effect.because(config)}", valid)


def _written(section: Section, before: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every field that was given."""
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set:
            value, path = getattr(section, name), before + (field.alias or name)
            if isinstance(value, Section):
                yield from _written(value, path + ".")
            else:
                yield path, value
