"""A run's folder, written by one run at a time. Resuming is in resume.py. No torch: the launcher starts here.

| in the folder | content |
|---|---|
| run.lock | flock held while a run writes here, released by the kernel if the run dies; names the holder |
| run.json | the run's identity, named in checkpoints and kept by restarts and resumes; the number of steps |
| config.yaml | the config; config-STEP.yaml: the config before a resume at STEP |
| source | settings published with the weights and tokenizer, which an export writes back (data/published.py) |
| checkpoints | step folders; set-aside-step-N: newer than the step of --resume-from |
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
"""Trackers' folders in a run's folder. W&B keeps links in its folder; Meshwright opens no file in these folders."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

TOUCH_SECONDS = 4.0
"""Seconds between two updates of the lock's times by the run that holds a folder."""
WATCH_SECONDS = 3 * TOUCH_SECONDS


@contextmanager
def locked(out: Path) -> Iterator[list[str]]:
    """Create the folder, and hold the folder's lock; yield notes to the user.

    On Lustre and NFS a lock may hold on one host only, or not at all. There a lock of a run that has not ended in order
    is watched for WATCH_SECONDS: if the lock's times still change, that run is alive.

    Raises:
        ConfigError: another run holds the folder; the folder is not writable; or the folder has a link, which somebody
            else's folder could use to have other files written.
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
        # excludes: a lock that was taken proves that no other run writes here.
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
        # On this host a taken lock is proof. A holder on another host may be invisible to the lock.
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
                os.ftruncate(descriptor, 0)  # ended in order: the next run need not watch the lock
    finally:
        os.close(descriptor)


def _touch(descriptor: int, over: threading.Event) -> None:
    with suppress(OSError):  # the disk is gone
        while not over.wait(TOUCH_SECONDS):
            os.utime(descriptor)


def _is_touched(descriptor: int) -> bool:
    """Return whether the lock's times change, within WATCH_SECONDS. Their age proves nothing: hosts' clocks may differ
    by hours."""
    first = os.fstat(descriptor).st_mtime_ns
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(TOUCH_SECONDS / 4)
        if os.fstat(descriptor).st_mtime_ns != first:
            return True
    return False


def _facts_in(descriptor: int) -> dict[str, Any]:
    """Read the last holder's facts from the lock; empty if the holder ended in order."""
    with suppress(OSError, ValueError):  # the holder may be writing the file now
        facts = parse_json(os.pread(descriptor, 4096, 0))
        return facts if isinstance(facts, dict) and {"host", "pid", "since"} <= facts.keys() else {}
    return {}


def not_writable(out: Path, error: OSError) -> ConfigError:
    return ConfigError.of("--out", out, f"cannot be written to ({error.strerror})", "a folder that you may write to")


def refuse_used(out: Path) -> None:
    """Raise ConfigError if the folder has metrics or checkpoints of another run."""
    for path in (out / "metrics.jsonl", *sorted((out / CHECKPOINTS).glob("step-*"))):
        if path.exists():
            rule = f"holds a run already ({path.relative_to(out)})"
            raise ConfigError.of("--out", out, rule, "another folder, or --resume to go on with it")


def begin(out: Path, config: Config) -> None:
    """Prepare the folder for a fresh run. Initial weights become the checkpoint of step 0, with their settings kept.

    Raises:
        CheckpointError: the weights cannot be imported, or the folder not written.
        DataError: a file of settings cannot be read.
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
    """Write run.json: the run's identity, and its number of steps."""
    write_whole(out, IDENTITY, json.dumps({"run": run, "steps": steps}) + "\n")


def steps_of(out: Path) -> int | None:
    """Read the run's number of steps from run.json; None if run.json does not have it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(read_json(out / IDENTITY)["steps"])
    return None


def identity_of(out: Path) -> str:
    """Read the run's identity from run.json; a new identity if there is no run.json."""
    try:
        return str(read_json(out / IDENTITY)["run"])
    except FileNotFoundError:
        return secrets.token_hex(8)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{out / IDENTITY} cannot be read ({error}): move it aside, and --resume makes it anew"
        ) from error


def write_whole(out: Path, name: str, text: str) -> None:
    """Write a file whole or not at all, by a rename."""
    try:
        partial = out / f".{name}.partial"
        write_fresh(partial, text)
        partial.rename(out / name)
    except OSError as error:
        raise not_writable(out, error) from error
