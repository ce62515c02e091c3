"""Facts that the ranks of a group tell each other: rows, texts, whether they hold the same bits.

Facts lie on the host, and travel between hosts (torch_comm.py): no device is waited for.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from meshwright.ranks.comm import Comm


def all_rows(row: Tensor, comm: Comm) -> Tensor:
    """Every member's row, in order: [n, *row]."""
    rows = row.new_empty(comm.size, *row.shape)
    comm.all_gather(rows, row)
    return rows


def all_texts(text: str, comm: Comm) -> list[str]:
    """Every member's text, in order. Sends the lengths, then the texts as bytes; only the lengths if all are empty."""
    content = text.encode(errors="surrogatepass")  # a file's name may hold bytes that are no text
    lengths = all_rows(torch.tensor([len(content)]), comm).flatten().tolist()
    if not any(lengths):
        return [""] * comm.size
    padded = torch.frombuffer(bytearray(content.ljust(max(lengths))), dtype=torch.uint8)
    rows = all_rows(padded, comm).tolist()
    return [bytes(row[:length]).decode(errors="surrogatepass") for row, length in zip(rows, lengths, strict=True)]


def text_of_root(text: str, comm: Comm, root: int = 0) -> str:
    """The text of the member `root`, on every member."""
    content = text.encode(errors="surrogatepass")
    length = torch.tensor([len(content)])
    comm.broadcast(length, root)
    buffer = bytearray(content if comm.index == root else int(length))
    row = torch.frombuffer(buffer, dtype=torch.uint8)
    comm.broadcast(row, root)
    return bytes(row.tolist()).decode(errors="surrogatepass")


def same_everywhere(x: Tensor, comm: Comm) -> bool:
    """Whether all members hold the same bits, by a SHA-256 of them. Sends 32 bytes."""
    digest = hashlib.sha256(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
    rows = all_rows(torch.tensor(list(digest), dtype=torch.uint8), comm)
    return bool((rows == rows[comm.index]).all())


def make_equal(x: Tensor, comm: Comm) -> bool:
    """Give all members the first one's bits of x; whether it held other ones anywhere."""
    differed = not same_everywhere(x, comm)
    if differed:
        comm.broadcast(x.detach(), 0)
    return differed
