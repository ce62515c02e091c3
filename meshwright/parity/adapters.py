"""Checks that adapters get gradients on every rank, hold equal values, and are exported as trained; no reference.

    probe = parity.adapter_probe(model, optimizer)     # before the loop, on every rank
    ...                                                # the loop
    probe.exported("adapter/")                         # a folder with safetensors, or a state dict

At each of the first steps ranks exchange marks of values and gradients. exports.py compares the saved tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.parity.exports import export_findings
from meshwright.parity.norm import TOLERANCES, mark_of
from meshwright.parity.norm_sums import Mark, are_similar, square
from meshwright.parity.probes import ProbeFinding, announce, first_names, shared
from meshwright.parity.trace import clean_names
from meshwright.ranks.dtensor import box_of, from_all_ranks, gradient_of, joined_place, local_of, whole_of
from meshwright.ranks.errors import ParityError
from meshwright.ranks.foreign import parse_json


@dataclass(frozen=True)
class Adapter:
    """A rank's part of an adapter at a step. `extent`: shape and offsets. `gradient`: None if there is none."""

    extent: str
    stepped: bool
    empty: bool
    values: Mark
    gradient: Mark | None
    tolerance: float

    @property
    def is_moved(self) -> bool:
        return self.gradient is not None and square(self.gradient) > 0


Step = list[dict[str, Adapter]]
"""Adapters by name, of each rank."""


class AdapterProbe:
    """Probe of the first steps of an optimizer. `findings`: the mistakes; `line`: the verdict in sentences."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], parts: Sequence[str], steps: int) -> None:
        self.optimizers, self.parts, self.num_steps = optimizers, parts, steps
        cleaned = clean_names([name for name, _ in model.named_parameters()])
        named = {cleaned[name]: parameter for name, parameter in model.named_parameters()}
        self.adapters = {name: p for name, p in named.items() if p.requires_grad}
        self.findings: list[ProbeFinding] = []
        self.line = ""
        self._steps: list[Step] = []
        self._stack = ExitStack()
        trained = {
            name for text in from_all_ranks(json.dumps(list(self.adapters)).encode()) for name in parse_json(text)
        }
        if not trained:
            raise ParityError(
                "adapter_probe: no parameter requires a gradient on any rank: unfreeze the adapters first"
            )
        frozen = [name for name in named if name in trained and name not in self.adapters]
        self._frozen = shared([
            ProbeFinding("frozen", name.rpartition(".")[0],
                f"{name}: frozen on rank {(joined_place() or (0, 1))[0]}, and trained on others; "
                "call requires_grad_() on every rank") for name in frozen
        ])  # fmt: skip
        self._initial = {name: value.clone() for name, value in self._wholes()}
        self._stack.callback(optimizers[0].register_step_pre_hook(self.before_step).remove)

    def _wholes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each adapter as a whole tensor on the CPU. Collective for DTensors."""
        for name, parameter in self.adapters.items():
            yield name, whole_of(parameter.detach()).cpu()

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        """Send marks of this rank's adapters to all ranks, before the optimizer's step. Collective."""
        stepped = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        adapters = {}
        for name, parameter in self.adapters.items():
            values, gradient = local_of(parameter), gradient_of(parameter)
            coarse = max(TOLERANCES.get(x.dtype, 0.0) for x in (values, gradient) if x is not None)
            extent = f"{tuple(values.shape)} {box_of(parameter)}"
            mark = None if gradient is None else mark_of(gradient)
            adapters[name] = Adapter(
                extent, id(parameter) in stepped, not values.numel(), mark_of(values), mark, coarse
            )
        text = json.dumps({name: asdict(adapter) for name, adapter in adapters.items()}).encode()
        self._steps.append([
            {name: Adapter(**tree) for name, tree in parse_json(each).items()} for each in from_all_ranks(text)
        ])  # fmt: skip
        if len(self._steps) == self.num_steps:
            self._judge()

    def _judge(self) -> None:
        """End the probe, and judge the steps, if there are some."""
        if not self._steps:
            return
        self._stack.close()
        self.findings = [*self._frozen, *step_findings(self._steps, self.parts)]
        words = [finding.sentence for finding in self.findings]
        count, ranks, steps = len(self._steps[0][0]), len(self._steps[0]), len(self._steps)
        self.line = announce("adapter probe", words or [
            f"{count} adapters have gradients in {steps} step{'s' * (steps > 1)} on {ranks} rank{'s' * (ranks > 1)}, "
            "and copies are equal"
        ])  # fmt: skip
        self._steps = []

    def check(self) -> None:
        """Raise ParityError if something is wrong, or if the optimizer has not stepped."""
        self._judge()
        if not self.line:
            raise ParityError("adapter probe: the optimizer has not stepped: call check() behind the loop")
        if self.findings:
            raise ParityError("\n".join(f"adapter probe: {finding.sentence}" for finding in self.findings))

    @torch.no_grad()
    def exported(
        self, source: Mapping[str, Tensor] | str | Path | None, rename: Callable[[str], str] | None = None
    ) -> list[ProbeFinding]:
        """Compare an export with the trained adapters. Collective.

        Args:
            source: a state dict, a safetensors file or a folder of such files; None on ranks without the export.
            rename: rename(name) gives a parameter's name in the export; by default equal, also without prefixes and
                without peft's name of the adapter.
        """
        self._judge()
        wholes = dict(self._wholes())
        boxes = {name: box_of(parameter) for name, parameter in self.adapters.items()}
        found = export_findings(wholes, boxes, self._initial, source, self.parts, rename)
        self.findings += found
        words = [finding.sentence for finding in found]
        line = announce("adapter probe", words or ["the export has every adapter as it was trained"])
        self.line = f"{self.line}\n{line}".strip()
        return found


def step_findings(steps: Sequence[Step], parts: Sequence[str]) -> list[ProbeFinding]:
    """Judge some steps of all ranks: adapters with one cause share a finding."""
    causes: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys(name for rank in steps[0] for name in rank):
        for category, why, remedy in causes_of(steps, name, any(fnmatch(name, pattern) for pattern in parts)):
            causes.setdefault((category, why, remedy), []).append(name)
    return [
        ProbeFinding(category, names[0].rpartition(".")[0] or names[0], f"{first_names(names)}: {why}; {remedy}")
        for (category, why, remedy), names in causes.items()
    ]


def causes_of(steps: Sequence[Step], name: str, are_parts: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, cause, remedy) of each mistake of an adapter."""
    held = {rank: [step[rank][name] for step in steps] for rank, adapters in enumerate(steps[0]) if name in adapters}
    held = {rank: line for rank, line in held.items() if not line[0].empty}
    if lacking := [rank for rank, line in held.items() if not line[0].stepped]:
        yield ("not stepped", f"the optimizer does not have it on {ranks_in(lacking)}",
               "give the optimizer all parameters that require gradients, after adapters are added")  # fmt: skip
        return
    if bare := [rank for rank, line in held.items() if all(each.gradient is None for each in line)]:
        yield ("no gradient", f"it has no gradient on {ranks_in(bare)} in {len(steps)} steps",
               "call the adapted module in the forward pass (enable the adapter); with recomputed layers let inputs "
               "require gradients (enable_input_require_grads)")  # fmt: skip
        return
    # If B starts at zero, A has a zero gradient only in step 1. A sharded adapter may have rows that no token uses.
    idle = [rank for rank, line in held.items() if not any(each.is_moved for each in line)]
    if len(steps) > 1 and idle and (are_parts or len(idle) == len(held)):
        yield ("zero gradient", f"its gradient is zero on {ranks_in(idle)} in all of {len(steps)} steps",
               "start one factor from random values and the other from zero, and use the adapter's output")  # fmt: skip
    if are_parts:
        return
    copies: dict[str, list[int]] = {}
    for rank, line in held.items():
        copies.setdefault(line[0].extent, []).append(rank)
    for ranks in copies.values():
        for index in range(len(steps)):
            line = [held[rank][index] for rank in ranks]
            tolerance = max(each.tolerance for each in line)
            if not are_similar([each.values for each in line], tolerance, by_length=False):
                start = "start from" if index == 0 else f"have moved apart before step {index + 1} to"
                yield ("different start" if index == 0 else "moved apart",
                       f"{ranks_in(ranks)} {start} different values",
                       "send rank 0's values to all before the loop, or name parts of one rank in parts=")  # fmt: skip
                return
            if not are_similar([each.gradient or (0.0,) for each in line], tolerance, by_length=False):
                yield ("missing reduction", f"{ranks_in(ranks)} hold copies with different gradients in step "
                       f"{index + 1}", "reduce gradients of adapters over these ranks before the step")  # fmt: skip
                return


def ranks_in(ranks: Sequence[int]) -> str:
    """Return ranks as a text."""
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def adapter_probe(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], parts: Sequence[str] = (), steps: int = 3
) -> AdapterProbe:
    """Watch a model's adapters for some steps, and compare exports. Call once before a loop, on every rank.

    The bits of training do not change. Every rank must reach each step.

    Args:
        model: the model; its parameters with requires_grad are the adapters.
        optimizer: all optimizers that step after one backward pass.
        parts: patterns of names of tensors that are different parts on each rank (experts). Other plain tensors of one
            name are copies; a DTensor's placements give the part of a rank.
        steps: number of steps.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers or steps < 1:
        raise ParityError(
            f"adapter_probe got {len(optimizers)} optimizers and {steps} steps: give at least one of each"
        )
    return AdapterProbe(model, optimizers, parts, steps)
