"""The rules that join fields. A rule is a generator of problems; it names the fields it reads, so that it can be
left out when one of these is itself mistaken, and every other mistake is still reported in the same message.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Set

from meshwright.config.data_rules import DATA_RULES
from meshwright.config.layout_rules import LAYOUT_RULES
from meshwright.config.memory_rules import MEMORY_RULES
from meshwright.config.pipeline_rules import PIPELINE_RULES
from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.registry import entries
from meshwright.section import Rule, divisors, field_of, listed, rule


@rule("batch.global", "layout.data.size")
def replicas_divide_batch(config: Config) -> Iterator[Problem]:
    batch, size = config.batch.global_, config.layout.data.size
    if batch % size:
        yield Problem("layout.data.size", size, f"does not divide batch.global={batch}", listed(divisors(batch)))


@rule("batch.global", "batch.micro", "layout.data.size")
def microbatches_divide_replica(config: Config) -> Iterator[Problem]:
    batch, size = config.batch.global_, config.layout.data.size
    if batch % size == 0 and config.replica_batch % config.micro:
        part = f"a replica's {config.replica_batch} sequences (batch.global={batch} / layout.data.size={size})"
        yield Problem("batch.micro", config.micro, f"does not divide {part}", listed(divisors(config.replica_batch)))


@rule("layout.tensor", "model", "data")
def tensor_cuts_are_equal(config: Config) -> Iterator[Problem]:
    """The one rule of divisibility: each number that the tensor section divides falls into equal parts."""
    yield from (cut.problem for cut in config.layout.tensor.cuts(config) if cut.problem)


@rule("layout.tensor", "batch.global", "batch.micro", "layout.data.size")
def tensor_splits_rows(config: Config) -> Iterator[Problem]:
    name, parts = config.layout.tensor.rows
    if config.replica_batch and config.micro % parts:
        what = f"is no multiple of {name}{parts}, over which a microbatch's samples are split"
        fitting = [micro for micro in divisors(config.replica_batch) if micro % parts == 0]
        if config.batch.micro == "auto" or not fitting:
            valid = f"a multiple of {parts * config.layout.data.size}"
            yield Problem("batch.global", config.batch.global_, what, valid)
        else:
            yield Problem("batch.micro", config.micro, what, listed(fitting))


@rule("layout.tensor", "layout.data.sync")
def sync_goes_with_tensor(config: Config) -> Iterator[Problem]:
    tensor, sync = config.layout.tensor, config.layout.data.sync
    if sync == "fsdp" and tensor.axes:
        rule_text = f"shards whole layers, and layout.tensor.kind={tensor.kind} has cut them already"
        valid = "zero1, allreduce, ring, rooted, server-gradient, server-loss"
        yield Problem("layout.data.sync", "fsdp", rule_text, valid)


@rule("precision.level", "precision.dtype")
def dtype_fits_level(config: Config) -> Iterator[Problem]:
    level, dtype = config.precision.level, config.precision.dtype
    valid = ("float32", "float64") if level == "O0" else ("bf16", "fp16")
    if dtype not in valid:
        yield Problem("precision.dtype", dtype, f"does not go with precision.level={level}", ", ".join(valid))


@rule("layout.transport")
def transport_is_installed(config: Config) -> Iterator[Problem]:
    if config.layout.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
        hint = "torch, auto; or mpi after pip install 'meshwright[mpi]'"
        yield Problem("layout.transport", "mpi", "needs mpi4py, which is not installed", hint)


@rule("layout.transport", "layout.data.sync")
def transport_carries_sync(config: Config) -> Iterator[Problem]:
    if config.layout.transport == "mpi" and config.layout.data.sync == "fsdp":
        rule_text = "runs inside torch.distributed, which layout.transport=mpi does not start"
        yield Problem("layout.data.sync", "fsdp", rule_text, "layout.transport=torch or auto, or sync=zero1")


@rule("layout.data.size", "layout.data.sync")
def there_is_something_to_shard(config: Config) -> Iterator[Problem]:
    size, sync = config.layout.data.size, config.layout.data.sync
    if sync == "fsdp" and size == 1:
        yield Problem(
            "layout.data.size", size, "leaves layout.data.sync=fsdp nothing to shard", "2 or more, or sync=allreduce"
        )


@rule("layout.transport", "device")
def transport_reaches_device(config: Config) -> Iterator[Problem]:
    if config.layout.transport == "mpi" and config.device == "cuda":
        yield Problem("layout.transport", "mpi", "moves host memory only, and device=cuda", "torch, auto")


@rule("steps", "optimizer.schedule.warmup")
def warmup_fits(config: Config) -> Iterator[Problem]:
    warmup = config.optimizer.schedule.warmup
    if warmup > config.steps:
        yield Problem(
            "optimizer.schedule.warmup", warmup, f"is longer than steps={config.steps}", f"0 to {config.steps}"
        )


def _where_chosen(group: str, field: str) -> Iterator[Rule]:
    """The rules that a group's strategies bring, each asked where one of its strategies is the run's.

    `field`: the config's, which holds that one.
    """

    def bind(own: Rule) -> Rule:
        def check(config: Config) -> Iterator[Problem]:
            if own in field_of(config, field).rules:
                yield from own.check(config)

        return Rule((field, *own.reads), check)

    yield from map(bind, dict.fromkeys(own for entry in entries(group).values() for own in entry.rules))


RULES = (
    *_where_chosen("models", "model"),
    replicas_divide_batch,
    microbatches_divide_replica,
    dtype_fits_level,
    transport_is_installed,
    transport_carries_sync,
    there_is_something_to_shard,
    transport_reaches_device,
    warmup_fits,
    *DATA_RULES,
    tensor_cuts_are_equal,
    tensor_splits_rows,
    *_where_chosen("tensor", "layout.tensor"),
    sync_goes_with_tensor,
    *PIPELINE_RULES,
    *MEMORY_RULES,
    *LAYOUT_RULES,
)


def broken_rules(config: Config, mistaken: Set[str] = frozenset()) -> list[Problem]:
    """Every problem of every rule, and those of no rule or problem that reads a mistaken field or section."""

    def sound(reads: Iterable[str]) -> bool:
        return not any(_within(read, field) for read in reads for field in mistaken)

    problems = (problem for rule in RULES if sound(rule.reads) for problem in rule.check(config))
    return [problem for problem in problems if sound(problem.reads)]


def _within(field: str, section: str) -> bool:
    return field == section or field.startswith(section + ".")
