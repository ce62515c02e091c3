"""The body of test_comm: every verb in every form and dtype, run on each rank of any transport, without asserts.

Values are small whole numbers, so that sums are exact in every dtype and in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.comm import Comm, PieceSizes
from meshwright.ranks.mesh import Mesh

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}
PIECE = 6
"""Elements of one rank's piece."""


def values(index: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the values of the member `index`: different for each member and each element, between -8 and 8."""
    return ((torch.arange(count) * (2 * index + 3) + 5 * index) % 17 - 8).to(dtype)


def _all_reduce(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, 7, dtype)
    comm.all_reduce(x)
    return x


def _all_reduce_matrix(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, 6, dtype).view(2, 3)
    comm.all_reduce(x)
    return x


def _all_reduce_scalar(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, 2, dtype)[1].clone()
    comm.all_reduce(x)
    return x


def _all_reduce_later(comm: Comm, dtype: torch.dtype) -> Tensor:
    first, second = values(comm.index, 4, dtype), values(comm.index + 10, 4, dtype)
    works = [comm.all_reduce(first, wait=False), comm.all_reduce(second, wait=False)]
    for work in reversed(works):
        work.wait()
    return torch.cat([first, second])


def _reduce_scatter(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, PIECE * comm.size, dtype)
    part = torch.empty(PIECE, dtype=dtype)
    comm.reduce_scatter(part, x)
    return part


def _reduce_scatter_in_place(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, PIECE * comm.size, dtype)
    part = x[comm.index * PIECE : (comm.index + 1) * PIECE]
    comm.reduce_scatter(part, x, wait=False).wait()
    return x[comm.index * PIECE : (comm.index + 1) * PIECE].clone()


def _all_gather(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = torch.empty(comm.size, 2, PIECE // 2, dtype=dtype)
    comm.all_gather(x, values(comm.index, PIECE, dtype).view(2, -1))
    return x


def _all_gather_in_place(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(PIECE * comm.size, dtype=dtype)
    part = x[comm.index * PIECE : (comm.index + 1) * PIECE]
    part.copy_(values(comm.index, PIECE, dtype))
    comm.all_gather(x, part, wait=False).wait()
    return x


def _all_to_all(comm: Comm, dtype: torch.dtype) -> Tensor:
    out = torch.empty(PIECE * comm.size, dtype=dtype)
    comm.all_to_all(out, values(comm.index, PIECE * comm.size, dtype))
    return out


def _all_to_all_of_unequal_pieces(comm: Comm, dtype: torch.dtype) -> Tensor:
    """Rank i sends i + j elements to rank j, so the first rank sends itself none."""
    pieces = PieceSizes(
        tuple(other + comm.index for other in range(comm.size)), tuple(comm.index + other for other in range(comm.size))
    )
    out = torch.empty(sum(pieces.received), dtype=dtype)
    comm.all_to_all(out, values(comm.index, sum(pieces.sent), dtype), pieces=pieces)
    whole = torch.zeros(PIECE * comm.size, dtype=dtype)
    whole[: len(out)] = out
    return whole


def _broadcast(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, PIECE, dtype)
    comm.broadcast(x, comm.size - 1)
    return x


def _reduce(comm: Comm, dtype: torch.dtype) -> Tensor:
    x = values(comm.index, PIECE + 1, dtype)
    comm.reduce(x, comm.size - 1)
    return x


def _gather(comm: Comm, dtype: torch.dtype) -> Tensor:
    root = comm.size - 1
    x = torch.empty(comm.size if comm.index == root else 0, PIECE, dtype=dtype)
    comm.gather(x, values(comm.index, PIECE, dtype), root)
    return x


def _scatter(comm: Comm, dtype: torch.dtype) -> Tensor:
    root = comm.size - 1
    x = values(comm.index, PIECE * comm.size if comm.index == root else 0, dtype)
    part = torch.empty(PIECE, dtype=dtype)
    comm.scatter(part, x, root)
    return part


def _exchange(comm: Comm, dtype: torch.dtype) -> Tensor:
    into = torch.empty(PIECE, dtype=dtype)
    comm.exchange(values(comm.index, PIECE, dtype), (comm.index + 1) % comm.size, into, (comm.index - 1) % comm.size)
    return into


def _exchange_later(comm: Comm, dtype: torch.dtype) -> Tensor:
    """Run two exchanges in a ring at once, and wait for the second first."""
    after, before = (comm.index + 1) % comm.size, (comm.index - 1) % comm.size
    into = torch.empty(2, PIECE, dtype=dtype)
    sent = [values(comm.index + 10 * number, PIECE, dtype) for number in range(2)]
    works = [comm.exchange(sent[number], after, into[number], before, wait=False) for number in range(2)]
    for work in reversed(works):
        work.wait()
    return into


def _relay(comm: Comm, dtype: torch.dtype) -> Tensor:
    """Send and receive down the line; each member adds its values."""
    x = values(comm.index, PIECE, dtype)
    if comm.index > 0:
        incoming = torch.empty_like(x)
        comm.receive(incoming, comm.index - 1)
        x += incoming
    if comm.index < comm.size - 1:
        comm.send(x, comm.index + 1)
    return x


def _nothing(comm: Comm, dtype: torch.dtype) -> Tensor:
    """Call every collective with tensors without elements, as a rank without rows or parameters does."""
    part, whole = torch.empty(0, 3, dtype=dtype), torch.empty(comm.size, 0, 3, dtype=dtype)
    comm.all_reduce(part)
    comm.reduce_scatter(part, whole)
    comm.all_gather(whole, part)
    comm.all_to_all(whole, whole.clone())
    comm.broadcast(part, 0)
    comm.reduce(part, 0)
    comm.gather(whole, part, 0)
    comm.scatter(part, whole, 0)
    comm.exchange(part, (comm.index + 1) % comm.size, torch.empty_like(part), (comm.index - 1) % comm.size)
    return whole


VERBS: dict[str, Callable[[Comm, torch.dtype], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_reduce_matrix": _all_reduce_matrix,
    "all_reduce_scalar": _all_reduce_scalar,
    "all_reduce_later": _all_reduce_later,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_in_place": _reduce_scatter_in_place,
    "all_gather": _all_gather,
    "all_gather_in_place": _all_gather_in_place,
    "all_to_all": _all_to_all,
    "all_to_all_unequal": _all_to_all_of_unequal_pieces,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "exchange": _exchange,
    "exchange_later": _exchange_later,
    "relay": _relay,
    "nothing": _nothing,
}


def run_verbs(mesh: Mesh) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return, by `verb/dtype`, the ledger's [axis, verb, calls, sent_bytes] of the call, and the call's result."""
    comm = mesh.comm("data")
    entries, results = {}, {}
    for verb, body in VERBS.items():
        for name, dtype in DTYPES.items():
            mesh.ledger.traffic.clear()
            results[f"{verb}/{name}"] = body(comm, dtype).clone()
            entries[f"{verb}/{name}"] = [
                [axis, kind, entry.calls, entry.sent_bytes] for (axis, kind), entry in mesh.ledger.traffic.items()
            ]
        comm.barrier()
    return entries, results


def run_subgroups(mesh: Mesh) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return, by axis, the sum of my group's world ranks, and member 1's broadcast; roots count inside the group."""
    facts, results = {}, {}
    for axes in (("outer",), ("inner",), ("outer", "inner")):
        comm = mesh.comm(*axes)
        total, told = torch.tensor([float(mesh.rank)]), torch.tensor([float(mesh.rank)])
        comm.all_reduce(total)
        comm.broadcast(told, 1)
        facts[comm.axis] = list(comm.ranks)
        results[comm.axis] = torch.cat([total, told])
    assert mesh.world is mesh.comm("outer", "inner")
    return facts | {"sent": mesh.ledger.sent_bytes()}, results
