"""The space that is searched: every legal layout of a run on so many devices of a cluster, as configs like the run's.

| field                      | values, in the order in which they are chosen                                          |
|----------------------------|----------------------------------------------------------------------------------------|
| layout.context             | the run's; of sequences of LONG tokens whole ones, and each kind over divisors         |
| layout.tensor              | none, megatron (activations whole, cut by sequence), tesseract q x q x d, sub-graphs   |
| layout.pipeline.size       | divisors of the devices that are left                                                  |
| layout.data.size           | what is left then                                                                      |
| memory.offload.to          | none, host                                                                             |
| layout.data.sync           | allreduce; zero1, zero2 and zero3 where gradients are summed at all                    |
| layout.data.shard          | null; of slices over more than a node the most of a rank's neighbours that share one   |
| layout.data.expert         | 1; of a model with experts the most of a rank's neighbours, and the most of all        |
| layout.order               | orders of data, pipe and the tensor section's axes that put others together on a node  |
| batch.micro                | divisors of a replica's samples                                                        |
| layout.pipeline.schedule   | all four; without stages the run's                                                     |
| layout.pipeline.chunks     | 1; of up to FEW p microbatches also CHUNKS, 1f1b's as a loop, message-driven's as a v  |
| layout.pipeline.limit      | auto; message-driven: 2p, p; of CHUNKS those that hold as much as 2p of whole stages   |
| memory.recompute           | none, selective, auto                                                                  |
| layout.data.exchange       | the run's; of the fastest that share experts also messages (`as_messages`)             |

A layout is legal where the config's own rules say so (config/rules.py); there are no others here. A rule is asked as
soon as the last of the fields that it reads is chosen, so that what it refuses is not gone into. Nor is a family of
layouts whose weights do not fit: those that differ only in what is chosen after layout.data.expert.

Fields that the user has fixed keep their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from meshwright.ranks.errors import Problem
from meshwright.ranks.planned import ExpertRanks
from meshwright.strategies.memory.section import FIELD as RECOMPUTE
from meshwright.strategies.memory.section import KEEPS_ALL, policy_of

LONG = 8192
"""Tokens."""

CHUNKS = 2
"""Parts of the model that a stage holds, where several are tried."""

FEW = 4
"""Microbatches a stage up to which chunks are tried: with more a step idles for less than a fifth, of which chunks
would save half."""

_SIZES = ("layout.context", "layout.tensor", "layout.pipeline.size", "layout.data.size")
"""Together they must be all devices, also where they are fixed."""

Refused = dict[str, Problem]
"""For kinds of tensor sections a problem that a layout of the kind has."""


@dataclass(frozen=True)
class SearchJob:
    """The run, cluster and devices of a search. `fixed`: dotted names of fields that keep the run's values; `known`:
    the values that a program knows of a field, by dotted name, where it knows some alone; `experts`: how a program
    deals experts."""

    run: Config
    cluster: Cluster
    devices: int
    fixed: Collection[str] = ()
    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    experts: ExpertRanks | None = None

    def is_known(self, name: str, value: Any) -> bool:
        """Whether a value of a field, or a section with fields that some values alone are known of, is known."""
        if name in self.known:
            return value in self.known[name]
        # Whole sequences are of no kind, whatever the field says.
        if name == "layout.context" and not value.axes:
            return True
        # A kind of section has fields that others do not have.
        inner = {each.removeprefix(f"{name}."): each for each in self.known if each.startswith(f"{name}.")}
        return all(_field(value, short) in (None, *self.known[each]) for short, each in inner.items())


@dataclass(frozen=True)
class Choice:
    """A field and the values that it may take, given those chosen before it."""

    field: str
    values: Callable[[Config, SearchJob], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Tail:
    """A layout's choices behind its microbatch, without the order of axes. Equal if they are the same object.
    `keeper`: the same without recomputation; None: this one recomputes nothing."""

    pipeline: PipelineSection
    recompute: str | int
    keeper: Tail | None

    def of(self, sized: Config) -> Config:
        """The config with these choices."""
        layout = sized.layout.model_copy(update={"pipeline": self.pipeline})
        memory = sized.memory.model_copy(update={"recompute": self.recompute})
        return sized.model_copy(update={"layout": layout, "memory": memory})


def legal_layouts(job: SearchJob, refused: Refused | None = None) -> Iterator[Config]:
    """All of them. `refused`: is given for each kind of tensor section the first problem that one of its kind has."""
    refused = {} if refused is None else refused
    yield from _chosen(_start(job), 0, len(CHOICES), job, refused)


def families(job: SearchJob, refused: Refused) -> Iterator[Config]:
    """Families of layouts that have all in common that their weights, gradients and states hang on."""
    yield from _chosen(_start(job), 0, FAMILY, job, refused)


def sizes_of(family: Config, job: SearchJob, refused: Refused) -> Iterator[Config]:
    """The family with each size of microbatch."""
    yield from _chosen(family, FAMILY, FAMILY + 1, job, refused)


def tails_of(sized: Config, job: SearchJob) -> tuple[tuple[Tail, ...], Refused]:
    """The choices that a config with a size of microbatch leaves before an order, and a problem of others by kind."""
    refused: Refused = {}
    kept: dict[PipelineSection, Tail] = {}
    tails = []
    for config in _chosen(sized, FAMILY + 1, len(CHOICES) - 1, job, refused):
        pipeline, memory = config.layout.pipeline, config.memory
        keeper = kept.setdefault(pipeline, Tail(pipeline, KEEPS_ALL, None))
        tails.append(Tail(pipeline, memory.recompute, keeper) if memory.policy.recomputes else keeper)
    return tuple(tails), refused


def ordered(layout: Config, job: SearchJob, refused: Refused) -> Iterator[Config]:
    """The layout in each legal order of its axes."""
    yield from _chosen(layout, len(CHOICES) - 1, len(CHOICES), job, refused)


def own_layout(job: SearchJob) -> Config | None:
    """The run file's own layout, on as many replicas as the devices have room for; None where it is not legal there."""
    run = _start(job)
    # A run file is mostly written for other devices; only its replicas can follow them.
    rest = job.devices // (run.layout.world_size // run.layout.data.size)
    if not is_fixed("layout.data.size", job.fixed) and rest % run.layout.data.expert == 0:
        run = with_field(run, "layout.data.size", max(1, rest))
    if run.layout.world_size != job.devices or not is_legal(run):
        return None
    if not all(job.is_known(choice.field, field_of(run, choice.field)) for choice in CHOICES):
        return None
    return with_field(run, "batch.micro", run.micro)


def orders_of(config: Config, job: SearchJob) -> Iterable[tuple[str, ...] | str]:
    """The orders of a layout's axes that may be chosen."""
    return _allowed(CHOICES[-1], config, job)


def savings(config: Config, job: SearchJob) -> Iterator[Config]:
    """The legal layouts that differ from this one in one further saving of memory: recomputation, or offload."""
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
    """The layout with rows that travel to experts under other microbatches' tasks, under each limit of a schedule that
    does so; none where that may not be chosen."""
    layout, free = config.layout, next(name for name, rule in entries("schedules").items() if rule.in_pieces)
    changes: dict[str, Any] = {"layout.data.exchange": "messages"}
    if layout.data.strategy.slices:  # which are summed in every microbatch, layer by layer
        changes["layout.data.sync"] = "zero1"
    if layout.pipeline.size > 1 and not layout.pipeline.rule.in_pieces:
        changes["layout.pipeline.schedule"] = free
    # Another program's rows travel as it knows how.
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
    """The fields that `key=value` words set: `layout.tensor={kind: megatron}` and `layout.tensor=megatron` set
    layout.tensor.kind, and `layout=auto` sets none."""
    fields: set[str] = set()
    for word in overrides:
        key, _, text = word.partition("=")
        if word == OPEN:
            continue
        fields |= set(_leaves(key, value_of_word(key, text)))
    return frozenset(fields)


def is_fixed(field: str, fixed: Collection[str]) -> bool:
    """Whether a field, or a section that it lies in, keeps the run's value."""
    return any(field == name or field.startswith(name + ".") for name in fixed)


def ranks_per_node(cluster: Cluster, devices: int) -> int:
    """The largest divisor of `devices` that fits on a node."""
    return max(size for size in divisors(devices) if size <= cluster.devices_per_node)


def _leaves(key: str, value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield in_words(key, value)[0]


def _start(job: SearchJob) -> Config:
    """The run, its nodes those of the cluster, and nothing left of a partition for other stages."""
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
    """Every way to make the choices up to `stop` of a config whose first `index` ones are made."""
    if index == stop:
        yield config
        return
    choice = CHOICES[index]
    for value in _allowed(choice, config, job):
        made = with_field(config, choice.field, value)
        # As soon as all that a rule reads is chosen, so that what it refuses is not gone into.
        problem = next((problem for rule in _rules_after(index) for problem in rule.check(made)), None)
        if problem is None:
            yield from _chosen(made, index + 1, stop, job, refused)
        else:
            # One problem a kind is enough to say why the answer has no layout of it.
            refused.setdefault(made.layout.tensor.kind, problem)


def _allowed(choice: Choice, config: Config, job: SearchJob) -> Iterable[Any]:
    """The values of a choice that agree with what is fixed, and that the program knows."""
    run = field_of(job.run, choice.field)
    values = choice.values(config, job)
    # How one stage chooses its tasks nobody asks.
    one_stage = choice.field.startswith("layout.pipeline.") and config.layout.pipeline.size == 1
    if job.known and (choice.field == "layout.pipeline.size" or not one_stage):
        values = [value for value in values if job.is_known(choice.field, value)]
    inner = [name for name in job.fixed if name.startswith(choice.field + ".")]
    whole = is_fixed(choice.field, job.fixed)
    # A kind that is fixed leaves its sizes free, and the other way around.
    if choice.field in ("layout.context", "layout.tensor") and inner and not whole:
        return [value for value in values if all(_field(value, name) == _field(run, name) for name in inner)]
    if not (whole or inner):
        return values
    # A fixed size must go with the devices; any other fixed value is the user's, whether it would be tried or not.
    return [value for value in values if value == run] if choice.field in _SIZES else [run]


def _field(section: Any, name: str) -> object:
    """A section's value under a dotted name's last word; None where it has no such field, or is no section."""
    return section.model_dump().get(name.rpartition(".")[2]) if isinstance(section, Section) else None


@cache
def _rules_after(index: int) -> tuple[Rule, ...]:
    """The rules that read the field of a choice and of none after it."""

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
    """A cut of a short sequence gives nothing that others do not, and would make the search several times as long."""
    if config.data.lengths.source < LONG and config.layout.context == ContextParallel():
        yield config.layout.context
        return
    yield ContextParallel()
    for kind, size in product(entries("contexts"), divisors(job.devices)[1:]):
        yield ContextParallel(kind=kind, size=size)


def ranks_of_layer(layout: Layout) -> int:
    """The number of ranks that share a layer."""
    return math.prod(size for _, size in (*layout.context.axes, *layout.tensor.axes))


def _orders(config: Config, job: SearchJob) -> Iterator[tuple[str, ...] | str]:
    """auto, and each order that puts other ranks together on a node."""
    usual = config.layout.model_copy(update={"order": "auto"}).axes
    sizes, tensor = dict(usual), config.layout.tensor.axes
    blocks = (
        config.layout.data.token_axes,
        ("pipe",),
        *((name,) for name in config.layout.context.token_axes),
        tuple(dict(tensor)),
    )
    reach = _ranks_in_reach(config, job)
    seen: set[tuple[int, ...]] = set()
    # Whole axes alone; those of the tensor section stay together, in their own order.
    orders = (tuple(name for block in chosen for name in block) for chosen in permutations(blocks))
    for order in (tuple(name for name, _ in usual), *orders):
        named = tuple((name, sizes[name]) for name in order)
        together = _together(named, reach)
        # Orders that put the same ranks on each node send over the same links.
        if together not in seen:
            yield "auto" if not seen else tuple(name for name in order if sizes[name] > 1)
        seen.add(together)


@cache
def _together(axes: tuple[tuple[str, int], ...], unit: int) -> tuple[int, ...]:
    """Which ranks share a unit, whatever the order: each one's unit, ranks by their coordinates on the axes by name,
    units by the first one in them."""
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name], stride = stride, stride * size
    steps = [range(0, size * strides[name], strides[name]) for name, size in sorted(axes)]
    number: dict[int, int] = {}
    return tuple(number.setdefault(sum(place) // unit, len(number)) for place in product(*steps))


def _pipelines(field: str, config: Config, job: SearchJob) -> tuple[int | str, ...]:
    """Candidates for a field of layout.pipeline behind its size."""
    pipeline, count = config.layout.pipeline, config.num_microbatches
    if field == "schedule":
        return tuple(reversed(entries("schedules"))) if pipeline.size > 1 else (pipeline.schedule,)
    if field == "chunks":
        few = pipeline.size > 1 and count <= FEW * pipeline.size
        return (1, CHUNKS) if few and pipeline.rule.tried_shape is not None else (1,)
    if field == "placement":
        return (pipeline.rule.tried_shape or "loop",) if pipeline.chunks > 1 else ("loop",)
    # Limits: one round through the stages, and two, where a run would ask its memory. What memory allows was as slow as
    # a limit of 7 for 64 stages. With chunks, two limits took 1.5 times the search's seconds.
    if pipeline.size == 1 or not pipeline.rule.by_memory:
        return ("auto",)
    rounds, stages = (2,) if pipeline.chunks > 1 else (2, 1), pipeline.size * pipeline.chunks
    return tuple(sorted({min(times * stages, count * pipeline.chunks) for times in rounds}, reverse=True))


def _syncs(config: Config, job: SearchJob) -> tuple[str, ...]:
    """The strategies that a planner tries; of ranks that sum nothing together they are all the first."""
    sizes = dict(config.layout.axes)
    summed = math.prod(sizes[axis] for axis in config.layout.token_axes)
    sharded = is_fixed("layout.data.shard", job.fixed) and job.run.layout.data.shard is not None
    tried = tuple(name for name, sync in entries("syncs").items() if sync.candidate and (sync.grouped or not sharded))
    return tried if summed > 1 else tried[:1]


def _shards(config: Config, job: SearchJob) -> tuple[int | None, ...]:
    """Candidates for layout.data.shard: none, and the largest group inside a node."""
    layout = config.layout
    if not layout.data.strategy.slices:
        return (None,)
    shard = max((size for size in divisors(layout.data.size) if size <= _replicas_of_node(config, job)), default=1)
    return (None, shard) if 1 < shard < layout.data.size else (None,)


def _experts(config: Config, job: SearchJob) -> list[int]:
    """Experts on every rank; held by the replicas of a node, so that rows stay there; and held by as many as can."""
    data, count = config.layout.data, config.model.routing.num_experts or 1
    if job.experts is not None and config.model.routing.num_experts:
        # Of a program that deals experts over a layer's ranks too, these are dealt first.
        tensor, context = dict(config.layout.tensor.axes).get("tensor", 1), config.layout.context.size
        parts = job.experts.tensor or tensor
        over = tensor // parts * (context if job.experts.context else 1)
        if tensor % parts or count % max(1, over):
            return []
        count //= over
    # Both must divide: replicas into groups, experts onto the ranks of a group.
    sizes = divisors(math.gcd(data.shard or data.size, count))
    here = max((size for size in sizes if size <= _replicas_of_node(config, job)), default=1)
    return sorted({1, here, sizes[-1]})


def _replicas_of_node(config: Config, job: SearchJob) -> int:
    """How many replicas a node has, or a domain of links as fast that is larger."""
    layout = config.layout
    return _ranks_in_reach(config, job) // (ranks_of_layer(layout) * layout.pipeline.size)


def _ranks_in_reach(config: Config, job: SearchJob) -> int:
    """The ranks of a node, or of a domain of links as fast, where that is larger."""
    nodes, domain = config.layout.ranks_per_node, job.cluster.domain_devices
    if domain > job.cluster.devices_per_node:
        return max(size for size in divisors(job.devices) if size <= domain)
    return job.devices if nodes == "auto" else nodes


OFFLOAD = "memory.offload.to"
SAVINGS = {OFFLOAD: "none", RECOMPUTE: KEEPS_ALL}
"""The fields by which a layout saves memory and takes longer, and the value of each that saves nothing."""


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
        # The candidates, and the policies and groups of layers that a program asks for: each is a third more.
        lambda config, job: [
            *(name for name, policy in entries("activations").items() if policy.candidate),
            *(each for each in job.known.get(RECOMPUTE, ()) if not candidate_policy(each)),
        ],
    ),
    Choice("layout.order", _orders),
)


def candidate_policy(setting: str | int) -> bool:
    """Whether a value of memory.recompute is a policy that every search tries."""
    return policy_of(setting).candidate and isinstance(setting, str)


FAMILY = 8
"""The choices that a family of layouts has in common."""

TAIL = tuple(dict.fromkeys((
    "layout.pipeline", "memory.recompute", "batch", "layout.data.size",
    # A section that may be of several classes is read as a whole (remembered.py).
    *(
        next((whole for whole in ("model", "data", "layout.tensor") if f"{read}.".startswith(f"{whole}.")),
             read.replace("batch.global", "batch.global_"))
        for index in range(FAMILY + 1, len(CHOICES) - 1)
        for rule in _rules_after(index)
        for read in rule.reads
    ),
)))  # fmt: skip
"""The fields on which a Tail depends, with those that the rules behind a microbatch's size read."""
