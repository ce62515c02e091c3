"""A run's folder: one run at a time writes it. What a run goes on from: resume.py. No torch: the launcher starts here.

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

from meshwright.config import Config, dump_config
from meshwright.errors import CheckpointError, ConfigError

LOCK, IDENTITY, CONFIG, CHECKPOINTS = "run.lock", "run.json", "config.yaml", "checkpoints"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
    for path in (out / "metrics.jsonl", *sorted((out / CHECKPOINTS).glob("step-*"))):
        if path.exists():
            rule = f"holds a run already ({path.relative_to(out)})"
            raise ConfigError.of("--out", out, rule, "another folder, or --resume to go on with it")


def begin(out: Path, config: Config) -> None:
    """Make the folder a fresh run's."""
    write_whole(out, IDENTITY, json.dumps({"run": secrets.token_hex(8)}) + "\n")
    write_whole(out, CONFIG, dump_config(config))


def identity_of(out: Path) -> str:
    """The run's name for itself; of a folder without one a new name."""
    try:
        return str(json.loads((out / IDENTITY).read_text())["run"])
    except FileNotFoundError:
        return secrets.token_hex(8)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{out / IDENTITY} cannot be read ({error}): remove it, and --resume makes it anew"
        ) from error


def write_whole(out: Path, name: str, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.rename(out / name)
    except OSError as error:
        raise not_writable(out, error) from error
