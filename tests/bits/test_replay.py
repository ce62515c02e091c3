"""A step made again: a right run, a planted bit, a planted wrong sum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from meshwright.bits.fixed import FixedPoint
from meshwright.cli import app
from meshwright.errors import ConfigError, MismatchError
from meshwright.tools.replay import replay
from tests.training.runs import config_for, make_corpus, run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps over two ranks, checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    layout = {"data": {"size": 2}, "transport": "threads"}
    config = config_for(make_corpus(folder), precision="float32", bits="layout-free", steps=6, layout=layout)
    return run(config, folder / "out")


@pytest.mark.parametrize("step, words", [(5, ()), (5, ("layout.data=3",)), (2, ("layout.data=1",))])
def test_a_right_run_is_replayed_on_any_ranks(out: Path, step: int, words: tuple[str, ...]) -> None:
    found = replay(out, step, words)
    assert (found.verdict, found.first, found.last) == ("equal", 1 if step < 4 else 4, step)
    found.check()


def test_a_sum_that_is_wrong_in_every_replay_is_the_programs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = FixedPoint.add

    def add_less(self: FixedPoint, total: torch.Tensor, addend: torch.Tensor, *, fresh: bool) -> None:
        add(self, total, addend * (1 - 2**-20), fresh=fresh)

    monkeypatch.setattr(FixedPoint, "add", add_less)
    found = replay(out, 5)
    assert (found.verdict, found.step) == ("program", 4)
    assert found.numbers["grad_norm"][1] == found.numbers["grad_norm"][2] != found.numbers["grad_norm"][0]
    with pytest.raises(MismatchError, match="step 4 is not what the run had: program"):
        found.check()


def test_a_bit_that_flips_once_is_the_machines(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = FixedPoint.add, iter(range(10**9))

    def add_a_flip(self: FixedPoint, total: torch.Tensor, addend: torch.Tensor, *, fresh: bool) -> None:
        add(self, total, addend, fresh=fresh)
        if next(calls) == 40:
            total.view(-1)[0] ^= 1 << 40

    monkeypatch.setattr(FixedPoint, "add", add_a_flip)
    result = CliRunner().invoke(app, ["replay", str(out), "--step", "5", "--json"])
    assert json.loads(result.stdout)["verdict"] == "machine"
    assert isinstance(result.exception, MismatchError)


def test_a_step_that_was_not_made_is_refused(out: Path) -> None:
    with pytest.raises(ConfigError, match="--step=9 is no step whose numbers the run has; valid: 1 to 6"):
        replay(out, 9)
