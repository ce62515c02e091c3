"""Sharded data parallelism: ZeRO-1 (arXiv 1910.02054, section 5.1) by us, the full sharding by torch's fully_shard.

| sync  | a rank holds           | forward, backward                      | gradients      | then       |
|-------|------------------------|----------------------------------------|----------------|------------|
| zero1 | 1/n of the states      | -                                      | reduce-scatter | all-gather |
| fsdp  | 1/n of everything      | all-gather of a block's weights, twice | reduce-scatter | -          |

ZeRO-1 sends (n-1)/n of the gradients and as much of the parameters: an all-reduce's bytes, with the optimizer's work in
between done once instead of n times.
"""

from __future__ import annotations

from meshwright.bucket import Bucket
from meshwright.comm import Comm, Work


class Zero1:
    """Rank r owns the r-th slice of every bucket."""

    replicated = False
    blocks = False

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        length = bucket.values.numel() // comm.size
        return comm.index * length, (comm.index + 1) * length

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        start, stop = self.owned(bucket, comm)
        return comm.reduce_scatter(bucket.gradients[start:stop], bucket.gradients, wait=False)

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        start, stop = self.owned(bucket, comm)
        return comm.all_gather(bucket.values, bucket.values[start:stop], wait=False)
