"""A run's folder: one run at a time writes it, and a run goes on from what it wrote itself.

| in the folder | what it is |
|---|---|
| run.lock | locked by the kernel (flock) while a run writes here, so it falls with its holder; says who that is |
| run.json | the run's identity: checkpoints name it, and it stays through restarts and resumes |
| config.yaml | the config; config-STEP.yaml is the one that it replaced when the run was resumed at STEP |
| checkpoints | step folders; set-aside-step-N: newer than the one that --resume-from asked for |
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.manifest import TOKENIZER_FILE
from meshwright.checkpoint.reader import Checkpoint, newest_step, newest_whole, steps_in
from meshwright.config import Config, dump_config
from meshwright.errors import CheckpointError, ConfigError, DamagedError, Problem

LOCK, IDENTITY, CONFIG, CHECKPOINTS = "run.lock", "run.json", "config.yaml", "checkpoints"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_DECISIVE = ("seed", "model.", "data.", "batch.global")
"""What a resumed run must have in common with the run that it goes on with, unless --accept-changes."""
_FREE = ("model.dropout",)
_OF_THE_SOURCE = ("data.source", "data.target", "data.languages", "data.tokenizer", "data.validation")
"""What says where tokens come from: free where the prepared tokens are the same ones."""


@contextmanager
def locked(out: Path) -> Iterator[list[str]]:
    """Hold the right to write the folder, which is made; yields what a user should know.

    Raises ConfigError at once where another run holds it, and where it cannot be written to.
    """
    notes = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise not_writable(out, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = f"is being written by {_holder(out)}"
            raise ConfigError.of("--out", out, holder, "another folder, or the same once that run has ended") from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise not_writable(out, error) from error
            notes.append(f"warning: {out} cannot be locked ({error.strerror}): start no second run that writes there")
        facts = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        yield notes
    finally:
        os.close(descriptor)


def _holder(out: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):  # it may be writing this very file
        facts = json.loads((out / LOCK).read_text())
        return f"another run: process {facts['pid']} on {facts['host']}, since {facts['since']}"
    return "another run"


def not_writable(out: Path, error: OSError) -> ConfigError:
    return ConfigError.of("--out", out, f"cannot be written to ({error.strerror})", "a folder that you may write to")


def refuse_used(out: Path) -> None:
    """Raises ConfigError where a fresh run would mix with what another has left."""
    for name in ("metrics.jsonl", *(f"{CHECKPOINTS}/{path.name}" for _, path in steps_in(out / CHECKPOINTS))):
        if (out / name).exists():
            rule = f"holds a run already ({name})"
            raise ConfigError.of("--out", out, rule, "another folder, or --resume to go on with it")


def begin(out: Path, config: Config) -> None:
    """Make the folder a fresh run's."""
    _write(out, IDENTITY, json.dumps({"run": secrets.token_hex(8)}) + "\n")
    _write(out, CONFIG, dump_config(config))


def go_on(out: Path, config: Config, data: str, step: int | None, *, accept_changes: bool) -> list[str]:
    """Make the folder ready for a run that goes on, from the newest checkpoint or that of `step`; what is to be said.

    `data`: the fingerprint of the prepared data. Raises ConfigError where the config differs in what a run must keep;
    CheckpointError where the checkpoint is damaged or another run's.
    """
    folder = out / CHECKPOINTS
    if step is not None:
        _find_step(folder, step)
    run, checkpoint = _newest(out, step)
    if checkpoint is None:
        begin(out, config)
        return []
    notes = _differences(checkpoint, config, data, accept_changes=accept_changes)
    for newer, path in steps_in(folder):
        if newer > checkpoint.manifest.progress.step:
            aside = path.with_name(f"set-aside-{path.name}")
            path.rename(aside)
            notes.append(f"{path.name} is set aside as {aside}")
    _write(out, IDENTITY, json.dumps({"run": run}) + "\n")
    return notes + _keep_config(out, config, checkpoint.manifest.progress.step)


def checkpoint_of_run(out: Path, *, resume: bool) -> tuple[str, int | None]:
    """The run's identity, and the step that it goes on from. Raises as `go_on`."""
    if not resume:
        return _identity(out), None
    run, checkpoint = _newest(out, None)
    return run, None if checkpoint is None else checkpoint.manifest.progress.step


def with_offer(error: DamagedError, folder: Path, step: int) -> DamagedError:
    """The error, with the newest checkpoint that the run could go on from instead."""
    older = newest_whole(folder, before=step)
    offer = "no older one is whole: begin a new run in another folder"
    if older is not None:
        offer = (
            f"the newest whole one is {older.name}: --resume-from {older.name.removeprefix('step-')} goes on from it"
        )
    return DamagedError(f"{error}; {offer}")


def _newest(out: Path, step: int | None) -> tuple[str, Checkpoint | None]:
    """The run's identity, and its newest checkpoint or that of `step`.

    A folder without an identity takes its newest checkpoint's. One that names no run, an import or one of version
    0.1.0, is anybody's.
    """
    folder = out / CHECKPOINTS
    path = newest_step(folder) if step is None else folder / f"step-{step}"
    run = _identity(out)
    if path is None:
        return run, None
    try:
        checkpoint = Checkpoint(path)
        checkpoint.file(TOKENIZER_FILE)
        if path.name != f"step-{checkpoint.manifest.progress.step}":
            raise DamagedError(f"{path} holds the checkpoint of step {checkpoint.manifest.progress.step}: name it so")
    except DamagedError as error:
        raise with_offer(error, folder, int(path.name.removeprefix("step-"))) from error
    wrote = checkpoint.manifest.origin.run
    if wrote and (out / IDENTITY).is_file() and wrote != run:
        raise CheckpointError(
            f"{path} is of another run ({wrote}) than {out} ({run}): move it away to go on with this run, or remove "
            f"{out / IDENTITY} to go on with that one"
        )
    return wrote or run, checkpoint


def _identity(out: Path) -> str:
    try:
        run = str(json.loads((out / IDENTITY).read_text())["run"])
    except FileNotFoundError:
        return secrets.token_hex(8)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{out / IDENTITY} cannot be read ({error}): remove it, and --resume makes it anew"
        ) from error
    return run


def _find_step(folder: Path, step: int) -> None:
    steps = [str(found) for found, _ in steps_in(folder)]
    if str(step) not in steps:
        raise ConfigError.of(
            "--resume-from", step, f"is no checkpoint in {folder}", ", ".join(steps) or "none is there"
        )


def _differences(checkpoint: Checkpoint, config: Config, data: str, *, accept_changes: bool) -> list[str]:
    """What differs between a checkpoint's config and the run's, a line each. Raises ConfigError where it may not."""
    origin, progress = checkpoint.manifest.origin, checkpoint.manifest.progress
    held, wanted = (_leaves(each.model_dump(mode="json", by_alias=True)) for each in (checkpoint.config, config))
    changed = [key for key in wanted | held if held.get(key) != wanted.get(key)]
    if not origin.run and progress.samples == 0:  # an import says what the model is, and nothing else
        changed = [key for key in changed if key.startswith("model.")]
    same_data = origin.data == data
    refused = [
        Problem(key, _shown(wanted, key), f"is {_shown(held, key)} in {checkpoint.folder}", "that, or --accept-changes")
        for key in changed
        if key.startswith(_DECISIVE) and key not in _FREE and not (same_data and key in _OF_THE_SOURCE)
    ]
    notes = [f"{key}: {_shown(held, key)} until step {progress.step}, now {_shown(wanted, key)}" for key in changed]
    if origin.data and not same_data:
        rule = f"holds other tokens or samples than those that {checkpoint.folder} was trained on"
        refused.append(Problem("data.source", config.data.source, rule, "the same data, or --accept-changes"))
        notes.append(f"data.source={config.data.source} {rule}")
    if refused and not accept_changes:
        raise ConfigError(refused)
    if origin.torch not in ("unknown", str(torch.__version__)):
        notes.append(f"{checkpoint.folder.name} was written with torch {origin.torch}, this is {torch.__version__}")
    return notes


def _leaves(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The values of a nested dict by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found


def _shown(leaves: dict[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else "absent"


def _keep_config(out: Path, config: Config, step: int) -> list[str]:
    """Write config.yaml; one that says something else is kept under the step until which it held."""
    path, dump = out / CONFIG, dump_config(config)
    kept = out / f"config-{step}.yaml"
    notes = []
    if path.is_file() and path.read_text(encoding="utf-8") != dump and not kept.exists():
        path.rename(kept)
        notes.append(f"config.yaml is new, the one until step {step} is {kept.name}")
    _write(out, CONFIG, dump)
    return notes


def _write(out: Path, name: str, text: str) -> None:
    """Whole or not at all."""
    try:
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.rename(out / name)
    except OSError as error:
        raise not_writable(out, error) from error
