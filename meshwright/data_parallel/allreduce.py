"""All-reduce: every rank sums all gradients and steps its own copy (Bai's DPS; torch's DistributedDataParallel).

Sends 2(n-1)/n of the gradients' bytes a rank, under the backward pass.
"""

from __future__ import annotations

from meshwright.bucket import Bucket
from meshwright.comm import Comm, Work
from meshwright.data_parallel.strategy import nothing_to_publish, whole


class AllReduce:
    """One all-reduce a bucket, by the transport's own algorithm."""

    replicated = True
    blocks = False

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        return whole(bucket)

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        return comm.all_reduce(bucket.gradients, wait=False)

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        return nothing_to_publish(bucket, comm)
