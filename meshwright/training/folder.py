"""A run's folder: one run at a time writes it. What a run goes on from: resume.py. No torch: the launcher starts here.

| in the folder | what it is |
|---|---|
| run.lock | locked by the kernel (flock) while a run writes here, so it falls with its holder; says who that is |
| run.json | the run's identity, which checkpoints name and restarts and resumes keep; its number of steps |
| config.yaml | the config; config-STEP.yaml is the one that it replaced when the run was resumed at STEP |
| source | the settings that weights and tokenizer came with, which an export writes back (data/published.py) |
| checkpoints | step folders; set-aside-step-N: newer than the one that --resume-from asked for |
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.config import Config, run_text
from meshwright.data.published import SOURCE, published_for
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.ranks.foreign import open_to_write, parse_json, plain_folder, read_json, write_fresh

LOCK, IDENTITY, CONFIG, CHECKPOINTS = "run.lock", "run.json", "config.yaml", "checkpoints"
OF_TRACKERS = ("wandb", "tensorboard", "mlruns", "mlartifacts")
"""Folders of trackers in a run's: W&B keeps links there, and Meshwright opens no file of them."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

TOUCH_SECONDS = 4.0
"""Between two signs of life of the run that holds a folder."""
WATCH_SECONDS = 3 * TOUCH_SECONDS


@contextmanager
def locked(out: Path) -> Iterator[list[str]]:
    """Hold the right to write the folder, which is made; yields what a user should know.

    Raises ConfigError at once where another run holds it, where it cannot be written to, and where it has a link, by
    which a folder of somebody else would have other files written. Where the lock itself says
    little (Lustre's and NFS's may hold on one host only, or be none at all), a run that has not ended in order is
    watched for some seconds: if it still touches its lock, it lives.
    """
    notes = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        plain_folder(out, OF_TRACKERS)
        descriptor = open_to_write(out / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise not_writable(out, error) from error
    over = threading.Event()
    try:
        # Whether the lock, once taken, says that nobody else writes here.
        excludes, taken = True, False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise not_writable(out, error) from error
            excludes = False
            notes.append(f"warning: {out} cannot be locked ({error.strerror}): start no second run that writes there")
        before = _facts_in(descriptor)
        # On this host a lock that could be taken is proof; a holder on another host may be one that the lock does not
        # see.
        watched = before and not (excludes and before["host"] == socket.gethostname())
        if taken or (watched and _is_touched(descriptor)):
            who = f": process {before['pid']} on {before['host']}, since {before['since']}" if before else ""
            rule = "another folder, or the same once that run has ended"
            raise ConfigError.of("--out", out, f"is being written by another run{who}", rule)
        facts = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        toucher = threading.Thread(target=_touch, args=(descriptor, over), name="lock", daemon=True)
        toucher.start()
        try:
            yield notes
        finally:
            over.set()
            toucher.join(TOUCH_SECONDS)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)  # ended in order: nobody need watch it
    finally:
        os.close(descriptor)


def _touch(descriptor: int, over: threading.Event) -> None:
    with suppress(OSError):  # the disk is gone
        while not over.wait(TOUCH_SECONDS):
            os.utime(descriptor)


def _is_touched(descriptor: int) -> bool:
    """Whether somebody gives the lock signs of life: its times change. How old they are says nothing: two hosts' clocks
    may be hours apart."""
    first = os.fstat(descriptor).st_mtime_ns
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(TOUCH_SECONDS / 4)
        if os.fstat(descriptor).st_mtime_ns != first:
            return True
    return False


def _facts_in(descriptor: int) -> dict[str, Any]:
    """The facts that the last holder wrote into the lock; nothing where it ended in order."""
    with suppress(OSError, ValueError):  # it may be writing this very file
        facts = parse_json(os.pread(descriptor, 4096, 0))
        return facts if isinstance(facts, dict) and {"host", "pid", "since"} <= facts.keys() else {}
    return {}


def not_writable(out: Path, error: OSError) -> ConfigError:
    return ConfigError.of("--out", out, f"cannot be written to ({error.strerror})", "a folder that you may write to")


def refuse_used(out: Path) -> None:
    """Raises ConfigError where a fresh run would mix with what another has left."""
    for path in (out / "metrics.jsonl", *sorted((out / CHECKPOINTS).glob("step-*"))):
        if path.exists():
            rule = f"holds a run already ({path.relative_to(out)})"
            raise ConfigError.of("--out", out, rule, "another folder, or --resume to go on with it")


def begin(out: Path, config: Config) -> None:
    """Make the folder a fresh run's; the weights that it starts from become its step 0, and their settings are kept.

    Raises CheckpointError, and DataError where a file of settings cannot be read.
    """
    weights = None
    if config.weights is not None:
        from meshwright.training.convert.folder import folder_of  # torch, which only such a run's launcher needs
        from meshwright.training.convert.transfer import import_folder

        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        weights = folder_of(config.weights)
        import_folder(weights, out / CHECKPOINTS / "step-0", wanted=config.model, seed=config.seed)
    if texts := published_for(config.data, weights):
        (out / SOURCE).mkdir(exist_ok=True)
    for name, text in texts.items():
        write_whole(out / SOURCE, name, text)
    write_identity(out, secrets.token_hex(8), config.steps)
    write_whole(out, CONFIG, run_text(config))


def write_identity(out: Path, run: str, steps: int) -> None:
    """Write run.json: the run's name for itself, and the last step that it is to make."""
    write_whole(out, IDENTITY, json.dumps({"run": run, "steps": steps}) + "\n")


def steps_of(out: Path) -> int | None:
    """The number of steps that the run in a folder is to make; None where its run.json does not say so."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(read_json(out / IDENTITY)["steps"])
    return None


def identity_of(out: Path) -> str:
    """The run's name for itself; of a folder without one a new name."""
    try:
        return str(read_json(out / IDENTITY)["run"])
    except FileNotFoundError:
        return secrets.token_hex(8)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{out / IDENTITY} cannot be read ({error}): move it aside, and --resume makes it anew"
        ) from error


def write_whole(out: Path, name: str, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        partial = out / f".{name}.partial"
        write_fresh(partial, text)
        partial.rename(out / name)
    except OSError as error:
        raise not_writable(out, error) from error
