"""Sums in the order of a tree: equal bits, whichever rank holds which addend.

Two neighbours are added, then two neighbouring sums, and so on; sums without an equal neighbour are added at the end. A
rank with a power of two of addends adds its run first; the ranks' sums are the leaves of the remaining tree. So six
addends may be on one rank, on three or on six. A tree sends the bytes of a ring's reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.ranks.collectives import Moving, here, start_all_reduce, start_reduce_scatter
from meshwright.ranks.comm import Comm


def tree_sum(addends: Iterable[Tensor]) -> Tensor:
    """Sum tensors in the order of a tree: two neighbours, then two sums of equally many addends, and so on. At the end
    the sums of fewer addends are added to those of more.

    The first tensor of each addition is overwritten.
    """
    waiting: list[tuple[int, Tensor]] = []  # one sum for each 1 in the binary number of addends so far
    for addend in addends:
        height, total = 0, addend
        while waiting and waiting[-1][0] == height:
            total = waiting.pop()[1].add_(total)
            height += 1
        waiting.append((height, total))
    while len(waiting) > 1:
        _, last = waiting.pop()
        waiting[-1][1].add_(last)
    return waiting[0][1]


def start_tree_all_reduce(x: Tensor, comm: Comm) -> Moving:
    """Begin to sum every rank's contiguous x [..., H] in the order of a balanced tree. Sends the bytes of a ring."""
    if comm.size == 1:
        return here(x)
    if comm.size == 2:
        return start_all_reduce(x, comm)  # two addends have one order
    flat, room = x.view(-1), -x.numel() % comm.size
    pieces = (torch.cat([flat, flat.new_zeros(room)]) if room else flat).view(comm.size, -1)
    received = torch.empty_like(pieces)
    work = comm.all_to_all(received, pieces, wait=False)

    def gathered() -> Tensor:
        comm.all_gather(pieces, tree_sum(received.unbind()).contiguous())
        return x.copy_(pieces.view(-1)[: x.numel()].view_as(x)) if room else x

    return Moving(work, gathered)


def start_tree_reduce(x: Tensor, comm: Comm) -> Moving:
    """Begin to sum every rank's x in the order of a balanced tree, on the first rank; other ranks get x back."""
    received = x.new_empty(comm.size if comm.index == 0 else 0, *x.shape)
    work = comm.gather(received, x, 0, wait=False)
    return Moving(work, lambda: tree_sum(received.unbind()) if comm.index == 0 else x)


def start_tree_reduce_scatter(x: Tensor, comm: Comm, dim: int) -> Moving:
    """Begin to sum every rank's x in the order of a balanced tree; each rank gets a part along `dim`."""
    if comm.size <= 2:
        return start_reduce_scatter(x, comm, dim)
    panels = x.unflatten(dim, (comm.size, -1)).movedim(dim % x.dim(), 0).contiguous()
    received = torch.empty_like(panels)
    work = comm.all_to_all(received, panels, wait=False)
    return Moving(work, lambda: tree_sum(received.unbind()))
