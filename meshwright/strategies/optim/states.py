"""States hold the slots' master weights and moments, and call the optimizer's update on them.

The optimizer decides the rate, the divisor and whether to skip, and passes one function (StepWeights). `InPlace` keeps
states on the slots' device and steps all slots of one weight decay in one call. memory/offload.py keeps states on the
host or disk and steps chunk by chunk. Both give equal bits. States and weights in bf16 are stepped in float32, piece by
piece, and rounded at random (rounding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.bucket import Slot, StepWeights
from meshwright.compute.parameters.role import StepRule
from meshwright.compute.parameters.rounding import WEIGHT, Draw, master_dtype, state_dtype, step_rounded
from meshwright.ranks.comm import size_bytes

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.strategies.optim.section import StateSpec


class States(Protocol):
    """Masters and moments of some slots. A half-precision slot has a float32 master unless `optimizer.masters` is bf16;
    any other slot is stepped itself."""

    streams: bool
    """Whether to step each slot as soon as its gradient arrives (Optimizer.streams)."""

    def step(self, indices: Iterable[int], step: StepWeights, draw: Draw) -> None:
        """Apply `step` to each slot once, in the order of `indices`, and update the half-precision weights. `draw`: the
        random bits that round bf16."""

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return views of slot `index`'s master weights ("weight") [n], and of its states by name, flat
        (StateSpec.shape)."""

    def prepare(self) -> None:
        """Allocate zero moments, as the first step would, to receive a checkpoint's."""

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights."""

    def update_masters(self) -> None:
        """Replace each master that does not round to its weight, after weights were broadcast from another replica."""


StatesFactory = Callable[["Config", Sequence[Slot]], States]


WIDENED_BYTES = 2**28
"""Upper bound, in bytes, on float32 copies of half-precision gradients in one call; a call steps slots up to this
bound."""


def stepped_together(widened_bytes: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of slots to step in one call, given the bytes of each slot's float32 gradient copy (0: none)."""
    together: list[int] = []
    total = 0
    for index, size in enumerate(widened_bytes):
        # A slot above WIDENED_BYTES is stepped alone.
        if together and total + size > WIDENED_BYTES:
            yield together
            together, total = [], 0
        together.append(index)
        total += size
    if together:
        yield together


class InPlace:
    """Masters and moments on the slots' device. Steps when all gradients have arrived."""

    streams = False

    def __init__(self, config: Config, slots: Sequence[Slot]) -> None:
        self._settings, self._update = config.optimizer, config.optimizer.update
        self.slots = slots
        # A half-precision weight would round away updates below its last bit, so a float32 copy is stepped.
        self.masters = [
            x if (dtype := master_dtype(config.optimizer, x.dtype)) == x.dtype else nn.Parameter(x.detach().to(dtype))
            for x in (slot.parameter for slot in slots)
        ]
        self._moments: list[dict[str, Tensor]] = [{} for _ in slots]
        """Moments by kind, each [n] as its master; empty until the first step or `prepare`."""
        self._has_moments = False

    @torch.no_grad()
    def step(self, indices: Iterable[int], step: StepWeights, draw: Draw) -> None:
        for index in indices:
            assert self.slots[index].parameter.grad is not None, "a slot without a gradient"
        if not self._has_moments:
            self.prepare()
        # Each call steps slots of one rule.
        for rule, members in by_rule([slot.rule for slot in self.slots]).items():
            if self._settings.rounds:
                for index in members:
                    gradient, specs = self.slots[index].parameter.grad, self._update.states_of(rule)
                    assert gradient is not None, "a slot without a gradient"
                    step_rounded(self.slots[index], 0, self.tensors(index), gradient, specs, step, draw)
                continue
            # float32 copies of all half-precision gradients at once would take the same number of bytes as the masters.
            pairs = [(self.slots[index].parameter.grad, self.masters[index]) for index in members]
            widened = [
                size_bytes(master) * (gradient is None or gradient.dtype != master.dtype) for gradient, master in pairs
            ]
            for some in stepped_together(widened):
                self._step_together([members[position] for position in some], rule, step)
        self.refresh()

    def _step_together(self, members: list[int], rule: StepRule, step: StepWeights) -> None:
        """Step slots of one rule in one call."""
        masters = [self.masters[index] for index in members]
        weights = [master.detach() for master in masters]
        slot_gradients = (self.slots[index].parameter.grad for index in members)
        gradients = [
            gradient.to(master.dtype)
            for gradient, master in zip(slot_gradients, masters, strict=True)
            if gradient is not None
        ]
        assert len(gradients) == len(members), "a slot without a gradient"
        specs = self._update.states_of(rule)
        moments = [[self._moments[index][spec.name] for index in members] for spec in specs]
        if rule.by == "matrices":
            slots = [self.slots[index] for index in members]
            weights, gradients, *moments = (
                [matrix for slot, flat in zip(slots, each, strict=True) for matrix in _matrices(slot, flat, spec)]
                for each, spec in zip((weights, gradients, *moments), (None, None, *specs), strict=True)
            )
        if weights:  # a rank may own no matrix
            step(weights, gradients, moments, rule)

    def tensors(self, index: int) -> dict[str, Tensor]:
        return {WEIGHT: self.masters[index].detach(), **self._moments[index]}

    def prepare(self) -> None:
        for moments, slot, master in zip(self._moments, self.slots, self.masters, strict=True):
            for spec in self._update.states_of(slot.rule):
                dtype = state_dtype(self._settings, spec, master.dtype)
                length = spec.elements(master.numel(), slot.size.matrices)
                moments[spec.name] = torch.zeros(length, dtype=dtype, device=master.device)
        self._has_moments = True

    def refresh(self) -> None:
        for slot, master in zip(self.slots, self.masters, strict=True):
            # A slot that is its own master: nothing to copy.
            if master is not slot.parameter:
                slot.parameter.data.copy_(master.data)

    @torch.no_grad()
    def update_masters(self) -> None:
        for slot, master in zip(self.slots, self.masters, strict=True):
            # A master that rounds to the weight is kept: the master has digits that the weight lacks.
            if not torch.equal(master.to(slot.parameter.dtype), slot.parameter):
                master.copy_(slot.parameter)


def _matrices(slot: Slot, flat: Tensor, spec: StateSpec | None) -> Iterator[Tensor]:
    """Yield views of `flat` as the slot's matrices [rows, columns], or as their states of the spec's shape."""
    if spec is None or spec.shape is None:
        for region in slot.places:
            yield flat[region.start : region.stop].view(region.shape[0], -1)
        return
    for region in slot.state_slices(spec.shape).places:
        yield flat[region.start : region.stop].view(region.shape)


def by_rule(rules: Sequence[StepRule]) -> dict[StepRule, list[int]]:
    """Return the indices of the slots that the optimizer steps, by rule; rules with weight decay first."""
    order = sorted(
        {rule for rule in rules if rule.by in ("matrices", "elements")}, key=lambda rule: (not rule.decays, rule.by)
    )
    return {rule: [index for index, slot_rule in enumerate(rules) if slot_rule == rule] for rule in order}
