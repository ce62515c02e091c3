"""Meta tensors as on a device: an attention in steps, dropout, GELU, by the kernels and the bytes that they make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.on_device import AsOnDevice, Attention
from meshwright.ranks.ledger import Ledger
from meshwright.tools.plan.recorder import Kernel, Program, Recorder

B, A, T, E = 2, 3, 8, 4
SCORES = B * A * T * T
HALF = torch.float16


def programs(
    compute: Callable[[Tensor], Tensor], x: Tensor, mode: AsOnDevice, *, fuses_dropout: bool = False
) -> tuple[Program, Program]:
    recorder = Recorder(fuses_dropout=fuses_dropout)
    with mode, recorder.program(Ledger()) as recorded:
        y = compute(x)
    forward = recorded()
    gradient = torch.empty_like(y)
    with mode, recorder.program(Ledger()) as recorded:
        torch.autograd.backward(y, gradient)
    return forward, recorded()


def attended(attention: Attention, *, dropout: float = 0.1) -> tuple[Program, Program]:
    # As models have them: one linear's output, in three, with heads before tokens.
    def attend(x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in x.unbind(2))
        return F.scaled_dot_product_attention(query, key, value, None, dropout, True)

    x = torch.empty(B, T, 3, A, E, dtype=HALF, device="meta", requires_grad=True)
    return programs(attend, x, AsOnDevice("cuda", attention))


def kernels(program: Program, kind: str) -> list[Kernel]:
    return [event for event in program.events if isinstance(event, Kernel) and event.kind == kind]


def test_steps_multiply_whole_scores_in_half_precision() -> None:
    forward, backward = attended("fused-softmax")
    product = 2 * SCORES * E
    assert [kernel.flops for kernel in kernels(forward, "product")] == [product] * 2
    assert [kernel.flops for kernel in kernels(backward, "product")] == [product] * 4
    assert {kernel.dtype for kernel in kernels(forward, "product") + kernels(forward, "special")} == {"fp16"}
    assert [kernel.touched_bytes for kernel in kernels(forward, "special")] == [2 * 2 * SCORES]
    assert not kernels(forward, "element"), "heads are multiplied where they are"


def test_steps_keep_five_bytes_of_a_score() -> None:
    forward, _ = attended("fused-softmax")
    output = 2 * B * A * T * E
    assert forward.kept_bytes == 5 * SCORES + output
    assert attended("fused-softmax", dropout=0.0)[0].kept_bytes == 2 * SCORES + output


def test_steps_apart_pass_over_the_scores_twice_more() -> None:
    together, apart = attended("fused-softmax"), attended("steps")
    assert apart[0].kept_bytes - together[0].kept_bytes == 1, "the model's own mask, which stands for one of [T, S]"
    assert apart[0].touched_bytes - together[0].touched_bytes == pytest.approx(2 * 4 * SCORES, rel=0.01)
    assert apart[1].touched_bytes - together[1].touched_bytes == pytest.approx(2 * 4 * SCORES, rel=0.01)


@pytest.mark.parametrize("fuses, expected", [(False, 11), (True, 7)])
def test_dropout_and_the_sum_after_it(fuses: bool, expected: int) -> None:
    """Read, written and the mask: 5 bytes; two read, one written: 6; together without what passes between: 7."""
    x = torch.empty(64, dtype=HALF, device="meta", requires_grad=True)
    mode = AsOnDevice("cuda", "fused")
    forward, backward = programs(lambda x: x + F.dropout(x, 0.1, True), x, mode, fuses_dropout=fuses)
    assert forward.touched_bytes == expected * x.numel()
    assert len(forward.events) == 2 - fuses
    assert kernels(backward, "element")[0].touched_bytes == 5 * x.numel()


def test_gelu_in_steps_is_eight_kernels() -> None:
    x = torch.empty(64, dtype=HALF, device="meta", requires_grad=True)
    for in_steps, count in ((False, 1), (True, 8)):
        mode = AsOnDevice("cuda", "fused", gelu_in_steps=in_steps)
        forward, _ = programs(lambda x: F.gelu(x, approximate="tanh"), x, mode)
        assert len(forward.events) == count
