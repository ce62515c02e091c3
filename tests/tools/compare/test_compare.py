"""Two layouts run for a round and a half; other tests compare made-up runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from html.parser import HTMLParser
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from meshwright import cli
from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.ranks.errors import ConfigError, LaunchError
from meshwright.ranks.launch import Interrupted
from meshwright.ranks.machine import Machine
from meshwright.tools.compare import job
from meshwright.tools.compare.job import (
    NO_CLUSTER,
    NUMBERS,
    PAGE,
    PICTURE,
    Order,
    compare_layouts,
    on_one_device,
    require_all,
)
from meshwright.tools.compare.layouts import Contender
from meshwright.tools.compare.report import as_dict, html_of, render
from meshwright.tools.compare.result import Measurement
from tests.patience import PATIENCE_SECONDS
from tests.tools.compare.runs import MODEL, STAGES, comparison, contender, predicted, rank, run

SMALL = Path(__file__).resolve().parents[2] / "planner" / "calibrate" / "small.yaml"
STEPS = 100  # enough for a Ctrl-C after the first step, even on a busy machine
LAYOUTS = {"replicas": {"data": {"size": 2, "sync": "zero1"}}, "stages": STAGES}


@pytest.fixture
def contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Contender]:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text about nothing\n" for number in range(400)))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    tree = {"model": MODEL, "data": {"source": str(text), "sequence": 16}, "batch": {"global": 4}}
    tree["precision"] = {"dtype": "float64"}
    layouts = {name: layout | {"transport": "torch"} for name, layout in LAYOUTS.items()}
    return [
        Contender(name, parse_config(tree | {"layout": layout}), f"{name}.yaml") for name, layout in layouts.items()
    ]


class Interrupter:
    """Sends this process a Ctrl-C once a file exists, as a person at the terminal would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not (self.path.exists() and self.path.stat().st_size) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)


def workers() -> list[psutil.Process]:
    """Return the launcher's forked ranks that still run."""
    server = vars(forkserver._forkserver)["_forkserver_pid"]
    return [child for child in psutil.Process(server).children() if child.status() != psutil.STATUS_ZOMBIE]


def test_two_layouts_run_agree_and_are_interrupted(contenders: list[Contender], tmp_path: Path) -> None:
    out = tmp_path / "out"
    Interrupter(out / "2-stages" / "round-2" / "metrics.jsonl")
    # The second round begins with the last layout: the Ctrl-C stops the third of four runs.
    order = Order("tiny", out, steps=STEPS, rounds=2)
    with pytest.raises(Interrupted) as caught:
        compare_layouts(contenders, order, load_cluster(str(SMALL)).model_copy(update={"device": double(SMALL)}))
    assert caught.value.exit_code == 130
    assert "stopped by SIGINT, after 2 of 4 runs; kept: replicas (1 of 2 rounds), stages (1 of 2 rounds)" in str(
        caught.value
    )
    assert str(out / PAGE) in str(caught.value)
    assert workers() == []

    made = json.loads((out / NUMBERS).read_text())
    replicas, stages = made["layouts"]
    assert (made["cluster"], made["within_noise"][0] in LAYOUTS, made["mean_error"] > 0) == ("small", True, True)
    assert replicas["losses"]["difference"] == 0.0
    assert 0 <= stages["losses"]["difference"] < 1e-10
    assert stages["losses"]["agree"]
    for row in (replicas, stages):
        measured = row["measured"]
        assert len(measured["step_seconds"][0]) == len(measured["losses"][0]) == STEPS
        assert measured["quartiles"][0] <= measured["seconds"] <= measured["quartiles"][1]
        for facts, foreseen in zip(measured["stages"], row["predicted"]["stages"], strict=True):
            sent: dict[str, int] = {}
            for call in facts["sent"]:
                sent[call["axis"]] = sent.get(call["axis"], 0) + call["bytes"]
            assert sent == foreseen["sent"]
            assert facts["held"] == {part: foreseen["memory"][part] for part in ("weights", "gradients", "states")}
    first, second = (stage["held"] for stage in stages["measured"]["stages"])
    assert first["states"] == 2 * first["weights"]
    assert first != second
    held = replicas["measured"]["stages"][0]["held"]
    assert held["states"] == held["weights"]  # a half of two moments
    assert well_formed((out / PAGE).read_text()) > 100
    assert (out / PICTURE).read_bytes().startswith(b"\x89PNG")


def double(path: Path) -> Any:
    """Return the small cluster's device, with float64 added."""
    device = load_cluster(str(path)).device
    return device.model_copy(update={"peak_flops_per_second": device.peak_flops_per_second | {"float64": 1e9}})


class Balanced(HTMLParser):
    """Counts elements; fails at a closing tag of an element that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1
        for name, value in attrs:
            assert name not in ("src", "href") or (value or "").startswith("data:"), f"{tag} fetches {value}"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def well_formed(page: str) -> int:
    """Return the number of a page's elements, after checking that all are closed and none is fetched."""
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert not parser.open
    assert "<script" not in page
    # With the colon: a picture's base64 may have any four letters.
    assert "http:" not in page
    assert "https:" not in page
    return parser.count


def test_the_page_has_every_layout_and_escapes_its_name() -> None:
    fine = run((1, 1, 0.5, 0.5), (5.0, 4.0, 3.0, 2.0), [rank(0, sent={("data", "all_reduce"): (1, 4000000)})])
    rows = [
        Measurement(contender("a<b>"), (fine,), predicted(0.6, (100, {"data": 4000000}))),
        Measurement(contender("dead"), failure="rank 1 failed: <nothing> left\nmore"),
        Measurement(contender("late"), (fine,), unpredicted="it is server-loss"),
    ]
    page = html_of(comparison(*rows), b"\x89PNG")
    well_formed(page)
    assert "a&lt;b&gt;" in page
    assert "4.00 / =" in page
    assert "+20.0%" in page
    assert "rank 1 failed: &lt;nothing&gt; left" in page
    assert "late was not predicted: it is server-loss" in page
    assert "data:image/png;base64,iVBORw==" in page
    assert "`" not in page
    assert "prefers-color-scheme: dark" in page
    assert "<code>meshwright compare run.yaml</code>" in html_of(
        comparison(*rows), b"\x89PNG", "meshwright compare run.yaml"
    )


def test_without_a_cluster_the_page_says_why_nothing_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    fine = run((1, 1, 0.5, 0.5), (5.0, 4.0, 3.0, 2.0), [rank(0)])
    made = comparison(Measurement(contender("a"), (fine,), unpredicted=NO_CLUSTER), cluster="", unpredicted=NO_CLUSTER)
    page = html_of(made, b"\x89PNG")
    assert page.count("Nothing was predicted: no --cluster") == 1
    assert "measured / predicted" not in page
    render(made)
    assert "Nothing was predicted" in capsys.readouterr().out
    assert as_dict(made)["unpredicted"] == NO_CLUSTER


def test_rounds_turn_around_and_a_dead_layout_is_left_out(
    contenders: list[Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def pretend(config: Any, data: Path, folder: Path, steps: int) -> Any:
        started.append("/".join(folder.parts[-2:]))
        if "2-stages" in started[-1]:
            raise LaunchError("rank 1 was killed by SIGKILL")
        ranks = [rank(number) for number in range(config.layout.world_size)]
        return run((1.0, 1.0, 0.5), (5.0, 4.0, 3.0), ranks)

    monkeypatch.setattr(job, "measure_run", pretend)
    again = Contender("again", contenders[0].config, "again.yaml")
    made = compare_layouts([*contenders, again], Order("tiny", tmp_path / "out", steps=3, rounds=2), None)
    assert started == [
        "1-replicas/round-1", "2-stages/round-1", "3-again/round-1", "3-again/round-2", "1-replicas/round-2",
    ]  # fmt: skip
    assert [len(row.runs) for row in made.rows] == [2, 0, 2]
    with pytest.raises(LaunchError, match=r"1 of 3 layouts failed; .*\nstages: rank 1 was killed by SIGKILL"):
        require_all(made, tmp_path / "out")


def test_what_cannot_run_fails_before_anything_starts(contenders: list[Contender], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for steps in (2, 1001):
        with pytest.raises(ConfigError, match=f"--steps={steps} is no number of steps.*valid: 3 to the run's 1000"):
            compare_layouts(contenders, Order("tiny", out, steps, 1), None)
    gpus = [Contender("g", contenders[0].config.model_copy(update={"device": "cuda"}), "g.yaml")]
    with pytest.raises(ConfigError, match=r"g\.yaml: device=cuda finds"):
        compare_layouts(gpus, Order("tiny", out, 3, 1), None)
    assert not out.exists()
    out.mkdir()
    (out / "something").touch()
    with pytest.raises(ConfigError, match=r"--out=.* is not empty; valid: a new folder"):
        compare_layouts(contenders, Order("tiny", out, 3, 1), None)


def test_the_command_names_the_file_of_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: gpt2-mini\nbatch: {global: 8}")
    (tmp_path / "bad.yaml").write_text("layout: {data: {size: 3}}")
    words = ["compare", str(tmp_path / "run.yaml"), "--layouts", str(tmp_path / "run.yaml"), str(tmp_path / "bad.yaml")]
    result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "out")])
    assert "bad.yaml: layout.data.size=3 does not divide batch.global=8" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gpus, device", [(1, "cpu"), (2, "auto")])
def test_all_layouts_run_on_one_type_of_device(gpus: int, device: str) -> None:
    """One GPU is enough for a layout of one rank, which would then be compared with a layout on a CPU."""
    alone, pair = (
        Contender(str(size), parse_config({"layout": {"data": {"size": size}}}), "a.yaml") for size in (1, 2)
    )
    found = on_one_device([alone, pair], Machine(cores=2, memory=2**30, gpus=gpus))
    assert [contender.config.device for contender in found] == [device, device]
