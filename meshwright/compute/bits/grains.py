"""Grains: a fixed number of samples is computed at a time, so that kernel shapes do not depend on the microbatch.

Each part of the chain is seeded by (seed, first sample of the grain, part). So dropout masks do not depend on stage,
replica or microbatch.

If an axis cuts the rows of a microbatch, each rank has grains of its own rows, and all ranks compute grain i at the
same time. Inside of branches (subgraph/) a rank computes one grain of each rank at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.model import Batch, Hidden
from meshwright.compute.parameters.fixed import rounded_loss
from meshwright.compute.parameters.shard import seed_generators, seed_of

RunPart = Callable[..., Any]


class SampleGrains:
    """Splits microbatches into grains of a fixed number of samples, and seeds random numbers by grain."""

    def __init__(
        self, samples: int, micro: int, seed: int, *, shares: int = 1, share: int = 0, at_once: int = 1,
        inside: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Make the grains of one rank.

        Args:
            samples: samples of a grain.
            micro: samples of a microbatch.
            seed: the run's seed.
            shares: number of ranks that share the rows of a microbatch.
            share: index of this rank among the ranks that share the rows.
            at_once: shares computed at once inside of branches.
            inside: batch entries that branches read.
        """
        self.samples, self.seed, self.inside, self.at_once = samples, seed, inside, at_once
        self.micro, self.rows, self.share = micro, micro // shares, share
        self.count = self.rows // samples
        """Grains of a microbatch on this rank."""
        self.scale = 1.0
        """The step's loss scale."""
        self.first = 0
        """Number of this replica's first sample of the step, counted over the run."""
        self._grain = 0
        """Number of the current grain's first sample in share 0."""
        self._part = 0
        self._drawn = 0
        """Random numbers drawn in the current part of the chain."""

    def of(self, batch: Batch, incoming: Hidden, microbatch: int | None = None) -> Iterator[tuple[Batch, Hidden]]:
        """Yield a copy of each grain's rows of a microbatch, in order: (batch, incoming).

        Args:
            batch: the rows of the microbatch.
            incoming: the hidden states of the microbatch; each grain's are copied and detached. A tensor for all
                samples (an attention bias [1, A, T, T]) has one row for each grain.
            microbatch: number of the microbatch in the step, if a forward pass begins; grains are then seeded by it.
        """
        for index in range(self.count):
            of_shares = {name: self.at_once if name in self.inside else 1 for name in batch}
            if microbatch is not None:
                self._grain = self.first + microbatch * self.micro + index * self.samples
            grain = {name: self._rows(x, index, of_shares[name]) for name, x in batch.items()}
            yield grain, tuple(self._rows(x, index, 1).detach().clone() for x in incoming)

    def _rows(self, x: Tensor, index: int, shares: int) -> Tensor:
        """Return the rows of grain `index` of x [shares · rows, ...], share by share."""
        every = len(x) // (shares * self.count)
        rows = x.unflatten(0, (shares, self.count * every))[:, index * every : (index + 1) * every]
        return rows.flatten(0, 1)

    def begin_step(self, first: int, scale: float) -> None:
        """Begin a step. `first`: number of this replica's first sample in the run; `scale`: the loss scale."""
        self.first, self.scale = first, scale

    def draw(self, shares: int) -> list[int]:
        """Return seeds for the next masks, equal on every rank that computes the grain.

        One seed, of this rank's share, if `shares` is 1; else one of each of the `shares`.
        """
        self._drawn += 1
        numbers = []
        for share in range(shares) if shares > 1 else [self.share]:
            generator = torch.Generator().manual_seed(self._seed(share))
            numbers.append(int(torch.randint(2**62, (self._drawn,), generator=generator)[-1]))
        return numbers

    def _seed(self, share: int) -> int:
        return seed_of(f"{self.seed}/dropout/{self._grain + share * self.rows}/{self._part}")

    def total_loss(self, losses: Sequence[Hidden]) -> Hidden:
        """Return (sum of the grains' losses,) in float64.

        Losses are rounded to multiples of one power of two, so the sum does not depend on the order of grains.
        """
        rounded = [rounded_loss(loss, self.scale) for (loss,) in losses]
        return (torch.stack(rounded).sum(),)

    def seeded(self, run_part: RunPart, device: torch.device) -> RunPart:
        """Return `run_part` with torch's generators seeded before each part. `device`: the device of the parts."""

        def run(layer: int, function: Callable[..., Any], *arguments: Any) -> Any:
            self._part, self._drawn = layer, 0
            seed_generators(self._seed(self.share), device)
            return run_part(layer, function, *arguments)

        return run

    def remembered(self, run_group: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run_group` with functions that draw equal numbers when a backward pass recomputes them."""

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            stands = self._grain, self._part, self._drawn

            def of_grain(*given: Any) -> Any:
                self._grain, self._part, self._drawn = stands
                return function(*given)

            return run_group(of_grain, *arguments)

        return run
