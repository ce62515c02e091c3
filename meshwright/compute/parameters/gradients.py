"""A rank's gradients: the memory each is accumulated in, the time it is computed, and the callback that follows.

A layer's backward pass passes a function `write(out, beta)` that computes a gradient. `Gradients` does the rest:

- Write each gradient into its part of a bucket (bucket.py) and accumulate there, without a copy.
- While weight gradients are deferred, keep `write` and its communication as work for later. In a pipeline the previous
  stage waits for the gradient of a linear's input. No stage waits for the weight gradients (zero-bubble pipelines,
  Qi et al., arXiv 2401.10241).
- Notify the data-parallel strategy of each finished gradient, so that full buckets can be reduced.
- If two chunks of a rank use one parameter (a tied table), accumulate each chunk's gradient in separate memory, by
  microbatch. The order of messages decides which chunk runs first, and would decide the last bits of a shared sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meshwright.ranks.collectives import Moving
from meshwright.ranks.comm import DONE

WriteGradient = Callable[[Tensor, int], object]
"""write(out, beta): set out to the gradient plus beta (0 or 1) times out. The dtype of `out` may be wider than the
parameter's dtype."""

WeightWork = Callable[[bool], None]
"""work(final): add a gradient to the parameter's sum. `final`: no other work follows in this step."""

Views = Mapping[nn.Parameter, Tensor]
"""For each parameter, the view of the bucket's gradients in the parameter's shape."""

OnGradient = Callable[[nn.Parameter], None]
"""on_gradient(parameter): called after a microbatch's gradient of the parameter has been added."""

OnFirst = Callable[[nn.Parameter], None]
"""on_first(parameter): called before a gradient is written, not added: the memory may have been freed."""


def memory_of(x: Tensor) -> tuple[int, int]:
    """Return a tensor's storage and offset, which identify the memory."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


class Gradients:
    """Accumulator of weight gradients, one per rank, shared by all layers. Layers without one use autograd's sums."""

    def __init__(
        self, views: Views | None = None, on_gradient: OnGradient | None = None, on_first: OnFirst | None = None
    ) -> None:
        self._views = dict(views or {})
        self.on_gradient = on_gradient
        self._on_first = on_first
        self._works: list[WeightWork] | None = None
        self._last_work: dict[nn.Parameter, int] = {}
        """The index of the last deferred work, by parameter."""
        self.user = 0
        """The rank's chunk that runs a backward pass or deferred work."""
        self.last_portion = True
        """Whether the running backward pass or work is the last of the microbatch."""
        self.apart: dict[nn.Parameter, dict[int, Tensor]] = {}
        """Per parameter used by several chunks: the gradient memory of each chunk except the first."""
        # Weak: Python's collector does not see hooks. A strong reference would keep a dropped model and its buckets.
        told: WeakMethod[OnGradient] = WeakMethod(self._accumulated)

        def tell(parameter: nn.Parameter) -> None:
            if (accumulated := told()) is not None:
                accumulated(parameter)

        for parameter in self._views if on_gradient else ():
            parameter.register_post_accumulate_grad_hook(tell)

    def begin_pass(self, user: int, *, last_portion: bool = True) -> None:
        """Begin a backward pass, or deferred work of one.

        Args:
            user: the rank's chunk that is computed.
            last_portion: True in the last portion of a microbatch.
        """
        self.user, self.last_portion = user, last_portion

    def add(
        self, parameter: nn.Parameter, like: Tensor, write: WriteGradient, *, may_wait: bool = True
    ) -> Tensor | None:
        """Add a gradient of the shape and dtype of `like`, now or (if it `may_wait`) as deferred work.

        Returns the value for autograd: None if added here, else the gradient. Autograd calls hooks in either case.
        """
        if self._works is not None and may_wait:
            if parameter in self._last_work:
                # A table used for source and target tokens has two works per microbatch. Only the last one is final:
                # a bucket reduced after the first would sum half of a gradient.
                index = self._last_work[parameter]
                earlier = self._works[index]
                self._works[index] = lambda final: earlier(False)
            self._last_work[parameter] = len(self._works)
            self._works.append(partial(self._write, parameter, like.shape, write))
        elif parameter in self._views:
            self._write(parameter, like.shape, write, final=False)
        else:
            out = torch.empty_like(like)
            write(out, 0)
            return out
        return None

    def share(self, parameter: nn.Parameter, users: Sequence[int]) -> None:
        """Allocate separate gradient memory for each of the rank's chunks `users` (ascending) but the first."""
        self.apart[parameter] = {user: torch.zeros_like(self._views[parameter]) for user in users[1:]}

    def fill(self, parameter: nn.Parameter) -> None:
        """Copy the parameter's gradient into the bucket unless it is already there; write zeros if there is none."""
        view, gradient = self._views[parameter], parameter.grad
        if gradient is not view:
            if self._on_first:
                self._on_first(parameter)
            if gradient is None:
                view.zero_()
            # .grad may be another tensor object over this memory. Compare storages: meta tensors all have address 0.
            elif memory_of(gradient) != memory_of(view):
                view.copy_(gradient)
        # Add in the order of the chunks, not of the backward passes, for equal last bits in every run.
        for apart in self.apart.get(parameter, {}).values():
            view.add_(apart)
            apart.zero_()

    def clear(self, parameter: nn.Parameter) -> None:
        """Drop the parameter's gradient, so that the next one is written, not added."""
        parameter.grad = None

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient has been written since the last `clear`."""
        return parameter.grad is not None

    @property
    def defers(self) -> bool:
        """Whether weight gradients are deferred."""
        return self._works is not None

    @contextmanager
    def deferred(self) -> Iterator[list[WeightWork]]:
        """Defer weight gradients of the backward passes inside the context: the yielded list receives the works."""
        assert self._works is None, "a backward pass inside a backward pass"
        self._works = []
        try:
            yield self._works
        finally:
            self._works = None
            self._last_work.clear()

    def start(self, start: Callable[[], Moving]) -> Moving:
        """Start communication for weight gradients now or, if they are deferred, when the result is waited for."""
        # Communication for W (weight gradients) would delay the message of B (input gradients) to the previous stage.
        return Moving(DONE, lambda: start().wait()) if self.defers else start()

    def _write(self, parameter: nn.Parameter, shape: torch.Size, write: WriteGradient, final: bool) -> None:
        """Write a gradient as .grad or add to .grad. Call `on_gradient` for a deferred one, since no hook runs then."""
        apart = self.apart.get(parameter, {}).get(self.user)
        if apart is not None:  # the running chunk accumulates in separate memory
            # `fill` zeroes this memory after each step, so the first gradient can be added too.
            write(apart.view(shape), 1)
            return
        gradient = parameter.grad
        adds = gradient is not None
        if gradient is None:
            if self._on_first:
                self._on_first(parameter)
            # The view becomes .grad: no memory is zeroed, allocated or copied for a first gradient.
            gradient = parameter.grad = self._views[parameter]
        write(gradient.view(shape), int(adds))
        if final and self.on_gradient:
            self.on_gradient(parameter)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        deferred = parameter in self._last_work  # autograd calls hooks for deferred gradients, too
        if self.on_gradient and not deferred and self.user not in self.apart.get(parameter, {}):
            self.on_gradient(parameter)
