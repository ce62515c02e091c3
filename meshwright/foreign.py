"""Files of a folder that somebody else may have made: a run, a model, a corpus, downloaded or shared.

tar, git and the Hub keep symbolic links, so that a folder can name any file of its reader: a link that is read sends
that file into an export, a link that is written empties the file. A pipe or a device makes its reader wait for ever.

| in such a folder                          | here                                                       |
|-------------------------------------------|------------------------------------------------------------|
| the folder itself, as the user names it   | may be a link: the user has named it                       |
| a link in it                              | refused by its name and its target, with the remedy        |
| a link of the Hub's cache to its blobs    | read: the snapshot and the blobs are one download          |
| a pipe, a device, a socket                | refused by its kind                                        |
| JSON of more than MOST_NESTED levels      | refused: readers that call themselves would end            |
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

from meshwright.errors import MeshwrightError

MOST_NESTED = 100
"""Levels of lists and objects in a JSON text that is read; the deepest that we and transformers write have about 10."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RefusedError(MeshwrightError, OSError):
    """A file of a folder that is not read or written: a link, a pipe, a device. An OSError as well, so that a reader of
    damaged files names this reason as it names any other."""

    exit_code = 2

    def __init__(self, text: str) -> None:
        super().__init__(errno.ELOOP, text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class NestedError(ValueError):
    """A JSON text of more levels than MOST_NESTED."""


def plain(path: Path, root: Path | None = None) -> Path:
    """Return `path` if it is no link and lies behind none, up to the folder that the user has named.

    Args:
        path: A file or folder, which may be missing.
        root: The named folder, which may be a link; by default the folder that `path` is in.

    Raises:
        RefusedError: A link, a pipe, a device or a socket.
    """
    root = path.parent if root is None else root
    for part in reversed([path, *path.parents]):
        if part != root and part.is_relative_to(root):
            _refuse(part, root)
    return path


def plain_folder(root: Path, foreign: Collection[str] = ()) -> Path:
    """Return `root` if it holds plain files and folders only, on every level.

    Args:
        root: The folder that the user has named.
        foreign: Names right under `root` that other libraries read and write alone; not looked at.

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
    """Open as `open_plain` a file of which large blocks are read, without a copy in between."""
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
    """Open a file that the user has named, which may be a link; a pipe or a device is refused."""
    return os.fdopen(_regular(os.open(path, _READ & ~os.O_NOFOLLOW), path), "rb")


def read_named(path: Path) -> str:
    """Read a file that the user has named as UTF-8; raises as `open_named`, and UnicodeDecodeError."""
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
    """Write a file of a folder anew: a link of its name is removed, and the file that it leads to stays."""
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
    """Parse a JSON text that somebody else has written.

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
