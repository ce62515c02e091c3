"""Horovod's ring all-reduce (Patarasuk and Yuan, 2009), written out over point-to-point messages.

Each rank cuts a bucket (the tensor fusion) into n blocks. In n-1 steps partial sums travel round the ring until rank r
holds block r+1 whole; in n-1 more the whole blocks travel round. Each step sends one block: 2(n-1)/n of the bytes a
rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.bucket import Bucket
from meshwright.comm import DONE, Comm, Work
from meshwright.data_parallel.strategy import nothing_to_publish, whole


def ring_all_reduce(x: Tensor, comm: Comm) -> None:
    """Sum x over the comm, in place. x [n·k]: its length is a multiple of the number of ranks."""
    size, index = comm.size, comm.index
    blocks = x.view(size, -1)
    after, before = (index + 1) % size, (index - 1) % size
    incoming = torch.empty_like(blocks[0])
    for step in range(size - 1):  # reduce-scatter: my partial sum moves on, the one behind it arrives
        comm.exchange(blocks[(index - step) % size], after, incoming, before)
        blocks[(index - step - 1) % size] += incoming
    for step in range(size - 1):  # all-gather: whole blocks move on
        comm.exchange(blocks[(index - step + 1) % size], after, blocks[(index - step) % size], before)


class Ring:
    """Ring all-reduce of each bucket."""

    replicated = True
    blocks = True

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        return whole(bucket)

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        ring_all_reduce(bucket.gradients, comm)
        return DONE

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        return nothing_to_publish(bucket, comm)
