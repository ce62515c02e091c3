"""The run of a search, the words that turn the run into the answer, and the signals that stop a search."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.app import LINE_SECONDS, progress_lines
from meshwright.cli.runs import plan
from meshwright.config import load_config, parse_config
from meshwright.data.files import silent
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.question import NamedRun, planned_run, stopped_by_signals
from meshwright.planner.plan.report import words_to_paste
from meshwright.planner.plan.search import layout_text, search
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.streams import PatientStream
from tests.planner.plan.questions import TREE, made_up

SMALL = ("layout.tensor.kind=none", "layout.pipeline.size=1", "memory.offload.to=none", "memory.recompute=none")


def test_a_run_plans_without_its_corpus_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The written run still names the corpus and the tokenizer; the printed words turn the run file into this run."""
    tree = TREE | {"data": {"source": "c4", "tokenizer": "/no/such/tokenizer.json", "sequence": 16}}
    run, out = tmp_path / "run.yaml", tmp_path / "plan.yaml"
    run.write_text(yaml.safe_dump(tree | {"layout": {"data": {"sync": "ring"}}}))
    with pytest.raises(ConfigError, match=r"data.source=c4 is no such file .*, hub:OWNER/NAME"):
        load_config(run)
    page = tmp_path / "plan.html"
    plan("two-cores", 2, run, list(SMALL[:2]), out=out, page=page, as_json=True)
    told = json.loads(capsys.readouterr().out)
    written = yaml.safe_load(out.read_text())
    assert written["data"]["source"] == "c4"
    assert written["layout"]["data"]["sync"] == "allreduce"
    assert {"layout.data.size=2", "layout.data.sync=allreduce"} <= set(shlex.split(told["words"]))
    assert "data 2 (ring); micro 4" in page.read_text(), "the run's own layout is predicted"
    assert "<title>run: layouts for 2 devices of two-cores</title>" in page.read_text()


def test_a_model_plans_without_a_run_file() -> None:
    cluster, named = load_cluster("dgx-h100"), NamedRun("llama-3.1-8b", 8192, 512)
    config, words = planned_run(Path("layout.data.sync=zero3"), named, ["batch.micro=1"], cluster)
    assert words == ["layout.data.sync=zero3", "batch.micro=1"]
    assert (config.model.hidden, config.data.lengths.source, config.batch.global_) == (4096, 8192, 512)
    assert (config.precision.dtype, config.layout.data.sync, config.micro) == ("bf16", "zero3", 1)
    assert (
        planned_run(None, NamedRun("gpt2-small", 512, 8), [], load_cluster("two-cores"))[0].precision.dtype == "float32"
    )
    with pytest.raises(ConfigError, match=r"--model=llama-3.1-8b has no effect beside the run file run.yaml"):
        planned_run(Path("run.yaml"), named, [], cluster)
    with pytest.raises(ConfigError, match=r"--batch=nothing is given"):
        planned_run(None, NamedRun("llama-3.1-8b", 8192), [], cluster)
    with pytest.raises(ConfigError, match=r"run=nothing is given; valid: RUN.yaml, or --model NAME"):
        planned_run(None, NamedRun(), [], cluster)


@pytest.mark.parametrize(
    "before, after, words",
    [
        ((), ("layout.data.size=4", "layout.data.sync=zero3", "batch.micro=1"),
         "batch.micro=1 layout.data.size=4 layout.data.sync=zero3"),
        (("layout.data.sync=zero1", "layout.data.size=4"), ("layout.data.sync=zero1", "layout.data.size=4"), ""),
        ((), ("layout.tensor={kind: megatron, size: 2}", "layout.pipeline.size=2", "layout.order=[tensor, pipe]"),
         "layout.pipeline.size=2 layout.tensor.kind=megatron layout.tensor.size=2 "
         "layout.tensor.sequence_parallel=false 'layout.order=[tensor,pipe]'"),
    ],
)  # fmt: skip
def test_the_words_to_paste_make_the_layout_of_the_run(
    before: tuple[str, ...], after: tuple[str, ...], words: str
) -> None:
    run, best = parse_config(TREE, before), parse_config(TREE, after)
    told = words_to_paste(best, run)
    assert sorted(shlex.split(told)) == sorted(shlex.split(words))
    assert parse_config(TREE, (*before, *shlex.split(told))) == best


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_search_with_the_best_so_far(number: signal.Signals) -> None:
    """Ctrl-C ends a search even if a shell ignored the signal; afterwards the signal's handler is the old one."""
    cluster, models = made_up(5)  # the run's own layout fits
    before = signal.signal(number, signal.SIG_IGN)
    try:

        def press(text: str, share: float | None) -> None:
            if "predicting" not in text:
                os.kill(os.getpid(), number)

        with stopped_by_signals(press) as tell:
            found = search(parse_config(TREE), cluster, 2, models=models, report=tell, partial=True)
        assert found.stopped
        assert found.predictions
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_drops_is_raised_by_the_next_report() -> None:
    class Dropping:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with stopped_by_signals(silent) as tell:
        Dropping()
        with pytest.raises(KeyboardInterrupt):
            tell("predicting", None)


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    clock = [0.0]
    show = progress_lines(PatientStream(sys.stderr), lambda: clock[0])
    for _ in range(25):
        clock[0] += 1
        show(f"layout {clock[0]:.0f}", None)
    assert capsys.readouterr().err.splitlines() == ["10 s: layout 10", "20 s: layout 20"]
    assert LINE_SECONDS == 10


def test_layouts_name_what_there_is() -> None:
    """A layout's text leaves out replicas if nothing is reduced, calls zero3 FSDP, and describes sub-graphs in
    words."""
    said = [
        layout_text(parse_config(TREE, words))
        for words in (
            ("layout.tensor={kind: megatron, size: 2}",),
            ("layout.data.size=4", "layout.data.sync=zero3"),
            ("layout.tensor={kind: subgraph, size: 2, branch: attention-core}",),
            (),
        )
    ]
    assert said == [
        "megatron: tensor 2; micro 8",
        "data 4 (zero3, as FSDP); micro 2",
        "subgraph (attention-core in branches, other layers on all ranks): data 1 (allreduce), branch 2; micro 8",
        "one device; micro 8",
    ]


@pytest.mark.parametrize(
    "words, valid",
    [
        (["--sequence", "2048", "--batch", "8"], "--model llama-3.1-8b --sequence 2048 --batch 8"),
        (["--batch", "8"], "--model llama-3.1-8b --batch 8"),
        ([], "--model llama-3.1-8b --sequence N --batch N"),
        (["steps=3"], "--model llama-3.1-8b --sequence N --batch N"),
    ],
)
def test_a_model_in_the_place_of_a_run_file_is_named_as_one(
    words: list[str], valid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "llama-3.1-8b", *words, "--cluster", "dgx-h100", "--devices", "8"]
    error = CliRunner().invoke(app, asked).exception
    assert str(error) == f"run=llama-3.1-8b is a model, and no run file; valid: {valid}"


def test_an_older_plan_stays_and_is_told_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("mine")
    words = ["--model", "gpt2-mini", "--sequence", "64", "--batch", "8", "layout.data.size=2", "layout.data.sync=zero1"]
    asked = ["plan", *words, "--cluster", "two-cores", "--devices", "2", "batch.micro=4", "memory.recompute=none"]
    result = CliRunner().invoke(app, [*asked, "--top", "1"])
    assert result.exit_code == 0, result.exception
    assert result.stderr.startswith("plan.yaml is there already: this command writes plan-2.yaml\n")
    assert "plan-2.yaml" in result.stdout
    assert Path("plan.yaml").read_text() == "mine"
    assert load_config(Path("plan-2.yaml")).layout.world_size == 2
    refused = CliRunner().invoke(app, [*asked, "--out", "plan.yaml"])
    assert str(refused.exception) == "--out=plan.yaml is there already; valid: plan-3.yaml"
