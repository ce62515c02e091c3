"""Search space of the planner: every legal layout of a run on n devices of a cluster, as changed copies of its config.

| field                      | values, in the order in which they are chosen                                          |
|----------------------------|----------------------------------------------------------------------------------------|
| layout.context             | the run's; for sequences of LONG tokens: uncut, and each kind over divisors of n       |
| layout.tensor              | none, megatron (activations whole, cut by sequence), tesseract q x q x d, sub-graphs   |
| layout.pipeline.size       | divisors of the remaining devices                                                      |
| layout.data.size           | all devices that then remain                                                           |
| memory.offload.to          | none, host                                                                             |
| layout.data.sync           | allreduce; zero1, zero2 and zero3 if ranks sum gradients                               |
| layout.data.shard          | null; if slices span more than a node: the largest group inside a node                 |
| layout.data.expert         | 1; for a model with experts: the largest group inside a node, and the largest of all   |
| layout.order               | orders of data, pipe and the tensor section's axes that put other ranks on a node      |
| batch.micro                | divisors of a replica's samples                                                        |
| layout.pipeline.schedule   | all four; with one stage: the run's                                                    |
| layout.pipeline.chunks     | 1; up to FEW p microbatches: also CHUNKS, 1f1b's as a loop, message-driven's as a v    |
| layout.pipeline.limit      | auto; message-driven: 2p, p; with CHUNKS: the limit with the memory of 2p whole stages |
| memory.recompute           | none, selective, auto                                                                  |
| layout.data.exchange       | the run's; for the fastest that share experts: also messages (`as_messages`)           |

p: number of stages. A layout is legal if it breaks no rule of the config (config/rules.py); this file adds no rules.
A rule is checked as soon as the last field that the rule reads is chosen, so that no refused layout is completed.
Layouts that differ only in fields chosen after layout.data.expert are a family. If a family's weights do not fit, the
search skips the whole family.

Fields that the user has fixed keep the run's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import permutations, product
from typing import Any

from meshwright.config import Config
from meshwright.config.layout import ContextParallel, Layout, PipelineSection
from meshwright.config.load import ELSEWHERE, OPEN, value_of_word
from meshwright.config.registry import entries
from meshwright.config.rules import RULES, broken_rules
from meshwright.config.section import Rule, Section, divisors, field_of, with_field
from meshwright.config.shorthand import in_words
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.expert_ranks import ExpertRanks
from meshwright.planner.plan.remembered import replaced
from meshwright.ranks.errors import Problem
from meshwright.strategies.memory.section import FIELD as RECOMPUTE
from meshwright.strategies.memory.section import KEEPS_ALL, policy_of

LONG = 8192
"""Tokens of a sequence from which context parallelism is tried."""

CHUNKS = 2
"""Chunks of a stage, if more than one chunk is tried."""

FEW = 4
"""Most microbatches per stage with which chunks are tried. With more a step idles for less than a fifth, and chunks
would save half of this idle time."""

_SIZES = ("layout.context", "layout.tensor", "layout.pipeline.size", "layout.data.size")
"""Sizes with the number of devices as product, even if the user fixed some."""

Refused = dict[str, Problem]
"""First broken rule by kind of tensor section."""


@dataclass(frozen=True)
class SearchJob:
    """The run, cluster and devices of a search.

    `fixed`: dotted names of fields that keep the run's values. `known`: the values that a program supports of a field,
    by dotted name; a field without an entry may have any value. `experts`: how a program deals experts to ranks.
    """

    run: Config
    cluster: Cluster
    devices: int
    fixed: Collection[str] = ()
    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    experts: ExpertRanks | None = None

    def is_known(self, name: str, value: Any) -> bool:
        """Return True if the program supports the value of a field, or all fields of a section."""
        if name in self.known:
            return value in self.known[name]
        # Uncut sequences have no kind, so the field's value has no effect.
        if name == "layout.context" and not value.axes:
            return True
        # A kind of section has fields that others do not have.
        inner = {each.removeprefix(f"{name}."): each for each in self.known if each.startswith(f"{name}.")}
        return all(_field(value, short) in (None, *self.known[each]) for short, each in inner.items())


@dataclass(frozen=True)
class Choice:
    """A field and candidate values, given the values of the fields chosen earlier."""

    field: str
    values: Callable[[Config, SearchJob], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Tail:
    """A layout's choices after the microbatch, without the order of axes. Compared by identity.

    `keeper`: the same choices without recomputation; None if this tail recomputes nothing.
    """

    pipeline: PipelineSection
    recompute: str | int
    keeper: Tail | None

    def keeping(self) -> Tail:
        """Return the same choices without recomputation."""
        return self.keeper or self

    def of(self, sized: Config) -> Config:
        """Apply these choices to a config."""
        layout = sized.layout.model_copy(update={"pipeline": self.pipeline})
        memory = sized.memory.model_copy(update={"recompute": self.recompute})
        return sized.model_copy(update={"layout": layout, "memory": memory})


def legal_layouts(job: SearchJob, refused: Refused | None = None) -> Iterator[Config]:
    """Yield all legal layouts. Into `refused` is written, by kind of tensor section, the first broken rule."""
    refused = {} if refused is None else refused
    yield from _chosen(_start(job), 0, len(CHOICES), job, refused)


def families(job: SearchJob, refused: Refused) -> Iterator[Config]:
    """Yield families of layouts. Layouts of a family share all fields that weights, gradients and states depend on."""
    yield from _chosen(_start(job), 0, FAMILY, job, refused)


def sizes_of(family: Config, job: SearchJob, refused: Refused) -> Iterator[Config]:
    """Yield the family with each size of microbatch."""
    yield from _chosen(family, FAMILY, FAMILY + 1, job, refused)


def tails_of(sized: Config, job: SearchJob) -> tuple[tuple[Tail, ...], Refused]:
    """Return a sized config's legal choices up to the order of axes, and the first broken rule by tensor kind."""
    refused: Refused = {}
    keepers: dict[PipelineSection, Tail] = {}
    tails = []
    for config in _chosen(sized, FAMILY + 1, len(CHOICES) - 1, job, refused):
        pipeline, memory = config.layout.pipeline, config.memory
        keeper = keepers.setdefault(pipeline, Tail(pipeline, KEEPS_ALL, None))
        tails.append(Tail(pipeline, memory.recompute, keeper) if memory.policy.recomputes else keeper)
    return tuple(tails), refused


def own_tail(config: Config) -> Tail:
    """Return a config's own choices after the microbatch."""
    keeper = Tail(config.layout.pipeline, KEEPS_ALL, None)
    return Tail(keeper.pipeline, config.memory.recompute, keeper) if config.memory.policy.recomputes else keeper


def ordered(layout: Config, job: SearchJob, refused: Refused) -> Iterator[Config]:
    """Yield the layout in each legal order of its axes."""
    yield from _chosen(layout, len(CHOICES) - 1, len(CHOICES), job, refused)


def own_layout(job: SearchJob) -> Config | None:
    """Return the run file's own layout with replicas on all devices; None if this layout is not legal there."""
    run = _start(job)
    # Most run files are written for another number of devices; only the number of replicas is adapted.
    rest = job.devices // (run.layout.world_size // run.layout.data.size)
    if not is_fixed("layout.data.size", job.fixed) and rest % run.layout.data.expert == 0:
        run = with_field(run, "layout.data.size", max(1, rest))
    if run.layout.world_size != job.devices or not is_legal(run):
        return None
    if not all(job.is_known(choice.field, field_of(run, choice.field)) for choice in CHOICES):
        return None
    return with_field(run, "batch.micro", run.micro)


def orders_of(config: Config, job: SearchJob) -> Iterable[tuple[str, ...] | str]:
    """Return the candidate orders of a layout's axes."""
    return _allowed(CHOICES[-1], config, job)


def savings(config: Config, job: SearchJob) -> Iterator[Config]:
    """Yield the legal layouts that differ from this one in one further saving of memory: recomputation or offload."""
    for choice in CHOICES:
        if choice.field not in SAVINGS or is_fixed(choice.field, job.fixed):
            continue
        nothing = SAVINGS[choice.field]
        if field_of(config, choice.field) != nothing:
            continue
        for value in _allowed(choice, config, job):
            saving = with_field(config, choice.field, value)
            if value != nothing and is_legal(saving):
                yield saving


def as_messages(config: Config, job: SearchJob) -> Iterator[Config]:
    """Yield the layout with rows sent to experts as messages, hidden by tasks of other microbatches, under each limit
    of the schedule with such messages. Yields nothing without shared experts, for another program, or if the user
    fixed one of the changed fields."""
    layout, free = config.layout, next(name for name, rule in entries("schedules").items() if rule.in_pieces)
    changes: dict[str, Any] = {"layout.data.exchange": "messages"}
    if layout.data.strategy.slices:  # slices would be summed in every microbatch, layer by layer
        changes["layout.data.sync"] = "zero1"
    if layout.pipeline.size > 1 and not layout.pipeline.rule.in_pieces:
        changes["layout.pipeline.schedule"] = free
    # Another program sends rows in its own way.
    if job.known or layout.data.expert == 1 or any(is_fixed(name, job.fixed) for name in changes):
        return
    if not is_fixed("layout.pipeline.partition", job.fixed):
        changes["layout.pipeline.partition"] = "auto"
    for name, value in changes.items():
        config = with_field(config, name, value)
    for limit in _allowed(next(each for each in CHOICES if each.field == "layout.pipeline.limit"), config, job):
        made = with_field(config, "layout.pipeline.limit", limit)
        if is_legal(made):
            yield made


def is_legal(config: Config) -> bool:
    return not broken_rules(config, frozenset(ELSEWHERE))


def fixed_fields(overrides: Iterable[str]) -> frozenset[str]:
    """Return the fields set by `key=value` words: `layout.tensor={kind: megatron}` and `layout.tensor=megatron` set
    layout.tensor.kind, and `layout=auto` sets none."""
    fields: set[str] = set()
    for word in overrides:
        key, _, text = word.partition("=")
        if word == OPEN:
            continue
        fields |= set(_leaves(key, value_of_word(key, text)))
    return frozenset(fields)


def is_fixed(field: str, fixed: Collection[str]) -> bool:
    """Return True if a field, or a section that contains the field, keeps the run's value."""
    return any(field == name or field.startswith(name + ".") for name in fixed)


def ranks_per_node(cluster: Cluster, devices: int) -> int:
    """Return the largest divisor of `devices` that fits on a node."""
    return max(size for size in divisors(devices) if size <= cluster.devices_per_node)


def _leaves(key: str, value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield in_words(key, value)[0]


def _start(job: SearchJob) -> Config:
    """Return the run with the cluster's node size; partition, placement, order and expert groups are reset unless
    fixed."""
    config = job.run
    for name, value in {
        "layout.ranks_per_node": ranks_per_node(job.cluster, job.devices),
        "layout.pipeline.partition": "auto",
        "layout.pipeline.placement": "loop",
        "layout.order": "auto",
        "layout.data.expert": 1,
    }.items():
        if name not in job.fixed:
            config = with_field(config, name, value)
    return config


def _chosen(config: Config, index: int, stop: int, job: SearchJob, refused: Refused) -> Iterator[Config]:
    """Yield the config with every legal combination of the choices from `index` up to `stop`."""
    if index == stop:
        yield config
        return
    choice = CHOICES[index]
    for value in _allowed(choice, config, job):
        # A view of a sized config (TAIL) keeps the number of microbatches.
        made = replaced(config, choice.field, value, *(("num_microbatches",) if index > FAMILY else ()))
        # A rule is checked as soon as all fields that the rule reads are chosen: no refused layout is completed.
        problem = next((problem for rule in _rules_after(index) for problem in rule.check(made)), None)
        if problem is None:
            yield from _chosen(made, index + 1, stop, job, refused)
        else:
            # One problem a kind is enough to explain why the answer has no layout of this kind.
            refused.setdefault(made.layout.tensor.kind, problem)


def _allowed(choice: Choice, config: Config, job: SearchJob) -> Iterable[Any]:
    """Return the values of a choice that agree with the fixed fields and that the program supports."""
    run = field_of(job.run, choice.field)
    values = choice.values(config, job)
    # With one stage the schedule has no effect, so any value is accepted.
    one_stage = choice.field.startswith("layout.pipeline.") and config.layout.pipeline.size == 1
    if job.known and (choice.field == "layout.pipeline.size" or not one_stage):
        values = [value for value in values if job.is_known(choice.field, value)]
    inner = [name for name in job.fixed if name.startswith(choice.field + ".")]
    whole = is_fixed(choice.field, job.fixed)
    # A fixed kind leaves the sizes free, and a fixed size the kind.
    if choice.field in ("layout.context", "layout.tensor") and inner and not whole:
        return [value for value in values if all(_field(value, name) == _field(run, name) for name in inner)]
    if not (whole or inner):
        return values
    # A fixed size must be a candidate for this number of devices; other fixed values are used without this check.
    return [value for value in values if value == run] if choice.field in _SIZES else [run]


def _field(section: Any, name: str) -> object:
    """Return a section's value under a dotted name's last word; None without such a field, or for no section."""
    return section.model_dump().get(name.rpartition(".")[2]) if isinstance(section, Section) else None


@cache
def _rules_after(index: int) -> tuple[Rule, ...]:
    """Return the rules that read the field of a choice and no field chosen later."""

    def last(rule: Rule) -> int:
        # A rule that reads layout.tensor reads layout.tensor.kind, and the other way around.
        touched = (
            i
            for i, choice in enumerate(CHOICES)
            for read in rule.reads
            if f"{read}.".startswith(f"{choice.field}.") or f"{choice.field}.".startswith(f"{read}.")
        )
        return max(touched, default=-1)

    return tuple(rule for rule in RULES if last(rule) == index)


def _contexts(config: Config, job: SearchJob) -> Iterator[ContextParallel]:
    """Yield context sections. A short sequence is not cut: it gains nothing, and the search would take several times
    as long."""
    if config.data.lengths.source < LONG and config.layout.context == ContextParallel():
        yield config.layout.context
        return
    yield ContextParallel()
    for strategy, size in product(entries("contexts"), divisors(job.devices)[1:]):
        yield ContextParallel(kind=strategy, size=size)


def ranks_of_layer(layout: Layout) -> int:
    """Return the number of ranks that share a layer."""
    return math.prod(size for _, size in (*layout.context.axes, *layout.tensor.axes))


def _orders(config: Config, job: SearchJob) -> Iterator[tuple[str, ...] | str]:
    """Yield auto, and each order that puts other ranks together on a node."""
    usual = config.layout.model_copy(update={"order": "auto"}).axes
    sizes, tensor = dict(usual), config.layout.tensor.axes
    blocks = (
        config.layout.data.token_axes,
        ("pipe",),
        *((name,) for name in config.layout.context.token_axes),
        tuple(dict(tensor)),
    )
    reach = _ranks_in_reach(config, job)
    seen: set[tuple[Hashable, ...]] = set()
    # Only whole axes are permuted. The axes of the tensor section stay together, in the section's order.
    orders = (tuple(name for block in chosen for name in block) for chosen in permutations(blocks))
    for order in (tuple(name for name, _ in usual), *orders):
        named = tuple((name, sizes[name]) for name in order)
        together = _together(named, reach)
        # Orders that put the same ranks on each node send over the same links.
        if together not in seen:
            yield "auto" if not seen else tuple(name for name in order if sizes[name] > 1)
        seen.add(together)


@cache
def _together(axes: tuple[tuple[str, int], ...], unit: int) -> tuple[Hashable, ...]:
    """Return a key of the groups of `unit` consecutive ranks, comparable between orders of the axes: the ranks of each
    axis in a group; if these do not divide, each rank's group. Ranks are then listed by coordinates on the axes sorted
    by name, and groups are numbered by first occurrence."""
    inside, left = [], unit
    for name, size in reversed(axes):
        together = math.gcd(size, left)
        if together < min(size, left):
            break
        inside.append((name, together))
        left //= together
    else:
        return tuple(sorted(each for each in inside if each[1] > 1))
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name], stride = stride, stride * size
    steps = [range(0, size * strides[name], strides[name]) for name, size in sorted(axes)]
    indices: dict[int, int] = {}
    return tuple(indices.setdefault(sum(coordinates) // unit, len(indices)) for coordinates in product(*steps))


def _pipelines(field: str, config: Config, job: SearchJob) -> tuple[int | str, ...]:
    """Return candidates for a field of layout.pipeline other than the size."""
    pipeline, count = config.layout.pipeline, config.num_microbatches
    if field == "schedule":
        return tuple(reversed(entries("schedules"))) if pipeline.size > 1 else (pipeline.schedule,)
    if field == "chunks":
        few = pipeline.size > 1 and count <= FEW * pipeline.size
        return (1, CHUNKS) if few and pipeline.rule.tried_shape is not None else (1,)
    if field == "placement":
        return (pipeline.rule.tried_shape or "loop",) if pipeline.chunks > 1 else ("loop",)
    # If a run would set the limit by its memory: one round through the stages, and two. The limit that memory allows
    # was as slow as a limit of 7 for 64 stages. With chunks, trying two limits took 1.5 times the search's seconds.
    if pipeline.size == 1 or not pipeline.rule.by_memory:
        return ("auto",)
    rounds, stages = (2,) if pipeline.chunks > 1 else (2, 1), pipeline.size * pipeline.chunks
    return tuple(sorted({min(times * stages, count * pipeline.chunks) for times in rounds}, reverse=True))


def _syncs(config: Config, job: SearchJob) -> tuple[str, ...]:
    """Return the syncs that a planner tries; only the first if no ranks sum gradients, since all are then equal."""
    sizes = dict(config.layout.axes)
    summed = math.prod(sizes[axis] for axis in config.layout.token_axes)
    sharded = is_fixed("layout.data.shard", job.fixed) and job.run.layout.data.shard is not None
    tried = tuple(name for name, sync in entries("syncs").items() if sync.candidate and (sync.grouped or not sharded))
    return tried if summed > 1 else tried[:1]


def _shards(config: Config, job: SearchJob) -> tuple[int | None, ...]:
    """Return candidates for layout.data.shard: None, and the largest group inside a node."""
    layout = config.layout
    if not layout.data.strategy.slices:
        return (None,)
    shard = max((size for size in divisors(layout.data.size) if size <= _replicas_of_node(config, job)), default=1)
    return (None, shard) if 1 < shard < layout.data.size else (None,)


def _experts(config: Config, job: SearchJob) -> list[int]:
    """Return sizes of the expert axis: 1, the most replicas of a node, so that rows stay on a node, and the most."""
    data, count = config.layout.data, config.model.routing.num_experts or 1
    if job.experts is not None and config.model.routing.num_experts:
        # A program may deal experts also over a layer's ranks. These ranks then take experts first.
        tensor, context = dict(config.layout.tensor.axes).get("tensor", 1), config.layout.context.size
        parts = job.experts.tensor or tensor
        over = tensor // parts * (context if job.experts.context else 1)
        if tensor % parts or count % max(1, over):
            return []
        count //= over
    # The size must divide both the replicas (into groups) and the experts (over the ranks of a group).
    sizes = divisors(math.gcd(data.shard or data.size, count))
    here = max((size for size in sizes if size <= _replicas_of_node(config, job)), default=1)
    return sorted({1, here, sizes[-1]})


def _replicas_of_node(config: Config, job: SearchJob) -> int:
    """Return the number of replicas in a node, or in a larger domain of equally fast links."""
    layout = config.layout
    return _ranks_in_reach(config, job) // (ranks_of_layer(layout) * layout.pipeline.size)


def _ranks_in_reach(config: Config, job: SearchJob) -> int:
    """Return the number of ranks in a node, or in a larger domain of equally fast links."""
    nodes, domain = config.layout.ranks_per_node, job.cluster.domain_devices
    if domain > job.cluster.devices_per_node:
        return max(size for size in divisors(job.devices) if size <= domain)
    return job.devices if nodes == "auto" else nodes


OFFLOAD = "memory.offload.to"
SAVINGS = {OFFLOAD: "none", RECOMPUTE: KEEPS_ALL}
"""Fields that save memory for more time, each with the value that saves nothing."""


CHOICES = (
    Choice("layout.context", _contexts),
    Choice(
        "layout.tensor",
        lambda config, job: (
            candidate
            for section in entries("tensor").values()
            for candidate in section.candidates(job.devices // config.layout.context.size)
        ),
    ),
    Choice("layout.pipeline.size", lambda config, job: divisors(job.devices // ranks_of_layer(config.layout))),
    Choice(
        "layout.data.size",
        lambda config, job: [job.devices // (ranks_of_layer(config.layout) * config.layout.pipeline.size)],
    ),
    Choice(OFFLOAD, lambda config, job: ("none", "host")),
    Choice("layout.data.sync", _syncs),
    Choice("layout.data.shard", _shards),
    Choice("layout.data.expert", _experts),
    Choice("batch.micro", lambda config, job: divisors(config.replica_batch) if config.replica_batch else []),
    *(
        Choice(f"layout.pipeline.{field}", partial(_pipelines, field))
        for field in ("schedule", "chunks", "placement", "limit")
    ),
    Choice(
        RECOMPUTE,
        # The candidates, then policies and groups of layers that a program uses: each makes the search a third longer.
        lambda config, job: [
            *(name for name, policy in entries("activations").items() if policy.candidate),
            *(each for each in job.known.get(RECOMPUTE, ()) if not candidate_policy(each)),
        ],
    ),
    Choice("layout.order", _orders),
)


def candidate_policy(setting: str | int) -> bool:
    """Return True if a value of memory.recompute is a policy that every search tries."""
    return policy_of(setting).candidate and isinstance(setting, str)


FAMILY = 8
"""Number of choices that a family of layouts has in common."""

TAIL = tuple(dict.fromkeys((
    "layout.pipeline", "memory.recompute", "num_microbatches",
    # A section with several possible classes is read as a whole (remembered.py).
    *(
        next((whole for whole in ("model", "data", "layout.tensor") if f"{read}.".startswith(f"{whole}.")),
             read.replace("batch.global", "batch.global_"))
        for index in range(FAMILY + 1, len(CHOICES) - 1)
        for rule in _rules_after(index)
        for read in rule.reads
    ),
)))  # fmt: skip
"""Fields that a Tail depends on, including all fields read by the rules checked after the microbatch's size."""
