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
        """Parameters with a sum in the view, or with a first addend."""
        self._first: set[nn.Parameter] = set()
        """Parameters with one addend in the view, not yet rounded: rounding two together writes the view once."""

    def share(self, parameter: nn.Parameter, users: Sequence[int]) -> None:
        """Do nothing: the rank's chunks add to a tied table in one memory, since integer sums have no order."""

    def fill(self, parameter: nn.Parameter) -> None:
        """Write zeros if the parameter has no gradient; a gradient is already in its view."""
        if parameter not in self._begun:
            if self._on_first:
                self._on_first(parameter)
            self._views[parameter].zero_()
        self._round_first(parameter)

    def clear(self, parameter: nn.Parameter) -> None:
        super().clear(parameter)
        self._begun.discard(parameter)
        self._first.discard(parameter)

    def has(self, parameter: nn.Parameter) -> bool:
        return parameter in self._begun

    def _write(self, parameter: nn.Parameter, shape: torch.Size, write: WriteGradient, final: bool) -> None:
        view = self._views[parameter]
        few = isinstance(write, RowGradient) and write.ids.numel() < len(view)
        if few and view.device.type == "cpu" and self.fixed.dtype == torch.float32:
            # Only the rows of a look-up are read, rounded and added; a GPU would wait for the number of rows.
            if self._begins(parameter):
                view.zero_()
            self._round_first(parameter)
            assert isinstance(write, RowGradient)
            ids, rows = write.distinct()
            sums = view[ids]
            self.fixed.add(sums, rows, fresh=False)
            view[ids] = sums
        elif (
            parameter not in self._begun
            and parameter not in self._counts
            and not self.last_portion  # the next portion's gradient is near
            and not isinstance(write, ScaledGradient)  # a computed gradient is rounded in place
            and self.fixed.holds(view)
        ):
            self._begins(parameter)
            self._first.add(parameter)
            write(self.fixed.first(view).view(shape), 0)
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

    def _round_first(self, parameter: nn.Parameter) -> None:
        """Round the first addend of a parameter, if it is not rounded yet."""
        if parameter in self._first:
            self._first.discard(parameter)
            view = self._views[parameter]
            self.fixed.add(view, self.fixed.first(view), fresh=True)

    def _add(self, parameter: nn.Parameter, addend: Tensor) -> None:
        view, digits = self._views[parameter], 0 if parameter in self._counts else GRADIENT_DIGITS
        if parameter in self._first:
            self._first.discard(parameter)
            self.fixed.add_to_first(view, addend.contiguous())
        else:
            self.fixed.add(view, addend.contiguous(), fresh=self._begins(parameter), digits=digits)
