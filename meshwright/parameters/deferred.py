"""Weight gradients as work for later: a backward pass that only goes back, and leaves what nobody waits for to a queue.

The gradient of a linear's input is urgent in a pipeline, since the stage before waits for it; those of its weights are
not (zero-bubble pipelines, Qi et al., arXiv 2401.10241). While a `Deferred` collects, a layer hands its weight
gradients over as functions instead of computing them, with the communication that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from meshwright.ranks.collectives import Moving
from meshwright.ranks.comm import DONE

WeightWork = Callable[[bool], None]
"""work(final): computes a parameter's gradient and adds it to what is there; `final`: no other follows in this step."""


def _not_yet(work: WeightWork, final: bool) -> None:
    work(False)


def _nobody(parameter: nn.Parameter) -> None:
    return None


@dataclass
class Deferred:
    """One for all layers of a rank. `filled` is told of a parameter whose gradient is whole."""

    filled: Callable[[nn.Parameter], None] = _nobody
    _works: list[WeightWork] | None = None
    _awaited: dict[nn.Parameter, int] = field(default_factory=dict)
    """Parameters with work in the list, and the place of their last one."""

    @property
    def collects(self) -> bool:
        return self._works is not None

    @contextmanager
    def collecting(self) -> Iterator[list[WeightWork]]:
        """The weight gradients of the backward passes inside come into the list."""
        assert self._works is None, "a backward pass inside a backward pass"
        self._works = []
        try:
            yield self._works
        finally:
            self._works = None
            self._awaited.clear()

    def add(self, parameter: nn.Parameter, work: WeightWork) -> None:
        assert self._works is not None, "nobody collects"
        if parameter in self._awaited:  # a table of which source and target are looked up: only the last work is final
            self._works[self._awaited[parameter]] = partial(_not_yet, self._works[self._awaited[parameter]])
        self._awaited[parameter] = len(self._works)
        self._works.append(work)

    def awaits(self, parameter: nn.Parameter) -> bool:
        """Whether the running backward pass has left this gradient for later. (Autograd's hooks fire all the same.)"""
        return parameter in self._awaited

    def start(self, start: Callable[[], Moving]) -> Moving:
        """Something that only a weight gradient needs: begun now, or where these are deferred when it is waited for."""
        return Moving(DONE, lambda: start().wait()) if self.collects else start()
