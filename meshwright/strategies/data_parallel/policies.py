"""Policies in which all ranks do equal work.

| sync      | gradients of S bytes          | the optimizer steps | then       | a rank sends             |
|-----------|-------------------------------|---------------------|------------|--------------------------|
| allreduce | the transport's all-reduce    | all, on every rank  | -          | 2(n-1)/n S               |
| ring      | point-to-point round the ring | all, on every rank  | -          | 2(n-1)/n S               |
| zero1     | reduce-scatter                | 1/n                 | all-gather | (n-1)/n S, twice         |

All-reduce is Bai's DPS and torch's DistributedDataParallel. It overlaps with the backward pass; over MPI and among the
ranks of one node it follows the backward pass (ranks/mpi.py, ranks/window_comm.py). The ring is Horovod's (Patarasuk
and Yuan, 2009; a bucket is Horovod's tensor fusion). A bucket is cut into n blocks. In n-1 steps partial sums are
passed on until rank r holds the sum of block r+1; in n-1 more steps the sums are passed on. ZeRO-1 (arXiv 1910.02054,
section 5.1) sends an all-reduce's bytes; in between, each weight is stepped once instead of n times.
"""

from __future__ import annotations

import torch

from meshwright.compute.parameters.bucket import Bucket
from meshwright.ranks.comm import DONE, Comm, Work
from meshwright.ranks.grid import REPLICATE
from meshwright.strategies.data_parallel.strategy import Policy


class AllReduce(Policy):
    """One all-reduce a bucket, by the transport's own algorithm."""

    by_pieces = True


class Ring(Policy):
    """Ring all-reduce of each bucket; bucket lengths are multiples of the number of ranks."""

    blocks = True

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        size, index = comm.size, comm.index
        blocks = bucket.gradients.view(-1).view(size, -1)
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
    """Shard groups: each group steps the whole bucket."""
