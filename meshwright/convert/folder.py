"""The folder that a conversion makes: whole or not at all, and never in the place of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from meshwright.data.progress import silent
from meshwright.data.staging import folder_lock, staged_folder
from meshwright.errors import CheckpointError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `out` if all goes well. Raises CheckpointError where `out` is taken."""
    try:
        with folder_lock(out.absolute(), silent):
            if out.exists() and (out.is_file() or any(out.iterdir())):
                raise CheckpointError(f"{out} exists; give another folder, or remove it")
            with staged_folder(out.absolute()) as folder:
                yield folder
    except (OSError, SafetensorError) as error:  # no right to write there, a full disk
        raise CheckpointError(f"{out} could not be written: {error}") from error
