"""The grain: so many samples are computed at a time, whatever the microbatch, so that kernels get one shape.

Random numbers are the grain's, too: each part of the chain begins with those of (seed, step, grain, part), so that
dropout's masks depend on no stage, replica or microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshwright.bits.fixed import rounded_loss
from meshwright.model import Batch, Hidden, rows_of
from meshwright.parameters.shard import seed_of

RunPart = Callable[..., Any]


class SampleGrains:
    """Grains of `samples` samples each, of microbatches of `micro`."""

    def __init__(self, samples: int, micro: int, seed: int) -> None:
        self.samples, self.micro, self.seed = samples, micro, seed
        self.scale = 1.0
        """The step's loss scale."""
        self.first = 0
        """The first sample of this replica's part of the step, counted from the run's first."""
        self._sample = 0
        """The first sample of the grain that goes forward."""

    def of(self, batch: Batch, incoming: Hidden) -> Iterator[tuple[Batch, Hidden]]:
        """Each grain's rows of a microbatch, in order, in memory of its own. Of what all samples share (a bias on
        attention, [1, A, T, T]) every grain has sent one."""
        count = next(iter(batch.values())).shape[0] // self.samples
        passing = zip(*(x.chunk(count) for x in incoming), strict=True) if incoming else [()] * count
        for number, own in enumerate(passing):
            rows = slice(number * self.samples, (number + 1) * self.samples)
            yield rows_of(batch, rows), tuple(x.detach().clone() for x in own)

    def begin_step(self, first: int, scale: float) -> None:
        """A step begins. `first`: this replica's first sample, counted from the run's first; `scale`: of the loss."""
        self.first, self.scale = first, scale

    def begin(self, microbatch: int, number: int) -> None:
        """Grain `number` of a microbatch of this step goes forward."""
        self._sample = self.first + microbatch * self.micro + number * self.samples

    def total_loss(self, losses: Sequence[Hidden]) -> Hidden:
        """(The sum of the grains' losses,), in float64: multiples of one power of two, whose order cannot matter."""
        rounded = [rounded_loss(loss, self.scale) for (loss,) in losses]
        return (torch.stack(rounded).sum(),)

    def seeded(self, run_part: RunPart) -> RunPart:
        """run_part, each of whose parts begins with random numbers of its own."""

        def run(part: int, function: Callable[..., Any], *arguments: Any) -> Any:
            torch.manual_seed(seed_of(f"{self.seed}/dropout/{self._sample}/{part}"))
            return run_part(part, function, *arguments)

        return run

    def remembered(self, run_group: Callable[..., Any]) -> Callable[..., Any]:
        """run_group, whose functions draw the same grain's numbers when they run again in a backward pass."""

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            sample = self._sample

            def of_grain(*given: Any) -> Any:
                self._sample = sample
                return function(*given)

            return run_group(of_grain, *arguments)

        return run
