"""The gated delta rule by chunks against transformers' two forms, in float64; documents, parts of sequences, states."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.models.delta_rule import (
    CHUNK,
    causal_convolution,
    chunked_delta_rule,
    fused_delta_rule,
    states_before,
    transition,
    unit,
)
from tests.families.qwen_next.models import InFloat64

theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

B, A, E, V = 2, 3, 6, 5


def drawn(length: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value, decay, rate of `length` tokens; queries and keys of any length."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(B, A, length, width, generator=generator, dtype=torch.float64) for width in (E, E, V)
    )
    decay, rate = (torch.randn(B, A, length, generator=generator, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (query, key, value, -F.softplus(decay).detach(), rate.sigmoid().detach())]


def ours(inputs: Sequence[Tensor], state: Tensor | None = None, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    query, key, *rest = inputs
    zeros = torch.zeros(B, A, E, V, dtype=torch.float64) if state is None else state
    return chunked_delta_rule(unit(query) * E**-0.5, unit(key), *rest, zeros, starts)


def answers(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of the outputs' sum times random numbers."""
    generator = torch.Generator().manual_seed(9)
    total = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(total, list(inputs))]


@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 7])
def test_chunks_compute_what_transformers_computes(form: str, length: int) -> None:
    inputs = drawn(length)
    state = torch.randn(B, A, E, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    query, key, value, decay, rate = (x.transpose(1, 2) for x in inputs)
    with InFloat64():
        out, after = getattr(theirs, form)(
            query, key, value, g=decay, beta=rate, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    wanted = answers([out.transpose(1, 2), after], [*inputs, state])
    for mine, other in zip(answers(ours(inputs, state), [*inputs, state]), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


LENGTHS = ([5, 1, 66, 3, 80], [64, 64, 27], [155], [1] * 155)
"""Tokens of each document of a row: some begin inside of a chunk, some are longer than a chunk."""


def starts_of(lengths: Sequence[int]) -> Tensor:
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    return torch.repeat_interleave(torch.tensor(begins), torch.tensor(lengths)).expand(B, -1)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} documents")
def test_each_document_begins_with_a_state_of_zeros(lengths: list[int]) -> None:
    inputs = drawn(sum(lengths))
    out, after = ours(inputs, starts=starts_of(lengths))
    parts = [ours(part) for part in zip(*(x.split(lengths, 2) for x in inputs), strict=True)]
    alone = torch.cat([one for one, _ in parts], 2), parts[-1][1]
    for mine, other in zip(answers((out, after), inputs), answers(alone, inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("place", [0, 50, 69])
def test_no_bit_of_a_document_depends_on_another(place: int) -> None:
    """Token `place` of documents of 70 and 85 tokens has other numbers, a million times as large."""
    lengths, inputs = [70, 85], drawn(155)
    changed = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        for x, factor in zip(changed, (1e6, 1e6, 1e6, 3.0, 0.5), strict=True):
            x[:, :, place] *= factor
    starts = starts_of(lengths)
    probes = []
    for each in (inputs, changed):
        out, after = ours(each, starts=starts)
        second = out[:, :, 70:]
        gradients = torch.autograd.grad((second.square().sum() + after.square().sum()), each)
        assert all(not gradient[:, :, :70].any() for gradient in gradients)
        probes.append([second, after, *(gradient[:, :, 70:] for gradient in gradients), out[:, :, :70]])
    *same, first = (torch.equal(one, other) for one, other in zip(*probes, strict=True))
    assert all(same)
    assert not first, "the first document has changed"


def test_a_convolution_reads_no_other_document() -> None:
    generator = torch.Generator().manual_seed(3)
    x, taps = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((B, 9, 4), (4, 4)))
    before = torch.randn(B, 3, 4, generator=generator, dtype=torch.float64)
    wanted = F.conv1d(torch.cat([before, x], 1).mT, taps.t().unsqueeze(1), groups=4).mT
    torch.testing.assert_close(causal_convolution(x, taps, before), wanted, rtol=1e-13, atol=1e-13)
    starts = torch.tensor([-2, -2, -2, 3, 3, 3, 3, 7, 7]).expand(B, -1)  # two tokens of `before` are the first's
    both = torch.cat([before[:, 1:], x], 1)
    alone = [F.conv1d(F.pad(part.mT, (3, 0)), taps.t().unsqueeze(1), groups=4).mT for part in both.split([5, 4, 2], 1)]
    found = causal_convolution(x, taps, before, starts)
    torch.testing.assert_close(found, torch.cat(alone, 1)[:, 2:], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("sizes", [[40, 40, 40], [3, 70, 47]])
def test_parts_of_a_sequence_pass_their_states_on(sizes: list[int], documents: bool) -> None:
    """Each part is computed without the previous part's state."""
    inputs = drawn(120)
    starts = starts_of([35, 2, 60, 23]) if documents else None
    query, key, *rest = inputs
    ready = unit(query) * E**-0.5, unit(key), *rest
    places = [sum(sizes[:number]) for number in range(len(sizes))]
    cut = [None] * len(sizes) if starts is None else starts.split(sizes, 1)
    parts: list[Any] = [
        transition(*part, None if own is None else own - place)
        for part, own, place in zip(zip(*(x.split(sizes, 2) for x in ready), strict=True), cut, places, strict=True)
    ]
    before = states_before(torch.stack([after for *_, after in parts]), V)
    out = torch.cat([own + reads @ state for (own, reads, _), state in zip(parts, before, strict=True)], 2)
    wanted = answers(ours(inputs, starts=starts)[:1], inputs)
    for mine, other in zip(answers([out], inputs), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, **options: Any) -> Any:
    """Compute fla's function, with fla's order of dimensions [1, T, A, E], by the rule's definition."""
    ends = options.get("cu_seqlens", torch.tensor([0, query.shape[1]])).tolist()
    outputs, state = [], options.get("initial_state")
    for first, last in pairwise(ends):
        known = torch.zeros(len(query), A, E, V, dtype=query.dtype) if state is None or len(ends) > 2 else state
        for t in range(first, last):
            known = known * decay[:, t, :, None, None].exp()
            missing = (value[:, t] - (known * key[:, t, ..., None]).sum(-2)) * rate[:, t, :, None]
            known = known + key[:, t, ..., None] * missing.unsqueeze(-2)
            outputs.append((known * query[:, t, ..., None]).sum(-2) * options["scale"])
    return torch.stack(outputs, 1), known if options.get("output_final_state") else None


@pytest.mark.parametrize("starts", [None, [[0, 0, 0, 3, 3, 5, 5], [0, 1, 1, 1, 1, 1, 6]]])
def test_fla_gets_tokens_and_documents_in_its_order(starts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = recurrence  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = drawn(7)
    query, key, *rest = inputs
    places = None if starts is None else torch.tensor(starts)
    state = torch.zeros(B, A, E, V, dtype=torch.float64)
    if starts is None:
        state = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fused = fused_delta_rule(unit(query) * E**-0.5, unit(key), *rest, state, places)
    plain = ours(inputs, state, places)
    known = 2 if starts is None else 1
    for one, other in zip(answers(fused[:known], inputs), answers(plain[:known], inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.skipif(find_spec("fla") is None or not torch.cuda.is_available(), reason="needs a GPU and fla")
def test_flas_kernels_are_as_near_as_halves_are() -> None:
    inputs = [x.detach().to("cuda", torch.float32).requires_grad_() for x in drawn(2 * CHUNK + 7)]
    query, key, *rest = inputs
    state = torch.zeros(B, A, E, V, device="cuda")
    halves = [x.bfloat16() for x in (unit(query) * E**-0.5, unit(key), rest[0])]
    fused = fused_delta_rule(*halves, *rest[1:], state)[0]
    plain = chunked_delta_rule(*(x.float() for x in halves), *rest[1:], state)[0]
    assert (fused - plain).norm() < 0.02 * plain.norm()
