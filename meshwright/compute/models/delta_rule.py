"""The gated delta rule (Yang et al., arXiv 2412.06464): linear attention with a state of fixed size for each head.

A head's state S [E, F] maps keys to values. Token t multiplies the state by exp(g_t) and corrects the value of k_t:

    S_t = exp(g_t) S_{t-1} + k_t (β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t))ᵀ        o_t = S_tᵀ q_t

Chunks of C tokens (Yang et al., arXiv 2406.06484, section 3.2): within a chunk, the corrections U [C, F] solve a
triangular system, and tokens read S, the state before the chunk, by products of matrices. G_t: the sum of g up to t.

    (I + tril(diag(β) (K Kᵀ ⊙ D), -1)) U = diag(β) (V - diag(exp G) K S)        D_ij = exp(G_i - G_j), i >= j
    O = diag(exp G) Q S + tril(Q Kᵀ ⊙ D) U        S' = exp(G_C) S + (diag(exp(G_C - G)) K)ᵀ U

U is linear in S, so S' = M S + N, with M and N of all chunks at once: the states take one product a chunk in order.

A document that begins inside of a chunk reads neither the state nor earlier tokens: those entries of D and of exp G are
zero. Sums of g are over a document's own tokens. So no bit of a document depends on the document before.

Ranks with a part of a sequence each compute M and N of the part's tokens from values [V, 0] and a state [0, I]
(`transition`); the states before each part follow from those of all parts (`states_before`).

The kernels of flash-linear-attention (fla) compute whole sequences on a GPU with fla installed, in half precision. fla
has sequences of several documents as one row, [1, tokens, heads, width], with the documents' ends. Its kernels multiply
in the dtype of queries, keys and values and keep states in float32. A run in float32 uses torch's products, because
fla's would be rounded to TF32.

Shapes: B batch, T tokens, A heads, E width of keys, F width of values, n chunks.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""C: tokens of a chunk."""

UNIT_EPSILON = 1e-6
"""The addend to a key's squared length, fixed in the authors' code and in transformers."""

HALVES = (torch.bfloat16, torch.float16)
INSTALLED = find_spec("fla") is not None
"""Found once: a compiled layer cannot look for packages."""


def unit(x: Tensor) -> Tensor:
    """Scale vectors [..., E] to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPSILON)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule by chunks, with gradients by autograd.

    Args:
        query: [B, A, T, E], of unit length times 1/√E.
        key: [B, A, T, E], of unit length.
        value: [B, A, T, F].
        decay: g [B, A, T], at most 0.
        rate: β [B, A, T], between 0 and 1.
        state: [B, A, E, F], before the first token.
        starts: int64 [B, T] on the device: the place of the first token of each token's document; negative if the
            document began before these tokens. None: all tokens continue the state's document.

    Returns:
        The outputs [B, A, T, F], and the state [B, A, E, F] after the last token.
    """
    length = query.shape[2]
    size = min(CHUNK, length)
    missing = -length % size
    if missing:  # rates of zero change no state
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
        decay, rate = (F.pad(x, (0, missing)) for x in (decay, rate))
    query, key, value = (x.unflatten(2, (-1, size)) for x in (query, key, value))  # [B, A, n, C, E]
    decay, rate = (x.unflatten(2, (-1, size)) for x in (decay, rate))  # [B, A, n, C]
    visible = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    since = decay.cumsum(-1)
    # Sums of g over the tokens after j up to i, each for itself: differences of the sums up to i and up to j would have
    # rounding errors of all tokens before, also of other documents.
    sums = (decay.unsqueeze(-1) * visible.tril(-1)).cumsum(-2)
    if starts is not None:
        starts = torch.cat([starts, starts[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size))[:, None]
        visible = visible & (starts.unsqueeze(-1) == starts.unsqueeze(-2))  # [B, 1, n, C, C]
        begins = torch.arange(0, length, size, device=query.device)[:, None]
        since = since.masked_fill(starts >= begins, -torch.inf)
    among, since = sums.masked_fill(~visible, -torch.inf).exp(), since.exp().unsqueeze(-1)
    weighted = key * rate.unsqueeze(-1)
    system = weighted @ key.mT * among
    known = torch.cat([value * rate.unsqueeze(-1), weighted * since], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.split((value.shape[-1], key.shape[-1]), -1)  # U = new - read S
    until = (key * among[..., -1, :].unsqueeze(-1)).mT  # [B, A, n, E, C]
    transfers = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device) * since[..., -1:, :] - until @ read
    added = until @ new
    # One product a chunk is in order; all others are of all chunks at once.
    states = [state]
    for transfer, more in zip(transfers.unbind(2), added.unbind(2), strict=True):
        states.append(transfer @ states[-1] + more)
    before = torch.stack(states[:-1], 2)
    fresh = new - read @ before
    out = (query * since) @ before + (query @ key.mT * among) @ fresh
    return out.flatten(2, 3)[:, :, :length], states[-1]


def transition(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the rule to tokens with an unknown state before the first; arguments as in `chunked_delta_rule`.

    Returns:
        Outputs [B, A, T, F] for a state of zeros, reads R [B, A, T, E], and [N, M] [B, A, E, F + E]: for a state S the
        outputs are more by R S, and the state after the last token is M S + N.
    """
    width, values = key.shape[-1], value.shape[-1]
    both = F.pad(value, (0, width))
    identity = torch.eye(width, dtype=key.dtype, device=key.device)
    state = F.pad(identity, (values, 0)).expand(*key.shape[:2], -1, -1)
    outputs, after = chunked_delta_rule(query, key, both, decay, rate, state, starts)
    stateless, reads = outputs.split((values, width), -1)
    return stateless, reads, after


def states_before(transitions: Tensor, values: int) -> Tensor:
    """Return the state before each part of a sequence; zeros before the first.

    Args:
        transitions: [N, M] of each part in order, [parts, B, A, E, F + E].
        values: F.

    Returns:
        [parts, B, A, E, F].
    """
    states = [torch.zeros_like(transitions[0, ..., :values])]
    for matrices in transitions[:-1]:
        states.append(matrices[..., values:] @ states[-1] + matrices[..., :values])
    return torch.stack(states)


def causal_convolution(x: Tensor, taps: Tensor, before: Tensor, starts: Tensor | None = None) -> Tensor:
    """Convolve each channel with the last W tokens.

    Args:
        x: [B, T, N].
        taps: [W, N]; the last one multiplies the token itself.
        before: [B, W - 1, N], the tokens before the first.
        starts: As in `chunked_delta_rule`; tokens of other documents count as zeros.

    Returns:
        [B, T, N], in the wider dtype of x and taps.
    """
    length, far = x.shape[1], len(taps) - 1
    whole = torch.cat([before, x], 1)
    y = x * taps[-1]
    for distance in range(1, far + 1):
        earlier = whole[:, far - distance : far - distance + length]
        if starts is not None:
            places = torch.arange(length, device=x.device)
            earlier = earlier.masked_fill((places - distance < starts).unsqueeze(-1), 0.0)
        y = y + earlier * taps[far - distance]
    return y


def fla_takes(x: Tensor) -> bool:
    """Return whether fla's kernels take an input: in half precision, on a GPU, with fla installed."""
    return x.is_cuda and x.dtype in HALVES and INSTALLED


def fused_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the rule by fla's kernels; arguments and results as of `chunked_delta_rule`, outputs in the state's dtype.

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
