"""States elsewhere: an optimizer whose masters and moments are in host memory or on disk, walked in half-buckets.

Only half-precision parameters and gradients stay on the device (AxoNN, arXiv 2110.13005, section on memory): with phi
parameters 4 · phi bytes, and 16 · bucket for the staging. A step, with pieces of bucket / 2 elements:

    lane      fetch 0 | fetch 1 |        write back 0, fetch 2 |        write back 1, fetch 3 | ...
    device              widen, divide, step, round 0             widen, divide, step, round 1   ...

The bits are those of the states in place: the same step on the same numbers, in pieces that end where the kernel's
vectors end (multiples of 64 elements). Slots that are float32 on the device (norm layers') are stepped there; their
moments travel. On a CPU a thread walks, so that a slot is stepped while the next one's sum is waited for; a GPU does so
by itself. Slots are stepped so only without clipping and loss scaling: with either, the norm must be known before the
first write, and taking a step back would need the second copy of the states that offloading is there to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Slot, SlotSize, StepWeights
from meshwright.ranks.comm import Work
from meshwright.strategies.memory.staging import GRADIENT, Lane, Staging
from meshwright.strategies.memory.store import PAGE_ELEMENTS, DiskStore, HostStore

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.strategies.optim.section import Update

WEIGHT = "weight"


SINGLE = 4
"""Bytes of a float32, in which masters are kept, and the moments of anything no wider."""


def moment_bytes(update: Update, slot: SlotSize) -> list[int]:
    """The bytes of each of a slot's states."""
    master = max(SINGLE, slot.dtype.itemsize)
    return [
        spec.elements(slot.elements, slot.matrices)
        * (master if spec.dtype == "master" else vars(torch)[spec.dtype].itemsize)
        for spec in update.states_of(slot.rule)
    ]


def state_bytes(config: Config, slots: Sequence[SlotSize], *, on_cpu: bool = False) -> int:
    """Masters and moments on the device: all of them, or with offload the two half-buckets of the staging.

    `slots`: those that a rank's optimizer steps. `on_cpu`: the device's memory is the host's, where an offloaded
    optimizer's store lies as well.
    """
    update = config.optimizer.update
    if config.memory.offload.to == "none":
        masters = sum(slot.elements * SINGLE for slot in slots if slot.dtype.itemsize < SINGLE)
        return masters + sum(sum(moment_bytes(update, slot)) for slot in slots)
    stored = 0
    if on_cpu and config.memory.offload.to == "host":
        stored = sum(slot.elements * (1 + len(update.states_of(slot.rule))) for slot in slots)
    longest = max((slot.elements for slot in slots), default=0)
    staged = 2 * min(config.memory.offload.bucket // 2, longest)
    return SINGLE * (stored + staged * (len(update.states) + 2))  # the store; master, moments and the gradient


@dataclass(frozen=True)
class SlotPiece:
    """Elements start..stop of a slot; the `number`-th of the walk over all slots."""

    number: int
    start: int
    stop: int


class Offloaded:
    """Masters and moments of some slots in a store. `staging`: all that is on the device for them."""

    streams = True

    def __init__(self, config: Config, slots: Sequence[Slot], device: torch.device, place: Path | int) -> None:
        """`place`: the file of states on disk, or the bytes of host memory that there are for them. Raises ConfigError
        where the file cannot be written, or there is no room for all of it."""
        self._update = config.optimizer.update
        self.slots = slots
        self.device = device
        self._layout, num_elements = _layout(config, slots)
        self.store = (
            DiskStore(num_elements, place) if isinstance(place, Path) else HostStore(num_elements, device, place)
        )
        self.lane = Lane(device, threaded=isinstance(place, Path) or device.type != "cuda")
        # Two halves make the bucket: one is stepped while the other is written back and fetched.
        half_bucket = config.memory.offload.bucket // 2
        # No piece is longer than a slot: a small model does not stage a whole bucket.
        longest = max((slot.parameter.numel() for slot in slots), default=0)
        kinds = WEIGHT, *(spec.name for spec in self._update.states)
        self.staging = Staging(kinds, min(half_bucket, longest), device)
        self._pieces = list(_pieces(slots, self.staging.length))
        # Slots are walked in the order of their numbers, so what follows a piece is known before any gradient is there.
        walk = [(index, piece) for index, pieces in enumerate(self._pieces) for piece in pieces]
        # The pieces of the half-precision slots, whose masters are in the store.
        half = ((index, slice(piece.start, piece.stop)) for index, piece in walk if WEIGHT in self._layout[index])
        self._half_spans = tuple(half)
        self._following = {before.number: after for (_, before), after in pairwise(walk)}
        self._ahead: Work | None = None
        self._has_moments = False
        self._walkers = ThreadPoolExecutor(1, "offload-steps")
        for index, span in self._half_spans:
            self._stored(index, WEIGHT)[span].copy_(slots[index].parameter.detach()[span])
        self.store.give_back()

    def step(self, indices: Iterable[int], step: StepWeights) -> None:
        self._has_moments = True
        if self.device.type == "cpu":
            # `indices` waits for each slot's gradients: meanwhile the thread steps the slots that are there.
            walks = [self._walkers.submit(self._walk, index, step) for index in indices]
            # Every result is asked for: what the thread raised is raised here.
            for walk in walks:
                walk.result()
        else:
            for index in indices:
                self._walk(index, step)
        self.lane.submit(lambda: None).wait()  # all is written back
        self.store.give_back()

    def tensors(self, index: int) -> dict[str, Tensor]:
        held = {WEIGHT: self.slots[index].parameter.detach()}
        for kind in self._layout[index]:
            # Moments of zeros are not part of a checkpoint before the first step, as in torch's optimizers.
            if kind == WEIGHT or self._has_moments:
                held[kind] = self._stored(index, kind)
        return held

    def prepare(self) -> None:
        if self._has_moments:
            for index, starts in enumerate(self._layout):
                for kind in starts.keys() - {WEIGHT}:
                    self._stored(index, kind).zero_()
        self._has_moments = True

    def refresh(self) -> None:
        for index, span in self._half_spans:
            self.slots[index].parameter.detach()[span].copy_(self._stored(index, WEIGHT)[span])
        self.store.give_back()

    def update_masters(self) -> None:
        for index, span in self._half_spans:
            held = self.slots[index].parameter.detach()[span].cpu()
            master = self._stored(index, WEIGHT)[span]
            if not torch.equal(master.to(held.dtype), held):
                master.copy_(held)

    @torch.no_grad()
    def _walk(self, index: int, step: StepWeights) -> None:
        """Step one slot, piece after piece; the next piece, be it the next slot's, is fetched meanwhile."""
        for piece in self._pieces[index]:
            fetched = self._ahead or self.lane.submit(partial(self._copy, index, piece, back=False))
            following = self._following.get(piece.number)
            # Asked for before this piece is stepped; the lane keeps order, so the half that it fills has been written
            # back.
            self._ahead = self.lane.submit(partial(self._copy, *following, back=False)) if following else None
            fetched.wait()
            self._step_piece(index, piece, step)
            self.lane.submit(partial(self._copy, index, piece, back=True))

    def _copy(self, index: int, piece: SlotPiece, *, back: bool) -> None:
        """Fetch a piece's states from the store to the staging, or write them back."""
        for kind, start in self._layout[index].items():
            stored = self._stored(index, kind)[piece.start : piece.stop]
            staged = self.staging.room(piece.number, kind, stored.numel())
            if not back:
                staged.copy_(stored, non_blocking=True)
                continue
            stored.copy_(staged, non_blocking=True)
            # Every kind begins on a page of its own, so no page that is given back holds a neighbour's elements.
            self.store.give_back(start + piece.start, start + piece.stop)

    def _step_piece(self, index: int, piece: SlotPiece, step: StepWeights) -> None:
        slot, span, length = self.slots[index], slice(piece.start, piece.stop), piece.stop - piece.start
        assert slot.parameter.grad is not None, "a slot without a gradient"
        weight, gradient = slot.parameter.detach()[span], slot.parameter.grad[span]
        staged = WEIGHT in self._layout[index]
        if staged:
            # Half precision: the float32 master is staged and stepped, the gradient widened, the weight rounded from
            # it.
            half, narrow = weight, gradient
            weight = self.staging.room(piece.number, WEIGHT, length)
            gradient = self.staging.room(piece.number, GRADIENT, length)
            gradient.copy_(narrow)
        states = self._update.states_of(slot.rule)
        moments = [[self.staging.room(piece.number, spec.name, length)] for spec in states]
        if slot.rule.by != "signs":
            step([weight], [gradient], moments, slot.rule)
        if staged:
            half.copy_(weight)

    def _stored(self, index: int, kind: str) -> Tensor:
        """The memory [n] in the store of one kind of a slot's state."""
        start = self._layout[index][kind]
        return self.store.values[start : start + self.slots[index].parameter.numel()]


def _layout(config: Config, slots: Sequence[Slot]) -> tuple[list[dict[str, int]], int]:
    """Where in the store each slot's states begin, by kind, each on a page of its own; and where the last one ends."""
    starts, end = [], 0
    for slot in slots:
        own: dict[str, int] = {}
        # A float32 weight is its own master, stays on the device, and has its moments alone in the store.
        master = (WEIGHT,) if slot.parameter.element_size() < 4 else ()
        for kind in (*master, *(spec.name for spec in config.optimizer.update.states_of(slot.rule))):
            own[kind] = end
            end += -(-slot.parameter.numel() // PAGE_ELEMENTS) * PAGE_ELEMENTS
        starts.append(own)
    return starts, end


def _pieces(slots: Sequence[Slot], length: int) -> Iterator[list[SlotPiece]]:
    """Each slot's pieces of at most `length` elements, numbered through."""
    number = 0
    for slot in slots:
        size = slot.parameter.numel()
        starts = range(0, size, length) if size else ()
        yield [SlotPiece(number + place, start, min(start + length, size)) for place, start in enumerate(starts)]
        number += len(starts)
