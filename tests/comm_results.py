"""The results that every verb of comm_cases.py must have."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.comm_cases import PIECE, values


def expected(verb: str, index: int, size: int, dtype: torch.dtype) -> Tensor | None:
    """Return the result that the member `index` must hold, or None if the result is undefined."""

    def total(count: int, shift: int = 0) -> Tensor:
        return torch.stack([values(member + shift, count, dtype) for member in range(size)]).sum(0, dtype=dtype)

    def piece(x: Tensor, number: int) -> Tensor:
        return x[number * PIECE : (number + 1) * PIECE]

    last = size - 1
    match verb:
        case "all_reduce":
            return total(7)
        case "all_reduce_matrix":
            return total(6).view(2, 3)
        case "all_reduce_scalar":
            return total(2)[1]
        case "all_reduce_later":
            return torch.cat([total(4), total(4, shift=10)])
        case "reduce_scatter" | "reduce_scatter_in_place":
            return piece(total(PIECE * size), index)
        case "all_gather":
            return torch.stack([values(member, PIECE, dtype).view(2, -1) for member in range(size)])
        case "all_gather_in_place":
            return torch.cat([values(member, PIECE, dtype) for member in range(size)])
        case "all_to_all":
            return torch.cat([piece(values(member, PIECE * size, dtype), index) for member in range(size)])
        case "all_to_all_unequal":
            rows = []
            for member in range(size):
                start = sum(member + other for other in range(index))
                everything = values(member, sum(member + other for other in range(size)), dtype)
                rows.append(everything[start : start + member + index])
            out = torch.cat(rows)
            return torch.cat([out, torch.zeros(PIECE * size - len(out), dtype=dtype)])
        case "broadcast":
            return values(last, PIECE, dtype)
        case "reduce":
            return total(PIECE + 1) if index == last else None
        case "gather":
            rows = [values(member, PIECE, dtype) for member in range(size)]
            return torch.stack(rows) if index == last else torch.empty(0, PIECE, dtype=dtype)
        case "scatter":
            return piece(values(last, PIECE * size, dtype), index)
        case "exchange":
            return values((index - 1) % size, PIECE, dtype)
        case "exchange_later":
            return torch.stack([values((index - 1) % size + 10 * number, PIECE, dtype) for number in range(2)])
        case "relay":
            return torch.stack([values(member, PIECE, dtype) for member in range(index + 1)]).sum(0, dtype=dtype)
        case "nothing":
            return torch.empty(size, 0, 3, dtype=dtype)
    raise AssertionError(verb)
