"""Offloaded states: masters and moments in host memory or on disk, stepped in half-buckets on the device.

Only half-precision parameters and gradients stay on the device (AxoNN, arXiv 2110.13005, section on memory): with phi
parameters 4 · phi bytes, and 16 · bucket for the staging. A step, with pieces of bucket / 2 elements:

    lane      fetch 0 | fetch 1 |        write back 0, fetch 2 |        write back 1, fetch 3 | ...
    device              widen, divide, step, round 0             widen, divide, step, round 1   ...

The bits equal the bits of states in place: the same step on the same numbers. Pieces end at the ends of the kernel's
vectors (multiples of 64 elements). Slots that are float32 on the device (norm layers') are stepped on the device, and
only their moments are copied. With bf16 masters, only moments are copied for all slots.

On a CPU a thread steps a slot while the next slot's sum is waited for; a GPU overlaps both without a thread. Stepping
before all sums are done is limited to runs without clipping and loss scaling: with either, the norm must be known
before the first write. Undoing a step would need a second copy of the states, the memory that offloading saves.
"""

from __future__ import annotations

from collections import Counter
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
from meshwright.compute.parameters.rounding import WEIGHT, Draw, master_dtype, state_dtype, step_rounded
from meshwright.ranks.comm import Work
from meshwright.strategies.memory.staging import GRADIENT, Lane, Staging
from meshwright.strategies.memory.store import ELEMENT_BYTES, PAGE_ELEMENTS, DiskStore, HostStore

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.config.schema import OptimizerSection


SINGLE = 4
"""Bytes of a float32."""


def moment_bytes(settings: OptimizerSection, slot: SlotSize) -> list[int]:
    """Return the bytes of each of a slot's states."""
    return [
        spec.elements(slot.elements, slot.matrices) * state_dtype(settings, spec, slot.dtype).itemsize
        for spec in settings.update.states_of(slot.rule)
    ]


def master_bytes(settings: OptimizerSection, stored: torch.dtype) -> int:
    """Return the bytes of an element's master in addition to a weight stored in a dtype; 0: the weight is its own
    master."""
    master = master_dtype(settings, stored)
    return 0 if master == stored else master.itemsize


def kept_bytes(settings: OptimizerSection, slots: Sequence[SlotSize]) -> int:
    """Return the bytes of masters and moments of slots, on the device or off it."""
    return sum(
        times * (slot.elements * master_bytes(settings, slot.dtype) + sum(moment_bytes(settings, slot)))
        for slot, times in Counter(slots).items()  # layers have equal slots
    )


def state_bytes(config: Config, slots: Sequence[SlotSize], *, on_cpu: bool = False) -> int:
    """Return the bytes of masters and moments on the device: all, or with offload the two half-buckets of the staging.

    `slots`: stepped by a rank's optimizer. `on_cpu`: the device's memory is the host's, and so includes an offloaded
    optimizer's store.
    """
    everything = kept_bytes(config.optimizer, slots)
    if config.memory.offload.to == "none":
        return everything
    longest = max((slot.elements for slot in slots), default=0)
    staged = 2 * min(config.memory.offload.bucket // 2, longest)
    each = sum(dtype.itemsize for dtype in staged_dtypes(config).values())
    return staged * each + (everything if on_cpu and config.memory.offload.to == "host" else 0)


def staged_dtypes(config: Config) -> dict[str, torch.dtype]:
    """Return the dtypes of all tensors in the staging, by kind: a master, its gradient, moments."""
    settings, half = config.optimizer, torch.bfloat16
    masters = {WEIGHT: torch.float32, GRADIENT: torch.float32} if master_bytes(settings, half) else {}
    return masters | {spec.name: state_dtype(settings, spec, half) for spec in settings.update.states}


@dataclass(frozen=True)
class SlotPiece:
    """Elements start..stop of a slot; the `index`-th piece over all slots."""

    index: int
    start: int
    stop: int


class Offloaded:
    """Masters and moments of some slots in a store. `staging`: all of the states' memory on the device."""

    streams = True

    def __init__(self, config: Config, slots: Sequence[Slot], device: torch.device, storage: Path | int) -> None:
        """`storage`: the file of states on disk, or the bytes of host memory available for states. Raises ConfigError
        if the file cannot be written, or if there is not enough room."""
        self._settings, self._update = config.optimizer, config.optimizer.update
        self.slots = slots
        self.device = device
        self._dtypes = staged_dtypes(config)
        self._layout, num_elements = _layout(self._dtypes, config, slots)
        starts = [start for offsets in self._layout for start in offsets.values()]
        self.store = (
            DiskStore(num_elements, storage)
            if isinstance(storage, Path)
            else HostStore(num_elements, device, storage, starts)
        )
        self.lane = Lane(device, threaded=isinstance(storage, Path) or device.type != "cuda")
        # The bucket has two halves: one is stepped while the other is written back and fetched.
        half_bucket = config.memory.offload.bucket // 2
        # No piece is longer than a slot: a small model does not allocate a whole bucket.
        longest = max((slot.parameter.numel() for slot in slots), default=0)
        self.staging = Staging(self._dtypes, min(half_bucket, longest), device)
        self._pieces = list(_pieces(slots, self.staging.length))
        # Slots are stepped in the order of their numbers, so the next piece is known before any gradient is there.
        walk = [(index, piece) for index, pieces in enumerate(self._pieces) for piece in pieces]
        # The pieces of half-precision slots: their masters are in the store.
        half = ((index, slice(piece.start, piece.stop)) for index, piece in walk if WEIGHT in self._layout[index])
        self._half_spans = tuple(half)
        self._following = {before.index: after for (_, before), after in pairwise(walk)}
        self._ahead: Work | None = None
        self._has_moments = False
        self._walkers = ThreadPoolExecutor(1, "offload-steps")
        for index, span in self._half_spans:
            self._stored(index, WEIGHT)[span].copy_(slots[index].parameter.detach()[span])
        self.store.give_back()

    def step(self, indices: Iterable[int], step: StepWeights, draw: Draw) -> None:
        self._has_moments = True
        if self.device.type == "cpu":
            # `indices` waits for each slot's gradients; meanwhile the thread steps earlier slots.
            walks = [self._walkers.submit(self._walk, index, step, draw) for index in indices]
            # Reading every result raises the thread's errors here.
            for walk in walks:
                walk.result()
        else:
            for index in indices:
                self._walk(index, step, draw)
        self.lane.submit(lambda: None).wait()  # everything is written back
        self.store.give_back()

    def tensors(self, index: int) -> dict[str, Tensor]:
        held = {WEIGHT: self.slots[index].parameter.detach()}
        for state_name in self._layout[index]:
            # Moments of zeros are not part of a checkpoint before the first step, as in torch's optimizers.
            if state_name == WEIGHT or self._has_moments:
                held[state_name] = self._stored(index, state_name)
        return held

    def prepare(self) -> None:
        if self._has_moments:
            for index, starts in enumerate(self._layout):
                for state_name in starts.keys() - {WEIGHT}:
                    self._stored(index, state_name).zero_()
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
    def _walk(self, index: int, step: StepWeights, draw: Draw) -> None:
        """Step one slot, piece after piece. The next piece, maybe of the next slot, is fetched meanwhile."""
        for piece in self._pieces[index]:
            fetched = self._ahead or self.lane.submit(partial(self._copy, index, piece, back=False))
            following = self._following.get(piece.index)
            # Started before this piece is stepped. The lane keeps order, so the half to fill has been written back.
            self._ahead = self.lane.submit(partial(self._copy, *following, back=False)) if following else None
            fetched.wait()
            self._step_piece(index, piece, step, draw)
            self.lane.submit(partial(self._copy, index, piece, back=True))

    def _copy(self, index: int, piece: SlotPiece, *, back: bool) -> None:
        """Fetch a piece's states from the store to the staging, or write them back."""
        for state_name, start in self._layout[index].items():
            stored = self._stored(index, state_name)[piece.start : piece.stop]
            staged = self.staging.room(piece.index, state_name, stored.numel())
            if not back:
                staged.copy_(stored, non_blocking=True)
                continue
            stored.copy_(staged, non_blocking=True)
            # Every kind begins on a separate page, so no page that is given back holds another kind's elements.
            first, last = (_words(end, self._dtypes[state_name]) for end in (piece.start, piece.stop))
            self.store.give_back(start + first, start + last)

    def _step_piece(self, index: int, piece: SlotPiece, step: StepWeights, draw: Draw) -> None:
        slot, span, length = self.slots[index], slice(piece.start, piece.stop), piece.stop - piece.start
        assert slot.parameter.grad is not None, "a slot without a gradient"
        weight, gradient = slot.parameter.detach()[span], slot.parameter.grad[span]
        staged = WEIGHT in self._layout[index]
        if staged:
            # Half precision: the float32 master is staged and stepped, the gradient widened, the weight rounded from
            # the master.
            half, narrow = weight, gradient
            weight = self.staging.room(piece.index, WEIGHT, length)
            gradient = self.staging.room(piece.index, GRADIENT, length)
            gradient.copy_(narrow)
        states = self._update.states_of(slot.rule)
        moments = {spec.name: self.staging.room(piece.index, spec.name, length) for spec in states}
        if slot.rule.by != "signs" and self._settings.rounds:
            step_rounded(slot, piece.start, {WEIGHT: weight, **moments}, gradient, states, step, draw)
        elif slot.rule.by != "signs":
            step([weight], [gradient], [[moment] for moment in moments.values()], slot.rule)
        if staged:
            half.copy_(weight)

    def _stored(self, index: int, state_name: str) -> Tensor:
        """Return the memory [n] in the store of one kind of a slot's state."""
        start, length = self._layout[index][state_name], self.slots[index].parameter.numel()
        stop = start + _words(length, self._dtypes[state_name])
        return self.store.values[start:stop].view(self._dtypes[state_name])[:length]


def _words(elements: int, dtype: torch.dtype) -> int:
    """Return the number of the store's float32 elements that hold `elements` of a dtype."""
    return -(-elements * dtype.itemsize // ELEMENT_BYTES)


def _layout(
    dtypes: dict[str, torch.dtype], config: Config, slots: Sequence[Slot]
) -> tuple[list[dict[str, int]], int]:  # fmt: skip
    """Return the store's index of the first element of each slot's states, by kind, each on a new page; and the total
    length."""
    starts, end = [], 0
    for slot in slots:
        offsets: dict[str, int] = {}
        # A weight that is its own master stays on the device; only its moments are in the store.
        master = (WEIGHT,) if master_bytes(config.optimizer, slot.parameter.dtype) else ()
        for state_name in (*master, *(spec.name for spec in config.optimizer.update.states_of(slot.rule))):
            offsets[state_name] = end
            end += -(-_words(slot.parameter.numel(), dtypes[state_name]) // PAGE_ELEMENTS) * PAGE_ELEMENTS
        starts.append(offsets)
    return starts, end


def _pieces(slots: Sequence[Slot], length: int) -> Iterator[list[SlotPiece]]:
    """Yield each slot's pieces of at most `length` elements, numbered over all slots."""
    count = 0
    for slot in slots:
        size = slot.parameter.numel()
        starts = range(0, size, length) if size else ()
        yield [SlotPiece(count + index, start, min(start + length, size)) for index, start in enumerate(starts)]
        count += len(starts)
