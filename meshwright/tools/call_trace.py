"""Traces of module calls: bits of a step's first `bits.samples` rows on one device, call by call, in both passes.

| pass     | inputs of a call                                   | outputs of a call                                 |
|----------|----------------------------------------------------|---------------------------------------------------|
| forward  | the tensors given to the module                    | the returned tensors                              |
| backward | the gradients of the returned tensors              | the gradients of the given tensors                |
| weights  | none                                               | the gradient of a parameter, summed over its uses |

A call is a line: pass, path, class, 16 hexadecimal digits of the inputs, 16 of the outputs. Calls inside of a module
have earlier lines than the module's call; a backward call of a module without gradients of its inputs has a line as
soon as the gradients of its outputs are known. Gradients of a module's parameters follow its last backward call.
Two traces of equal programs have equal lines, whatever layout trained the run.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compute.model import Batch, Samples, counts_of, to_device
from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.config.section import with_field
from meshwright.parity.trace import all_tensors, in_backward
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint.merkle import tensor_leaf
from meshwright.training.checkpoint.reader import Checkpoint
from meshwright.training.checkpoint.restore import restore
from meshwright.training.decisions import WIDENING, resolve, this_machine
from meshwright.training.parts import Parts, build
from meshwright.training.step import replica_backward

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
ROOT = "model"
"""The name of the whole chain, whose path is empty."""
DIGITS = 16
"""Hexadecimal digits of a hash: 8 bytes."""
MOST_CALLS = 2**16
"""Lines of a trace, of at most 400 characters each."""


@dataclass(frozen=True)
class Call:
    """A module's call in a pass, or a parameter's gradient."""

    direction: str
    """forward, backward or weights."""
    path: str
    """The module's or parameter's name in the chain."""
    type: str
    """The module's class."""
    inputs: str
    outputs: str

    @classmethod
    def of(cls, line: str) -> Call:
        """Read a line of a trace."""
        return cls(*line.split(" "))

    @property
    def line(self) -> str:
        """Return the line of a trace."""
        return " ".join(asdict(self).values())

    @property
    def name(self) -> str:
        """Return path and class, as messages have them."""
        return f"{self.path} ({self.type})"


class Recorder:
    """Records the calls of a model's modules by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.given: list[str] = []
        """The hashes of the inputs of calls that have not ended."""
        self.modules = {module: name or ROOT for name, module in model.named_modules()}

    def hook(self, stack: ExitStack) -> None:
        """Install the hooks, until the stack is closed."""
        for module in self.modules:
            for handle in (
                module.register_forward_pre_hook(self.before, with_kwargs=True),
                module.register_forward_hook(self.after, with_kwargs=True),
                module.register_full_backward_hook(self.backward),
            ):
                stack.callback(handle.remove)

    def before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        """Hash the inputs before the module can write into these."""
        if not in_backward():
            self.given.append(hashed(all_tensors((arguments, keywords))))

    def after(self, module: nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
        """Record a forward call."""
        if not in_backward():
            self.add(FORWARD, module, self.given.pop(), hashed(all_tensors(result)))

    def backward(self, module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        """Record a backward call."""
        self.add(BACKWARD, module, hashed(all_tensors(of_outputs)), hashed(all_tensors(of_inputs)))

    def add(self, direction: str, module: nn.Module, inputs: str, outputs: str) -> None:
        """Append a call. Raises ConfigError at more than MOST_CALLS."""
        self.calls.append(Call(direction, self.modules[module], type(module).__name__, inputs, outputs))
        if len(self.calls) > MOST_CALLS:
            raise ConfigError.of("--trace", True, f"needs more than {MOST_CALLS:,} lines for this model", "no --trace")

    def lines(self, gradients: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return the trace after the backward pass. `gradients`: flat, by the parameter's name."""
        last = {call.path: index for index, call in enumerate(self.calls) if call.direction == BACKWARD}
        types = {path: type(module).__name__ for module, path in self.modules.items()}
        following: dict[int, list[Call]] = {}
        for name, gradient in gradients.items():
            path = name.rpartition(".")[0] or ROOT
            call = Call(WEIGHTS, name, types[path], hashed(()), hashed([gradient]))
            following.setdefault(last.get(path, len(self.calls) - 1), []).append(call)
        ordered = ([call, *following.get(index, ())] for index, call in enumerate(self.calls))
        return tuple(call.line for calls in ordered for call in calls)


def hashed(tensors: Sequence[Tensor]) -> str:
    """Return the first DIGITS of the SHA-256 over dtype, shape and bytes of each tensor, in order."""
    total = hashlib.sha256()
    for index, x in enumerate(tensors):
        total.update(tensor_leaf(str(index), x.detach().cpu().contiguous())[1])
    return total.hexdigest()[:DIGITS]


def trace_calls(config: Config, samples: Samples, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Compute the first rows after a checkpoint on one device, forward and backward; return the trace.

    These are `bits.samples` rows, or the first microbatch of a run without layout-free bits. The loss is the mean over
    these rows. Nothing is recomputed or compiled. Torch's threads and random numbers are restored afterwards.

    Args:
        config: The run's config.
        samples: The run's data.
        checkpoint: The checkpoint, of the run.

    Raises:
        ConfigError: The loss is over pairs, the trace is too long, or the run's device is not here.
        CheckpointError: The checkpoint does not fit.
    """
    if config.loss is not None:
        raise ConfigError.of("--trace", True, "has no step of a loss over pairs", "no --trace")
    origin, progress = checkpoint.manifest.origin, checkpoint.manifest.progress
    count = config.bits.samples if config.bits.layout_free else config.micro
    alone = config.model_copy(
        update={
            "layout": Layout(transport="torch"),
            "batch": config.batch.model_copy(update={"global_": count, "micro": count}),
            "memory": type(config.memory)(),
            "compile": "none",
            "epochs": None,
            "steps": progress.step + 1,
        }
    )
    if WIDENING in origin.resolved:
        alone = with_field(alone, WIDENING, origin.resolved[WIDENING])
    alone = resolve(alone, this_machine()).config
    mesh = solo_mesh(torch.device(alone.device), alone.grid.names)
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        stack.enter_context(torch.random.fork_rng())
        torch.set_num_threads(alone.threads if isinstance(alone.threads, int) else before)
        parts = build(alone, mesh, drawn=False)
        restore(parts, checkpoint)
        return traced_passes(parts, samples.samples(progress.samples, count), progress.samples)


def traced_passes(parts: Parts, rows: Batch, seen: int) -> tuple[str, ...]:
    """Run the passes of one rank's parts on a batch, and return the trace.

    Args:
        parts: The parts of a layout of one device.
        rows: A batch of batch.global samples.
        seen: The number of samples that the run has seen before.
    """
    with ExitStack() as stack:
        # Integers have no gradients: an embedding's backward call has outputs' gradients alone.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        recorder = Recorder(parts.model)
        recorder.hook(stack)
        counts = counts_of(rows, parts.model.labels)
        replica_backward(parts, to_device(rows, parts.mesh.device), counts, seen)
        parts.strategy.finish()
    gradients: dict[str, Tensor] = {}
    for slot in parts.strategy.slots:
        held = slot.parameter.grad
        assert held is not None, "a slot holds its gradient after the sums"
        gradients |= {region.name: held[region.start : region.stop] for region in slot.places}
    return recorder.lines(gradients)


def first_parted(certified: Sequence[str], here: Sequence[str]) -> str:
    """Name the first call with other bits; '' if all are equal.

    If a call's inputs differ and all earlier outputs are equal, the operation is between modules, in the innermost
    module around the call.
    """
    for line, now in zip(certified, here, strict=False):
        if line == now:
            continue
        call, other_call = Call.of(line), Call.of(now)
        if (call.direction, call.path, call.type) != (other_call.direction, other_call.path, other_call.type):
            return f"{call.direction} pass, {call.name} was called, and here {other_call.name}"
        if call.direction == WEIGHTS:
            return f"backward pass, {call.name}: the parameter's gradient differs"
        if call.inputs == other_call.inputs:
            told = "outputs differ, inputs are equal"
            if call.direction == BACKWARD:
                told = "gradients of its inputs differ, gradients of its outputs are equal"
            return f"{call.direction} pass, {call.name}: {told}"
        types = {each.path: each.name for each in map(Call.of, certified) if each.direction != WEIGHTS}
        outer = call.path
        while outer != ROOT:
            outer = outer.rpartition(".")[0] or ROOT
            if outer in types:
                break
        gradients = "" if call.direction == FORWARD else "gradients of its outputs "
        told = f"{gradients or 'inputs '}differ, and no earlier call does: an operation between modules"
        return f"{call.direction} pass, {types.get(outer, outer)}, at {call.name}: {told}"
    if len(certified) != len(here):
        return f"{len(certified)} calls were certified, here are {len(here)}"
    return ""
