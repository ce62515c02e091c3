"""Attention kernels that return output and log-sum-exp, so that a ring can combine blocks.

| kernel      | device, inputs                                   | l          | memory besides arguments        |
|-------------|--------------------------------------------------|------------|---------------------------------|
| `CpuKernel` | CPUs                                             | [B, A, t]  | -                               |
| `Flash`     | GPUs with FlashAttention, half, no mask          | [B, A, t]  | -                               |
| `Efficient` | GPUs, float32 or masks                           | [B, A, t'] | keys and values for all queries |
| `Kernel`    | all: float64 on GPUs                             | [B, A, t]  | TILE_ELEMENTS scores, twice     |
| `Capped`    | all: scores with a soft cap                      | [B, A, t]  | TILE_ELEMENTS scores, 3 times   |

l: the log-sum-exp of a query's scores. t': t rounded up to a multiple of 32. A backward kernel takes output and l of
whole sequences: it recomputes the weights of the whole softmax, so gradients of blocks add up (Liu et al., arXiv
2310.01889). No fused kernel of torch has a soft cap. Sinks are added to the l of any kernel (by_kernel.py).

An H100 has run `Flash` and `Efficient` (tests/test_one_gpu.py). Without a GPU tests check the arguments of both, on
meta tensors and with functions of the same results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

TILE_ELEMENTS = 2**24
"""Scores in memory at a time without a fused kernel."""
_LSE_MULTIPLE = 32
"""`Efficient` pads the rows of l to a multiple of this."""
_BIAS_MULTIPLE = 8
"""`Efficient` reads a mask's row in multiples of this."""


class Attended(NamedTuple):
    """The output [B, A, t, E]; l [B, A, t], at least float32; the state of the dropout's random numbers, which a
    backward kernel takes although there is no dropout."""

    out: Tensor
    sums: Tensor
    seeds: tuple[Tensor, ...] = ()


class Kernel:
    """softmax(scale · Q Kᵀ + bias) V by products over tiles of scores.

    Q [B, A, t, E]; K and V [B, A/G, s, E], one head for G queries; bias [B, 1, 1 or t, s] or None; t = s if causal.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> Attended:
        key, value = (_for_each_query(x, query) for x in (key, value))
        outs, all_sums = [], []
        for rows in _tiles(query, key):
            scores, _ = self._scores(query, key, bias, rows, causal, scale, backward=False)
            sums = scores.logsumexp(-1)
            outs.append((scores - sums.unsqueeze(-1)).exp().to(value.dtype) @ value)
            all_sums.append(sums)
        return Attended(torch.cat(outs, 2), torch.cat(all_sums, 2))

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, bias: Tensor | None,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the addend of dQ, and dK and dV of the block. `whole`: output and l of all blocks together."""
        out, sums, _ = whole
        heads, key, value = key.shape[1], _for_each_query(key, query), _for_each_query(value, query)
        inner = (gradient * out).to(sums.dtype).sum(-1, keepdim=True)
        dqs, dk, dv = [], torch.zeros_like(key, dtype=sums.dtype), torch.zeros_like(value, dtype=sums.dtype)
        for rows in _tiles(query, key):
            scores, slopes = self._scores(query, key, bias, rows, causal, scale, backward=True)
            scores = scores - sums[:, :, rows].unsqueeze(-1)
            weights = scores.exp()
            del scores
            dv += weights.to(gradient.dtype).transpose(-1, -2) @ gradient[:, :, rows]
            dweights = (gradient[:, :, rows] @ value.transpose(-1, -2)).to(sums.dtype)
            dscores = weights * (dweights - inner[:, :, rows]) * scale
            dscores = (dscores if slopes is None else dscores * slopes).to(query.dtype)
            dqs.append(dscores @ key)
            dk += dscores.transpose(-1, -2) @ query[:, :, rows]
        dk, dv = (_of_heads(x, heads) for x in (dk, dv))
        return torch.cat(dqs, 2), dk, dv

    def _scores(
        self, query: Tensor, key: Tensor, bias: Tensor | None, rows: slice, causal: bool, scale: float, *,
        backward: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return scores [B, A, rows, s], at least float32, and with `backward` the slopes of a cap."""
        wide = torch.promote_types(query.dtype, torch.float32)
        scores, slopes = self._capped((query[:, :, rows] @ key.transpose(-1, -2)).to(wide) * scale, backward)
        if bias is not None:
            scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, rows])
        if causal:
            places = torch.arange(key.shape[2], device=key.device)
            scores = scores.masked_fill(places > places[rows, None], torch.finfo(wide).min / 2)
        return scores, slopes

    def _capped(self, scores: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Return scaled scores before bias and masks, and the slopes of a cap."""
        return scores, None


@dataclass(frozen=True)
class Capped(Kernel):
    """Tiles of scores with a soft cap: s = cap · tanh(x / cap) of x = scale · Q Kᵀ; dx = ds (1 - (s / cap)²).

    The bias is added to s, so a hidden key stays hidden.
    """

    cap: float
    widens: bool = False
    """Whether halves are computed as float32 (precision.products)."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> Attended:
        half = query.dtype
        query, key, value = self._operands(query, key, value)
        attended = super().attend(query, key, value, bias, causal, scale)
        return attended._replace(out=attended.out.to(half))

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, bias: Tensor | None,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gradient, query, key, value = self._operands(gradient, query, key, value)
        return super().gradients(gradient, query, key, value, whole, bias, causal, scale)

    def _operands(self, *halves: Tensor) -> tuple[Tensor, ...]:
        wide = self.widens and halves[0].element_size() < 4
        return tuple(x.float() for x in halves) if wide else halves

    def _capped(self, scores: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
        shares = torch.tanh(scores / self.cap)
        return shares * self.cap, 1 - shares.square() if backward else None


class CpuKernel(Kernel):
    """torch's FlashAttention for CPUs."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> Attended:
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        # On the meta device torch 2.11 gives float32 sums, although the kernel gives float64.
        return Attended(out, sums.to(torch.promote_types(query.dtype, torch.float32)))

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, bias: Tensor | None,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, whole.out, whole.sums, 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq, dk, dv


class Flash(Kernel):
    """FlashAttention on a GPU."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> Attended:
        assert bias is None, "FlashAttention takes no mask"
        out, sums, _, _, _, _, *seeds, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return Attended(out, sums, tuple(seeds))

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, bias: Tensor | None,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        lengths = query.shape[2], key.shape[2]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            # The kernel ignores the strides of l, so l must be contiguous.
            gradient, query, key, value, whole.out, whole.sums.contiguous(), None, None, *lengths, 0.0, causal,
            *whole.seeds, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class Efficient(Kernel):
    """The memory-efficient attention of a GPU (Rabe and Staats, arXiv 2112.05682, in the form of xFormers)."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> Attended:
        key, value = (_for_each_query(x, query) for x in (key, value))
        out, sums, *seeds = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(bias, query), True, 0.0, causal, scale=scale
        )
        return Attended(out, sums[:, :, : query.shape[2]], tuple(seeds))

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, bias: Tensor | None,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        heads, key, value = key.shape[1], _for_each_query(key, query), _for_each_query(value, query)
        # Padding rows have weights of 0: exp(x - inf).
        filling = -query.shape[2] % _LSE_MULTIPLE
        sums = torch.nn.functional.pad(whole.sums, (0, filling), value=torch.inf)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _aligned(bias, query), whole.out, sums, *whole.seeds, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        dk, dv = (_of_heads(x, heads) for x in (dk, dv))
        return dq, dk, dv


def kernel_of(query: Tensor, key: Tensor, value: Tensor, masked: bool, device_type: str) -> Kernel:
    """Choose the kernel for a device type and tensors of these shapes, which may be on the meta device."""
    if has_torch_function((query,)):  # a plan's device may have no fused attention (on_device.py)
        chosen: Kernel = handle_torch_function(kernel_of, (query,), query, key, value, masked, device_type)
        return chosen
    if device_type == "cpu":
        return CpuKernel()
    if query.dtype == torch.float64:
        return Kernel()
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, key.shape[1] != query.shape[1])
    # The kernels need widths that are multiples of 8; other widths would be padded in each step.
    aligned = query.shape[-1] % 8 == 0
    takes_flash = torch.backends.cuda.can_use_flash_attention(asked) if query.is_cuda else query.element_size() < 4
    if aligned and takes_flash and not masked:
        return Flash()
    expanded = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, False, False)
    takes_efficient = torch.backends.cuda.can_use_efficient_attention(expanded) if query.is_cuda else True
    return Efficient() if aligned and takes_efficient else Kernel()


def _aligned(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """Expand the mask to all heads and queries, with rows padded to _BIAS_MULTIPLE in memory."""
    if bias is None:
        return None
    length = bias.shape[-1]
    wide = torch.nn.functional.pad(bias, (0, -length % _BIAS_MULTIPLE))[..., :length]
    return wide.expand(*query.shape[:3], length)


def _tiles(query: Tensor, key: Tensor) -> list[slice]:
    """Cut queries into runs with at most TILE_ELEMENTS scores."""
    batch, heads, count, _ = query.shape
    length = max(1, TILE_ELEMENTS // (batch * heads * key.shape[2]))
    return [slice(first, min(first + length, count)) for first in range(0, count, length)]


def _for_each_query(x: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values [B, A/G, s, E] for the queries: [B, A, s, E]."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Sum gradients [B, A, s, E] over the queries of a head: [B, A/G, s, E]."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
