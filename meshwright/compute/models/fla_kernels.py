"""The gated delta rule by the kernels of flash-linear-attention (fla), on a GPU with fla installed, in half precision.

fla has sequences of several documents as one row: [1, tokens, heads, width], with the documents' ends. Its kernels
multiply in the dtype of queries, keys and values and keep states in float32. A run in float32 uses torch's products
(`delta_rule`), because fla's would be rounded to TF32.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
INSTALLED = find_spec("fla") is not None
"""Found once: a compiled layer cannot look for packages."""


def takes(x: Tensor) -> bool:
    """Return whether the kernels take an input: in half precision, on a GPU, with fla installed."""
    return x.is_cuda and x.dtype in HALVES and INSTALLED


def fused_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule; arguments and results as of `chunked_delta_rule`, outputs in the state's dtype.

    With `starts`, every document begins in these tokens: the state before is zeros, and so is the returned one.
    """
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    tokens = [x.transpose(1, 2) for x in (query, key, value, decay, rate)]  # [B, T, A, ...]
    if starts is None:
        out, after = rule(*tokens, scale=1.0, initial_state=state, output_final_state=True)
        return out.transpose(1, 2).to(state.dtype), after
    batch, length = starts.shape
    begins = (starts == torch.arange(length, device=starts.device)).flatten().nonzero().flatten()
    ends = torch.cat([begins, begins.new_tensor([batch * length])])
    rows = [x.flatten(0, 1).unsqueeze(0) for x in tokens]
    out, _ = rule(*rows, scale=1.0, cu_seqlens=ends)
    return out.squeeze(0).unflatten(0, (batch, length)).transpose(1, 2).to(state.dtype), torch.zeros_like(state)
