"""Files of a folder that another person may have made."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.ranks.foreign import (
    MOST_NESTED,
    NestedError,
    RefusedError,
    open_named,
    open_plain,
    open_to_write,
    parse_json,
    plain,
    plain_folder,
    read_json,
    read_text,
    write_fresh,
)

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"


def link_out(path: Path) -> None:
    path.symlink_to("../secret")


def absolute_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


def dangling_link(path: Path) -> None:
    path.symlink_to("../not-there")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def link_inside(path: Path) -> None:
    (path.parent / "other").write_text("{}")
    path.symlink_to("other")


def link_to_a_folder(path: Path) -> None:
    path.symlink_to("..")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name has about 100 characters
        listener.bind(path.name)
        os.chdir(before)


REFUSED: list[Callable[[Path], None]] = [
    link_out, absolute_link, dangling_link, loop, link_inside, link_to_a_folder, device, os.mkfifo, unix_socket,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("sekrit")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_is_no_plain_file_is_refused_by_its_name(make: Callable[[Path], None], folder: Path) -> None:
    path = folder / "x.json"
    make(path)
    for read in (open_plain, read_text, read_json, plain, plain_folder, lambda path: open_to_write(path, os.O_RDWR)):
        with pytest.raises(RefusedError, match=r"x\.json is (a link to|a pipe|a socket)"):
            read(folder if read is plain_folder else path)
    assert (folder.parent / "secret").read_text() == "sekrit"


def test_a_link_between_is_refused_and_the_named_folder_may_be_one(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "a").write_text("whole")
    named = folder.parent / "named"
    named.symlink_to(folder)
    assert read_text(named / "checkpoints" / "a", named) == "whole"
    (folder / "checkpoints").rename(folder.parent / "elsewhere")
    (folder / "checkpoints").symlink_to("../elsewhere")
    with pytest.raises(RefusedError, match="checkpoints is a link to"):
        read_text(named / "checkpoints" / "a", named)
    with pytest.raises(RefusedError, match="checkpoints is a link to"):
        plain_folder(named)
    assert plain_folder(named, foreign=("checkpoints",)) == named


def test_a_snapshot_of_the_hubs_cache_is_read(tmp_path: Path) -> None:
    """The Hub's client keeps files in `blobs`, and in `snapshots` links to these files."""
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    (snapshot / "sub").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "cafe").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/cafe")
    (snapshot / "sub" / "config.json").symlink_to("../../../blobs/cafe")
    assert read_json(snapshot / "config.json") == {"a": 1}
    assert read_json(snapshot / "sub" / "config.json", snapshot) == {"a": 1}
    assert plain_folder(snapshot) == snapshot
    named = tmp_path / "named"
    named.symlink_to(snapshot)
    assert read_json(named / "config.json") == {"a": 1}
    (tmp_path / "secret").write_text("{}")
    (blobs / "beef").symlink_to(tmp_path / "secret")
    for number, target in enumerate(("../../../secret", "../../blobs/beef", "../../blobs", "../../blobs/none")):
        (snapshot / f"{number}.json").symlink_to(target)
        with pytest.raises(RefusedError):
            read_json(snapshot / f"{number}.json")


def test_a_named_file_may_be_a_link_and_no_pipe(folder: Path) -> None:
    (folder / "link").symlink_to("../secret")
    with open_named(folder / "link") as file:
        assert file.read() == b"sekrit"
    os.mkfifo(folder / "pipe")
    with pytest.raises(RefusedError, match="is a pipe"):
        open_named(folder / "pipe")


def test_a_file_is_written_anew_where_a_link_was(folder: Path) -> None:
    (folder / "partial").symlink_to("../secret")
    write_fresh(folder / "partial", "ours")
    assert (folder / "partial").read_text() == "ours"
    assert not (folder / "partial").is_symlink()
    assert (folder.parent / "secret").read_text() == "sekrit"


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_levels_of_json(opening: str, closing: str) -> None:
    levels = len(opening.replace('"a":', ""))
    for times in (MOST_NESTED // levels + 1, 100_000):
        for text in (opening * times + "1" + closing * times, opening * times):
            with pytest.raises(ValueError, match=r"levels deep|Expecting"):
                parse_json(text)
    most = MOST_NESTED // levels
    parse_json(opening * most + "1" + closing * most)
    parse_json((opening * most + "1" + closing * most).encode())
    with pytest.raises(NestedError):
        parse_json("[" + opening * most + "1" + closing * most + "]")


def test_wide_json_is_no_deep_json() -> None:
    assert len(parse_json("[" + ",".join(["[[1]]"] * 10_000) + "]")) == 10_000


OWN = {
    "cli/completion.py": "our own schema",
    "ranks/environment.py": "a variable that the launcher has set",
    "ranks/launch/failure.py": "the launch's own folder",
    "ranks/launch/worker.py": "the launch's own folder",
    "data/marks.py": "the tokenizers library's own state",
    "data/packing.py": "spans that were packed a moment ago",
    "ranks/comm_store.py": "ranks of the job",
    "ranks/peers.py": "ranks of the job",
    "ranks/window.py": "ranks of the job",
    "planner/nodes.py": "ranks of the job",
    "training/follow.py": "a pipe of the run's own",
    "training/meeting.py": "ranks of the job",
    "training/pictures.py": "ranks of the job",
    "training/resume.py": "ranks of the job",
    "training/worker.py": "ranks of the job",
    "data/records.py": "a line of a corpus, whose depth ends in a sentence there",
    "data/files.py": "a stamp of ours in the cache",
    "data/renderer.py": "the answer of a process of ours",
    "data/template_process.py": "the question of a process of ours",
}
"""Modules that parse JSON from no other person's folder."""


def test_json_of_other_peoples_folders_has_one_reader() -> None:
    parse = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load")
    }
    assert parse - {"ranks/foreign.py"} <= OWN.keys()


READERS = {"training/convert", "training/checkpoint"}
"""Folders of modules that read only other people's files."""


def test_other_peoples_folders_are_opened_by_one_door() -> None:
    """Modules of models and checkpoints open files for reading through meshwright/ranks/foreign.py alone."""
    mistakes = []
    for room in READERS:
        modules = list((PACKAGE / room).rglob("*.py"))
        assert len(modules) > 4
        for path in modules:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    name, words = node.func.attr, [ast.unparse(word) for word in node.args]
                    reads = name in ("read_text", "read_bytes") or (name == "open" and words[:1] in ([], ["'rb'"]))
                    if reads and ast.unparse(node.func.value) != "gzip":
                        mistakes.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "safe_open":
                    assert ast.unparse(node.args[0]).startswith("plain("), f"{path.name}:{node.lineno}"
    assert mistakes == []
