"""Grains: a fixed number of samples is computed at a time, so that kernels get one shape under every microbatch.

Random numbers belong to the grain: each part of the chain is seeded by (seed, sample, part), so that dropout's masks do
not depend on stage, replica or microbatch.

Where an axis cuts a microbatch's rows, each rank has grains of its own rows and all ranks go through them together.
Inside of branches (subgraph/) a rank computes one grain of each rank at once.
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
    """Grains of `samples` samples, of microbatches of `micro` samples."""

    def __init__(
        self, samples: int, micro: int, seed: int, *, shares: int = 1, share: int = 0, at_once: int = 1,
        inside: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`shares`: ranks that share a microbatch's rows; `share`: this rank's index among them. `at_once`: shares
        computed at once inside of branches; `inside`: entries of a batch that branches read."""
        self.samples, self.seed, self.inside, self.at_once = samples, seed, inside, at_once
        self.micro, self.rows, self.share = micro, micro // shares, share
        self.count = self.rows // samples
        """Grains of a microbatch on this rank."""
        self.scale = 1.0
        """The step's loss scale."""
        self.first = 0
        """Number of this replica's first sample of the step, counted over the run."""
        self._grain = 0
        """Number of the current grain's first sample, in the first share."""
        self._part = 0
        self._drawn = 0
        """Random numbers drawn in the current part of the chain."""

    def of(self, batch: Batch, incoming: Hidden, microbatch: int | None = None) -> Iterator[tuple[Batch, Hidden]]:
        """Each grain's rows of a microbatch in order, copied. A tensor for all samples (an attention bias [1, A, T, T])
        comes once from each grain. `microbatch`: its number in the step, where each grain's forward pass begins then.
        """
        for number in range(self.count):
            of_shares = {name: self.at_once if name in self.inside else 1 for name in batch}
            if microbatch is not None:
                self._grain = self.first + microbatch * self.micro + number * self.samples
            grain = {name: self._rows(x, number, of_shares[name]) for name, x in batch.items()}
            yield grain, tuple(self._rows(x, number, 1).detach().clone() for x in incoming)

    def _rows(self, x: Tensor, number: int, shares: int) -> Tensor:
        """A grain's rows of x, which has rows of `shares` shares one after another."""
        every = len(x) // (shares * self.count)
        rows = x.unflatten(0, (shares, self.count * every))[:, number * every : (number + 1) * every]
        return rows.flatten(0, 1)

    def begin_step(self, first: int, scale: float) -> None:
        """Begin a step. `first`: number of this replica's first sample in the run; `scale`: of the loss."""
        self.first, self.scale = first, scale

    def draw(self, shares: int) -> list[int]:
        """A seed for a block's next masks, equal wherever the grain is computed: of this rank's share, or one of each
        of `shares`."""
        self._drawn += 1
        numbers = []
        for share in range(shares) if shares > 1 else [self.share]:
            generator = torch.Generator().manual_seed(self._seed(share))
            numbers.append(int(torch.randint(2**62, (self._drawn,), generator=generator)[-1]))
        return numbers

    def _seed(self, share: int) -> int:
        return seed_of(f"{self.seed}/dropout/{self._grain + share * self.rows}/{self._part}")

    def total_loss(self, losses: Sequence[Hidden]) -> Hidden:
        """(Sum of the grains' losses,) in float64. Losses are rounded to multiples of one power of two, so that their
        order does not matter."""
        rounded = [rounded_loss(loss, self.scale) for (loss,) in losses]
        return (torch.stack(rounded).sum(),)

    def seeded(self, run_part: RunPart, device: torch.device) -> RunPart:
        """run_part, which seeds torch's generators at the begin of each part; `device`: where parts compute."""

        def run(part: int, function: Callable[..., Any], *arguments: Any) -> Any:
            self._part, self._drawn = part, 0
            seed_generators(self._seed(self.share), device)
            return run_part(part, function, *arguments)

        return run

    def remembered(self, run_group: Callable[..., Any]) -> Callable[..., Any]:
        """run_group, whose functions draw the same numbers again when a backward pass recomputes them."""

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            stands = self._grain, self._part, self._drawn

            def of_grain(*given: Any) -> Any:
                self._grain, self._part, self._drawn = stands
                return function(*given)

            return run_group(of_grain, *arguments)

        return run
