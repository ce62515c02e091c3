"""States: where the masters and moments of the slots live, and how they are stepped.

The optimizer decides (rate, divisor, whether a step is applied at all), and hands that over as a function; states call
it. `InPlace` keeps them on the device beside the slots and steps all of one weight decay in one call; memory/offload.py
keeps them elsewhere and steps piece by piece. Both leave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from meshwright.parameters.bucket import Slot, StepWeights
from meshwright.ranks.comm import size_bytes

if TYPE_CHECKING:
    from meshwright.config import Config


class States(Protocol):
    """The masters and moments of some slots. Half-precision slots have float32 masters; others are their own."""

    streams: bool
    """Whether a slot is best stepped as soon as its gradient is there, while others' are still under way."""

    def step(self, indices: Iterable[int], step: StepWeights) -> None:
        """StepWeights each slot once, in the order of `indices`; then the weights are new."""

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The weights and the state tensors of slot `index`, each [n] like the slot, by name. Views, not copies."""

    def prepare(self) -> None:
        """Make zero states as torch would at its first step, so that a checkpoint's can be copied in."""

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights."""

    def update_masters(self) -> None:
        """Copy into a master the weight that is no longer its rounding, since the weight was mended."""


StatesFactory = Callable[["Config", Sequence[Slot]], States]


WIDENED_BYTES = 2**28
"""The most that float32 copies of half-precision gradients take at a time: as many slots are stepped together."""


def stepped_together(widened_bytes: Sequence[int]) -> Iterator[list[int]]:
    """The indices of slots that are stepped in one call, given the bytes that each one's gradient is widened to."""
    together: list[int] = []
    total = 0
    for index, size in enumerate(widened_bytes):
        # A slot larger than the bound goes alone: it cannot be cut here.
        if together and total + size > WIDENED_BYTES:
            yield together
            together, total = [], 0
        together.append(index)
        total += size
    if together:
        yield together


class InPlace:
    """Every slot's master and moments, whole. A step is taken when all gradients are there."""

    streams = False

    def __init__(self, config: Config, slots: Sequence[Slot]) -> None:
        self._kinds = config.optimizer.update.states
        self._matrices = config.optimizer.update.matrices
        self.slots = slots
        # A half-precision weight would swallow steps below its last bit: a float32 copy of it is stepped instead.
        self.masters = [
            nn.Parameter(x.detach().float()) if x.element_size() < 4 else x for x in (slot.parameter for slot in slots)
        ]
        self._moments: list[dict[str, Tensor]] = [{} for _ in slots]
        """The moments by kind, each [n] like its master; made by the first step, or by `prepare` for a checkpoint's."""
        self._has_moments = False

    @torch.no_grad()
    def step(self, indices: Iterable[int], step: StepWeights) -> None:
        for index in indices:
            assert self.slots[index].parameter.grad is not None, "a slot without a gradient"
        if not self._has_moments:
            self.prepare()
        # Weight decay acts on matrices alone, and is one number a call: two calls at least.
        for matrix in (True, False):
            members = [index for index, slot in enumerate(self.slots) if slot.matrix == matrix and not slot.nudged]
            # float32 copies of all gradients at once would take as much as the masters; WIDENED_BYTES bounds them.
            pairs = [(self.slots[index].parameter.grad, self.masters[index]) for index in members]
            widened = [size_bytes(master) * (own is None or own.dtype != master.dtype) for own, master in pairs]
            for some in stepped_together(widened):
                self._step_together([members[place] for place in some], matrix, step)
        self.refresh()

    def _step_together(self, members: list[int], matrix: bool, step: StepWeights) -> None:
        """Step slots that have the same weight decay, in one call."""
        masters = [self.masters[index] for index in members]
        weights = [master.detach() for master in masters]
        own = (self.slots[index].parameter.grad for index in members)
        gradients = [
            gradient.to(master.dtype) for gradient, master in zip(own, masters, strict=True) if gradient is not None
        ]
        assert len(gradients) == len(members), "a slot without a gradient"
        moments = [[self._moments[index][kind] for index in members] for kind in self._kinds]
        if self._matrices:
            weights, gradients, *moments = (
                [part for index, flat in zip(members, each, strict=True) for part in _parts(self.slots[index], flat)]
                for each in (weights, gradients, *moments)
            )
        step(weights, gradients, moments, matrix)

    def tensors(self, index: int) -> dict[str, Tensor]:
        return {"weight": self.masters[index].detach(), **self._moments[index]}

    def prepare(self) -> None:
        self._moments = [{kind: torch.zeros_like(master.detach()) for kind in self._kinds} for master in self.masters]
        self._has_moments = True

    def refresh(self) -> None:
        for slot, master in zip(self.slots, self.masters, strict=True):
            # A float32 slot is its own master: nothing to copy.
            if master is not slot.parameter:
                slot.parameter.data.copy_(master.data)

    @torch.no_grad()
    def update_masters(self) -> None:
        for slot, master in zip(self.slots, self.masters, strict=True):
            # A master that rounds to the weight knows digits that the weight has lost: only one that does not is
            # replaced.
            if not torch.equal(master.to(slot.parameter.dtype), slot.parameter):
                master.copy_(slot.parameter)


def _parts(slot: Slot, flat: Tensor) -> Iterator[Tensor]:
    """A slot's parameters, of memory [n] like the slot's: a hidden layer's matrix [rows, columns], all else flat."""
    for place in slot.places:
        part = flat[place.start : place.stop]
        yield part.view(place.shape[0], -1) if place.is_hidden else part
