"""A step made again: a right run, a planted bit, a planted wrong sum."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compute.parameters.fixed import FixedPoint
from meshwright.ranks.errors import ConfigError, DamagedError, MismatchError
from meshwright.tools.replay import replay
from tests.training.runs import config_for, make_corpus, run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps over two ranks, checkpoints at 3 and 6, roots of the even steps."""
    folder = tmp_path_factory.mktemp("runs")
    layout = {"data": {"size": 2}, "transport": "threads"}
    words = {"precision": "float32", "bits": "layout-free", "steps": 6, "check": {"root_every": 2}}
    config = config_for(make_corpus(folder), layout=layout, **words)
    return run(config, folder / "out")


@pytest.mark.parametrize("step, words", [(5, ()), (5, ("layout.data=3",)), (2, ("layout.data=1",))])
def test_a_right_run_is_replayed_on_any_ranks(out: Path, step: int, words: tuple[str, ...]) -> None:
    found = replay(out, step, words)
    assert (found.verdict, found.first, found.last) == ("equal", 1 if step < 4 else 4, step)
    found.check()


def test_a_sum_that_is_wrong_in_every_replay_is_the_programs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = FixedPoint.add

    def add_less(self: FixedPoint, total: torch.Tensor, addend: torch.Tensor, **options: Any) -> None:
        add(self, total, addend * (1 - 2**-20), **options)

    monkeypatch.setattr(FixedPoint, "add", add_less)
    found = replay(out, 5)
    assert (found.verdict, found.step) == ("program", 4)
    assert found.numbers["grad_norm"][1] == found.numbers["grad_norm"][2] != found.numbers["grad_norm"][0]
    with pytest.raises(MismatchError, match="step 4 is not what the run had: program"):
        found.check()


def test_a_bit_that_flips_once_is_the_machines(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = FixedPoint.add, iter(range(10**9))

    def add_a_flip(self: FixedPoint, total: torch.Tensor, addend: torch.Tensor, **options: Any) -> None:
        add(self, total, addend, **options)
        if next(calls) == 40:
            total.view(-1)[0] ^= 1 << 40

    monkeypatch.setattr(FixedPoint, "add", add_a_flip)
    result = CliRunner().invoke(app, ["replay", str(out), "--step", "5", "--json"])
    assert json.loads(result.stdout)["verdict"] == "machine"
    assert isinstance(result.exception, MismatchError)


def test_a_step_that_was_not_made_is_refused(out: Path) -> None:
    with pytest.raises(ConfigError, match="--step=9 is no step whose numbers the run has; valid: 1 to 6"):
        replay(out, 9)


@pytest.fixture
def damaged(out: Path, tmp_path: Path) -> Path:
    """The run with a flipped bit in the checkpoint of step 3."""
    folder = Path(shutil.copytree(out, tmp_path / "damaged"))
    shard = sorted((folder / "checkpoints" / "step-3").glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    return folder


def test_a_damaged_checkpoint_before_the_step_is_named_and_not_passed_over(damaged: Path) -> None:
    said: list[str] = []
    with pytest.raises(DamagedError, match=r"step-3/rank-\d.safetensors is damaged") as caught:
        replay(damaged, 5, say=said.append)
    assert str(caught.value).endswith("; --from 0 repeats steps 1 to 5 instead, from the beginning")
    assert str(damaged) in str(caught.value)
    assert said == [], "nothing was begun"
    assert replay(damaged, 5, start=0, say=said.append).first == 1
    assert said == [f"repeats steps 1 to 5 from the beginning of {damaged}: 5 steps"]
    with pytest.raises(ConfigError, match=r"--from=2 is no checkpoint before step 5 in .*; valid: 3, 0"):
        replay(damaged, 5, start=2)


def test_the_start_and_the_cost_are_said_before_the_first_step(out: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(out), "--step", "4"])
    first, *verdict = result.stdout.splitlines()
    assert first == f"repeats steps 4 to 4 from step-3 of {out}: 1 step"
    said = "equal: steps 4 to 4 have the run's losses and norms, and one root; program and machine are sound"
    assert " ".join(verdict).split() == said.split()


def test_a_root_of_another_version_is_said_to_be_uncompared(out: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(out, tmp_path / "older"))
    lines = folder / "metrics.jsonl"
    lines.write_text(lines.read_text().replace('"root": "2-', '"root": "'))
    result = CliRunner().invoke(app, ["replay", str(folder), "--step", "5"])
    assert "losses and norms; no root was compared;" in " ".join(result.stdout.split())
    found = replay(out, 2)
    assert (found.verdict, found.roots) == ("equal", 1)


@pytest.mark.parametrize("start", [None, 0])
def test_changed_data_are_refused_by_the_runs_own_paths_and_accepted_by_a_word(
    out: Path, tmp_path: Path, start: int | None
) -> None:
    words = [f"data.source={make_corpus(tmp_path, seed=2)}"]
    with pytest.raises(ConfigError) as caught:
        replay(out, 5, words, start=start)
    assert f"that {out / 'checkpoints'}/step-" in str(caught.value)
    assert "or --accept-changes" in str(caught.value)
    assert "/meshwright-" not in str(caught.value), "a temporary folder"
    options = ["--accept-changes", *(() if start is None else ("--from", "0")), *words]
    result = CliRunner().invoke(app, ["replay", str(out), "--step", "5", "--json", *options])
    assert json.loads(result.stdout.splitlines()[-1])["verdict"] == "program"
