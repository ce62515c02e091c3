"""Files of another person's folder: a run, a model, a corpus, downloaded or shared.

tar, git and the Hub keep symbolic links, so a folder can name any file of the reader's machine. Reading a link copies
the file into an export; writing to a link empties the file. Reading a pipe or a device may never end.

| in such a folder                          | here                                                       |
|-------------------------------------------|------------------------------------------------------------|
| the folder itself, named by the user      | may be a link                                              |
| a link in the folder                      | refused; the error has name, target and remedy             |
| a link of the Hub's cache to its blobs    | read: the snapshot and the blobs are one download          |
| a pipe, a device, a socket                | refused; the error has the kind                            |
| JSON of more than MOST_NESTED levels      | refused: recursive readers would raise RecursionError      |
| a file to write                           | made anew, or opened without following a link              |
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import MeshwrightError

MOST_NESTED = 100
"""Levels of lists and objects in a JSON text that is read; the deepest that we and transformers write have about 10."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RefusedError(MeshwrightError, OSError):
    """A link, a pipe or a device in a folder. An OSError as well, because readers of damaged files catch OSError and
    print its reason."""

    exit_code = 2

    def __init__(self, text: str) -> None:
        super().__init__(errno.ELOOP, text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class NestedError(ValueError):
    """A JSON text of more levels than MOST_NESTED."""


def plain(path: Path, root: Path | None = None) -> Path:
    """Return `path` if neither the file nor a folder between `root` and the file is a link.

    Args:
        path: A file or folder, which may be missing.
        root: The folder named by the user, possibly a link; by default the folder of `path`.

    Raises:
        RefusedError: A link, a pipe, a device or a socket.
    """
    root = path.parent if root is None else root
    for ancestor in reversed([path, *path.parents]):
        if ancestor != root and ancestor.is_relative_to(root):
            _refuse(ancestor, root)
    return path


def plain_folder(root: Path, foreign: Collection[str] = ()) -> Path:
    """Return `root` if all entries on every level are plain files and folders.

    Args:
        root: The folder named by the user.
        foreign: Names directly under `root`, used by other libraries alone; not checked.

    Raises:
        RefusedError: A link, a pipe, a device or a socket in the folder.
    """
    for path in _entries(root, foreign):
        _refuse(path, root)
    return root


def _entries(folder: Path, foreign: Collection[str] = ()) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # missing, or not ours to read: its reader says so
    for entry in entries:
        if entry.name not in foreign:
            yield folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(folder / entry.name)


def _refuse(path: Path, root: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # missing: its reader says so
    if stat.S_ISLNK(mode):
        # The Hub's cache has links from models--NAME/snapshots/REVISION into models--NAME/blobs. Resolved whole: a link
        # into blobs that is a link itself leads elsewhere.
        with suppress(OSError, RuntimeError):  # a loop of links
            target, folders = path.resolve(), (root.resolve(), *root.resolve().parents)
            snapshot = next((folder for folder in folders if folder.parent.name == "snapshots"), None)
            if snapshot and target.is_relative_to(snapshot.parent.parent / "blobs") and target.is_file():
                return
        rule = f"{path} is a link to {path.readlink()}: files of a folder are read and written there alone"
        raise RefusedError(f"{rule}; copy the file into the folder, or name its own folder")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RefusedError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}: valid is a plain file; move it aside"
        )


def open_plain(path: Path, root: Path | None = None) -> io.BufferedReader:
    """Open a file of a folder for reading; `root` as in `plain`.

    Raises:
        RefusedError: A link, a pipe, a device or a socket.
        OSError: The file is missing or cannot be read.
    """
    return os.fdopen(_opened(path, root), "rb")


def open_unbuffered(path: Path, root: Path | None = None) -> io.FileIO:
    """Open a file as `open_plain` does, without a buffer: for reads of large blocks."""
    return os.fdopen(_opened(path, root), "rb", buffering=0)


def _opened(path: Path, root: Path | None) -> int:
    plain(path, root)
    # A link of the Hub was judged above, and is opened at its target.
    return _regular(os.open(path.resolve() if path.is_symlink() else path, _READ), path)


def read_text(path: Path, root: Path | None = None) -> str:
    """Read a file of a folder as UTF-8; raises as `open_plain`, and UnicodeDecodeError."""
    with open_plain(path, root) as file:
        return file.read().decode("utf-8")


def open_named(path: Path) -> io.BufferedReader:
    """Open a file named by the user, possibly a link; a pipe or a device is refused."""
    return os.fdopen(_regular(os.open(path, _READ & ~os.O_NOFOLLOW), path), "rb")


def read_named(path: Path) -> str:
    """Read a file named by the user as UTF-8; raises as `open_named`, and UnicodeDecodeError."""
    with open_named(path) as file:
        return file.read().decode("utf-8")


def open_to_write(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file of a run's folder with `flags` of os.open and return the descriptor; a link is refused.

    Raises:
        RefusedError: A link, a pipe, a device or a socket.
        OSError: The file cannot be opened.
    """
    plain(path)
    return _regular(os.open(path, flags | _WRITE, mode), path)


def write_fresh(path: Path, text: str, mode: int = 0o644) -> None:
    """Remove a file of a folder and write a new one: the target of a link is left unchanged."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _WRITE, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _regular(descriptor: int, path: Path) -> int:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise RefusedError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}: valid is a plain file; move it aside"
        )
    os.set_blocking(descriptor, True)
    return descriptor


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text of another person.

    Raises:
        NestedError: More than MOST_NESTED levels.
        ValueError: The text is no JSON.
    """
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise NestedError(f"nests more than {MOST_NESTED} levels deep") from error
    # A text of fewer brackets than levels need not be looked through.
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    level, deep = [tree] if opened > MOST_NESTED else [], 0
    while level := [
        inner for node in level if isinstance(node, dict | list)
        for inner in (node.values() if isinstance(node, dict) else node) if isinstance(inner, dict | list)
    ]:  # fmt: skip
        deep += 1
        if deep >= MOST_NESTED:
            raise NestedError(f"nests more than {MOST_NESTED} levels deep")
    return tree


def read_json(path: Path, root: Path | None = None) -> Any:
    """Parse a JSON file of a folder; raises as `open_plain` and `parse_json`."""
    with open_plain(path, root) as file:
        return parse_json(file.read())
