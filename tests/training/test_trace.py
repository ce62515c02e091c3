"""Traces of real steps: every task of every stage once, in the run's folder; and the valid words of `--trace`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.runs import planned_trace, traced_steps
from meshwright.config import Config
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.pipeline.trace import read_trace
from tests.training.runs import config_for, lines_of, make_corpus, run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def config_of(corpus: Path, layout: dict[str, Any], **changes: Any) -> Config:
    """Return a config with six microbatches a step."""
    common = {"layout": layout | {"transport": "torch"}, "steps": 3, "checkpoint": {"every": 0}}
    return config_for(corpus, **common | changes)


def test_every_task_of_every_stage_once(corpus: Path, tmp_path: Path) -> None:
    """Of two replicas with two stages, the first is traced, without the passes of the validation."""
    config = config_of(
        corpus,
        {"pipeline": {"size": 2, "schedule": "message-driven"}, "data": {"size": 2}},
        batch={"global": 24, "micro": 2},
        validation={"every": 1, "batches": 1},
    )
    run(config, tmp_path, trace=(1, 3))
    assert sorted(path.name for path in tmp_path.glob("trace*")) == [
        f"trace-step-{step}.{kind}" for step in (1, 3) for kind in ("json", "png")
    ]
    timeline = read_trace(tmp_path / "trace-step-3.json")
    expected = [(stage, f"{kind}{index}") for stage in range(2) for kind in "FBW" for index in range(6)]
    assert Counter((span.stage, span.name) for span in timeline.tasks) == Counter(expected)
    starts = {(span.stage, span.name): span.start_seconds for span in timeline.tasks}
    for index in range(6):  # both stages share one clock; a message may arrive before the sending task is over
        assert starts[0, f"F{index}"] < starts[1, f"F{index}"]
        assert starts[1, f"B{index}"] < starts[0, f"B{index}"]
    phases = {(span.stage, span.name) for span in timeline.spans if span.microbatch is None}
    assert phases == {(stage, name) for stage in range(2) for name in ("data_parallel", "optimizer")}
    line = lines_of(tmp_path)[2]
    assert len(line["idle_shares"]) == 2
    assert all(0 < share < 1 for share in line["idle_shares"])
    assert timeline.total_seconds <= line["phase_seconds"]["passes"] * 1.5
    assert sum(line["phase_seconds"].values()) <= line["step_seconds"] + 1e-4
    assert (tmp_path / "trace-step-3.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_run_without_stages(corpus: Path, tmp_path: Path) -> None:
    """A run without stages is a pipeline of one stage, with a forward and a backward pass a microbatch and no waits."""
    config = config_of(corpus, {"data": {"size": 1}}, steps=2)
    run(config, tmp_path, trace=(2,))
    timeline = read_trace(tmp_path / "trace-step-2.json")
    assert [span.name for span in timeline.tasks] == [f"{kind}{index}" for index in range(6) for kind in "FB"]
    assert timeline.idle_shares == pytest.approx((0.0,), abs=1e-9)
    # Shares of wall time: a busy machine takes a part between two tasks, but never all of the time.
    assert 0 <= lines_of(tmp_path)[1]["idle_shares"][0] < 1


def test_step_that_was_made_before(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(config_of(corpus, {"data": {"size": 1}}, steps=2), tmp_path)
    run(config_of(corpus, {"data": {"size": 1}}, steps=3), tmp_path, resume=True, trace=(1, 2, 3))
    assert "no trace of what was made before: step 1, 2" in capfd.readouterr().out
    assert [path.name for path in tmp_path.glob("trace*.json")] == ["trace-step-3.json"]


def test_words_for_steps(corpus: Path) -> None:
    config = config_of(corpus, {})
    assert traced_steps([], config) == ()
    assert traced_steps(["3", "1", "3"], config) == (1, 3)
    for word in ("0", "4", "-1", "1.5", "trace.json"):
        with pytest.raises(ConfigError, match=rf"--trace={word} is not a step of the run; valid: 1 to 3; with"):
            traced_steps(["1", word], config)


def test_words_for_a_plan() -> None:
    assert planned_trace([]) is None
    assert planned_trace(["out/plan.json"]) == Path("out/plan.json")
    with pytest.raises(ConfigError, match=r"--trace=20 is not one file for the trace of a plan; valid: trace.json"):
        planned_trace(["20"])
    with pytest.raises(ConfigError, match=r"--trace=a.json, b.json is not one file"):
        planned_trace(["a.json", "b.json"])
