"""Public mistakes, each a program of a few lines beside its right form: the kind and the module that parity names."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.parity.check import collect, run_check

FOLDER = Path(__file__).resolve().parents[2] / "examples/parity/public"
NAMED = {
    "chunked_loss": ("missing reduction", "head"),
    "contiguous_copy": ("missing reduction", "1"),
    "expert_gradients": ("scaled", "experts.1"),
    "experts_to_local": ("missing reduction", "1"),
    "loss_parallel_log_softmax": ("wrong values", "(loss)"),
    "router_counts": ("wrong values", "1"),
    "shared_kv_biases": ("missing reduction", "1"),
    "shared_rotary_key": ("missing reduction", "1"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMED)
def test_a_public_mistake_is_named(name: str) -> None:
    right, wrong = (run_check(check) for check in collect(FOLDER / f"{name}.py"))
    assert right.holds, right.verdict
    assert wrong.finding is not None, "not seen"
    assert (wrong.finding.kind, wrong.finding.module) == NAMED[name]


def test_every_program_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NAMED, "common"}
