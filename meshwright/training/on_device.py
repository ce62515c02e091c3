"""Meta tensors with a device's operators: attention, dropout, GELU and autocast as on that device.

| attention     | operators between the linears                                                                     |
|---------------|---------------------------------------------------------------------------------------------------|
| fused         | one kernel forward, one backward; nothing of [B, A, T, S] in memory                               |
| fused-softmax | Q Kᵀ, one kernel that scales, masks and takes the softmax, dropout, the product with V, in the    |
|               | run's dtype: Megatron-LM's kernels (Narayanan et al., SC 2021, section 4.2)                       |
| steps         | as fused-softmax, with separate kernels for scaling, masking and softmax                          |
| wide-steps    | as steps, on scores in float32 (Megatron-LM's --attention-softmax-in-fp32 without fused kernels)  |
| torch         | the steps of F.scaled_dot_product_attention without a fused kernel, in float32 for half precision |

All rows but `fused` compute every score of a causal attention. With dropout in half precision these rows keep 5 bytes
of each score: the softmax, the mask of the dropout, the dropout's product; wide-steps keeps 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from meshwright.compute.context.documents import flash_takes
from meshwright.compute.context.kernels import Kernel, kernel_of
from meshwright.compute.context.widened import attend_widened
from meshwright.compute.tensor.gelu import gelu

Attention = Literal["fused", "fused-softmax", "steps", "wide-steps", "torch"]

LOWERED = frozenset([
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "conv1d",
    "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
])  # fmt: skip
"""Functions that autocast runs on narrowed tensors (torch's page on AMP, "Autocast Op Reference")."""
_LOSSES = frozenset(["cross_entropy", "nll_loss", "mse_loss", "kl_div", "binary_cross_entropy_with_logits", "prod"])
WIDENED = {
    "cpu": _LOSSES,
    "cuda": _LOSSES | frozenset([
        "softmax", "log_softmax", "logsumexp", "layer_norm", "group_norm", "norm", "sum", "cumsum", "exp", "expm1",
        "log", "log1p", "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "__rdiv__", "softplus",
        # torch 2.11 does not cast it.
        *(["rms_norm"] if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA") else []),
    ]),
}  # fmt: skip
"""Functions that autocast runs in float32, by type of device. Our models call no other function that is cast."""

_OURS = frozenset([
    F.scaled_dot_product_attention, attend_widened, flash_takes, kernel_of, F.dropout, F.rms_norm, F.gelu,
])  # fmt: skip
"""Functions that devices compute by other operators than meta tensors."""


class AsOnDevice(TorchFunctionMode):
    """A mode that makes meta tensors run a device's operators.

    F.scaled_dot_product_attention runs the device's `attention` (a fused kernel if the inputs allow, as torch would
    choose). Dropout on a GPU is one kernel, and GELU on a CPU is our own. Under autocast tensors are cast before use,
    so that autograd saves the same tensors as on the device. A weight of our layers is cast at its use, once a pass.

    Args:
        device_type: the simulated device.
        attention: a row of the module's table.
        gelu_in_steps: GELU as separate operators, as in a program of torch's operators.
        heads_apart: separate attention kernels for each head.
        norms_in_steps: RMS norm on a GPU as separate operators; torch has a kernel since 2.9.
        keys_grouped: a GPU's fused attention reads one key for several queries, as FlashAttention and cuDNN do.
        copies_values: a fused attention reads values with the keys' strides, and copies values with other strides.
    """

    def __init__(
        self,
        device_type: str,
        attention: Attention,
        *,
        gelu_in_steps: bool = False,
        heads_apart: bool = False,
        norms_in_steps: bool = False,
        keys_grouped: bool = False,
        copies_values: bool = False,
    ) -> None:
        super().__init__()
        self.copies_values = copies_values
        self.heads_apart, self.norms_in_steps, self.keys_grouped = heads_apart, norms_in_steps, keys_grouped
        self.device_type, self.attention, self.gelu_in_steps = device_type, attention, gelu_in_steps

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Most calls only read a tensor's shape: half a million in a search.
        if function.__name__ == "__get__":
            return function(*args)
        casts = torch.is_autocast_enabled("cpu")
        if not casts and function not in _OURS:
            return function(*args, **kwargs) if kwargs else function(*args)
        # torch's autocast depends on a tensor's device, and ignores meta tensors.
        if casts and (dtype := self._autocast_dtype(function, kwargs or {})) is not None:

            def cast(x: Any) -> Any:
                is_cast = isinstance(x, Tensor) and x.is_meta and x.is_floating_point() and x.dtype != torch.float64
                return x.to(dtype) if is_cast else x

            args, kwargs = tree_map(cast, (args, kwargs))
        if function is attend_widened and self.attention != "fused":  # without a fused kernel there is nothing to widen
            function = F.scaled_dot_product_attention
        if function is F.scaled_dot_product_attention and self.attention != "torch":
            return self._attend(*args, **(kwargs or {}))
        if function is flash_takes:  # for windows: one kernel, as on the device
            query = args[0]
            half, fused = query.element_size() < 4, self.attention == "fused"
            return fused and half and self.device_type == "cuda" and query.shape[-1] % 8 == 0
        if function is kernel_of and self.attention != "fused":
            return Kernel()  # a kernel that returns a ring's sums too
        if function is kernel_of:
            return kernel_of(*args[:4], self.device_type)  # meta tensors do not name the device
        if function is F.dropout and self.device_type == "cuda":
            return self._drop(*args, **(kwargs or {}))
        if function is F.rms_norm and self.device_type == "cuda" and not self.norms_in_steps:
            # For RMS norm a GPU has one kernel each way, meta tensors run steps; layer norm's kernels move equal bytes.
            given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | dict(kwargs or {})
            return F.layer_norm(given["input"], given["normalized_shape"], given.get("weight"))
        if (
            function is F.gelu
            and kwargs == {"approximate": "tanh"}
            and (self.gelu_in_steps or self.device_type == "cpu")
        ):
            [x] = args
            if self.gelu_in_steps:
                return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
            return gelu(x, device_type="cpu")
        return function(*args, **(kwargs or {}))

    def _autocast_dtype(self, function: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """Return the dtype that autocast casts a function's tensors to; None if nothing is cast. Calls with `out` or
        `dtype` are not cast."""
        if "out" in kwargs or kwargs.get("dtype") is not None:
            return None
        if function.__name__ in LOWERED:
            return torch.get_autocast_dtype("cpu")
        return torch.float32 if function.__name__ in WIDENED[self.device_type] else None

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert not inplace, "no layer of ours drops in place"
        return _dropout(x, p, on_gpu=True) if training and p > 0 else x

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if self.heads_apart and query.shape[1] > 1:
            assert not enable_gqa, "a published program's heads have keys of their own"
            heads = [x.split(1, 1) for x in (query, key, value)]
            masks: Sequence[Tensor | None] = [attn_mask] * query.shape[1]
            if attn_mask is not None and attn_mask.dim() > 3 and attn_mask.shape[1] > 1:
                masks = attn_mask.split(1, 1)  # a bias of each head
            each = zip(*heads, masks, strict=True)
            return torch.cat([self._attend(q, k, v, mask, dropout_p, is_causal, scale) for q, k, v, mask in each], 1)
        if (
            enable_gqa
            and (self.attention != "fused" or self.device_type != "cpu")
            and not (self.keys_grouped and self.attention == "fused" and attn_mask is None)
        ):
            # These kernels need one key a query head.
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        if self.attention != "fused":
            masked = attn_mask is not None or is_causal
            return _attend_in_steps(
                query, key, value, attn_mask, dropout_p, masked, self.attention, on_gpu=self.device_type == "cuda",
            )  # fmt: skip
        if self.copies_values and key.stride()[:-1] != value.stride()[:-1]:
            value = value.transpose(1, 2).contiguous().transpose(1, 2)
        learns_mask = attn_mask is not None and attn_mask.requires_grad
        # Fused kernels compute no gradient of a mask, and the CPU's has no dropout: torch would run its steps.
        if learns_mask or (self.device_type == "cpu" and dropout_p > 0):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # torch does the same before these kernels; the addend takes memory, too.
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
        if self.device_type == "cpu":
            attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        else:
            if key.shape[1] < query.shape[1]:
                shared: Tensor = _SharedKeys.apply(query, key, value, dropout_p, is_causal, scale)
                return shared
            bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
            attended = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )[0]
        return attended


def _attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, masked: bool, attention: Attention,
    *, on_gpu: bool,
) -> Tensor:  # fmt: skip
    """Attend with scores and probabilities [B·A, T, S] in the queries' dtype; the first product applies the scale.
    `attention`: a row of the module's table with separate products."""
    heads = query.shape[:2]
    scores = torch.bmm(_HeadsInRow.apply(query), _HeadsInRow.apply(key).mT).unflatten(0, heads)
    if attention == "wide-steps":
        scores = scores.float()
    if attention in ("steps", "wide-steps"):
        # Any factor: only the kernel is counted, since meta tensors have no numbers.
        scores = scores * 1.0
        if masked:
            hidden = torch.empty((), dtype=torch.bool, device=scores.device).expand(scores.shape[-2:])
            scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    probabilities = torch.softmax(scores, -1).to(query.dtype)
    if dropout:
        probabilities = _dropout(probabilities, dropout, on_gpu=on_gpu)
    return torch.bmm(probabilities.flatten(0, 1), _HeadsInRow.apply(value)).unflatten(0, heads)


def _dropout(x: Tensor, share: float, *, on_gpu: bool) -> Tensor:
    """Drop elements: on a GPU by one kernel, which keeps a mask of bytes; elsewhere by three, with a mask in x's
    dtype."""
    return torch.native_dropout(x, share, True)[0] if on_gpu else torch.dropout(x, share, True)


class _SharedKeys(torch.autograd.Function):
    """A fused attention with one key for several queries. In the backward pass each query gives a separate gradient of
    the key; the gradients are summed (flash_api.cpp of FlashAttention-2)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        outs = kernel(query, key, value, None, True, dropout, causal, scale=scale)
        ctx.save_for_backward(query, key, value, *outs)
        ctx.settings = dropout, causal, scale
        out: Tensor = outs[0]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *outs = ctx.saved_tensors
        dropout, causal, scale = ctx.settings
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        each = kernel(gradient, query, key, value, None, *outs, dropout, [True, True, True, False], causal, scale=scale)
        dk, dv = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in each[1:3])
        return each[0], dk, dv, None, None, None


class _HeadsInRow(torch.autograd.Function):
    """A reshape [B, A, T, E] -> [B·A, T, E] without a copy. A batched product accepts operands with strides. On meta
    tensors one set of strides represents all: Megatron-LM's layout of sequences before samples, [T, B, A, E]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        *ctx.heads, length, width = x.shape
        count = math.prod(ctx.heads)
        return x.as_strided((count, length, width), (width, count * width, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.unflatten(0, ctx.heads)
