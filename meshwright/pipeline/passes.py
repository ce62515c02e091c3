"""The forward and backward passes of a step's microbatches: one after another on whole models, or as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from meshwright.model import Batch, Model, Scales
from meshwright.pipeline.span import Moment, Span, Watch
from meshwright.ranks.flight_recorder import FlightRecorder

Seed = Callable[[int], None]
"""seed(i): sets the random numbers of microbatch i's forward pass."""


class Passes(Protocol):
    """What the train loop asks: all microbatches of a step, or of an evaluation."""

    @property
    def spans(self) -> Sequence[Span]:
        """What this rank did in the last step, and when."""

    def train(self, batches: Sequence[Batch], scales: Scales, seed: Seed) -> Tensor:
        """Leaves the gradients' sums with the strategy.

        Returns the sum of the scaled losses, a float64 scalar; 0 on a rank that computes no loss.
        """

    def hidden(self, batches: Sequence[Batch]) -> Iterator[Tensor | None]:
        """Of each microbatch the normed hidden states [B, T, H], without gradients; None where no loss is computed."""


class Backward(Protocol):
    """A data-parallel strategy, as far as passes see it."""

    def backward(self, model: Model, batch: Batch, scales: Scales, *, final: bool) -> Tensor: ...


class Accumulation:
    """Whole models: a microbatch after the other, whose gradients add up."""

    def __init__(self, model: Model, strategy: Backward, device: torch.device, recorder: FlightRecorder) -> None:
        self.model = model
        self.strategy = strategy
        self.device = device
        self.recorder = recorder
        self._watch = Watch(device)
        self._moments: list[Moment] = []

    @property
    def spans(self) -> Sequence[Span]:
        """One a microbatch: both of its passes. Each ends where the next begins."""
        times = [moment() for moment in self._moments]
        return [
            Span(0, f"FB{index}", "forward+backward", start, end, index)
            for index, (start, end) in enumerate(pairwise(times))
        ]

    def train(self, batches: Sequence[Batch], scales: Scales, seed: Seed) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self._watch.start()
        self._moments = [self._watch.now()]
        for index, batch in enumerate(batches):
            seed(index)
            self.recorder.task = f"FB{index}"
            total += self.strategy.backward(self.model, batch, scales, final=index == len(batches) - 1)
            self._moments.append(self._watch.now())
        return total

    def hidden(self, batches: Sequence[Batch]) -> Iterator[Tensor | None]:
        for batch in batches:
            yield self.model.trunk(batch)
