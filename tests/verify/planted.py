"""Workers of `verify` with a bug planted in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.bucket import Bucket
from meshwright.comm import DONE, Comm, Work
from meshwright.data_parallel.allreduce import AllReduce
from meshwright.optim.in_place import InPlace
from meshwright.verify.job import worker


def wrong_gradient(*arguments: Any, **named: Any) -> None:
    """One element of one rank's gradients is off by 1e-9."""
    right = AllReduce.reduce

    def wrong(self: AllReduce, bucket: Bucket, comm: Comm) -> Work:
        if comm.size > 1 and comm.index == 0 and bucket.matrix:
            bucket.gradients[0] += 1e-9
        return right(self, bucket, comm)

    AllReduce.reduce = wrong  # type: ignore[method-assign]
    worker(*arguments, **named)


def dropped_sum(*arguments: Any, **named: Any) -> None:
    """Nobody sums."""
    AllReduce.reduce = lambda self, bucket, comm: DONE  # type: ignore[method-assign]
    worker(*arguments, **named)


def wrong_step(*arguments: Any, **named: Any) -> None:
    """The layout's learning rate is a millionth too large."""
    right = InPlace.step

    def wrong(self: InPlace, indices: Iterable[int], rate: float, divisor: float, steps_taken: int) -> None:
        parallel = self.config.layout.data.size > 1
        right(self, indices, rate * (1 + 1e-6) if parallel else rate, divisor, steps_taken)

    InPlace.step = wrong  # type: ignore[method-assign]
    worker(*arguments, **named)
