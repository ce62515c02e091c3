"""A checkpoint is written during the next steps, whole or not at all, under any failure. Only the newest are kept."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.compute.parameters.bucket import Place
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.training.checkpoint import Checkpoint, Piece, newest_step, writer
from meshwright.training.checkpoint.manifest import Manifest, Progress, StoredFile
from meshwright.training.checkpoint.shard import Stored, write_shard
from tests.oracle.data_parallel import config_for
from tests.patience import PATIENCE_SECONDS
from tests.training.checkpoint.states import open_writer
from tests.workers import run_ranks as run_threads

run_ranks = partial(run_threads, transport="torch")
"""Ranks are processes: a disk is mounted for a single rank, and a killed rank leaves files."""

ONE, THREE = Grid((("data", 1),)), Grid((("data", 3),))
ROWS = 4


def pieces(mesh: Mesh, value: Tensor | float) -> Iterator[Piece]:
    """Yield this rank's rows of a weight [world · ROWS, 2]."""
    shape, box = (mesh.grid.world_size * ROWS, 2), Box((mesh.rank * ROWS, 0), (ROWS, 2))
    tensor = value if isinstance(value, Tensor) else torch.full((ROWS, 2), float(value))
    yield Piece("weight", Place("w", shape, box, 0, 2 * ROWS), tensor)


def stored(folder: Path) -> Tensor:
    checkpoint = Checkpoint(folder)
    shape = checkpoint.shapes["w"]
    return checkpoint.read("w", "weight", Box((0, 0), shape))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def config_of(mesh: Mesh) -> Any:
    return config_for("allreduce", mesh.grid.world_size)


def save_behind(mesh: Mesh, folder: Path) -> tuple[list[str], list[str]]:
    """Save on a blocked disk and change the weights at once. Return the names of steps before the disk is released, and
    all names after."""
    moving = threading.Event()
    write_shard = writer.write_shard

    def slow(*arguments: Any) -> StoredFile:
        moving.wait(PATIENCE_SECONDS)
        return write_shard(*arguments)

    weights = torch.full((ROWS, 2), 1.0)
    with patch.object(writer, "write_shard", slow):
        checkpoints = open_writer(mesh, config_of(mesh), folder)
        checkpoints.save(Progress(step=1), pieces(mesh, weights))
        weights.fill_(2.0)
        before = [name for name in names(folder) if name.startswith("step")]
        moving.set()
        checkpoints.wait()
    return before, names(folder)


def test_save_returns_before_the_file_is_there(tmp_path: Path) -> None:
    assert run_ranks(save_behind, ONE, tmp_path) == [([], ["step-1"])]
    assert bool((stored(tmp_path / "step-1") == 1.0).all()), "later weights leaked into the checkpoint"


def save_steps(mesh: Mesh, folder: Path, steps: list[int], keep: int) -> None:
    checkpoints = open_writer(mesh, config_of(mesh), folder, keep)
    for step in steps:
        checkpoints.save(Progress(step=step), pieces(mesh, step))
    checkpoints.wait()


def test_a_single_element_of_a_column_is_written(tmp_path: Path) -> None:
    """A slice of one element is contiguous to torch, but the stride is kept, and torch refuses to read bytes of the
    slice."""
    column = torch.arange(48.0).view(2, 24)[:1, 5]
    stored, _ = write_shard(
        tmp_path / "one.safetensors", [Stored("weight/x", "weight of x", (1,), Box((0,), (1,)), column)]
    )
    assert stored.size_bytes == (tmp_path / "one.safetensors").stat().st_size
    assert load_file(tmp_path / "one.safetensors")["weight/x"].tolist() == [5]


def test_newest_stay(tmp_path: Path) -> None:
    run_ranks(save_steps, THREE, tmp_path, [8, 9, 10, 11], 2)
    assert names(tmp_path) == ["step-10", "step-11"]
    assert newest_step(tmp_path) == tmp_path / "step-11"
    assert stored(tmp_path / "step-11").shape == (3 * ROWS, 2)


def test_step_that_is_there_is_replaced(tmp_path: Path) -> None:
    run_ranks(save_steps, THREE, tmp_path, [5], 2)
    run_ranks(save_steps, ONE, tmp_path, [5], 2)
    assert names(tmp_path) == ["step-5"]
    assert names(tmp_path / "step-5") == ["manifest.json", "rank-0.safetensors", "tokenizer.json"]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(function: Callable[..., Any]) -> Callable[..., None]:
    def wrapped(*arguments: Any) -> None:
        function(*arguments)
        die()

    return wrapped


MOMENTS: dict[str, tuple[object, str, Callable[..., None]]] = {
    "before the shard": (writer, "write_shard", die),
    "after the shard": (writer, "write_shard", then_die(writer.write_shard)),
    "before its fsync": (writer, "sync", die),
    "before the manifest": (Manifest, "write", die),
    "after the manifest": (Manifest, "write", then_die(Manifest.write)),
}


def killed_at(moment: str, folder: Path) -> None:
    """Write step 1, and end this process while step 2 is written."""
    owner, name, deed = MOMENTS[moment]
    environment = Environment(0, 1, 0, 1, 0, "torchrun")
    with open_mesh(ONE, environment, "torch", torch.device("cpu"), Rendezvous("127.0.0.1", 0, hosted=False)) as mesh:
        save_steps(mesh, folder, [1], 9)
        with patch.object(owner, name, deed):
            save_steps(mesh, folder, [2], 9)


def open_again(mesh: Mesh, folder: Path) -> list[str]:
    return open_writer(mesh, config_of(mesh), folder).unfinished


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_writing(moment: str, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=killed_at, args=(moment, tmp_path))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL
    assert newest_step(tmp_path) == tmp_path / "step-1", "half a checkpoint counts"
    half = [name for name in names(tmp_path) if name != "step-1"]
    assert len(half) == 1

    assert run_ranks(open_again, ONE, tmp_path) == [half], "it was not reported"
    assert names(tmp_path) == ["step-1"]
    assert bool((stored(tmp_path / "step-1") == 1).all())


def fail_on(mesh: Mesh, folder: Path, failing: int) -> str:
    """Write step 1, then step 2 with a full disk on one rank. Return this rank's error."""
    write_shard = writer.write_shard

    def full(*arguments: Any) -> StoredFile:
        if mesh.rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_shard(*arguments)

    checkpoints = open_writer(mesh, config_of(mesh), folder)
    checkpoints.save(Progress(step=1), pieces(mesh, 1))
    checkpoints.wait()
    mesh.world.barrier()
    with patch.object(writer, "write_shard", full):
        notes = checkpoints.save(Progress(step=2), pieces(mesh, 2))
        assert notes == []
        try:
            checkpoints.wait()
        except CheckpointError as error:
            return str(error)
    return "written"


@pytest.mark.parametrize("failing", [0, 2])
def test_disk_full(failing: int, tmp_path: Path) -> None:
    answers = run_ranks(fail_on, THREE, tmp_path, failing)
    cause = f"a checkpoint could not be written to {tmp_path}: rank {failing}: [Errno 28] No space left on device"
    assert set(answers) == {f"{cause}; the newest complete one is {tmp_path / 'step-1'}"}, "one cause, on all ranks"
    assert names(tmp_path) == ["step-1"]
    assert bool((stored(tmp_path / "step-1") == 1).all())


def fail_for_a_while(mesh: Mesh, folder: Path) -> list[list[str]]:
    """Save steps 1 to 6; rank 1 cannot write steps 2 and 3. Return the notes of each save, and of the wait after the
    last."""
    write_shard = writer.write_shard
    checkpoints = open_writer(mesh, config_of(mesh), folder)
    said = []
    for step in range(1, 7):

        def odd(*arguments: Any, step: int = step) -> StoredFile:
            if mesh.rank == 1 and step in (2, 3):
                raise KeyError("a bug")
            return write_shard(*arguments)

        with patch.object(writer, "write_shard", odd):
            said.append(checkpoints.save(Progress(step=step), pieces(mesh, step)))
            assert checkpoints._thread is not None
            checkpoints._thread.join()
    checkpoints.wait()
    return said


def test_a_failed_save_warns_once_and_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    first, second = run_ranks(fail_for_a_while, Grid((("data", 2),)), tmp_path)
    failed = "warning: no checkpoint of step 2: rank 1: KeyError: 'a bug'; training goes on with the older ones"
    assert first == second == [[], [], [failed], [], ["checkpoints are written again"], []]
    assert names(tmp_path) == ["step-1", "step-4", "step-5", "step-6"]


Usage = namedtuple("Usage", "total used free")


def save_with_room(mesh: Mesh, folder: Path, keep: int, before: list[int], freed: int) -> tuple[list[str], list[str]]:
    """Save the steps of `before`, then step 9 on a disk with no room except `freed` bytes a removed step."""
    save_steps(mesh, folder, before, 9)
    checkpoints = open_writer(mesh, config_of(mesh), folder, keep)

    def usage(path: Path) -> Usage:
        removed = len(before) - len([name for name in names(folder) if name.startswith("step-")])
        return Usage(0, 0, removed * freed)

    with patch.object(shutil, "disk_usage", usage):
        notes = checkpoints.save(Progress(step=9), pieces(mesh, 9))
    with suppress(CheckpointError):
        checkpoints.wait()
    return notes, names(folder)


ROOM: dict[str, tuple[int, list[int], int, list[str]]] = {
    "what keep allows is removed first": (2, [1, 2, 3], 10**6, ["step-3", "step-9"]),
    "keep 1, several left by a larger keep": (1, [1, 2, 3], 10**6, ["step-9"]),
    "the newest is never removed for the next": (1, [1], 10**6, ["step-1"]),
    "not enough": (2, [1, 2, 3], 10, ["step-3"]),
}


@pytest.mark.parametrize("keep, before, freed, left", ROOM.values(), ids=ROOM)
def test_room_is_asked_for_first(keep: int, before: list[int], freed: int, left: list[str], tmp_path: Path) -> None:
    answers = run_ranks(save_with_room, Grid((("data", 2),)), tmp_path, keep, before, freed)
    assert [stays for _, stays in answers] == [left, left]
    needs = rf"warning: no checkpoint of step 9: it needs 2,064 bytes, and {tmp_path} has {'0' if keep == 1 else '20'}"
    for notes, _ in answers:
        assert notes == [] if "step-9" in left else re.match(needs, notes[0]), notes


def on_a_full_disk(mesh: Mesh, folder: Path) -> list[str]:
    """Save step 1, fill the disk from another process, then save step 2 and step 3, which is promised room that the
    disk lacks."""
    checkpoints = open_writer(mesh, config_of(mesh), folder)
    said = checkpoints.save(Progress(step=1), pieces(mesh, 1))
    checkpoints.wait()
    mesh.world.barrier()
    if mesh.rank == 0:
        fill(folder / "other")
    mesh.world.barrier()
    said += checkpoints.save(Progress(step=2), pieces(mesh, 2))
    with patch.object(shutil, "disk_usage", lambda folder: Usage(0, 0, 10**9)):
        said += checkpoints.save(Progress(step=3), pieces(mesh, 3))
        with pytest.raises(
            CheckpointError, match=r"rank \d: .*No space left on device.*; the newest complete one is .*step-1"
        ):
            checkpoints.wait()
    (folder / "other").unlink(missing_ok=True)
    mesh.world.barrier()
    for step in (4, 5):
        said += checkpoints.save(Progress(step=step), pieces(mesh, step))
    checkpoints.wait()
    return said


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_real_full_disk(small_disk: Path) -> None:
    for said in run_ranks(on_a_full_disk, Grid((("data", 2),)), small_disk):
        assert len(said) == 2
        assert re.match(rf"warning: no checkpoint of step 2: it needs 2,064 bytes, and {small_disk} has 0;", said[0])
        assert said[1] == "checkpoints are written again"
    assert {name for name in names(small_disk) if name != "other"} == {"step-1", "step-4", "step-5"}
    assert bool((stored(small_disk / "step-5") == 5).all())


def lose_folder(mesh: Mesh, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Remove the folder between two saves, and then during a write."""
    checkpoints = open_writer(mesh, config_of(mesh), folder)
    checkpoints.save(Progress(step=1), pieces(mesh, 1))
    checkpoints.wait()
    mesh.world.barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder)
    mesh.world.barrier()
    between = checkpoints.save(Progress(step=2), pieces(mesh, 2))
    checkpoints.wait()

    write_shard = writer.write_shard

    def removed(*arguments: Any) -> StoredFile:
        if mesh.rank == 1:
            shutil.rmtree(folder)
        while folder.exists():
            time.sleep(0.001)
        return write_shard(*arguments)

    with patch.object(writer, "write_shard", removed):
        checkpoints.save(Progress(step=3), pieces(mesh, 3))
        assert checkpoints._thread is not None
        checkpoints._thread.join()
    mesh.world.barrier()
    during = checkpoints.save(Progress(step=4), pieces(mesh, 4))
    checkpoints.wait()
    return between, during, names(folder)


def test_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    again = f"warning: {folder} was removed during the run, and every checkpoint in it: it is made again"
    cause = "its folder was removed while it was written"
    failed = f"warning: no checkpoint of step 3: {cause}; training goes on with the older ones"
    first, *others = run_ranks(lose_folder, THREE, folder)
    assert first == ([again], [failed, again], ["step-4"])
    for other in others:
        assert other == ([], [failed], ["step-4"])


def save_read_only(mesh: Mesh, folder: Path) -> str:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    checkpoints = open_writer(mesh, config_of(mesh), folder)
    started = time.monotonic()
    with patch.object(Path, "mkdir", refused):
        notes = checkpoints.save(Progress(step=1), pieces(mesh, 1))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        assert notes
        assert time.monotonic() - started < 10, "ranks waited for each other"
        return str(error)
    return "written"


def test_read_only_folder_is_one_cause_at_once(tmp_path: Path) -> None:
    (answer,) = set(run_ranks(save_read_only, THREE, tmp_path))
    cause = rf"\[Errno 30\] Read-only file system: '{tmp_path}'; there is no complete one"
    assert re.fullmatch(rf"a checkpoint could not be written to {tmp_path}: {cause}", answer)


def open_where_nobody_may(mesh: Mesh, folder: Path) -> str:
    try:
        open_writer(mesh, config_of(mesh), folder)
    except CheckpointError as error:
        return str(error)
    return "opened"


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (answer,) = run_ranks(open_where_nobody_may, ONE, tmp_path / "file" / "checkpoints")
    assert answer == f"checkpoints cannot be written to {tmp_path / 'file' / 'checkpoints'}: Not a directory"
