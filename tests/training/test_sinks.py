"""Trackers: each gets every step's numbers, offline. Fakes replace packages that are not installed."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from meshwright.config import Config, parse_config, parse_run
from meshwright.ranks.errors import ConfigError, MeshwrightError
from meshwright.training import sinks
from meshwright.training.metrics import MetricsWriter
from meshwright.training.sinks import TrackedRun, Tracker, open_sinks, require_sinks

SETTINGS = {"steps": 3, "optimizer": {"lr": 0.1}}
LINES = [{"step": step, "loss": 4.0 / step, "applied": True, "sent_bytes": {"data": 1}} for step in (1, 2, 3)]


def track(name: str, folder: Path, lines: list[dict[str, Any]], project: str = "tests") -> None:
    metrics = Config().metrics.model_copy(update={"sinks": (name,)})
    run = TrackedRun(folder, "5eed", project, True, SETTINGS, lines[0]["step"] - 1)
    writer = MetricsWriter(folder, run.first_step, open_sinks(metrics, run))
    assert [note for line in lines for note in writer.write(line)] == []
    writer.close()


class Fake:
    """The common interface of wandb and trackio: `init` returns a run that logs numbers of a step, and finishes."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0

    def init(self, **given: Any) -> Fake:
        self.given.append(given)
        return self

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_number_of_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=fake.init))
    track(name, tmp_path, LINES[:2])
    track(name, tmp_path, LINES[2:])
    assert fake.logged == [(step, {"loss": 4.0 / step, "applied": True}) for step in (1, 2, 3)]
    first, again = fake.given
    assert first == again, "a run that goes on is the same run"
    assert (first["project"], first["config"], first["resume"]) == ("tests", SETTINGS, "allow")
    assert first.get("mode", "offline") == "offline"
    assert fake.finished == 2


class FakeMlflow:
    """The calls of mlflow's client as documented by mlflow, on a store that outlives a client."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.uris: list[str] = []

    def client(self, uri: str) -> FakeMlflow:
        self.uris.append(uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, ids: list[str], wanted: str, max_results: int) -> list[Any]:
        assert wanted == "tags.`meshwright.run` = '5eed'"
        found = [run for run, kept in self.runs.items() if kept["in"] in ids and "5eed" in kept["tags"].values()]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in found[:max_results]]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        run = f"run-{len(self.runs)}"
        self.runs[run] = {"in": experiment, "tags": tags, "params": {}, "metrics": [], "ended": 0}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_param(self, run: str, key: str, value: Any) -> None:
        self.runs[run]["params"][key] = value

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        self.runs[run]["metrics"].append((step, key, value))

    def set_terminated(self, run: str) -> None:
        self.runs[run]["ended"] += 1


def test_mlflow_finds_its_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=fake.client))
    track("mlflow", tmp_path, LINES[:2])
    track("mlflow", tmp_path, LINES[2:])
    (run,) = fake.runs.values()
    assert [(step, value) for step, key, value in run["metrics"] if key == "loss"] == [(1, 4.0), (2, 2.0), (3, 4 / 3)]
    assert run["params"] == {"steps": 3, "optimizer.lr": 0.1}
    assert run["ended"] == 2
    assert fake.uris == [f"sqlite:///{tmp_path}/mlflow.db"] * 2


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    track("wandb", tmp_path, LINES)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-5eed")
    assert list(folder.glob("run-5eed.wandb"))


@pytest.mark.filterwarnings("default")
def test_mlflow_offline_goes_on_with_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    track("mlflow", tmp_path, LINES[:2])
    track("mlflow", tmp_path, LINES[2:])
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
        ((runs,),) = database.execute("select count(*) from runs").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
    assert rows == [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3))]
    assert runs == 1
    assert params == {"steps": "3", "optimizer.lr": "0.1"}


@pytest.mark.filterwarnings("default")
def test_trackio_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    track("trackio", tmp_path, LINES)
    (path,) = (tmp_path / "trackio").rglob("tests*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(text)["loss"] for (text,) in database.execute("select metrics from metrics order by step")]
    assert rows == [4.0, 2.0, pytest.approx(4 / 3)]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.sinks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'metrics.sinks=wandb needs wandb, .*: pip install "meshwright\[wandb\]"'):
        require_sinks(parse_run({}, ["metrics.sinks=[wandb]"]).metrics)
    with pytest.raises(ConfigError, match=r"metrics.sinks.*each tensorboard, wandb, mlflow, trackio"):
        parse_run({}, ["metrics.sinks=[comet]"])


def test_a_tracker_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("no\nkey")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    with pytest.raises(MeshwrightError, match=r"wandb cannot begin: ValueError: no key; leave it out"):
        track("wandb", tmp_path, LINES)


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    def write(step: int, scalars: object) -> None:
        raise ConnectionError("the server is gone")

    def close() -> None:
        raise AssertionError("never reached")

    writer = MetricsWriter(tmp_path, 0, {"wandb": Tracker(write, close)})
    assert writer.write(LINES[0]) == ["warning: wandb cannot be written: the server is gone; it ends before step 1"]
    assert writer.write(LINES[1]) == []
    writer.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_field_of_version_0_1_0_is_read() -> None:
    assert parse_config({"metrics": {"tensorboard": False}}).metrics.sinks == ()
    assert parse_run({}, ["metrics.tensorboard=true"]).metrics.sinks == ("tensorboard",)


@pytest.mark.skipif(find_spec("prometheus_client") is None, reason="prometheus-client is not installed")
def test_prometheus_is_answered_while_a_run_is_made(tmp_path: Path) -> None:
    """The server is at loopback, with the newest step's numbers. The port is free again after the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = TrackedRun(tmp_path / "first", "5eed", "meshwright", True, {}, 0, "127.0.0.1", port)
    metrics = parse_config({"metrics": {"sinks": ["prometheus"], "port": port}}).metrics
    tracker = open_sinks(metrics, run)["prometheus"]
    page = f"http://127.0.0.1:{port}/metrics"
    tracker.write(1, {"loss": 2.5, "validation/loss": 3.0})
    tracker.write(2, {"loss": 2.25})
    text = urlopen(page).read().decode()
    assert 'meshwright_loss{folder="first",run="5eed"} 2.25' in text
    assert 'meshwright_validation_loss{folder="first",run="5eed"} 3.0' in text
    assert 'meshwright_step{folder="first",run="5eed"} 2.0' in text
    with pytest.raises(ConfigError, match=rf"metrics\.port={port} cannot be listened at for prometheus"):
        open_sinks(metrics, run)
    tracker.close()
    with pytest.raises(URLError):
        urlopen(page)
    open_sinks(metrics, run)["prometheus"].close()  # the port is free
    nowhere = TrackedRun(tmp_path, "5eed", "meshwright", True, {}, 0, "192.0.2.1", port)
    with pytest.raises(ConfigError, match=r"as 192\.0\.2\.1:\d+: .*valid: a free port, or"):
        open_sinks(metrics, nowhere)


def test_prometheus_without_its_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs prometheus_client.*"meshwright\[prometheus\]"'):
        sinks.require_sinks(parse_config({"metrics": {"sinks": ["prometheus"]}}).metrics)


def test_an_address_has_an_effect_on_a_sink_that_is_asked_alone() -> None:
    parse_run({"metrics": {"sinks": ["prometheus"], "address": "0.0.0.0", "port": 9500}})
    with pytest.raises(ConfigError, match=r"metrics\.port=9500 has no effect.*metrics\.sinks=\[prometheus\]"):
        parse_run({"metrics": {"sinks": ["tensorboard"], "port": 9500}})
