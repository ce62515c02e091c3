"""Facts exchanged by a group's ranks: rows of int64, texts, and equality of a tensor's bits on all ranks.

Facts are host tensors and are sent over gloo (torch_comm.py), so no exchange waits for a GPU.

A hash (`hash_bits`) has 64 bits: the sum over 8-byte words w[r, c] of w[r, c] · (row[r] + column[c]) modulo 2^64. Row
factors are even and column factors odd, so each word's factor is odd, and any flipped bit changes the sum. Exchanged
words change the sum too. The hash is computed on the tensor's device, by two sums over blocks that stay in a cache:
SHA-256 of 7 B parameters took a CPU thread 40 seconds, and copied a GPU's weights to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.ranks.comm import Comm

COLUMNS = 2**10
BLOCK_ROWS = {"cpu": 2**7, "cuda": 2**17}
"""Rows that are read at once: a CPU's cache holds 1 MiB for both sums, a GPU wants few kernels."""
FACTOR, ROW_FACTOR = 0xC13FA9A902A6328F - 2**64, 0x91E10DA5C79E7B1D - 2**64
"""2^64 divided by the plastic number and by its square, as signed numbers: the two-dimensional analogue of the golden
ratio, which gives neighbouring words distant factors. One constant for both gave words 1,022 apart the same factor."""


def all_rows(row: Tensor, comm: Comm) -> Tensor:
    """Gather every member's row, in order: [n, *row]."""
    rows = row.new_empty(comm.size, *row.shape)
    comm.all_gather(rows, row)
    return rows


def all_texts(text: str, comm: Comm) -> list[str]:
    """Gather every member's text, in order. Sends the lengths, then the texts as bytes, unless all are empty."""
    content = text.encode(errors="surrogatepass")  # a file's name may hold bytes that are no text
    lengths = all_rows(torch.tensor([len(content)]), comm).flatten().tolist()
    if not any(lengths):
        return [""] * comm.size
    # All rows of an all-gather have equal size: pad each text to the longest, and cut the received rows by length.
    padded = torch.frombuffer(bytearray(content.ljust(max(lengths))), dtype=torch.uint8)
    rows = all_rows(padded, comm).tolist()
    return [bytes(row[:length]).decode(errors="surrogatepass") for row, length in zip(rows, lengths, strict=True)]


def text_of_root(text: str, comm: Comm, root: int = 0) -> str:
    """Broadcast the text of the member `root` to every member."""
    content = text.encode(errors="surrogatepass")
    length = torch.tensor([len(content)])
    comm.broadcast(length, root)
    # A bytearray, since torch cannot receive into the read-only memory of bytes.
    buffer = bytearray(content if comm.index == root else int(length))
    row = torch.frombuffer(buffer, dtype=torch.uint8)
    comm.broadcast(row, root)
    return bytes(row.tolist()).decode(errors="surrogatepass")


def hash_bits(x: Tensor) -> Tensor:
    """Hash the bits of x [n], contiguous, to an int64 scalar on x's device."""
    words, last = _words(x)
    whole = words.numel() // COLUMNS * COLUMNS
    blocks = words[:whole].view(-1, COLUMNS).split(BLOCK_ROWS[x.device.type])
    rest = torch.cat([words[whole:], last])  # [up to COLUMNS]
    sums = [(block.sum(1), block.sum(0)) for block in blocks]  # the second while the block is in the cache
    rows = torch.cat([*(across for across, _ in sums), rest.sum(0, keepdim=True)])
    columns = torch.stack([down for _, down in sums]).sum(0) if whole else words.new_zeros(COLUMNS)
    # The last, shorter row has the columns that it fills.
    columns[: rest.numel()] += rest
    # Times 2 makes row factors even, | 1 column factors odd: a word's factor, the sum of both, is odd.
    row_factors = torch.arange(1, rows.numel() + 1, device=x.device) * ROW_FACTOR * 2
    column_factors = torch.arange(COLUMNS, device=x.device) * FACTOR | 1
    return (rows * row_factors).sum() + (columns * column_factors).sum()


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """View x's memory as int64: the whole words, and the remaining bytes padded with zeros, if any."""
    # A view as int64 must begin at a multiple of 8 bytes.
    if x.storage_offset() * x.element_size() % 8:
        x = x.clone()
    each = 8 // x.element_size()
    whole = x.numel() // each * each
    last = x.new_zeros(each if whole < x.numel() else 0)
    last[: x.numel() - whole] = x[whole:]
    return x[:whole].view(torch.int64), last.view(torch.int64)


def same_everywhere(x: Tensor, comm: Comm) -> bool:
    """Return whether all members hold the same bits of x, by a hash computed on x's device. Sends 16 bytes a member.

    The hash is blind to words that end in zeros (2,048 ones in float64 hash like zeros), so the sum of the words' upper
    halves, which overflows for no tensor, is compared as well.
    """
    if comm.size == 1:
        return True
    flat = x.detach().contiguous().view(-1)
    halves = sum((block >> 32).sum() for words in _words(flat) for block in words.split(2**17))  # 1 MiB: in a cache
    rows = all_rows(torch.stack([hash_bits(flat), torch.as_tensor(halves)]).cpu(), comm)
    return bool((rows == rows[comm.index]).all())


def make_equal(x: Tensor, comm: Comm) -> bool:
    """Copy the first member's x to all members if any bits differ. Returns True if any member's bits differed."""
    differed = not same_everywhere(x, comm)
    if differed:
        comm.broadcast(x.detach(), 0)
    return differed
