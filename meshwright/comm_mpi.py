"""MpiComm: the verbs over MPI (mpi4py), on host memory. On one machine its shared memory beats gloo's sockets.

MPI knows no half-precision sums, so these go as an all-to-all of the pieces, a sum in float32 in rank order, and an
all-gather: the bytes of a bandwidth-optimal all-reduce, and a better sum. A half-precision reduce is one of these too.
Blocking forms throughout: an MPI library makes progress only inside its calls, so that on a CPU nothing would
run under the backward pass, and Open MPI's non-blocking all-reduce takes twice the blocking one's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.comm import DONE, Comm, Ledger, Work

HALF = (torch.float16, torch.bfloat16)


def raw(x: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as bytes, for verbs that only move."""
    assert x.is_contiguous(), f"a tensor with gaps, of shape {tuple(x.shape)}: it would be received into a copy"
    return x.detach().view(-1).view(torch.uint8).numpy()


class MpiComm(Comm):
    """`comm` is an mpi4py communicator that holds the same ranks in the same order."""

    def __init__(self, axis: str, ranks: Sequence[int], index: int, ledger: Ledger, comm: Any) -> None:
        super().__init__(axis, ranks, index, ledger)
        from mpi4py import MPI

        self.in_place = MPI.IN_PLACE
        self.comm = comm

    def receive(self, x: Tensor, source: int) -> None:
        self.comm.Recv(raw(x), source=source)

    def barrier(self) -> None:
        self.comm.Barrier()

    def _all_reduce(self, x: Tensor) -> Work:
        if x.dtype in HALF:
            self._half_all_reduce(x.view(-1))
        else:
            self.comm.Allreduce(self.in_place, x.detach().numpy())
        return DONE

    def _half_all_reduce(self, x: Tensor) -> None:
        padded = torch.zeros(-(-x.numel() // self.size) * self.size, dtype=x.dtype)
        padded[: x.numel()] = x
        part = padded.view(self.size, -1)[self.index]
        self._reduce_scatter(part, padded)
        self._all_gather(padded, part)
        x.copy_(padded[: x.numel()])

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        if x.dtype in HALF:
            pieces = torch.empty_like(x)
            self._all_to_all(pieces, x)
            part.view(-1).copy_(pieces.view(self.size, -1).sum(0, dtype=torch.float32))
        elif part.data_ptr() == x.view(self.size, -1)[self.index].data_ptr():
            result = torch.empty_like(part)
            self.comm.Reduce_scatter_block(x.detach().numpy(), result.numpy())
            part.copy_(result)
        else:
            self.comm.Reduce_scatter_block(x.detach().numpy(), part.detach().numpy())
        return DONE

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        in_place = part.data_ptr() == x.view(self.size, -1)[self.index].data_ptr()
        self.comm.Allgather(self.in_place if in_place else raw(part), raw(x))
        return DONE

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        self.comm.Alltoall(raw(x), raw(out))
        return DONE

    def _broadcast(self, x: Tensor, root: int) -> Work:
        self.comm.Bcast(raw(x), root=root)
        return DONE

    def _reduce(self, x: Tensor, root: int) -> Work:
        if x.dtype in HALF:
            self._half_all_reduce(x.view(-1))
        elif self.index == root:
            self.comm.Reduce(self.in_place, x.detach().numpy(), root=root)
        else:
            self.comm.Reduce(x.detach().numpy(), None, root=root)
        return DONE

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        self.comm.Gather(raw(part), raw(x) if self.index == root else None, root=root)
        return DONE

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        self.comm.Scatter(raw(x) if self.index == root else None, raw(part), root=root)
        return DONE

    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> None:
        self.comm.Sendrecv(raw(x), dest=to, recvbuf=raw(into), source=source)

    def _send(self, x: Tensor, to: int) -> None:
        self.comm.Send(raw(x), dest=to)
