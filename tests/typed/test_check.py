"""Sums are followed before ranks start: every built-in layout's fit, and each planted mistake is refused by a sentence.

The mistakes are those of somebody who writes a kit, a policy or a model: each is put where a plug-in's own code stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.parity_cases import MISTAKES, RIGHT
from benchmarks.types import WHY_NOT, refusal
from meshwright.config import parse_config
from meshwright.config.load import parse_run
from meshwright.data_parallel.policies import AllReduce, Zero1
from meshwright.errors import SumError
from meshwright.parameters.shard import ShardSpec
from meshwright.ranks.collectives import here, start_all_reduce
from meshwright.ranks.comm import DONE
from meshwright.tensor.boundary import CutActivations, WholeActivations
from meshwright.typed.check import check_sums
from tests.fuzz.__main__ import COVERING
from tests.fuzz.axes import TENSORS, read_cases, tree_of
from tests.fuzz.draw import few_of
from tests.fuzz.test_fuzz import numbered
from tests.harness import resolved

FIXED = read_cases(COVERING)
SHOWN = ("model", "sync", "kind", "context", "common", "branch", "recompute")
FEW = few_of(
    [{axis: (case | {"kind": TENSORS[case["tensor"]]["kind"]})[axis] for axis in SHOWN}
     | {axis: FIXED[0][axis] for axis in FIXED[0] if axis not in SHOWN} for case in FIXED], [],
)  # fmt: skip
"""The numbers of the fixed cases that have every model, sync and kind of layout; the others are long."""


@numbered(FIXED, FEW)
def test_the_sums_of_every_layout_fit(case) -> None:
    check_sums(resolved(parse_run(tree_of(case))))


def run(**layout: Any):
    return resolved(
        parse_config(
            {
                "model": {"layers": 1, "hidden": 16, "heads": 4, "positions": 8, "vocabulary": 260, "dropout": 0.0},
                "data": {"kind": "text", "source": "stdlib", "sequence": 8},
                "batch": {"global": 8, "micro": 2},
                "layout": {"tensor": {"kind": "megatron", "size": 2}, "data": {"size": 2}, **layout},
                "steps": 1,
            }
        )
    )


CUT_SEQUENCES = {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}}


def twice(x, comm):
    start_all_reduce(x, comm).wait()
    return start_all_reduce(x, comm)


def no_axis_of(name: str) -> Callable[..., tuple[str, ...]]:
    right = ShardSpec.sum_axes
    return lambda spec, mesh: tuple(axis for axis in right(spec, mesh) if axis != name)


PLANTED = {
    "a pair's output is not summed": (
        {}, WholeActivations, "start_leave", lambda boundary, x: here(x),
        r"^blocks\.0\.attention\.output: a partial sum is added to what is whole \(axis tensor\): sum it over the axis",
    ),
    "a pair's output is summed twice": (
        {}, WholeActivations, "start_leave", lambda boundary, x: twice(x, boundary.mesh.comm("tensor")),
        r"^blocks\.0\.attention\.output: what every rank holds whole is summed.*\(axis tensor\): leave the sum out",
    ),
    "a pair's output is summed over another axis": (
        {}, WholeActivations, "start_leave", lambda boundary, x: start_all_reduce(x, boundary.mesh.comm("data")),
        r"^blocks\.0\.attention\.output: .*different parts are summed.*\(axis data\)",
    ),
    "gradients are not summed": (
        {}, AllReduce, "reduce", lambda policy, bucket, comm: DONE,
        r"its gradient is each rank's own addend when the optimizer reads it.*\(axis data\)",
    ),
    "gradients are summed twice": (
        {}, AllReduce, "reduce", lambda policy, bucket, comm: twice(bucket.gradients, comm).work,
        r"^what [\w.]+ gets: what every rank holds whole is summed.*\(axis data\)",
    ),
    "a spec leaves an axis out": (
        CUT_SEQUENCES, ShardSpec, "sum_axes", no_axis_of("tensor"),
        r"its gradient is (another on each rank|each rank's own addend).*\(axis tensor\).*token_axes",
    ),
    "a slice is not summed": (
        {"data": {"size": 2, "sync": "zero1"}}, Zero1, "reduce", lambda policy, bucket, comm: DONE,
        r"its gradient is each rank's own addend.*\(axis data\)",
    ),
    "a cut sequence enters a pair as it is": (
        CUT_SEQUENCES, CutActivations, "start_leave", lambda boundary, x: here(x.chunk(2, -2)[0].contiguous()),
        r"blocks\.0\.attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_sum_is_refused_with_module_axis_and_remedy(name: str) -> None:
    layout, owner, method, wrong, said = PLANTED[name]
    with patch.object(owner, method, wrong), pytest.raises(SumError, match=said):
        check_sums(run(**layout))
    check_sums(run(**layout))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.wrong)
def test_of_the_planted_mistakes_those_are_refused_that_types_can_tell(mistake) -> None:
    assert bool(refusal(mistake.setting, mistake.wrong)) == (mistake.wrong not in WHY_NOT)


@pytest.mark.parametrize("setting", RIGHT, ids=str)
@pytest.mark.diagonal
def test_right_programs_are_not_refused(setting) -> None:
    assert refusal(setting) == ""
