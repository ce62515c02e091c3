"""A table of a benchmark names the machine, and the load next to the measurement."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import interleave
from benchmarks.contender import Contender, Option, Place
from benchmarks.interleave import (
    ALLOCATORS,
    Plan,
    Result,
    Spread,
    machine,
    plan_arguments,
    plan_of,
    show,
    write_json,
)
from benchmarks.llama_model import Sizes, options_of
from benchmarks.ours import RandomRows, reference_config, train
from benchmarks.reference import REFERENCE, global_batch
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.machine import Machine
from meshwright.training.decisions import resolve
from tests.benchmarks.mapped import TENSOR_BYTES

LOOP = [sys.executable, "-c", "while True: pass"]


def busy() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline() == LOOP]


class Team:
    """A contender with a step of one millisecond for each busy process on the machine."""

    held_bytes, processor = 0, (1.0,)

    def __init__(self, contender: Contender, folder: Path) -> None:
        pass

    def begin(self, steps: int) -> None:
        pass

    def end(self) -> None:
        pass

    def run(self, steps: int) -> tuple[list[float], float]:
        return [float(len(busy()))] * steps, 1.0

    def close(self) -> None:
        pass


def contender(name: str) -> Contender:
    return Contender(name, "benchmarks.ours:serial")


def made(name: str, milliseconds: float, processor: float) -> Result:
    return Result(contender(name), [milliseconds], 1.0, 1, processor=[processor])


def test_busy_processes_run_beside_the_rounds_and_end_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "Team", Team)
    plan = plan_of(plan_arguments("").parse_args(["--rounds", "2", "--steps", "1", "--busy", "2"]))
    (result,) = interleave.interleave([contender("a")], plan)
    assert (plan.busy, result.rounds, result.busy) == (2, [2.0, 2.0], 2)
    assert busy() == []


def test_a_table_names_the_processor_and_its_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show("steps", [made("a", 2.0, 3.0), made("b", 4.0, 9.0)], ["a"])
    said = " ".join(capsys.readouterr().out.split())
    assert "steps, beside 1 busy process" in said
    assert machine() in said
    assert "2.00 (2.00 2.00) | 3.00 (3.00 3.00)" in said
    write_json(tmp_path / "kept.json", {"steps": []})
    assert machine() in (tmp_path / "kept.json").read_text()
    assert Plan().busy == 0


def test_ratios_are_taken_within_rounds() -> None:
    slow, fast = (
        Result(contender("slow"), [2.0, 40.0, 6.0, 8.0], 1.0),
        Result(contender("fast"), [1.0, 10.0, 3.0, 4.0], 1.0),
    )
    assert slow.ratio(fast) == Spread(2.0, 2.0, 2.5)
    assert fast.milliseconds == Spread(2.5, 3.5, 5.5)


def test_workers_start_at_once_and_are_told_of_the_allocator(tmp_path: Path) -> None:
    """Two ranks each, forked; a process with the variable allocates large tensors on the heap."""
    found, before = {}, dict(os.environ)
    for allocator in ALLOCATORS:
        made = Contender(allocator, "tests.benchmarks.mapped:mapped", ranks=2, allocator=allocator)
        (found[allocator],) = interleave.interleave([made], Plan(rounds=2))
    # A variable for workers, left in the caller, would reach every process started later.
    assert dict(os.environ) == before
    assert found["told"].loss == 0
    assert found["glibc"].loss >= TENSOR_BYTES
    for result in found.values():
        assert len(result.rounds) == 2
        assert min(result.rounds) > 0
        assert min(result.processor) > 0
        assert result.held_bytes >= TENSOR_BYTES


def test_a_contender_that_fails_says_why() -> None:
    options: dict[str, Option] = {"schedule": "1f1b", "partition": "3", "microbatches": 4}
    with pytest.raises(LaunchError, match="does not cut 4 layers"):
        interleave.interleave([Contender("odd", "benchmarks.torch_pipeline:train", options)], Plan(rounds=1))


def test_ours_and_theirs_see_the_same_tokens() -> None:
    rows = RandomRows(reference_config({}))
    tokens, labels = global_batch(3)
    mine = rows.samples(3 * REFERENCE.batch + 2, 4)
    assert torch.equal(mine["tokens"], tokens[2:6])
    assert torch.equal(mine["labels"], labels[2:6])
    sizes = Sizes(rows=2, tokens=8)
    tokens, _ = sizes.batch(1)
    assert torch.equal(RandomRows(reference_config(options_of(sizes))).samples(2, 2)["tokens"], tokens)


def test_ours_is_resolved_as_a_run_is() -> None:
    """The contender is a step of the train loop, with hooks, and with `compile: auto` as resolved on a CPU."""
    assert resolve(reference_config({}), Machine.here()).config.compile == "none"
    with train(Place(0, 1), **{"model.layers": 1}) as step:
        assert step() == pytest.approx(math.log(REFERENCE.vocabulary), rel=0.02)
