"""Backward passes that sum the columns of their results on the way (`compile: kernels`), by Triton on a GPU.

| operation     | reads                 | writes | sums of columns                           |
|---------------|-----------------------|--------|-------------------------------------------|
| norm_backward | dy, x, other addend   | dx     | gradients of the norm's weight, bias; dx  |
| gelu_backward | dy, x                 | dx     | dx: the gradient of the bias before GELU  |
| join_heads    | dq, dk, dv            | dx     | dx: the gradient of the bias before heads |

Inductor makes a pass of its own for most of these sums: a kernel of rows cannot add up columns without partial sums.
Here each program of a kernel has a range of rows and writes one row of partial sums; the caller's `sum(0)` adds up
these rows. No addition is atomic and no size is measured, so repeated runs have equal bits on any card.

Each operation has a reference in torch's operations, which runs on CPUs and without Triton. sums_in_graphs.py connects
the sums with the linears before: no operation here knows a bias.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.tensor.fused import Fused
from meshwright.compute.tensor.islands import CUBIC, LINEAR

PROGRAMS = 264
"""The most rows of partial sums: two for each multiprocessor of an H100. A constant, so bits are those of any card."""
ROW_ELEMENTS, TILE = 2048, 4096
"""Elements that a program of a norm, and of the other kernels, holds at a time, if a row has fewer."""
COLUMNS = 256
"""Columns of a program of GELU and of heads."""
WIDEST = 4096
"""The widest norm in registers, as a program holds whole rows: ptxas keeps some of 8,192 columns in memory."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the kernels, which compute in float32."""
INSTALLED = find_spec("triton") is not None
SLOPE, RATIO = 1 / math.sqrt(2 * math.pi), 1 / math.sqrt(2)
CURVE = 3 * CUBIC

if INSTALLED:
    import triton
    import triton.language as tl

    @triton.jit
    def norm_backward_kernel(  # type: ignore[no-untyped-def]
        dy, x, weight, addend, dx, of_weight, of_bias, of_dx, rows, rows_each, width, epsilon,
        HAS_ADDEND: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Backward pass of a norm of `rows` rows, `rows_each` a program; partial sums [programs, width]."""
        program = tl.program_id(0)
        columns = tl.arange(0, WIDTH)
        inside = columns < width
        gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)
        sum_weight = tl.zeros([WIDTH], tl.float32)
        sum_bias = tl.zeros([WIDTH], tl.float32)
        sum_dx = tl.zeros([WIDTH], tl.float32)
        last = tl.minimum((program + 1) * rows_each, rows)
        for start in range(program * rows_each, last, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < last)[:, None] & inside[None, :]
            at = row[:, None].to(tl.int64) * width + columns[None, :]
            centred = tl.load(x + at, mask, 0.0).to(tl.float32)
            gradient = tl.load(dy + at, mask, 0.0).to(tl.float32)
            if CENTRED:
                centred = tl.where(mask, centred - (tl.sum(centred, 1) / width)[:, None], 0.0)
            scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + epsilon)[:, None]
            normed = centred * scale
            weighted = gradient * gain[None, :]
            result = weighted - normed * (tl.sum(weighted * normed, 1) / width)[:, None]
            if CENTRED:
                result -= (tl.sum(weighted, 1) / width)[:, None]
                sum_bias += tl.sum(gradient, 0)
            result *= scale
            if HAS_ADDEND:
                result += tl.load(addend + at, mask, 0.0).to(tl.float32)
            tl.store(dx + at, result.to(dx.dtype.element_ty), mask)
            sum_weight += tl.sum(gradient * normed, 0)
            sum_dx += tl.sum(tl.where(mask, result, 0.0), 0)
        to = program * width + columns
        tl.store(of_weight + to, sum_weight, inside)
        tl.store(of_dx + to, sum_dx, inside)
        if CENTRED:
            tl.store(of_bias + to, sum_bias, inside)

    @triton.jit
    def gelu_backward_kernel(  # type: ignore[no-untyped-def]
        dy, x, dx, of_dx, rows, rows_each, width, LINEAR: tl.constexpr, CUBIC: tl.constexpr, CURVE: tl.constexpr,
        SLOPE: tl.constexpr, RATIO: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Backward pass of GELU for `COLUMNS` columns of `rows_each` rows; partial sums [programs, width]."""
        program = tl.program_id(0)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        total = tl.zeros([COLUMNS], tl.float32)
        last = tl.minimum((program + 1) * rows_each, rows)
        for start in range(program * rows_each, last, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < last)[:, None] & inside[None, :]
            at = row[:, None].to(tl.int64) * width + columns[None, :]
            value = tl.load(x + at, mask, 0.0).to(tl.float32)
            gradient = tl.load(dy + at, mask, 0.0).to(tl.float32)
            square = value * value
            if TANH:
                gate = tl.sigmoid((LINEAR + CUBIC * square) * value)
                slope = gate + value * gate * (1 - gate) * (LINEAR + CURVE * square)
            else:
                slope = 0.5 + 0.5 * tl.erf(value * RATIO) + value * tl.exp(-0.5 * square) * SLOPE
            result = gradient * slope
            tl.store(dx + at, result.to(dx.dtype.element_ty), mask)
            total += tl.sum(result, 0)
        tl.store(of_dx + program * width + columns, total, inside)

    @triton.jit
    def join_heads_kernel(  # type: ignore[no-untyped-def]
        heads, dx, of_dx, rows, rows_each, width, offset, whole, tokens, head_width,
        batch_stride, head_stride, token_stride, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Copy a part [B, A, T, E] into columns `offset` to `offset + width` of dx [B · T, whole], with their sums."""
        program = tl.program_id(0)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        source = (columns // head_width) * head_stride + (columns % head_width) * stride
        total = tl.zeros([COLUMNS], tl.float32)
        last = tl.minimum((program + 1) * rows_each, rows)
        for start in range(program * rows_each, last, ROWS):
            row = (start + tl.arange(0, ROWS)).to(tl.int64)
            mask = (row < last)[:, None] & inside[None, :]
            begin = (row // tokens) * batch_stride + (row % tokens) * token_stride
            value = tl.load(heads + begin[:, None] + source[None, :], mask, 0.0)
            tl.store(dx + row[:, None] * whole + offset + columns[None, :], value, mask)
            total += tl.sum(value.to(tl.float32), 0)
        tl.store(of_dx + program * whole + offset + columns, total, inside)


def shares(rows: int, tile_rows: int, most: int = PROGRAMS) -> tuple[int, int]:
    """Return (number of programs, rows of each): whole tiles of rows, at most `most` programs, none without rows."""
    tiles = -(-rows // tile_rows)
    each = -(-tiles // most) * tile_rows
    return (-(-rows // each), each) if rows else (0, tile_rows)


def norm_shares(x: Tensor) -> tuple[int, int, int, int]:
    """Return (programs, rows of each, rows of a tile, columns of a tile) for a norm of x [..., N]."""
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    tile = max(1, ROW_ELEMENTS // width)
    return *shares(x.shape[:-1].numel(), tile), tile, width


def column_shares(rows: int, width: int) -> tuple[int, int]:
    """Return (programs, rows of each) for a pass over [rows, width] in tiles of COLUMNS columns."""
    return shares(rows, TILE // COLUMNS, max(16, 4 * PROGRAMS // max(1, -(-width // COLUMNS))))


def by_kernel(*tensors: Tensor) -> bool:
    """Return whether Triton's kernels take these tensors: on a GPU, of a dtype that float32 holds."""
    return INSTALLED and all(x.is_cuda and x.dtype in DTYPES for x in tensors)


def partial_sums(x: Tensor, rows_each: int) -> Tensor:
    """Sum each `rows_each` rows of x [n, N] -> [programs, N]."""
    return torch.stack([rows.sum(0) for rows in x.split(rows_each)]) if x.shape[0] else x.new_empty(0, x.shape[1])


NormSums = tuple[Tensor, Tensor, Tensor, Tensor]
"""dx [..., N], and partial sums [programs, N] of the gradients of weight and bias, and of dx; of an RMS norm's bias no
rows."""


def norm_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, addend: Tensor | None, epsilon: float, centred: bool
) -> NormSums:
    """Compute the backward pass of a norm by torch's operations; arguments as of `norm_backward`."""
    wide, width = torch.promote_types(weight.dtype, torch.float32), x.shape[-1]
    each = norm_shares(x)[1]
    h, gradient = (t.reshape(-1, width).to(wide) for t in (x, dy))
    h = h - h.mean(1, keepdim=True) if centred else h
    scale = torch.rsqrt(h.square().mean(1, keepdim=True) + epsilon)
    normed, weighted = h * scale, gradient * weight.to(wide)
    dx = weighted - normed * (weighted * normed).mean(1, keepdim=True)
    dx = (dx - weighted.mean(1, keepdim=True) if centred else dx) * scale
    dx = dx if addend is None else dx + addend.reshape(-1, width).to(wide)
    of_bias = partial_sums(gradient, each) if centred else gradient.new_empty(0, width)
    sums = partial_sums(gradient * normed, each), of_bias, partial_sums(dx, each)
    return dx.to(x.dtype).view(x.shape), *sums


def norm_backward_by_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, addend: Tensor | None, epsilon: float, centred: bool
) -> NormSums:
    """Compute the backward pass of a norm by Triton; arguments as of `norm_backward`."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    addend = None if addend is None else addend.contiguous()
    programs, each, tile, columns = norm_shares(x)
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    dx = torch.empty_like(x)
    of_weight, of_dx = (x.new_empty(programs, width, dtype=torch.float32) for _ in range(2))
    of_bias = x.new_empty(programs if centred else 0, width, dtype=torch.float32)
    if programs:
        norm_backward_kernel[programs,](
            dy, x, weight, dx if addend is None else addend, dx, of_weight, of_bias, of_dx, rows, each, width, epsilon,
            HAS_ADDEND=addend is not None, CENTRED=centred, ROWS=tile, WIDTH=columns,
            num_warps=8 if columns <= ROW_ELEMENTS else 16,
        )  # fmt: skip
    return dx, of_weight, of_bias, of_dx


@torch.library.custom_op("meshwright::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, addend: Tensor | None, epsilon: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the backward pass of a norm over the last dim, and sums of columns.

    Args:
        dy: [..., N], the gradient of the norm's output.
        x: [..., N], the norm's input.
        weight: [N].
        addend: [..., N], a further addend of x's gradient: that of the residual sum; None: no addend.
        epsilon: the addend to the variance.
        centred: a layer norm, not an RMS norm.

    Returns: NormSums.
    """
    return (norm_backward_by_kernel if by_kernel(dy, x, weight) else norm_backward_reference)(
        dy, x, weight, addend, epsilon, centred
    )


@norm_backward.register_fake
def norm_backward_shapes(
    dy: Tensor, x: Tensor, weight: Tensor, addend: Tensor | None, epsilon: float, centred: bool
) -> NormSums:
    """Return empty results of `norm_backward`, for a compiler."""
    wide, programs = torch.promote_types(weight.dtype, torch.float32), norm_shares(x)[0]
    counts = programs, programs if centred else 0, programs
    of_weight, of_bias, of_dx = (x.new_empty(count, x.shape[-1], dtype=wide) for count in counts)
    return x.new_empty(x.shape), of_weight, of_bias, of_dx


def gelu_backward_reference(dy: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Compute the backward pass of GELU by torch's operations; arguments as of `gelu_backward`."""
    wide, width = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
    dx = torch.ops.aten.gelu_backward(dy.to(wide), x.to(wide), approximate="tanh" if tanh else "none")
    return dx.to(x.dtype), partial_sums(dx.reshape(-1, width), column_shares(x.shape[:-1].numel(), width)[1])


def gelu_backward_by_kernel(dy: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Compute the backward pass of GELU by Triton; arguments as of `gelu_backward`."""
    dy, x = dy.contiguous(), x.contiguous()
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    programs, each = column_shares(rows, width)
    dx, of_dx = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
    if programs:
        gelu_backward_kernel[programs, -(-width // COLUMNS)](
            dy, x, dx, of_dx, rows, each, width, LINEAR, CUBIC, CURVE, SLOPE, RATIO,
            TANH=tanh, ROWS=TILE // COLUMNS, COLUMNS=COLUMNS, num_warps=8,
        )  # fmt: skip
    return dx, of_dx


@torch.library.custom_op("meshwright::gelu_backward", mutates_args=())
def gelu_backward(dy: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Compute the backward pass of GELU of x [..., N], in the tanh form or exact.

    Returns: dx [..., N], and partial sums [programs, N] of dx.
    """
    return (gelu_backward_by_kernel if by_kernel(dy, x) else gelu_backward_reference)(dy, x, tanh)


@gelu_backward.register_fake
def gelu_backward_shapes(dy: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return empty results of `gelu_backward`, for a compiler."""
    programs, wide = column_shares(x.shape[:-1].numel(), x.shape[-1])[0], torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(programs, x.shape[-1], dtype=wide)


def joined_shape(parts: list[Tensor]) -> tuple[int, int, int, int]:
    """Return (B, T, number of parts, width of a part) of parts [B, A, T, E]."""
    batch, heads, tokens, width = parts[0].shape
    return batch, tokens, len(parts), heads * width


def join_heads_reference(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join parts by torch's operations; arguments as of `join_heads`."""
    batch, tokens, count, width = joined_shape(parts)
    dx = torch.stack([heads.transpose(1, 2).flatten(2) for heads in parts], 2)
    wide = dx.view(batch * tokens, count * width).to(torch.promote_types(dx.dtype, torch.float32))
    return dx, partial_sums(wide, column_shares(batch * tokens, width)[1])


def join_heads_by_kernel(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join parts by Triton; arguments as of `join_heads`."""
    batch, tokens, count, width = joined_shape(parts)
    rows, whole = batch * tokens, count * width
    programs, each = column_shares(rows, width)
    dx = parts[0].new_empty(batch, tokens, count, width)
    of_dx = dx.new_empty(programs, whole, dtype=torch.float32)
    for index, heads in enumerate(parts if programs else ()):
        join_heads_kernel[programs, -(-width // COLUMNS)](
            heads, dx, of_dx, rows, each, width, index * width, whole, tokens, heads.shape[-1], *heads.stride()[:3],
            heads.stride(3), ROWS=TILE // COLUMNS, COLUMNS=COLUMNS, num_warps=8,
        )  # fmt: skip
    return dx, of_dx


@torch.library.custom_op("meshwright::join_heads", mutates_args=())
def join_heads(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join G tensors [B, A, T, E].

    Returns: x [B, T, G, A · E], and partial sums [programs, G · A · E] of x over B and T.
    """
    return (join_heads_by_kernel if by_kernel(*parts) else join_heads_reference)(parts)


@join_heads.register_fake
def join_heads_shapes(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return empty results of `join_heads`, for a compiler."""
    batch, tokens, count, width = joined_shape(parts)
    programs, wide = column_shares(batch * tokens, width)[0], torch.promote_types(parts[0].dtype, torch.float32)
    return parts[0].new_empty(batch, tokens, count, width), parts[0].new_empty(programs, count * width, dtype=wide)


OPERATIONS = tuple(
    getattr(torch.ops.meshwright, name).default for name in ("norm_backward", "gelu_backward", "join_heads")
)
"""The operations in graphs. Each has dx as the first result, and partial sums of dx as the last."""


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x if its dtype is another; torch 2.11 gives a graph's function zeros for a `to` that changes nothing."""
    return x if x.dtype == dtype else x.to(dtype)


class FusedNorm(torch.autograd.Function):
    """A norm over the last dim of x [..., N], in the weight's dtype; the output has the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.centred, ctx.biased = epsilon, centred, bias is not None
        h = in_dtype(x, weight.dtype)
        if centred:
            return in_dtype(F.layer_norm(h, weight.shape, weight, bias, epsilon), x.dtype)
        return in_dtype(F.rms_norm(h, weight.shape, weight, epsilon), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, of_weight, of_bias, _ = torch.ops.meshwright.norm_backward(dy, x, weight, None, ctx.epsilon, ctx.centred)
        dbias = in_dtype(of_bias.sum(0), weight.dtype) if ctx.biased else None
        return dx, in_dtype(of_weight.sum(0), weight.dtype), dbias, None, None


class FusedGelu(torch.autograd.Function):
    """GELU of x, in the tanh form or exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return F.gelu(x, approximate="tanh" if tanh else "none")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx, _ = torch.ops.meshwright.gelu_backward(dy, ctx.saved_tensors[0], ctx.tanh)
        return dx, None


class FusedHeads(torch.autograd.Function):
    """Split x [B, T, G, N] into G tensors [B, A, T, N/A]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> tuple[Tensor, ...]:
        return tuple(group.transpose(1, 2) for group in x.unflatten(-1, (heads, -1)).unbind(2))

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None]:
        dx, _ = torch.ops.meshwright.join_heads(list(parts))
        return dx, None


def fused_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
    """Norm x [..., N] over the last dim in the dtype of weight and bias [N]; the output has the dtype of x.

    Args:
        x: the input.
        weight: multiplies.
        bias: is added; None without, and in an RMS norm.
        epsilon: the addend to the variance.
        centred: a layer norm, not an RMS norm.
    """
    y: Tensor = FusedNorm.apply(x, weight, bias, epsilon, centred)
    return y


def fused_gelu(tanh: bool, x: Tensor) -> Tensor:
    """Compute GELU of each element of x, in the tanh form or exact."""
    y: Tensor = FusedGelu.apply(x, tanh)
    return y


def fused_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split x [B, T, G, N] into G tensors [B, heads, T, N/heads]."""
    parts: tuple[Tensor, ...] = FusedHeads.apply(x, heads)
    return parts


FUSED = Fused(fused_norm, fused_gelu, fused_heads)
