"""The order of messages changes no bit of the losses and gradients, with dropout on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from meshwright.ranks.grid import Grid
from tests.oracle.pipeline import LOOP, WHOLE, V, laid_out, pipelined
from tests.oracle.tensor import ONE_D
from tests.strategies.pipeline.bits import assert_same_bits, bits_of, runs_of, with_dropout
from tests.workers import run_ranks

CASES = {
    "2 stages, message-driven": (2, "message-driven", WHOLE),
    "2 stages, axonn": (2, "axonn", WHOLE),
    "3 stages, message-driven": (3, "message-driven", WHOLE),
    "3 stages, axonn": (3, "axonn", WHOLE),
    "2 stages of 2 ranks, message-driven": (2, "message-driven", ONE_D[0]),
    "2 stages of 2 chunks as a v, a tied table": (2, "message-driven", WHOLE, V),
    "3 stages of 2 chunks as a loop": (3, "message-driven", WHOLE, LOOP),
    "2 stages of 2 chunks as a v, slices of weights": (2, "message-driven", WHOLE, V, {"size": 2, "sync": "zero3"}),
    "2 stages of 2 chunks as a v, slices of weights over a context": (
        2, "message-driven", WHOLE, V, {"sync": "zero3"}, {"size": 2, "kind": "ulysses"},
    ),
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_order_of_arrival_changes_no_bit(case: tuple[Any, ...]) -> None:
    stages, schedule, tensor, placed, data, context = (*case, *(None, {}, {})[len(case) - 3 :])
    config = pipelined("gpt2", stages, schedule, tensor, data.get("size", 1), placed)
    config = laid_out(config, data=data, context=context)
    ranks = runs_of(with_dropout(config), (None, None, 1, 2))
    for first, *others in ranks:
        for other in others:
            assert_same_bits(other, first)
    orders = set(zip(*([bits.order for bits in rank] for rank in ranks), strict=True))
    one_order = schedule == "axonn" and stages == 2  # forward up to the limit, then each gradient in turn
    assert (len(orders) == 1) == one_order, "all runs did the same in the same order: nothing was tested"


def test_a_table_of_two_chunks_is_summed_by_chunk_whatever_ran_before() -> None:
    """The look-ups' gradients are weight gradients of the first chunk, here after backward passes of the last."""
    config = with_dropout(pipelined("gpt2", *CASES["2 stages of 2 chunks as a v, a tied table"][:3], 1, V), limit=16)
    first, _ = run_ranks(bits_of, Grid(config.layout.axes), config, (None, None), True)
    usual, crossed = first
    assert_same_bits(crossed, usual)
    pairs = pairwise(task for task in crossed.order if task[0] in "BW")
    assert any(one[0] + two[0] == "BW" and one.endswith(".1") and "." not in two for one, two in pairs), crossed.order


def test_other_limits_and_other_processes_change_no_bit() -> None:
    """The number of microbatches in flight is a matter of memory."""
    config = pipelined("gpt2", 3, "message-driven", WHOLE)
    runs = [runs_of(with_dropout(config, limit=limit), (1,)) for limit in (1, 8, 8)]
    for run in runs[1:]:
        for (mine,), (wanted,) in zip(run, runs[0], strict=True):
            assert_same_bits(mine, wanted)
