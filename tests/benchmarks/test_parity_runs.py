"""The table of recorded scripts: each row has the expected verdict, and a missing framework is named."""

from __future__ import annotations

import pytest

from benchmarks import parity_runs
from benchmarks.parity_runs import RUNS, SCRIPTS, run_all


@pytest.mark.long  # tests/parity has scripts of every run
def test_scripts_run_as_they_are_by_torchrun_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = run_all([run for run in RUNS if run.script == "zero" and run.wrong in ("", "mean")])
    assert [row["expected"] for row in told] == [True, True], told
    said = capsys.readouterr().out
    assert "| zero |  | equal, 2 steps | yes |" in said
    assert "wrong buffer at 1" in said
    assert "right pairs equal: 1 of 1; mistakes named as expected: 1 of 1" in said


def test_a_framework_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_runs, "installed", lambda package: "")
    assert not run_all([run for run in RUNS if run.script == "deepspeed_zero" and run.stage == 2])
    assert capsys.readouterr().out.count("deepspeed is not installed") == 5


def test_every_row_has_its_script_and_every_script_its_mistakes() -> None:
    assert {run.script for run in RUNS} == {file.stem for file in SCRIPTS.glob("*.py")}
    for run in RUNS:
        text = (SCRIPTS / f"{run.script}.py").read_text()
        assert f'"{run.wrong}"' in text or not run.wrong, run
        assert bool(run.wrong) == bool(run.kind) == bool(run.module), run
