"""What an offloaded optimizer asks of the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.section import listed, rule

BUCKET_MULTIPLE = 128
"""Two halves, each of whole vectors of the optimizer's kernels: so the bits are those of the optimizer in place."""


@rule("memory.offload.to", "precision.level")
def offload_leaves_half_precision(config: Config) -> Iterator[Problem]:
    to, level = config.memory.offload.to, config.precision.level
    if to != "none" and level != "O2":
        rule_text = f"takes float32 masters off the device, and precision.level={level} has none"
        yield Problem("memory.offload.to", to, rule_text, "none, or precision.level=O2 with dtype bf16 or fp16")


@rule("memory.offload.to", "layout.data.sync")
def offload_goes_with_buckets(config: Config) -> Iterator[Problem]:
    to, sync = config.memory.offload.to, config.layout.data.sync
    if to != "none" and sync == "fsdp":
        rule_text = "does not go with layout.data.sync=fsdp, whose float32 shards are what torch gathers from"
        yield Problem("memory.offload.to", to, rule_text, "none, or layout.data.sync=zero1, allreduce, ...")


@rule("memory.offload.to", "memory.offload.bucket")
def offload_buckets_have_two_halves(config: Config) -> Iterator[Problem]:
    to, bucket = config.memory.offload.to, config.memory.offload.bucket
    if to != "none" and bucket % BUCKET_MULTIPLE:
        below = bucket // BUCKET_MULTIPLE * BUCKET_MULTIPLE
        near = listed([*([below] if below else []), below + BUCKET_MULTIPLE])
        yield Problem("memory.offload.bucket", bucket, f"is not a multiple of {BUCKET_MULTIPLE}", f"{near}, 1M")


MEMORY_RULES = (
    offload_leaves_half_precision,
    offload_goes_with_buckets,
    offload_buckets_have_two_halves,
)
