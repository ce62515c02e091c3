"""A soft cap and sinks: equal to a softmax written out in float64 to 1e-12, under every context and kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compute.context import documents
from meshwright.compute.context.context import Context, WidenedHeads
from meshwright.compute.context.kernels import Capped, CpuKernel, Efficient, Flash, Kernel
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.shaped import attend_shaped
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.models.attention import AttentionCore
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.recompute import LiveBytes, recomputed_in_part, recomputing
from meshwright.tools.verify.reference import MaskedSequences
from meshwright.tools.verify.reference_kit import ReferenceKit
from meshwright.training.on_device import AsOnDevice
from tests.compute.context.documents import LENGTHS, SOLO, A, K, T, operands, starts_of
from tests.compute.context.ways import WAYS, context_of
from tests.workers import run_ranks

SCALE, CAP = 0.3, 2.0
"""Scores are about 3: the cap bends most scores."""
MASKS = {
    "none": (None, None), "window": (None, 5), "documents": (tuple(LENGTHS), None), "both": (tuple(LENGTHS), 5),
}  # fmt: skip
"""Documents and a window."""
SHAPES = {"cap": (CAP, False), "sinks": (None, True), "cap and sinks": (CAP, True)}
NAMES = ("output", "dQ", "dK", "dV", "dsinks")


class Case(NamedTuple):
    """A causal attention."""

    documents: Sequence[Sequence[int]] | None = None
    window: int | None = None
    cap: float | None = None
    sunk: bool = False

    def spec(self, sinks: Tensor | None) -> AttentionSpec:
        starts = None if self.documents is None else starts_of(self.documents)
        own = sinks if self.sunk else None
        return AttentionSpec(True, self.window, SCALE, documents=starts, soft_cap=self.cap, sinks=own)

    def hidden(self) -> Tensor:
        """bool [B or 1, 1, T, T]: True for a key that a query does not see."""
        seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - (self.window or T))[None]
        if self.documents is not None:
            starts = starts_of(self.documents)
            seen = seen & (starts[:, :, None] == starts[:, None, :])
        return ~seen[:, None]


def cases(*, exact: bool = False) -> list[Case]:
    """Return every mask with every shape; cases of equal bits have no sinks."""
    every = [Case(*MASKS[mask], *SHAPES[shape]) for mask, shape in product(MASKS, SHAPES)]
    return [case for case in every if not (exact and case.sunk)]


def logits() -> Tensor:
    """Return a sink a head: one below most scores, one above."""
    return torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.float64)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cap: float | None, sinks: Tensor | None, *,
    scale: float = SCALE, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """exp(s_j) / (sum of exp(s_i) + exp(sink)) times v_j."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bate,base->bats", q, k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    terms = scores.exp()
    if hidden is not None:
        terms = terms.masked_fill(hidden, 0.0)
    total = terms.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("bats,base->bate", terms / total, v)


def gradients(out: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the output and the gradients, with zeros for inputs without an effect."""
    found = torch.autograd.grad(out, inputs, gradient, allow_unused=True)
    pairs = zip(found, inputs, strict=True)
    return out.detach(), *(torch.zeros_like(x) if dx is None else dx for dx, x in pairs)


@cache
def expected_of(case: Case) -> tuple[Tensor, ...]:
    inputs, gradient = operands()
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    out = written_out(q, k, v, case.hidden(), case.cap, sinks if case.sunk else None)
    return gradients(out, (q, k, v, sinks), gradient)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], error: float = 1e-12) -> None:
    for name, one, other in zip(NAMES, found, expected, strict=True):
        off = float((one - other).norm() / other.norm().clamp(min=1))
        assert off <= error, f"{name}: {off}"


def attended(mesh: Mesh, way: str, block: int) -> list[tuple[Tensor, ...]]:
    """Return for each case this rank's tokens of the output, dQ, dK and dV, the rank's part of dsinks, and the tokens'
    positions."""
    documents.BLOCK = block  # a rank's process has the package to itself
    inputs, gradient = operands()
    context, found = context_of(way, mesh), []
    places = context.positions(0, T // mesh.size("context"), torch.device("cpu"))
    for case in cases(exact=WAYS[way].exact):
        mine = [x[:, :, places].clone().requires_grad_() for x in inputs]
        sinks = logits().requires_grad_()
        out = context.attend(*mine, case.spec(sinks))
        found.append((*gradients(out, (*mine, sinks), gradient[:, :, places]), places))
    return found


@pytest.mark.parametrize("way, block", [*((way, 4) for way in WAYS), ("whole", 128), ("ring 2", 128)])
def test_equals_a_softmax_written_out(way: str, block: int) -> None:
    results = run_ranks(attended, Grid((("context", WAYS[way].ranks),)), way, block, forked=True)
    for number, case in enumerate(cases(exact=WAYS[way].exact)):
        expected = expected_of(case)
        together = [torch.empty_like(x) for x in expected[:4]]
        for found in results:
            for whole, part in zip(together, found[number][:4], strict=True):
                whole[:, :, found[number][-1]] = part
        assert_close([*together, sum(found[number][4] for found in results)], expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["whole", "ring 2", "ring tiles", "ulysses"])
def test_all_see_all_but_padding(way: str, shape: str) -> None:
    """Not causal."""
    cap, sunk = SHAPES[shape]
    results = run_ranks(padded, Grid((("context", WAYS[way].ranks),)), way, cap, sunk)
    inputs, gradient = operands()
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    out = written_out(q, k, v, ~seen_of(), cap, sinks if sunk else None)
    expected = gradients(out, (q, k, v, sinks), gradient)
    together = [torch.empty_like(x) for x in expected[:4]]
    for found in results:
        for whole, part in zip(together, found[:4], strict=True):
            whole[:, :, found[-1]] = part
    assert_close([*together, sum(found[4] for found in results)], expected)


def seen_of() -> Tensor:
    return (torch.arange(T) < torch.tensor([1, 17, T, T - 1, 30])[:, None])[:, None, None]


def padded(mesh: Mesh, way: str, cap: float | None, sunk: bool) -> tuple[Tensor, ...]:
    inputs, gradient = operands()
    context = context_of(way, mesh)
    places = context.positions(0, T // mesh.size("context"), torch.device("cpu"))
    mine, sinks = [x[:, :, places].clone().requires_grad_() for x in inputs], logits().requires_grad_()
    spec = AttentionSpec(scale=SCALE, seen=seen_of(), soft_cap=cap, sinks=sinks if sunk else None)
    out = context.attend(*mine, spec)
    return *gradients(out, (*mine, sinks), gradient[:, :, places]), places


def test_a_row_of_padding_alone_falls_into_the_sinks() -> None:
    (q, k, v), _ = operands()
    seen = torch.zeros(len(q), 1, 1, T, dtype=torch.bool)
    for cap in (None, CAP):
        spec = AttentionSpec(seen=seen, soft_cap=cap, sinks=logits())
        assert torch.equal(Context().attend(q, k, v, spec), torch.zeros_like(q))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("learnt", [False, True])
def test_a_bias_is_added_behind_the_cap(shape: str, per_head: bool, learnt: bool) -> None:
    """A kernel adds the bias, or steps do if the bias has a gradient."""
    cap, sunk = SHAPES[shape]
    inputs, gradient = operands()
    torch.manual_seed(3)
    bias = torch.randn(1, A if per_head else 1, T, T, dtype=torch.float64).requires_grad_(learnt)
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    wanted = (q, k, v, sinks, bias) if learnt else (q, k, v, sinks)
    own = sinks if sunk else None
    out = Context().attend(q, k, v, AttentionSpec(scale=SCALE, bias=bias, soft_cap=cap, sinks=own))
    plain = written_out(q, k, v, None, cap, own, bias=bias)
    for one, other in zip(gradients(out, wanted, gradient), gradients(plain, wanted, gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_sets_weights_to_zero(shape: str) -> None:
    """With values that name keys, the output is the weights: each is 0, or grown by 1 / (1 - p)."""
    cap, sunk = SHAPES[shape]
    inputs, _ = operands()
    q, k = inputs[0][:1], inputs[1][:1]
    v = torch.eye(T, dtype=torch.float64).expand(1, K, T, T)
    own = logits() if sunk else None
    weights = written_out(q, k, v, Case().hidden(), cap, own)
    torch.manual_seed(4)
    spec = AttentionSpec(True, scale=SCALE, dropout=0.25, soft_cap=cap, sinks=own)
    out = Context().attend(q, k, v, spec)
    zeroed = out == 0
    torch.testing.assert_close(out, torch.where(zeroed, 0.0, weights / 0.75), rtol=1e-12, atol=1e-12)
    share = float((zeroed & ~Case().hidden()).sum() / (A * T * (T + 1) / 2))
    assert abs(share - 0.25) < 0.05, share


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_add_up(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.compute.context.kernels.TILE_ELEMENTS", len(LENGTHS) * A * T * 7)
    monkeypatch.setattr("meshwright.compute.context.widened.kernel_of", lambda *_: Kernel())
    case = Case(None, None, *SHAPES[shape])
    inputs, gradient = operands()
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    out = Context().attend(q, k, v, case.spec(sinks))
    assert_close(gradients(out, (q, k, v, sinks), gradient), expected_of(case))


@pytest.mark.parametrize("case", cases())
def test_the_reference_of_verify_knows_both(case: Case) -> None:
    inputs, gradient = operands()
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    out = MaskedSequences().attend(q, k, v, case.spec(sinks))
    assert_close(gradients(out, (q, k, v, sinks), gradient), expected_of(case))


def core_of(case: Case) -> AttentionCore:
    return AttentionCore(ReferenceKit(), AttentionSpec(True, case.window, SCALE, soft_cap=case.cap))


@pytest.mark.parametrize("case", [case for case in cases() if case.documents is None])
def test_a_cache_gives_what_the_whole_gives(case: Case) -> None:
    (q, k, v), _ = operands()
    core, cache_of, sinks = core_of(case), KeyValueCache(), logits() if case.sunk else None
    outs = []
    for queries, keys, values in zip(*(x.split([7] + [1] * (T - 7), 2) for x in (q, k, v)), strict=True):
        seen = cache_of.extend(0, keys, values, case.window)
        outs.append(core(queries, *seen, sinks=sinks))
    assert (torch.cat(outs, 2) - expected_of(case)[0]).norm() <= 1e-12


@pytest.mark.parametrize("run", ["whole", "in part"])
@pytest.mark.parametrize("case", cases())
def test_recomputation_gives_the_same_gradients(case: Case, run: str) -> None:
    inputs, gradient = operands()
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    core = core_of(case)
    mesh = planned_mesh(SOLO, 0, ("context",), "cpu")
    core.run_by(recomputing(mesh) if run == "whole" else recomputed_in_part)
    starts = None if case.documents is None else starts_of(case.documents)
    out = core(q, k, v, documents=starts, sinks=sinks if case.sunk else None)
    assert_close(gradients(out, (q, k, v, sinks), gradient), expected_of(case))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("casts", [False, True])
def test_halves_round_once_or_twice(shape: str, widens: bool, casts: bool) -> None:
    """bf16 rounds to 2^-9. `casts`: autocast narrows float32."""
    case = Case(None, 5, *SHAPES[shape])
    inputs, gradient = operands()
    narrow = [x.bfloat16().to(torch.float32 if casts else torch.bfloat16).requires_grad_() for x in inputs]
    sinks = logits().float().requires_grad_()
    context = Context()
    if widens:
        context.heads = WidenedHeads()
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        out = context.attend(*narrow, case.spec(sinks))
    assert out.dtype == torch.bfloat16
    found = gradients(out, (*narrow, sinks), gradient.bfloat16())
    wide = [x.detach().double().requires_grad_() for x in (*narrow, sinks)]
    plain = written_out(*wide[:3], case.hidden(), case.cap, wide[3] if case.sunk else None)
    for name, one, other in zip(NAMES, found, gradients(plain, wide, gradient), strict=True):
        assert one.dtype == (torch.float32 if name == "dsinks" or (casts and name != "output") else torch.bfloat16)
        assert (one.double() - other).norm() <= 2e-2 * other.norm(), name


class InFloat64(TorchFunctionMode):
    """Softmax keeps the operand's dtype, whatever dtype is asked for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if function is F.softmax:
            given["dtype"] = None
        return function(*args, **given)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", ["cap", "sinks"])
def test_equals_transformers(shape: str, window: int | None) -> None:
    """Gemma 2's attention with a soft cap, gpt-oss' with sinks."""
    name = {"cap": "gemma2.modeling_gemma2", "sinks": "gpt_oss.modeling_gpt_oss"}[shape]
    theirs = pytest.importorskip(f"transformers.models.{name}").eager_attention_forward
    case = Case(None, window, *SHAPES[shape])
    inputs, gradient = operands()
    q, k, v, sinks = (x.requires_grad_() for x in (*inputs, logits()))
    module = nn.Module()
    module.num_key_value_groups, module.sinks = A // K, sinks
    mask = torch.zeros(1, 1, T, T, dtype=torch.float64).masked_fill_(case.hidden(), torch.finfo(torch.float64).min)
    with InFloat64():
        out, _ = theirs(module, q, k, v, mask, scaling=SCALE, softcap=case.cap)
    theirs_found = gradients(out.transpose(1, 2), (q, k, v, sinks), gradient)
    ours = gradients(Context().attend(q, k, v, case.spec(sinks)), (q, k, v, sinks), gradient)
    assert_close(ours, theirs_found, 1e-10)


@pytest.mark.parametrize(
    "dtype, masked, device, cap, kernel",
    [
        (torch.bfloat16, False, "cuda", None, Flash),
        (torch.bfloat16, True, "cuda", None, Efficient),
        (torch.float32, False, "cuda", None, Efficient),
        (torch.float32, False, "cpu", None, CpuKernel),
        (torch.bfloat16, False, "cuda", CAP, Capped),
        (torch.float32, False, "cpu", CAP, Capped),
    ],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_plan_counts_the_devices_kernel(
    dtype: torch.dtype, masked: bool, device: str, cap: float | None, kernel: type[Kernel], ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On meta tensors, sinks hold no scores, and a cap holds tiles of scores."""
    length, heads, width = 2048, 8, 64
    q, k, v = (
        torch.empty(1, count, length, width, dtype=dtype, device="meta", requires_grad=True) for count in (heads, 2, 2)
    )
    sinks = torch.empty(heads, device="meta", requires_grad=True)
    mask = torch.ones(1, 1, 1, ranks * length, dtype=torch.bool, device="meta") if masked else None
    spec = AttentionSpec(not masked, seen=mask, soft_cap=cap, sinks=sinks)
    mesh = planned_mesh(Grid((("context", ranks),)), 0, ("context",), device)
    context = Context() if ranks == 1 else RingAttention(mesh)
    used = []
    monkeypatch.setattr(
        kernel, "attend", lambda self, *given, own=kernel.attend: used.append(type(self)) or own(self, *given)
    )
    with AsOnDevice(device, "fused"), LiveBytes() as live:
        out = context.attend(q, k, v, spec)
        found = torch.autograd.grad(out, (q, k, v, sinks), torch.empty_like(out))
    assert set(used) == {kernel}
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape, sinks.shape]
    assert (live.peak < length * length * heads * 4 / 2) == (kernel is not Capped)


def test_a_spec_without_either_is_torchs() -> None:
    assert AttentionSpec(causal=True, window=4).plain
    assert not AttentionSpec(soft_cap=CAP).plain
    assert not AttentionSpec(sinks=logits()).plain
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="soft_cap="):
            AttentionSpec(soft_cap=wrong)


def test_equal_bits_have_sinks() -> None:
    (q, k, v), _ = operands()
    spec = AttentionSpec(causal=True, sinks=logits())
    usual = Context().attend(q, k, v, spec)
    for way in ("heads", "runs"):
        context = context_of(way, planned_mesh(SOLO, 0, ("context",), "cpu"))
        torch.testing.assert_close(context.attend(q, k, v, spec), usual)


def test_a_spec_is_split_by_heads() -> None:
    bias, sinks = torch.arange(4.0)[None, :, None, None], logits()
    halves = AttentionSpec(bias=bias, sinks=sinks, soft_cap=CAP).by_heads(2)
    for half, own, logit in zip(halves, bias.chunk(2, 1), sinks.chunk(2), strict=True):
        assert torch.equal(half.bias, own)
        assert torch.equal(half.sinks, logit)
        assert half.soft_cap == CAP
    spec = AttentionSpec(bias=bias[:, :1])
    assert spec.by_heads(2) == [spec, spec]


def test_a_bias_of_the_kernel_has_four_dims() -> None:
    """Masks of windows are [T, S]."""
    (q, k, v), _ = operands()
    spec = AttentionSpec(soft_cap=CAP, scale=SCALE)
    flat = torch.zeros(T, T, dtype=torch.float64).masked_fill_(Case().hidden()[0, 0], -torch.inf)
    outs = [attend_shaped(q, k, v, mask, False, spec, False) for mask in (flat, flat[None, None])]
    assert torch.equal(*outs)
