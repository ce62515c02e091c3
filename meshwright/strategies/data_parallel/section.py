"""Facts on data-parallel strategies, for the config and the planner. No torch.

| sync            | summed by                | stages | cut layers | MPI | recomputation | offload | planned |
|-----------------|--------------------------|--------|------------|-----|---------------|---------|---------|
| server-loss     | the parameter server     |        | yes        | yes | yes           | yes     |         |
| server-gradient | the parameter server     | yes    | yes        | yes | yes           | yes     | yes     |
| rooted          | gather, sum, broadcast   | yes    | yes        | yes | yes           | yes     | yes     |
| allreduce       | all-reduce               | yes    | yes        | yes | yes           | yes     | yes     |
| ring            | our own ring             | yes    | yes        | yes | yes           | yes     | yes     |
| zero1           | reduce-scatter           | yes    | yes        | yes | yes           | yes     | yes     |
| zero2           | the same, each microbatch | yes   | yes        |     | yes           | yes     | yes     |
| zero3           | the same, weights sliced  | yes   | yes        |     | yes           | yes     | yes     |

To add a strategy, write a `Sync` and a line in the registry (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.config.registry import entries
from meshwright.config.section import Rule, divisors, listed, rule
from meshwright.ranks.errors import Problem
from meshwright.ranks.transports import TRANSPORTS

if TYPE_CHECKING:
    from meshwright.config import Config

FIELD, SHARD, EXPERT_FIELD = "layout.data.sync", "layout.data.shard", "layout.data.expert"


@dataclass(frozen=True)
class Sync:
    """Facts on a strategy. Code is named as `module:attribute`, since torch is not imported yet."""

    policy: str
    """Makes the `Policy` that sums and publishes buckets (strategy.py)."""
    synchroniser: str = "meshwright.strategies.data_parallel.strategy:Synchroniser"
    """Makes the strategy from (buckets, mesh, policy)."""
    rules: tuple[Rule, ...] = ()
    """Rules on combinations that are refused, and why; checked if the strategy is chosen."""
    cuts_parameters: bool = False
    """Whether a rank steps slices of flat memory, which cut parameters at any element."""
    over_mpi: bool = True
    """Whether the strategy runs over MPI: `transport: auto` then chooses MPI on CPUs."""
    candidate: bool = False
    """Whether a planner tries the strategy. Other strategies are planned if a run names one."""
    slices: bool = False
    """Whether gradients are kept as slices, and so summed in every microbatch: replicas then run a stage's tasks in one
    order."""
    gathers: bool = False
    """Whether weights are slices as well, gathered part by part of the model: a bucket then holds one part's
    parameters."""
    deals_matrices: bool = False
    """Whether a rank steps whole matrices that it owns, if the optimizer steps matrices (Bucket.segments)."""
    grouped: bool = False
    """Whether groups of ranks may each hold all slices (layout.data.shard)."""
    like: str = ""
    """The strategy's name elsewhere."""
    unplanned: str = ""
    """The reason if a planner cannot compute the strategy: `is more than ...`."""
    order_free: bool = True
    """Whether the sync only adds the ranks' buckets, so that integer sums are equal under any layout."""


def _refused(field: str, when: Callable[[Config], object], why: str, instead: str = "{others}") -> Rule:
    """Return a rule that refuses some strategies. `why`, `instead`: formats of `config`; `others`: the strategies that
    the rule allows, the planner's candidates first."""

    @rule(FIELD, field)
    def refused(config: Config) -> Iterator[Problem]:
        if when(config):
            left = [name for name, sync in reversed(entries("syncs").items()) if refused not in sync.rules]
            others = ", ".join(sorted(left, key=lambda name: not entries("syncs")[name].candidate))
            valid = instead.format(config=config, others=others)
            yield Problem(FIELD, config.layout.data.sync, why.format(config=config), valid)

    return refused


needs_whole_models = _refused(
    "layout.pipeline.size",
    lambda config: config.layout.pipeline.size > 1,
    "runs a whole model on every rank, and layout.pipeline.size={config.layout.pipeline.size} cuts it into stages",
)
needs_one_axis_of_replicas = _refused(
    EXPERT_FIELD,
    lambda config: config.layout.data.expert > 1,
    "knows replicas alone, and layout.data.expert={config.layout.data.expert} gives ranks different experts",
)
needs_trained_weights = _refused(
    "model.frozen",
    lambda config: config.model.freezes,
    "expects a gradient of every parameter, and model.frozen or model.adapter leaves some without",
    "{others}, or model.frozen=[] model.adapter=null",
)
needs_losses_of_the_head = _refused(
    "model",
    lambda config: config.model.losses_in_layers,
    "computes losses where all outputs come together, "
    "and {config.model.losses_in_layers} gives layers losses of their own",
    "{others}, or {config.model.losses_in_layers}=0",
)
needs_losses_of_tokens = _refused(
    "loss",
    lambda config: config.loss is not None,
    "computes the loss of gathered outputs and labels, and loss.kind={config.loss.kind} also needs the first weights' "
    "numbers of each pair",
)
# Refuses transports unsuitable for a strategy; `auto` chooses a suitable one (Sync.over_mpi).
needs_verbs_under_way = _refused(
    "layout.transport",
    lambda config: config.layout.transport != "auto" and not TRANSPORTS[config.layout.transport].moves_alone,
    "sends while it computes, and layout.transport={config.layout.transport} moves nothing before it is waited for",
    "layout.transport=torch, auto, or layout.data.sync=zero1",
)


@rule(FIELD, "layout.data.exchange", EXPERT_FIELD)
def needs_whole_parts(config: Config) -> Iterator[Problem]:
    """Slices are summed in every microbatch, bucket by bucket, in an order that pieces of layers do not keep."""
    sync = config.layout.data.sync
    if config.layout.data.in_pieces:
        rule_text = "sums a layer's gradients as one, and layout.data.exchange=messages cuts layers into pieces"
        syncs = {needs_whole_parts, needs_one_axis_of_replicas}
        left = [name for name, entry in entries("syncs").items() if syncs.isdisjoint(entry.rules)]
        yield Problem(FIELD, sync, rule_text, f"{', '.join(left)}, or layout.data.exchange=blocking")


@rule(SHARD, "layout.data.size")
def shards_are_equal(config: Config) -> Iterator[Problem]:
    size, shard = config.layout.data.size, config.layout.data.shard
    # Each group of `shard` ranks holds the model once: a remainder would hold a part.
    if shard is not None and size % shard:
        yield Problem(SHARD, shard, f"does not divide layout.data.size={size}", f"null, {listed(divisors(size))}")


SERVER_LOSS = Sync(
    "meshwright.strategies.data_parallel.parameter_server:Server",
    "meshwright.strategies.data_parallel.parameter_server:ServerLoss",
    rules=(
        needs_whole_models,
        needs_trained_weights,
        needs_losses_of_the_head,
        needs_losses_of_tokens,
        needs_one_axis_of_replicas,
    ),
    unplanned="is more than sums of gradients in buckets",
    order_free=False,
)
"""A parameter server that also computes the losses of all replicas' outputs."""
SERVER_GRADIENT = Sync(
    "meshwright.strategies.data_parallel.parameter_server:Server",
    "meshwright.strategies.data_parallel.parameter_server:ServerGradient",
    rules=(needs_one_axis_of_replicas,),
)
"""A parameter server: rank 0 sums the gradients, steps, and sends the weights."""
ROOTED = Sync("meshwright.strategies.data_parallel.parameter_server:Rooted")
"""Rank 0 gathers the gradients, sums and broadcasts them; every rank steps."""
ALLREDUCE = Sync("meshwright.strategies.data_parallel.policies:AllReduce", candidate=True)
"""All-reduce in buckets under the backward pass; every rank steps (as torch's DDP)."""
RING = Sync("meshwright.strategies.data_parallel.policies:Ring")
"""Our own ring: reduce-scatter and all-gather over point-to-point messages; every rank steps."""
ZERO1 = Sync(
    "meshwright.strategies.data_parallel.policies:Zero1", cuts_parameters=True, deals_matrices=True, grouped=True,
    rules=(shards_are_equal,), candidate=True,
)  # fmt: skip
"""Optimizer states are slices: reduce-scatter, each rank steps its 1/n, all-gather (ZeRO-1)."""
ZERO2 = Sync(
    "meshwright.strategies.data_parallel.sharded:Zero2", "meshwright.strategies.data_parallel.sharded:Sharded",
    slices=True, grouped=True, cuts_parameters=True, deals_matrices=True,
    rules=(needs_verbs_under_way, shards_are_equal, needs_whole_parts), over_mpi=False, candidate=True,
)  # fmt: skip
"""Gradients are slices, too: a reduce-scatter in every microbatch (ZeRO-2)."""
ZERO3 = Sync(
    "meshwright.strategies.data_parallel.gathering:Zero3", "meshwright.strategies.data_parallel.gathering:Gathering",
    slices=True, gathers=True, grouped=True, cuts_parameters=True,
    rules=(needs_verbs_under_way, shards_are_equal, needs_whole_parts), over_mpi=False, candidate=True, like="FSDP",
)  # fmt: skip
"""Weights are slices, too, gathered part by part of the model (ZeRO-3, as FSDP)."""
