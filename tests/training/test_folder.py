"""A run's folder has one writer. A run continues from checkpoints of the same run, and prints the changes of the
config."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.bucket import Place
from meshwright.compute.parameters.shard import Box, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, run_text
from meshwright.configs import shipped
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.training import folder, resume
from meshwright.training.checkpoint import CheckpointWriter, Piece
from meshwright.training.checkpoint.manifest import Origin, Progress
from meshwright.training.job import train
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import config_for, make_corpus
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
DATA = "da7a"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def write_steps(mesh: Mesh, out: Path, config: Config, run: str, steps: list[int], keep: int) -> None:
    def pieces() -> Iterator[Piece]:
        for name, spec in shard_specs(make_chain(config, SerialKit(solo_mesh(torch.device("meta"))))).items():
            size = math.prod(spec.shape)
            box = Box((0,) * len(spec.shape), spec.shape)
            yield Piece("weight", Place(name, spec.shape, box, 0, size), torch.ones(size))

    origin = Origin(config.model_dump(mode="json", by_alias=True), run, DATA if run else "")
    writer = CheckpointWriter(out / folder.CHECKPOINTS, mesh, keep, origin, {})
    for step in steps:
        samples = step * config.batch.global_
        assert writer.save(Progress(step=step, samples=samples), pieces()) == []
    writer.wait()


def leave(out: Path, config: Config, run: str, *steps: int, keep: int = 9) -> None:
    """Write the folder of a run with checkpoints at these steps."""
    run_ranks(write_steps, ONE, out, config, run, list(steps), keep)


def steps_of(out: Path) -> list[str]:
    return sorted(path.name for path in (out / folder.CHECKPOINTS).iterdir())


@pytest.fixture
def used(corpus: Path, tmp_path: Path) -> Path:
    """Return the folder of a run that was stopped after step 6."""
    out = tmp_path / "run"
    out.mkdir()
    folder.begin(out, config_for(corpus))
    leave(out, config_for(corpus), run_of(out), 3, 6)
    return out


def run_of(out: Path) -> str:
    return str(json.loads((out / folder.IDENTITY).read_text())["run"])


def go_on(out: Path, config: Config, step: int | None = None, data: str = DATA, accept: bool = False) -> list[str]:
    return resume.go_on(out, config, data, step, accept_changes=accept)


def hold(out: Path, ready: Any) -> None:
    with folder.locked(out):
        ready.set()
        signal.pause()


@pytest.mark.parametrize("resume", [False, True])
def test_second_run_is_refused_at_once(resume: bool, corpus: Path, used: Path) -> None:
    """A run that would resume next to the live run is refused as well. A dead run's lock is no obstacle."""
    if not resume:
        shutil.rmtree(used / folder.CHECKPOINTS)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(used, ready))
    holder.start()
    try:
        assert ready.wait(PATIENCE_SECONDS)
        text = (
            rf"--out={used} is being written by another run: process {holder.pid} on \S+, since 20\d\d-.* UTC; valid:"
        )
        before = sorted(path.name for path in used.rglob("*"))
        with pytest.raises(ConfigError, match=text):
            train(config_for(corpus), used, resume=resume)
        assert sorted(path.name for path in used.rglob("*")) == before
    finally:
        holder.kill()
        holder.join()
    with folder.locked(used) as notes:
        assert notes == []


@pytest.mark.parametrize("lives", [True, False])
def test_a_lock_that_holds_on_one_host_only(lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Lustre with localflock, a lock excludes this host's runs alone. Signs of life exclude a run on another
    host."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(folder, "TOUCH_SECONDS", 0.1)
    monkeypatch.setattr(folder, "WATCH_SECONDS", 2.0)
    today = time.time()
    monkeypatch.setattr(time, "time", lambda: today + 86400)  # this host's clock is a day ahead of the holder's
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, ready))
    with patch("socket.gethostname", lambda: "node7"):
        holder.start()
    try:
        assert ready.wait(PATIENCE_SECONDS)
        if not lives:
            holder.kill()
            holder.join()
        refused = pytest.raises(ConfigError, match=rf"written by another run: process {holder.pid} on node7, since")
        with refused if lives else nullcontext(), folder.locked(tmp_path):
            pass
    finally:
        holder.kill()
        holder.join()
    assert (tmp_path / folder.LOCK).read_text().startswith('{"host": "node7"' if lives else "")


def test_lock_that_does_not_exist_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with folder.locked(tmp_path) as notes:
        assert notes == [
            f"warning: {tmp_path} cannot be locked (Function not implemented): start no second run that writes there"
        ]


def test_fresh_run_in_a_folder_with_checkpoints_is_refused(corpus: Path, used: Path) -> None:
    """A fresh run once deleted the new checkpoints, which had smaller numbers, and reported success."""
    with pytest.raises(
        ConfigError, match=r"holds a run already \(checkpoints/step-3\); valid: another folder, or --res"
    ):
        train(config_for(corpus), used, resume=False)
    assert steps_of(used) == ["step-3", "step-6"]


def test_only_own_checkpoints_are_pruned(corpus: Path, tmp_path: Path) -> None:
    config = config_for(corpus)
    leave(tmp_path, config, "", 0)
    leave(tmp_path, config, "aaaa", 100)
    leave(tmp_path, config, "bbbb", 1, 2, keep=1)
    assert steps_of(tmp_path) == ["step-0", "step-100", "step-2"]
    leave(tmp_path, config, "bbbb", 3, keep=1)
    assert steps_of(tmp_path) == ["step-0", "step-100", "step-3"], "a resumed run knows its own"


def test_another_runs_checkpoint_is_not_gone_on_from(corpus: Path, used: Path) -> None:
    leave(used, config_for(corpus), "aaaa", 100)
    text = r"step-100 is of another run \(aaaa\) than .*: move it aside to go on with this run, or .*run.json"
    with pytest.raises(CheckpointError, match=text):
        go_on(used, config_for(corpus))
    with pytest.raises(CheckpointError, match=text):  # in a restarted worker
        resume.checkpoint_of_run(used)
    (used / folder.IDENTITY).unlink()
    go_on(used, config_for(corpus))
    assert run_of(used) == "aaaa"


def test_identity_stays(corpus: Path, used: Path) -> None:
    run = run_of(used)
    assert go_on(used, config_for(corpus)) == []
    assert resume.checkpoint_of_run(used) == (run, 6)


def test_damaged_one_is_refused_and_the_newest_whole_one_is_named(corpus: Path, used: Path) -> None:
    manifest = used / folder.CHECKPOINTS / "step-6" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float16"))
    with pytest.raises(CheckpointError, match=r"is damaged.*; the newest whole one is step-3: --resume-from 3 goes on"):
        go_on(used, config_for(corpus))
    notes = go_on(used, config_for(corpus), 3)
    assert notes == [f"step-6 is set aside as {manifest.parent.with_name('set-aside-step-6')}"]
    assert resume.checkpoint_of_run(used) == (run_of(used), 3)


def test_damaged_shard_of_the_older_one_is_not_offered(corpus: Path, used: Path) -> None:
    for step in ("step-3", "step-6"):
        shard = used / folder.CHECKPOINTS / step / "rank-0.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    (used / folder.CHECKPOINTS / "step-6" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no older one is whole: begin a new run in another folder"):
        go_on(used, config_for(corpus))


def test_renamed_checkpoint_is_refused(corpus: Path, used: Path) -> None:
    """Under the new name, step 3 would be taken for the newest, and the real checkpoints would be set aside."""
    (used / folder.CHECKPOINTS / "step-3").rename(used / folder.CHECKPOINTS / "step-9")
    text = r"step-9 holds the checkpoint of step 3: name it so; the newest whole one is step-6: --resume-from 6"
    with pytest.raises(CheckpointError, match=text):
        go_on(used, config_for(corpus))
    assert steps_of(used) == ["step-6", "step-9"]


def test_step_that_is_not_there(corpus: Path, used: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume-from=4 is no checkpoint in .*; valid: 3, 6"):
        go_on(used, config_for(corpus), 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 4}, r"seed=4 is 3 in .*step-6; valid: that, or --accept-changes"),
    "sequence": ({"data": {"sequence": 10}}, r"data.sequence=10 is 12 in"),
    "batch": ({"batch": {"global": 24, "micro": 2}}, r"batch.global=24 is 12 in"),
    "heads": ({"model": {"heads": 4}}, r"model.heads=4 is 2 in"),
}


@pytest.mark.parametrize("change, text", REFUSED.values(), ids=REFUSED)
def test_decisive_change_is_refused_unless_accepted(
    change: dict[str, Any], text: str, corpus: Path, used: Path
) -> None:
    plain = config_for(corpus).model_dump(mode="json", by_alias=True)
    config = Config.model_validate(plain | {key: merged(plain[key], value) for key, value in change.items()})
    before = (used / folder.CONFIG).read_text()
    with pytest.raises(ConfigError, match=text):
        go_on(used, config)
    assert (used / folder.CONFIG).read_text() == before, "a refused run must leave no trace"
    notes = go_on(used, config, accept=True)
    assert len(notes) == 2
    assert " until step 6, now " in notes[0]


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize(
    "change, why",
    [
        ({"layers": 2}, r"blocks.1.\S+ should be \[\d+.*\], and it has no such parameter"),
        ({"hidden": 32}, r"should be \[.*32.*\], and it has \[.*16.*\]"),
        ({"tied": False}, r"should be \[.*\], and it has no such parameter"),
    ],
)
def test_another_shape_cannot_be_accepted(
    change: dict[str, Any], why: str, accept: bool, corpus: Path, used: Path
) -> None:
    """The misfit is an error before ranks start. Changes that --accept-changes would allow are in the same error."""
    plain = config_for(corpus).model_dump(mode="json", by_alias=True)
    config = Config.model_validate(plain | {"seed": 4, "model": {**plain["model"], **change}})
    with pytest.raises(ConfigError) as caught:
        go_on(used, config, accept=accept)
    told = {problem.field: str(problem) for problem in caught.value.problems}
    field = f"model.{next(iter(change))}"
    assert set(told) == ({field} if accept else {"seed", field})
    assert re.search(rf"is \w+ in .*step-6, whose weights do not fit: .*{why}; valid: that, or a new run", told[field])
    assert "--accept-changes" not in told[field]


def merged(held: Any, change: Any) -> Any:
    return {**held, **change} if isinstance(held, dict) else change


def test_other_data_behind_the_same_name_is_refused(corpus: Path, used: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds other tokens or samples than those that .*step-6 was trained on"):
        go_on(used, config_for(corpus), data="0ddda7a")
    assert len(go_on(used, config_for(corpus), data="0ddda7a", accept=True)) == 1


def test_data_that_moved_is_the_same_data(corpus: Path, used: Path, tmp_path: Path) -> None:
    moved = config_for(Path(shutil.copytree(corpus, tmp_path / "moved")))
    notes = go_on(used, moved)
    assert notes[0] == f'data.source: "{corpus}" until step 6, now "{tmp_path / "moved"}"'


def test_other_changes_are_shown_and_the_old_config_is_kept(corpus: Path, used: Path) -> None:
    before = (used / folder.CONFIG).read_text()
    config = config_for(corpus, optimizer={"lr": 1e-3}, steps=20, layout={"data": {"size": 3}, "transport": "torch"})
    assert set(go_on(used, config)) == {
        "optimizer.lr: 0.01 until step 6, now 0.001",
        "steps: 8 until step 6, now 20",
        "layout.data.size: 2 until step 6, now 3",
        "config.yaml is new, the one until step 6 is config-6.yaml",
    }
    assert (used / "config-6.yaml").read_text() == before
    assert (used / folder.CONFIG).read_text() == run_text(config)


def test_import_says_what_the_model_is_and_nothing_else(corpus: Path, tmp_path: Path) -> None:
    imported = config_for(corpus, seed=9, batch={"global": 4, "micro": 2})
    leave(tmp_path, imported, "", 0)
    assert go_on(tmp_path, config_for(corpus)) == []
    other = config_for(corpus).model_dump(mode="json", by_alias=True)
    other["model"]["heads"] = 4
    with pytest.raises(ConfigError, match=r"model.heads=4 is 2 in"):
        go_on(tmp_path, Config.model_validate(other))


def test_identity_that_is_none(corpus: Path, used: Path) -> None:
    (used / folder.IDENTITY).write_text("[]")
    with pytest.raises(CheckpointError, match=r"run.json cannot be read .*: move it aside, and --resume makes it anew"):
        go_on(used, config_for(corpus))


def test_accepting_changes_of_a_new_run_has_no_effect() -> None:
    run_file = shipped("runs")["quickstart"]
    result = CliRunner().invoke(app, ["train", str(run_file), "--accept-changes"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--accept-changes=true has no effect on a new run; valid: leave it out, or")
