"""A rank's gradients as sums of integers (fixed.py): equal bits in any order of portions, microbatches and chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.fixed import GRADIENT_DIGITS, FixedPoint
from meshwright.compute.parameters.gradients import Gradients, OnFirst, OnGradient, Views, WriteGradient
from meshwright.compute.parameters.writes import RowGradient, ScaledGradient


class ExactGradients(Gradients):
    """Accumulator of gradients as integers: adds each gradient to an int64 view, or to pairs of int64.

    A microbatch has several portions, each with a separate backward pass. `on_gradient` is called only in the last
    portion (`last_portion`): the bucket may be reduced after that call.
    """

    def __init__(
        self, views: Views, fixed: FixedPoint, on_gradient: OnGradient | None, on_first: OnFirst | None = None,
        counts: Collection[nn.Parameter] = (),
    ) -> None:  # fmt: skip
        """`counts`: parameters with whole numbers as gradients, of which a step reads the signs: added unscaled."""
        super().__init__(views, on_gradient, on_first)
        self.fixed, self._counts = fixed, frozenset(counts)
        self._begun: set[nn.Parameter] = set()
        """Parameters with a sum in the view."""

    def share(self, parameter: nn.Parameter, users: Sequence[int]) -> None:
        """Do nothing: the rank's chunks add to a tied table in one memory, since integer sums have no order."""

    def fill(self, parameter: nn.Parameter) -> None:
        """Write zeros if the parameter has no gradient; a gradient is already in its view."""
        if parameter not in self._begun:
            if self._on_first:
                self._on_first(parameter)
            self._views[parameter].zero_()

    def clear(self, parameter: nn.Parameter) -> None:
        super().clear(parameter)
        self._begun.discard(parameter)

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self._begun

    def _write(self, parameter: nn.Parameter, shape: torch.Size, write: WriteGradient, final: bool) -> None:
        view = self._views[parameter]
        few = isinstance(write, RowGradient) and write.ids.numel() < len(view)
        if few and view.device.type == "cpu" and self.fixed.dtype == torch.float32:
            # Only the rows of a look-up are read, rounded and added; a GPU would wait for the number of rows.
            if self._begins(parameter):
                view.zero_()
            assert isinstance(write, RowGradient)
            ids, rows = write.distinct()
            sums = view[ids]
            self.fixed.add(sums, rows, fresh=False)
            view[ids] = sums
        elif isinstance(write, ScaledGradient) and write.gradient.dtype == self.fixed.dtype:
            self._add(parameter, write.in_place())  # nothing reads the computed gradient again
        else:
            addend = torch.empty(shape, dtype=self.fixed.dtype, device=view.device)
            write(addend, 0)
            self._add(parameter, addend)
        if final and self.on_gradient and self.last_portion:
            self.on_gradient(parameter)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Move autograd's sum of one portion from .grad to the view, before the next portion."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._add(parameter, gradient.to(self.fixed.dtype))
        if self.on_gradient and self.last_portion and parameter not in self._last_work:
            self.on_gradient(parameter)

    def _begins(self, parameter: nn.Parameter) -> bool:
        """Note an addend of the parameter. Returns True for the first: the view has no sum."""
        if parameter in self._begun:
            return False
        if self._on_first:
            self._on_first(parameter)
        self._begun.add(parameter)
        return True

    def _add(self, parameter: nn.Parameter, addend: Tensor) -> None:
        digits = 0 if parameter in self._counts else GRADIENT_DIGITS
        fresh = self._begins(parameter)
        self.fixed.add(self._views[parameter], addend.contiguous(), fresh=fresh, digits=digits)
