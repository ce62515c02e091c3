"""Policies in which all ranks take part alike.

| sync      | gradients of S bytes          | the optimizer steps | then       | a rank sends             |
|-----------|-------------------------------|---------------------|------------|--------------------------|
| allreduce | the transport's all-reduce    | all, on every rank  | -          | 2(n-1)/n S               |
| ring      | point-to-point round the ring | all, on every rank  | -          | 2(n-1)/n S               |
| zero1     | reduce-scatter                | 1/n                 | all-gather | (n-1)/n S, as much again |

All-reduce is Bai's DPS and torch's DistributedDataParallel; it travels under the backward pass (over MPI and among
ranks of one node behind it: ranks/mpi.py, ranks/window_comm.py). The ring is Horovod's (Patarasuk and Yuan, 2009): a
bucket, its tensor fusion, is cut into n blocks; in n-1 steps partial sums travel round until rank r holds block r+1
whole, in n-1 more the whole blocks travel round. ZeRO-1 (arXiv 1910.02054, section 5.1) sends an all-reduce's bytes,
with the optimizer's work in between done once instead of n times.
"""

from __future__ import annotations

import torch

from meshwright.compute.parameters.bucket import Bucket
from meshwright.ranks.comm import DONE, Comm, Work
from meshwright.ranks.grid import REPLICATE
from meshwright.strategies.data_parallel.strategy import Policy


class AllReduce(Policy):
    """One all-reduce a bucket, by the transport's own algorithm."""


class Ring(Policy):
    """Ring all-reduce of each bucket, whose length is a multiple of the number of ranks."""

    blocks = True

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        size, index = comm.size, comm.index
        blocks = bucket.gradients.view(size, -1)
        after, before = (index + 1) % size, (index - 1) % size
        incoming = torch.empty_like(blocks[0])
        for step in range(size - 1):  # reduce-scatter: my partial sum moves on, the one behind it arrives
            comm.exchange(blocks[(index - step) % size], after, incoming, before)
            blocks[(index - step - 1) % size] += incoming
        for step in range(size - 1):  # all-gather: whole blocks move on
            comm.exchange(blocks[(index - step + 1) % size], after, blocks[(index - step) % size], before)
        return DONE


class Zero1(Policy):
    """Rank r owns the r-th slice of every bucket."""

    owners = "each"
    apart: tuple[str, ...] = (REPLICATE,)
    """Shard groups, each of which steps the whole bucket."""
