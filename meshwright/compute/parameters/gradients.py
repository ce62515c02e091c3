"""A rank's gradients: where each is added up, when it is computed, and who is told that it is there.

A layer's backward pass says how a gradient is computed, `write(out, beta)`, and leaves the rest to `Gradients`:

- a gradient is written into its part of a bucket (bucket.py) and added up there, without a copy;
- while weight gradients are deferred, `write` is kept as work for later, with the communication that it needs. The
  gradient of a linear's input is urgent in a pipeline, since the stage before waits for it; those of its weights are
  not (zero-bubble pipelines, Qi et al., arXiv 2401.10241);
- the data-parallel strategy is told of each gradient that is there, so that full buckets can leave;
- where two chunks of a rank use one parameter, a table that is tied, each adds up in memory of its own, in the order of
  the microbatches. Messages decide whose task comes first, and in one memory they would decide the sum's last bits.
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
"""write(out, beta): compute a gradient into out, plus beta (0 or 1) times what is there. `out` may be wider than the
parameter's dtype."""

WeightWork = Callable[[bool], None]
"""work(final): computes a parameter's gradient and adds it to what is there; `final`: no other follows in this step."""

Views = Mapping[nn.Parameter, Tensor]
"""Each parameter's part of its bucket's gradients, in the parameter's shape."""

OnGradient = Callable[[nn.Parameter], None]
"""on_gradient(parameter): called when a microbatch's gradient of the parameter is there."""

OnFirst = Callable[[nn.Parameter], None]
"""on_first(parameter): called before a gradient is written, not added: its memory may have been given back."""


def memory_of(x: Tensor) -> tuple[int, int]:
    """The storage that a tensor lies in, and where in it."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


class Gradients:
    """All layers of a rank share one. Layers that were given none leave the adding up to autograd."""

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
        """The rank's chunk whose backward pass or work runs."""
        self.last_portion = True
        """Whether the backward pass or work that runs is the last of its microbatch."""
        self.apart: dict[nn.Parameter, dict[int, Tensor]] = {}
        """Parameters that several chunks use, with the memory of each but the first, whose gradient comes last."""
        # Weak: Python's collector does not see hooks, and a model that is dropped would stay with its bucket's memory.
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
        """Add to a gradient of the shape and dtype of `like`; returns what the backward pass hands to autograd.

        Where the gradient is added up here, now or later, autograd is handed None, and fires its hooks all the same.
        """
        if self._works is not None and may_wait:
            if parameter in self._last_work:
                # A table of which source and target are looked up has two works a microbatch: it is whole after the
                # last of them, and a bucket that left after the first would sum half of a gradient.
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
        """Let these chunks of the rank, in ascending order, add up a parameter's gradients apart from each other."""
        self.apart[parameter] = {user: torch.zeros_like(self._views[parameter]) for user in users[1:]}

    def fill(self, parameter: nn.Parameter) -> None:
        """Put the parameter's gradient into its memory, unless it was computed there; zeros where there is none."""
        view, gradient = self._views[parameter], parameter.grad
        if gradient is not view:
            if self._on_first:
                self._on_first(parameter)
            if gradient is None:
                view.zero_()
            # It may be in its memory as another tensor object. By storage: meta tensors all have the address 0.
            elif memory_of(gradient) != memory_of(view):
                view.copy_(gradient)
        # In the order of the chunks, whatever order their backward passes took: the same last bits in every run.
        for apart in self.apart.get(parameter, {}).values():
            view.add_(apart)
            apart.zero_()

    def clear(self, parameter: nn.Parameter) -> None:
        """Forget a gradient: the next is written, not added."""
        parameter.grad = None

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient has come since it was cleared."""
        return parameter.grad is not None

    @property
    def defers(self) -> bool:
        """Whether weight gradients are left for later."""
        return self._works is not None

    @contextmanager
    def deferred(self) -> Iterator[list[WeightWork]]:
        """The weight gradients of the backward passes inside come into the list, as work for later."""
        assert self._works is None, "a backward pass inside a backward pass"
        self._works = []
        try:
            yield self._works
        finally:
            self._works = None
            self._last_work.clear()

    def start(self, start: Callable[[], Moving]) -> Moving:
        """Begin communication for weight gradients: now, or where these are deferred when it is waited for."""
        # What W alone needs would delay what B sends to the stage before.
        return Moving(DONE, lambda: start().wait()) if self.defers else start()

    def _write(self, parameter: nn.Parameter, shape: torch.Size, write: WriteGradient, final: bool) -> None:
        """The gradient becomes .grad or is added to it. A deferred one is announced here, as no hook does."""
        apart = self.apart.get(parameter, {}).get(self.user)
        if apart is not None:  # the memory in which the chunk at work adds up, other than the parameter's own
            # Zeros lie there between steps (fill), so that adding needs no first time.
            write(apart.view(shape), 1)
            return
        adds = parameter.grad is not None
        if parameter.grad is None:
            if self._on_first:
                self._on_first(parameter)
            # autograd adopts the view as .grad: no memory is zeroed, allocated or copied for a first gradient.
            parameter.grad = self._views[parameter]
        write(parameter.grad.view(shape), int(adds))
        if final and self.on_gradient:
            self.on_gradient(parameter)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        deferred = parameter in self._last_work  # hooks fire for deferred gradients, too
        if self.on_gradient and not deferred and self.user not in self.apart.get(parameter, {}):
            self.on_gradient(parameter)
