"""The rules that join fields of several sections. The rules of a single strategy are in the strategy's section.

A rule is a generator of problems with a list of the fields that the rule reads. A rule is left out if one of these
fields is itself mistaken, so that every other mistake is still reported in the same message.
"""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from operator import attrgetter

from meshwright.compute.bits.section import (
    grains_fill_microbatches,
    graphs_have_whole_layers,
    layers_fall_into_blocks,
    parts_are_equal,
    parts_of_heads_are_dealt_equally,
    parts_of_hidden_are_equal,
    rings_have_runs_of_queries,
    runs_are_equal,
    scales_are_powers_of_two,
    what_is_summed_in_an_order,
)
from meshwright.compute.models.preference_section import (
    experts_are_balanced_by_rows,
    pairs_have_a_loss,
    rows_are_summed_whole,
)
from meshwright.config.layout import part_of_axis
from meshwright.config.messages import nearest
from meshwright.config.registry import entries
from meshwright.config.schema import Config
from meshwright.config.section import Rule, at_most, divisors, listed, multiples, rule, shown
from meshwright.ranks.errors import Problem
from meshwright.ranks.transports import TRANSPORTS
from meshwright.strategies.memory.section import GROUPING

OFFLOAD_MULTIPLE = 128
"""Divides offload's bucket: two halves of whole kernel vectors, for the same bits as without offload."""


FIRST_LAST_AND_ONE = 3
"""The fewest layers of a chain with linears in FP8: the first and the last layer have none."""

_SIZES = ("layout.data.size", "layout.pipeline.size", "layout.context.size", "layout.tensor")


@rule("data.kind", "model.family")
def family_reads_data(config: Config) -> Iterator[Problem]:
    data, model = config.data, config.model
    if data.gives != model.reads:
        kinds = [data_kind for data_kind, section in entries("data").items() if section.gives == model.reads]
        yield Problem("data.kind", data.kind, f"is not what a {model.family} reads", ", ".join(kinds))


@rule("batch.global", "layout.data.size")
def replicas_divide_batch(config: Config) -> Iterator[Problem]:
    batch, size = config.batch.global_, config.layout.data.size
    if batch % size:
        yield Problem("layout.data.size", size, f"does not divide batch.global={batch}", listed(divisors(batch)))


@rule("batch.global", "batch.micro", "layout.data.size")
def microbatches_divide_replica(config: Config) -> Iterator[Problem]:
    batch, size = config.batch.global_, config.layout.data.size
    if batch % size == 0 and config.replica_batch % config.micro:
        quantity = f"a replica's {config.replica_batch} sequences (batch.global={batch} / layout.data.size={size})"
        yield Problem(
            "batch.micro", config.micro, f"does not divide {quantity}", listed(divisors(config.replica_batch))
        )


@rule("layout.tensor", "model", "data")
def tensor_cuts_are_equal(config: Config) -> Iterator[Problem]:
    """Check that each number that the tensor section divides falls into equal parts."""
    yield from (cut.problem for cut in config.layout.tensor.cuts(config) if cut.problem)


@rule("layout.tensor", "batch.global", "batch.micro", "layout.data.size")
def tensor_splits_rows(config: Config) -> Iterator[Problem]:
    rows = config.layout.tensor.rows
    if config.replica_batch and config.micro % rows.parts:
        what = f"is no multiple of {rows.by}{rows.parts}, over which a microbatch's samples are split"
        fitting = [micro for micro in divisors(config.replica_batch) if micro % rows.parts == 0]
        if config.batch.micro == "auto" or not fitting:
            valid = multiples(rows.parts * config.layout.data.size, config.batch.global_)
            yield Problem("batch.global", config.batch.global_, what, valid)
        else:
            yield Problem("batch.micro", config.micro, what, listed(fitting))


@rule("precision.level", "precision.dtype")
def dtype_fits_level(config: Config) -> Iterator[Problem]:
    level, dtype = config.precision.level, config.precision.dtype
    valid = ("float32", "float64") if level == "O0" else ("bf16", "fp16")
    if dtype not in valid:
        yield Problem("precision.dtype", dtype, f"does not go with precision.level={level}", ", ".join(valid))


@rule("precision.products", "precision.dtype")
def fp8_is_of_bf16(config: Config) -> Iterator[Problem]:
    """Refuse FP8 with other dtypes than bf16.

    fp16 scales the loss for the sake of range, but FP8 rows have separate scales. float32 is chosen for exact products.
    """
    if config.precision.in_fp8 and config.precision.dtype != "bf16":
        what = f"rounds operands in bf16, and precision.dtype={config.precision.dtype}"
        yield Problem("precision.products", "fp8", what, "precision=bf16 precision.products=fp8; stored")


@rule("precision.products", "bits.kind")
def fp8_has_scales_of_its_layout(config: Config) -> Iterator[Problem]:
    if config.precision.in_fp8 and config.bits.layout_free:
        what = "has scales of each rank's own rows and columns, which no layout shares; bits.kind=layout-free"
        yield Problem("precision.products", "fp8", what, "stored, float32; or bits.kind=usual")


@rule("precision.products", "model.layers", "model.stage_blocks")
def fp8_has_layers(config: Config) -> Iterator[Problem]:
    layers = config.model.num_blocks
    if config.precision.in_fp8 and layers < FIRST_LAST_AND_ONE:
        what = f"spares the first and the last layer, and the model has {layers}"
        yield Problem("precision.products", "fp8", what, f"stored, or {FIRST_LAST_AND_ONE} layers or more")


@rule("model.adapter", "model.frozen", "precision.products", "model", "layout.tensor", "bits")
def adapters_are_next_to_frozen_linears(config: Config) -> Iterator[Problem]:
    model, adapter = config.model, config.model.adapter
    if adapter is None:
        return
    if model.frozen:
        rule_text = "has no effect next to model.adapter, which freezes all but the adapters"
        yield Problem("model.frozen", ", ".join(model.frozen), rule_text, "[], or model.adapter=null")
    if config.precision.in_fp8:
        rule_text = f"would multiply adapters of rank {adapter.rank} in FP8, whose scales are of whole layers"
        yield Problem("precision.products", "fp8", rule_text, "stored, float32; or model.adapter=null")
    if config.layout.tensor.rows.leads > 1:
        rule_text = "runs adapters on one rank alone, whose gradients would differ from those of the other ranks"
        yield Problem("layout.tensor.common", "one", rule_text, "all; or model.adapter=null")
    if adapter.dora and adapter.dropout:
        rule_text = "drops inputs of adapters alone, and magnitudes scale the sum with the frozen linear"
        yield Problem("model.adapter.dropout", adapter.dropout, rule_text, "0; or model.adapter.dora=false")
    tensor = config.layout.tensor
    if adapter.dora and (tensor.batch_axes or tensor.inner_size > model.branches.number):
        heads = f"{model.branches.field}={model.branches.number} of {tensor.inner_size} ranks"
        rule_text = "needs whole columns of a linear on a rank, and layout.tensor." + (
            f"kind={tensor.kind} sends blocks or rows of them" if tensor.batch_axes else f"size shares {heads}"
        )
        yield Problem("model.adapter.dora", True, rule_text, "false; or layout.tensor.kind=megatron of fewer ranks")
    experts = [layer for layer in range(model.num_blocks) if model.has_experts(layer)]
    names = [f"blocks.{layer}.feed_forward.{name}" for layer in experts for name in ("expand", "contract")]
    if adapter.is_on(*names) and names:
        without = "patterns of other linears, such as attention.*, in model.adapter.on"
        if adapter.dropout:
            rule_text = "drops inputs of experts, each of them on another rank, as peft does not either"
            yield Problem("model.adapter.dropout", adapter.dropout, rule_text, f"0; or {without}")
        if adapter.dora:
            rule_text = "trains magnitudes of whole linears, and experts have none, in peft neither"
            yield Problem("model.adapter.dora", True, rule_text, f"false; or {without}")


@rule("layout.transport")
def transport_is_installed(config: Config) -> Iterator[Problem]:
    name = config.layout.transport
    if name != "auto" and importlib.util.find_spec(TRANSPORTS[name].module) is None:
        hint = f"torch, auto; or {name} after pip install 'meshwright[{name}]'"
        yield Problem("layout.transport", name, f"needs {TRANSPORTS[name].module}, which is not installed", hint)


@rule("layout.transport", "device")
def transport_reaches_device(config: Config) -> Iterator[Problem]:
    name, device = config.layout.transport, config.device
    if "auto" not in (name, device) and device not in TRANSPORTS[name].devices:
        yield Problem("layout.transport", name, f"moves host memory only, and device={device}", "torch, auto")


@rule("layout.transport", "restarts.times")
def transport_outlives_a_rank(config: Config) -> Iterator[Problem]:
    name, times = config.layout.transport, config.restarts.times
    if times and name != "auto" and TRANSPORTS[name].in_process:
        rule_text = f"starts lost processes again, and layout.transport={name} has none"
        yield Problem("restarts.times", times, rule_text, "0")


@rule("restarts.shrink", "layout.data.size")
def replicas_are_left(config: Config) -> Iterator[Problem]:
    if config.restarts.shrink and config.layout.data.size == 1:
        rule_text = "goes on with fewer replicas, and layout.data.size=1 has none to lose"
        yield Problem("restarts.shrink", "true", rule_text, "false, or layout.data.size=2 or more")


@rule("layout.pipeline.size", "model.layers", "model.stage_blocks")
def stages_have_layers(config: Config) -> Iterator[Problem]:
    size, layers = config.layout.pipeline.size, config.model.num_blocks
    if size > layers + 2:
        can_fill = f"is more than the model's {layers} layers, the embedding and the head can fill"
        yield Problem("layout.pipeline.size", size, can_fill, at_most(layers + 2))


@rule("layout.pipeline.size", "layout.pipeline.chunks", "model.layers", "model.stage_blocks")
def chunks_have_layers(config: Config) -> Iterator[Problem]:
    size, chunks, layers = config.layout.pipeline.size, config.layout.pipeline.chunks, config.model.num_blocks
    if size <= layers + 2 < size * chunks:
        can_fill = f"on {size} stages is more than the model's {layers} layers, the embedding and the head can fill"
        yield Problem("layout.pipeline.chunks", chunks, can_fill, at_most((layers + 2) // size))


@rule("layout.pipeline")
def chunks_go_with_schedule(config: Config) -> Iterator[Problem]:
    pipeline = config.layout.pipeline
    if pipeline.chunks == 1 or pipeline.placement in pipeline.rule.shapes:
        return
    name, kinds = pipeline.schedule, [schedule for schedule, rule in entries("schedules").items() if rule.shapes]
    if not pipeline.rule.shapes:
        rule_text = f"does not go with layout.pipeline.schedule={name}, which knows one chunk a stage"
        yield Problem(
            "layout.pipeline.chunks", pipeline.chunks, rule_text, f"1, or layout.pipeline.schedule={', '.join(kinds)}"
        )
    else:
        others = [schedule for schedule in kinds if pipeline.placement in entries("schedules")[schedule].shapes]
        rule_text = f"does not go with layout.pipeline.schedule={name}, whose order is another"
        valid = f"{', '.join(pipeline.rule.shapes)}, or layout.pipeline.schedule={', '.join(others)}"
        yield Problem("layout.pipeline.placement", pipeline.placement, rule_text, valid)


@rule("layout.pipeline")
def limit_has_room_for_chunks(config: Config) -> Iterator[Problem]:
    limit, chunks = config.layout.pipeline.limit, config.layout.pipeline.chunks
    if limit != "auto" and limit < chunks:
        rule_text = f"leaves no place for a microbatch in each of layout.pipeline.chunks={chunks}"
        yield Problem("layout.pipeline.limit", limit, rule_text, f"auto, {chunks} or more")


@rule("layout.pipeline", "model.layers", "model.stage_blocks")
def partition_is_of_the_layers(config: Config) -> Iterator[Problem]:
    pipeline, layers = config.layout.pipeline, config.model.num_blocks
    if isinstance(pipeline.partition, str):
        return
    given = shown(pipeline.partition)
    count = pipeline.size * pipeline.chunks
    valid = f"auto, measured, or {count} numbers that add up to {layers}"
    if len(pipeline.partition) != count:
        each = f"layout.pipeline.size={pipeline.size} stages"
        if pipeline.chunks > 1:
            each = f"the {count} chunks of {each}"
        rule_text = f"is not one number for each of {each}"
        yield Problem("layout.pipeline.partition", given, rule_text, valid)
    elif sum(pipeline.partition) != layers:
        yield Problem("layout.pipeline.partition", given, f"does not add up to the model's {layers} layers", valid)
    elif 0 in pipeline.partition[1:-1]:
        rule_text = (
            f"leaves a {'chunk' if pipeline.chunks > 1 else 'stage'} between the first and the last nothing to do"
        )
        yield Problem("layout.pipeline.partition", given, rule_text, valid)


@rule("layout.pipeline")
def limit_has_an_effect(config: Config) -> Iterator[Problem]:
    # Also an effect. The planner's space checks only rules, and must not drop a user's limit with gpipe.
    pipeline = config.layout.pipeline
    if pipeline.limit != "auto" and pipeline.rule.fixed:
        rule_text = f"has no effect on layout.pipeline.schedule={pipeline.schedule}"
        free = ", ".join(name for name, rule in entries("schedules").items() if not rule.fixed)
        yield Problem("layout.pipeline.limit", pipeline.limit, rule_text, f"auto, or layout.pipeline.schedule={free}")


@rule("memory.offload.to", "precision.level", "optimizer")
def offload_leaves_half_precision(config: Config) -> Iterator[Problem]:
    to, level = config.memory.offload.to, config.precision.level
    if to != "none" and level != "O2":
        rule_text = f"takes float32 masters off the device, and precision.level={level} has none"
        yield Problem("memory.offload.to", to, rule_text, "none, or precision.level=O2 with dtype bf16 or fp16")
    elif to != "none" and config.optimizer.masters == "bf16" and not config.optimizer.update.states:
        name = config.optimizer.name
        rule_text = f"finds nothing to keep elsewhere: optimizer.name={name} has no moments, masters=bf16 no masters"
        yield Problem("memory.offload.to", to, rule_text, "none, or optimizer.masters=float32")


@rule("optimizer.states", "precision.dtype")
def moments_are_rounded_from_float32(config: Config) -> Iterator[Problem]:
    if config.optimizer.states == "bf16" and config.precision.dtype == "float64":
        rule_text = "rounds moments, and a run in precision.dtype=float64 is there to be exact"
        yield Problem("optimizer.states", "bf16", rule_text, "float32, or precision.dtype=float32, bf16, fp16")


@rule("optimizer.masters", "precision.level", "precision.dtype")
def masters_are_bf16_weights(config: Config) -> Iterator[Problem]:
    level, dtype = config.precision.level, config.precision.dtype
    if config.optimizer.masters == "bf16" and (level, dtype) != ("O2", "bf16"):
        rule_text = f"steps weights that are stored in bf16, and precision.level={level} with dtype={dtype} has none"
        yield Problem("optimizer.masters", "bf16", rule_text, "float32, or precision=bf16, which is O2")


@rule("memory.offload.to", "memory.offload.bucket")
def offload_buckets_have_two_halves(config: Config) -> Iterator[Problem]:
    to, bucket = config.memory.offload.to, config.memory.offload.bucket
    if to != "none" and bucket % OFFLOAD_MULTIPLE:
        below = bucket // OFFLOAD_MULTIPLE * OFFLOAD_MULTIPLE
        near = listed([*([below] if below else []), below + OFFLOAD_MULTIPLE])
        yield Problem("memory.offload.bucket", bucket, f"is not a multiple of {OFFLOAD_MULTIPLE}", f"{near}, 1M")


@rule("layout.order", *_SIZES)
def order_names_every_axis_once(config: Config) -> Iterator[Problem]:
    order, sizes = config.layout.order, dict(config.layout.axes)
    if order == "auto":
        return
    known = config.layout.model_copy(update={"order": "auto"}).axes
    parts: dict[str, list[int | None]] = defaultdict(list)
    for name, size in map(part_of_axis, order):
        parts[name].append(size)
    wrong = [f"names {name}, no axis of this layout{nearest(name, list(sizes))}" for name in parts if name not in sizes]
    for name, (*outer, last) in parts.items():
        split = math.prod(size or 1 for size in outer)
        if None in outer:
            wrong.append(
                f"names {name} {len(outer) + 1} times, of which all but the last need a size, such as {name}:2"
            )
        elif last is not None:
            wrong.append(f"gives a size to the last {name}, which has what is left")
        elif sizes.get(name, split) % split:
            wrong.append(f"cuts {name} into {split} parts, which do not divide its {sizes[name]} ranks")
    wrong += [f"leaves {name} out" for name, size in known if size > 1 and name not in parts]
    if wrong:
        alone = ", ".join(name for name, size in known if size == 1)
        note = f" (of one rank, may be left out: {alone})" if alone else ""
        valid = f"auto, {shown([name for name, _ in known])} in any order{note}"
        yield Problem("layout.order", shown(order), " and ".join(wrong), valid)


@rule("layout.data.expert", "layout.data.shard", "layout.data.size")
def replicas_share_experts(config: Config) -> Iterator[Problem]:
    data = config.layout.data
    field, ranks = ("shard", data.shard) if data.shard is not None else ("size", data.size)
    if ranks % data.expert:
        rule_text = f"does not divide layout.data.{field}={ranks}"
        yield Problem("layout.data.expert", data.expert, rule_text, listed(divisors(ranks)))


@rule("layout", "model", "bits")
def head_is_cut_over_stages(config: Config) -> Iterator[Problem]:
    layout, model, spread = config.layout, config.model, "layout.pipeline.head=spread"
    pipeline, tied, rows = layout.pipeline, getattr(model, "tied", False), getattr(model, "padded_vocabulary", 0)
    if pipeline.head == "last" or pipeline.size == 1:
        return
    families = ", ".join(name for name, family in entries("models").items() if family.spreads_head)
    free = ", ".join(name for name, rule in entries("schedules").items() if rule.in_pieces)
    for broken, field, value, why, valid in (
        (not model.spreads_head, "model.family", model.family, f"has losses that {spread} does not know", families),
        (tied, "model.tied", True, f"keeps a table whole that {spread} cuts", "false"),
        (model.losses_in_layers, model.losses_in_layers, "set", f"adds losses of layers, and {spread} has none", "0"),
        (rows % pipeline.size, "model.vocabulary_multiple", model.vocabulary_multiple,
         f"makes {rows} rows, which {spread} does not cut into {pipeline.size} equal parts",
         str(pipeline.size * model.vocabulary_multiple)),
        (pipeline.chunks > 1, "layout.pipeline.chunks", pipeline.chunks, f"does not go with {spread}", "1"),
        (not pipeline.rule.in_pieces, "layout.pipeline.schedule", pipeline.schedule,
         f"has an order that knows no tasks of {spread}", free),
        (layout.tensor.kind != "none", "layout.tensor.kind", layout.tensor.kind,
         f"cuts the classes of a head that {spread} cuts", "none"),
        (layout.data.in_pieces, "layout.data.exchange", "messages", f"trades otherwise than {spread}", "blocking"),
        (layout.data.strategy.slices, "layout.data.sync", layout.data.sync,
         f"sums each microbatch's buckets in an order that {spread} does not keep", "zero1, allreduce, ring"),
        (config.bits.layout_free, "bits.kind", config.bits.kind, f"adds up classes otherwise than {spread}", "usual"),
    ):  # fmt: skip
        if broken:
            yield Problem(field, value, why, f"layout.pipeline.head=last, or {field}={valid}")


@rule("layout.data.exchange", "layout.data.expert", "layout.pipeline")
def messages_go_with_schedule(config: Config) -> Iterator[Problem]:
    pipeline = config.layout.pipeline
    if config.layout.data.in_pieces and pipeline.size > 1 and not pipeline.rule.in_pieces:
        rule_text = (
            f"does not go with layout.pipeline.schedule={pipeline.schedule}, whose order knows no pieces of layers"
        )
        free = ", ".join(name for name, rule in entries("schedules").items() if rule.in_pieces)
        yield Problem("layout.data.exchange", "messages", rule_text, f"blocking, or layout.pipeline.schedule={free}")


@rule("layout.data.exchange", "layout.data.expert", "bits")
def messages_are_of_whole_microbatches(config: Config) -> Iterator[Problem]:
    if config.layout.data.in_pieces and config.bits.layout_free:
        rule_text = "sends a microbatch's rows at a time, and bits.layout_free computes some of its samples at a time"
        yield Problem("layout.data.exchange", "messages", rule_text, "blocking")


@rule("layout.ranks_per_node", *_SIZES)
def nodes_are_full(config: Config) -> Iterator[Problem]:
    here, ranks = config.layout.ranks_per_node, config.layout.world_size
    if here != "auto" and ranks % here:
        rule_text = f"does not divide the {ranks} ranks of the layout"
        yield Problem("layout.ranks_per_node", here, rule_text, f"auto, {listed(divisors(ranks))}")


def _where_chosen(group: str, field: str, chosen: str = "") -> Iterator[Rule]:
    """Yield the rules of all strategies of a group, each bound to runs that chose a strategy with this rule.

    Args:
        group: the group of the registry.
        field: the field that names the strategy, or holds its section.
        chosen: the attribute of the config that holds the strategy, if `field` holds only a name.
    """
    rules_of = attrgetter(f"{chosen or field}.rules")

    def bind(rule: Rule) -> Rule:
        return Rule((field, *rule.reads), lambda config: rule.check(config) if rule in rules_of(config) else iter(()))

    yield from map(bind, dict.fromkeys(rule for entry in entries(group).values() for rule in entry.rules))


PARTITION_RULES = (
    stages_have_layers, chunks_have_layers, partition_is_of_the_layers, limit_has_an_effect, chunks_go_with_schedule,
    limit_has_room_for_chunks,
)  # fmt: skip
"""The rules of a partition. The decisions of a resumed run must also keep these rules."""

RULES = (
    family_reads_data,
    *_where_chosen("data", "data"),
    *_where_chosen("models", "model"),
    replicas_divide_batch,
    microbatches_divide_replica,
    dtype_fits_level,
    fp8_is_of_bf16,
    fp8_has_scales_of_its_layout,
    fp8_has_layers,
    adapters_are_next_to_frozen_linears,
    pairs_have_a_loss,
    rows_are_summed_whole,
    experts_are_balanced_by_rows,
    transport_is_installed,
    transport_reaches_device,
    transport_outlives_a_rank,
    replicas_are_left,
    tensor_cuts_are_equal,
    tensor_splits_rows,
    *_where_chosen("tensor", "layout.tensor"),
    *_where_chosen("contexts", "layout.context", "layout.context.strategy"),
    *_where_chosen("optimizers", "optimizer", "optimizer.update"),
    *_where_chosen("syncs", "layout.data", "layout.data.strategy"),
    *GROUPING,
    *PARTITION_RULES,
    *_where_chosen("activations", "memory.recompute", "memory.policy"),
    offload_leaves_half_precision,
    offload_buckets_have_two_halves,
    moments_are_rounded_from_float32,
    masters_are_bf16_weights,
    order_names_every_axis_once,
    nodes_are_full,
    replicas_share_experts,
    head_is_cut_over_stages,
    messages_go_with_schedule,
    messages_are_of_whole_microbatches,
    grains_fill_microbatches,
    scales_are_powers_of_two,
    graphs_have_whole_layers,
    layers_fall_into_blocks,
    parts_are_equal,
    parts_of_hidden_are_equal,
    runs_are_equal,
    parts_of_heads_are_dealt_equally,
    rings_have_runs_of_queries,
    what_is_summed_in_an_order,
)


def broken_rules(config: Config, mistaken: Set[str] = frozenset()) -> list[Problem]:
    """Return the problems of all rules, except for rules and problems that read a mistaken field or section."""

    def sound(reads: Iterable[str]) -> bool:
        return not any(f"{read}.".startswith(f"{field}.") for read in reads for field in mistaken)

    problems = (problem for rule in RULES if sound(rule.reads) for problem in rule.check(config))
    return [problem for problem in problems if sound(problem.reads)]
