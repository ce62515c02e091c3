"""Sums are followed before ranks start: every built-in layout's fit, and each planted mistake is refused by a sentence.

The mistakes are typical of the author of a kit, a policy or a model: each is planted in the code of a plug-in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.compute.parameters.shard import ShardSpec
from meshwright.compute.tensor.boundary import CutActivations, WholeActivations
from meshwright.config import parse_config
from meshwright.config.load import parse_run
from meshwright.ranks.collectives import here, start_all_reduce
from meshwright.ranks.comm import DONE
from meshwright.ranks.errors import SumError
from meshwright.strategies.data_parallel.policies import AllReduce, Zero1
from meshwright.training.typed.check import check_sums
from tests.fuzz.__main__ import COVERING
from tests.fuzz.axes import TENSORS, read_cases, tree_of
from tests.fuzz.draw import few_of
from tests.fuzz.fixed import numbered
from tests.harness import resolved
from tests.parity.cases import MISTAKES, RIGHT, PlantedMistake
from tests.parity.programs import Setting
from tests.patience import PATIENCE_SECONDS
from tests.training.typed.__main__ import WHY_NOT, refusal

ROOT = Path(__file__).resolve().parents[3]
FIXED = read_cases(COVERING)
SHOWN = ("kind", "context")
FEW = few_of(
    [{axis: (case | {"kind": TENSORS[case["tensor"]]["kind"]})[axis] for axis in SHOWN}
     | {axis: FIXED[0][axis] for axis in FIXED[0] if axis not in SHOWN} for case in FIXED], [],
)  # fmt: skip
"""The numbers of the fixed cases that cover every kind of layout and context; the other cases are long."""


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


def some(cases: Sequence[Any], every: int) -> list[Any]:
    """Return the cases with ids; each `every`-th is not long."""
    marks = [() if number % every == 0 else pytest.mark.long for number in range(len(cases))]
    names = [case.wrong if isinstance(case, PlantedMistake) else str(case) for case in cases]
    return [pytest.param(case, id=name, marks=mark) for case, name, mark in zip(cases, names, marks, strict=True)]


@pytest.mark.parametrize("mistake", some(MISTAKES, 6))
def test_of_the_planted_mistakes_those_are_refused_that_types_can_tell(mistake: PlantedMistake) -> None:
    assert bool(refusal(mistake.setting, mistake.wrong)) == (mistake.wrong not in WHY_NOT)


@pytest.mark.parametrize("setting", some(RIGHT, 12))
def test_right_programs_are_not_refused(setting: Setting) -> None:
    assert refusal(setting) == ""


def test_the_page_has_the_table_that_the_command_prints() -> None:
    page = (Path(__file__).resolve().parent / "README.md").read_text()
    assert all(f"| {wrong} | not: {why} |" in page for wrong, why in WHY_NOT.items())
    assert all(f"| {mistake.wrong} | " in page for mistake in MISTAKES)
    assert f"it refuses {len(MISTAKES) - len(WHY_NOT)}, and none of the {len(RIGHT)} right programs" in page


REGISTERED = """
import sys
from pathlib import Path
import meshwright as mw

if __name__ == "__main__":
    mw.register("syncs", "own", "own_section:OWN")
    config = mw.load("run.yaml", sys.argv[1:])
    mw.train(config, Path("out"))
"""


def test_a_plug_in_is_refused_before_its_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(REGISTERED)
    imports = "from meshwright.strategies.data_parallel.section import Sync"
    section = f'{imports}\n\nOWN = Sync(policy="own_policy:Own")\n"""No sums."""\n'
    (tmp_path / "own_section.py").write_text(section)
    (tmp_path / "own_policy.py").write_text(
        "from meshwright.strategies.data_parallel.strategy import Policy\nfrom meshwright.ranks.comm import DONE\n\n\n"
        "class Own(Policy):\n    blocks = False\n\n    def reduce(self, bucket, comm):\n        return DONE\n"
    )
    (tmp_path / "run.yaml").write_text(
        "model: {layers: 1, hidden: 16, heads: 4, positions: 8, vocabulary: 257, dropout: 0.0}\n"
        "data: {kind: text, source: stdlib, sequence: 8}\nbatch: {global: 8, micro: 4}\n"
        "layout: {data: {size: 2, sync: own}, transport: torch}\nsteps: 1\n"
    )
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    assert "SumError" in done.stderr, done.stderr
    assert "its gradient is each rank's own addend when the optimizer reads it" in done.stderr, done.stderr
    assert "(axis data): sum it over the axis" in done.stderr
    assert not list(tmp_path.glob("out/metrics.jsonl")), "ranks have begun"
