"""Inputs of recomputed groups in host memory, by the activation policy `offload`.

A group's input is copied to pinned host memory while the group runs forward, and the memory on the device is free when
the next group begins. In a backward pass, the copy of one group's input back to the device is started when the backward
pass of the next group begins.

| on the device  | forward pass of group i            | backward pass of group i                           |
|----------------|------------------------------------|----------------------------------------------------|
| compute stream | waits for the copy of input i-1    | waits for input i, computes the group forward and back |
| lane           | copies input i to the host         | copies input i-1 to the device                     |

On a CPU the host's memory is the device's: copies are made at once, and save nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from meshwright.compute.model import Run
from meshwright.ranks.comm import DONE, Work, size_bytes
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.transport import Transport
from meshwright.strategies.memory.staging import Lane

Fetch = Callable[[], Sequence[Tensor]]
"""fetch(): moved tensors on the device, without a graph. Called once."""


class Copies(Protocol):
    """Copies of groups' inputs."""

    def moved(self, given: Sequence[Tensor]) -> Fetch:
        """Move a group's inputs, before the group runs forward."""

    def passed(self, result: Any) -> None:
        """Note the result of a group's forward pass."""


def in_host_memory(mesh: Mesh) -> Run:
    """Make a run that computes a function again in the backward pass, from arguments kept in host memory."""
    planned = mesh.device.type == "meta" and mesh.device_type == "cuda"
    lane = Lane(mesh.device, threaded=False)
    return partial(recomputed_from, PlannedCopies(mesh.transport) if planned else HostCopies(lane))


def recomputed_from(copies: Copies, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), computed again in the backward pass from arguments that were moved meanwhile.

    Tensors that require a gradient are moved. The others are shared by layers (rotations, masks), and stay.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    leaves, form = tree_flatten(arguments)
    positions = [position for position, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    first = [leaves[position] for position in positions]
    token = [x.new_empty(0) for x in first[:1]]  # gives checkpoint the device of the random numbers
    fetch = copies.moved(first)
    for position in positions:
        leaves[position] = None  # a closure that held the tensors would hold the device's memory

    def computed(*_: Tensor) -> Any:
        # The first pass reads the original tensors: their graph carries the gradients on.
        inputs = first.copy() if first else [x.requires_grad_() for x in fetch()]
        first.clear()
        filled = list(leaves)
        for position, x in zip(positions, inputs, strict=True):
            filled[position] = x
        return function(*tree_unflatten(filled, form))

    result = checkpoint(computed, *token, use_reentrant=False)
    copies.passed(result)
    return result


@dataclass(eq=False)
class Inputs:
    """The inputs of one group in one pass."""

    on_host: Sequence[Tensor]
    copied: Work
    """The copies to the host."""
    here: Sequence[Tensor]
    """The inputs on the device: still, or fetched; else empty."""
    before: Callable[[], Inputs | None]
    """Returns the inputs of the group before in the same pass."""
    fetched: Work = DONE
    """The copies to the device."""


class HostCopies:
    """Copies in host memory. The device holds the newest inputs until the next ones are moved and, in a backward pass,
    the inputs of one group ahead."""

    def __init__(self, lane: Lane) -> None:
        """lane: makes the copies, in order."""
        self._device, self._lane = lane.device, lane
        on_gpu = lane.device.type == "cuda"
        self._room = partial(torch.empty_like, device="cpu" if on_gpu else lane.device, pin_memory=on_gpu)
        self._newest: Callable[[], Inputs | None] = lambda: None
        self._passed: Sequence[weakref.ref[Tensor]] = ()
        """The results of the last group."""

    def moved(self, given: Sequence[Tensor]) -> Fetch:
        # A group's input is the previous group's result, the same tensor object.
        follows = any(x is passed() for x in given for passed in self._passed)
        before = self._newest if follows else (lambda: None)
        self._leave()
        here = [x.detach() for x in given]
        on_host = [self._room(x) for x in here]
        inputs = Inputs(on_host, self._lane.submit(partial(_copy, on_host, here)), here, before)
        self._newest = weakref.ref(inputs)
        return partial(self._fetch, inputs)

    def passed(self, result: Any) -> None:
        self._passed = [weakref.ref(x) for x in tree_leaves(result) if isinstance(x, Tensor)]
        if self._device.type == "meta":  # a separately recorded group has no next group that would free the inputs
            self._leave()

    def _fetch(self, inputs: Inputs) -> Sequence[Tensor]:
        """Return the inputs on the device, and start the copies of the group before."""
        if self._newest() is not inputs:
            self._leave()
        self._start(inputs)
        inputs.fetched.wait()
        here, inputs.here = inputs.here, ()
        if before := inputs.before():
            self._start(before)
        return here

    def _start(self, inputs: Inputs) -> None:
        """Start the copies to the device, unless the inputs are there."""
        if not inputs.here:
            inputs.here = [torch.empty_like(x, device=self._device) for x in inputs.on_host]
            inputs.fetched = self._lane.submit(partial(_copy, inputs.here, inputs.on_host))

    def _leave(self) -> None:
        """Free the newest inputs on the device. The compute stream waits for the copies before the memory is reused."""
        if newest := self._newest():
            newest.copied.wait()
            newest.here = ()
        self._newest = lambda: None


def _copy(out: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for target, x in zip(out, of, strict=True):
        target.copy_(x, non_blocking=True)


class PlannedCopies:
    """Copies of a planned GPU: memory is counted on the meta device, seconds by the transport's observer.

    Each group is recorded separately. A forward pass ends no sooner than the copies of the group's inputs. A backward
    pass ends no sooner than the copies of the previous group's inputs, which are on the device then. These are assumed
    to be as large as the group's inputs.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: Work = DONE
        self._ahead: Sequence[Tensor] = ()

    def moved(self, given: Sequence[Tensor]) -> Fetch:
        self._under_way = self._transport.host_copy(sum(map(size_bytes, given)), to_host=True)
        for x in given[:1]:
            x.register_hook(self.end_backward)  # the gradient of the input ends a group's backward pass
        make = [partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
        return partial(self._fetch, make)

    def passed(self, result: Any) -> None:
        self._under_way.wait()

    def _fetch(self, make: Sequence[Callable[[], Tensor]]) -> Sequence[Tensor]:
        here, self._ahead = [allocate() for allocate in make], [allocate() for allocate in make]
        self._under_way = self._transport.host_copy(sum(map(size_bytes, here)), to_host=False)
        return here

    def end_backward(self, gradient: Tensor) -> None:
        """End the backward pass of a group.

        Args:
            gradient: of the group's first input.
        """
        self._under_way.wait()
        self._ahead = ()
