"""What pipeline stages and activation checkpointing ask of a model and of a strategy."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.section import rule

WITHOUT_LIMIT = ("gpipe", "1f1b")
"""Schedules whose order is fixed, and with it how many microbatches a stage holds."""


@rule("layout.pipeline.size", "model.layers", "model.stage_blocks")
def stages_have_layers(config: Config) -> Iterator[Problem]:
    size, layers = config.layout.pipeline.size, config.model.num_blocks
    if size > layers + 2:
        rule_text = f"is more than the model's {layers} layers, the embedding and the head can fill"
        yield Problem("layout.pipeline.size", size, rule_text, f"1 to {layers + 2}")


@rule("layout.pipeline", "model.layers", "model.stage_blocks")
def partition_is_of_the_layers(config: Config) -> Iterator[Problem]:
    pipeline, layers = config.layout.pipeline, config.model.num_blocks
    if isinstance(pipeline.partition, str):
        return
    given = "[" + ", ".join(map(str, pipeline.partition)) + "]"
    valid = f"{pipeline.size} numbers that add up to {layers}, or auto, measured"
    if len(pipeline.partition) != pipeline.size:
        rule_text = f"is not one number for each of layout.pipeline.size={pipeline.size} stages"
        yield Problem("layout.pipeline.partition", given, rule_text, valid)
    elif sum(pipeline.partition) != layers:
        yield Problem("layout.pipeline.partition", given, f"does not add up to the model's {layers} layers", valid)
    elif 0 in pipeline.partition[1:-1]:
        rule_text = "leaves a stage between the first and the last nothing to do"
        yield Problem("layout.pipeline.partition", given, rule_text, valid)


@rule("layout.pipeline")
def limit_has_an_effect(config: Config) -> Iterator[Problem]:
    pipeline = config.layout.pipeline
    if pipeline.limit != "auto" and pipeline.schedule in WITHOUT_LIMIT:
        rule_text = f"has no effect on layout.pipeline.schedule={pipeline.schedule}"
        yield Problem("layout.pipeline.limit", pipeline.limit, rule_text, "auto, or schedule axonn, message-driven")


@rule("layout.pipeline.size", "layout.data.sync")
def sync_goes_with_stages(config: Config) -> Iterator[Problem]:
    size, sync = config.layout.pipeline.size, config.layout.data.sync
    if size > 1 and sync in ("fsdp", "server-loss"):
        rule_text = f"runs a whole model on every rank, and layout.pipeline.size={size} cuts it into stages"
        yield Problem("layout.data.sync", sync, rule_text, "allreduce, ring, rooted, server-gradient, zero1")


@rule("memory.recompute", "model.layers", "model.stage_blocks")
def recomputed_groups_fit(config: Config) -> Iterator[Problem]:
    recompute, layers = config.memory.recompute, config.model.num_blocks
    if isinstance(recompute, int) and recompute > layers:
        yield Problem(
            "memory.recompute.every", recompute, f"is more than the model's {layers} layers", f"1 to {layers}"
        )


@rule("memory.recompute", "model.family")
def selective_recomputation_finds_attention(config: Config) -> Iterator[Problem]:
    if config.memory.recompute == "selective" and not config.model.has_attention:
        rule_text = f"recomputes attention, and a {config.model.family} has none"
        yield Problem("memory.recompute", "selective", rule_text, "none, auto, {every: n}")


@rule("memory.recompute", "layout.data.sync")
def sync_goes_with_recomputation(config: Config) -> Iterator[Problem]:
    if config.memory.recompute != "none" and config.layout.data.sync == "fsdp":
        rule_text = "gathers weights in hooks of its own, which memory.recompute would call twice"
        yield Problem("layout.data.sync", "fsdp", rule_text, "zero1, allreduce, or memory.recompute=none")


PIPELINE_RULES = (
    stages_have_layers,
    partition_is_of_the_layers,
    limit_has_an_effect,
    sync_goes_with_stages,
    recomputed_groups_fit,
    selective_recomputation_finds_attention,
    sync_goes_with_recomputation,
)
