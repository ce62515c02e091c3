"""The grain: so many samples are computed at a time, whatever the microbatch, so that kernels get one shape.

Random numbers are the grain's, too: each part of the chain begins with those of (seed, sample, part), so that dropout's
masks depend on no stage, replica or microbatch.

Where an axis cuts a microbatch's rows, each of its ranks has its own grains, and goes through them in step with the
others. Inside of branches (subgraph/) it sees the rows of all of them at once: one grain of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.bits.fixed import rounded_loss
from meshwright.model import Batch, Hidden
from meshwright.parameters.shard import seed_of

RunPart = Callable[..., Any]


class SampleGrains:
    """Grains of `samples` samples each, of microbatches of `micro`."""

    def __init__(
        self, samples: int, micro: int, seed: int, *, shares: int = 1, share: int = 0, at_once: int = 1,
        inside: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`shares`: ranks among which a microbatch's rows are dealt out, of which this one has the `share`-th part.
        `at_once`: the shares that a rank sees inside of branches; `inside`: the entries of a batch that are read there.
        """
        self.samples, self.seed, self.inside, self.at_once = samples, seed, inside, at_once
        self.micro, self.rows, self.share = micro, micro // shares, share
        self.count = self.rows // samples
        """Grains of a microbatch, one after another."""
        self.scale = 1.0
        """The step's loss scale."""
        self.first = 0
        """The first sample of this replica's part of the step, counted from the run's first."""
        self._grain = 0
        """The first sample of the grain that goes forward, of the first share."""
        self._part = 0
        self._drawn = 0
        """Numbers that blocks have drawn in this part of the chain."""

    def of(self, batch: Batch, incoming: Hidden) -> Iterator[tuple[Batch, Hidden]]:
        """Each grain's rows of a microbatch, in order, in memory of its own. Of what all samples share (a bias on
        attention, [1, A, T, T]) every grain has sent one."""
        for number in range(self.count):
            of_shares = {name: self.at_once if name in self.inside else 1 for name in batch}
            grain = {name: self._rows(x, number, of_shares[name]) for name, x in batch.items()}
            yield grain, tuple(self._rows(x, number, 1).detach().clone() for x in incoming)

    def _rows(self, x: Tensor, number: int, shares: int) -> Tensor:
        """A grain's rows of x, of each of its `shares`; none of what another rank holds for all."""
        every = len(x) // (shares * self.count)
        rows = x.unflatten(0, (shares, self.count * every))[:, number * every : (number + 1) * every]
        return rows.flatten(0, 1)

    def begin_step(self, first: int, scale: float) -> None:
        """A step begins. `first`: this replica's first sample, counted from the run's first; `scale`: of the loss."""
        self.first, self.scale = first, scale

    def begin(self, microbatch: int, number: int) -> None:
        """Grain `number` of a microbatch of this step goes forward."""
        self._grain = self.first + microbatch * self.micro + number * self.samples

    def draw(self, shares: int) -> list[int]:
        """A number for the next masks of blocks, which is the grain's wherever it is computed: this rank's own or, of
        several `shares`, each one's."""
        self._drawn += 1
        numbers = []
        for share in range(shares) if shares > 1 else [self.share]:
            generator = torch.Generator().manual_seed(self._seed(share))
            numbers.append(int(torch.randint(2**62, (self._drawn,), generator=generator)[-1]))
        return numbers

    def _seed(self, share: int) -> int:
        return seed_of(f"{self.seed}/dropout/{self._grain + share * self.rows}/{self._part}")

    def total_loss(self, losses: Sequence[Hidden]) -> Hidden:
        """(The sum of the grains' losses,), in float64: multiples of one power of two, whose order cannot matter."""
        rounded = [rounded_loss(loss, self.scale) for (loss,) in losses]
        return (torch.stack(rounded).sum(),)

    def seeded(self, run_part: RunPart) -> RunPart:
        """run_part, each of whose parts begins with random numbers of its own."""

        def run(part: int, function: Callable[..., Any], *arguments: Any) -> Any:
            self._part, self._drawn = part, 0
            torch.manual_seed(self._seed(self.share))
            return run_part(part, function, *arguments)

        return run

    def remembered(self, run_group: Callable[..., Any]) -> Callable[..., Any]:
        """run_group, whose functions draw the same grain's numbers when they run again in a backward pass."""

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            stands = self._grain, self._part, self._drawn

            def of_grain(*given: Any) -> Any:
                self._grain, self._part, self._drawn = stands
                return function(*given)

            return run_group(of_grain, *arguments)

        return run
