"""The annotated tree in docs/tour.md: every path exists, every folder is listed, every line has a text."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^(?P<indent> *)(?P<name>\S+)(?:  +(?P<text>\S.*))?$")


def tree_of_tour() -> dict[str, str]:
    """Return path -> text of the path's line. Folders end in `/`; two spaces deeper is one folder deeper."""
    text = (ROOT / "docs/tour.md").read_text()
    block = text.split("## The tree", 1)[1].split("```", 2)[1]
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in block.strip("\n").splitlines():
        match = LINE.match(line)
        assert match is not None, f"not a line of the tree: {line!r}"
        depth = len(match["indent"]) // 2
        path = "".join([*parents[:depth], match["name"]])
        parents = [*parents[:depth], match["name"]]
        found[path] = match["text"] or ""
    return found


def test_every_path_exists_and_says_what_it_is() -> None:
    for path, text in tree_of_tour().items():
        assert (ROOT / path).exists(), f"{path} is in the tour's tree and not in the repository"
        assert text, f"{path} has no words in the tour's tree"
        assert path.endswith("/") == (ROOT / path).is_dir(), f"{path}: folders end in /"


def test_every_room_is_in_the_tree() -> None:
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "meshwright").rglob("__init__.py")}
    missing = rooms - set(tree_of_tour())
    assert not missing, f"not in the tour's tree: {sorted(missing)}"


def test_the_shortest_way_is_short() -> None:
    """The tour's table has at most twelve files and 2,500 lines, and ten questions follow the table."""
    page = (ROOT / "docs/tour.md").read_text()
    part = page[page.index("## The shortest way from") : page.index("## Adding a strategy")]
    files = re.findall(r"^\| \[`[^`]+`\]\(\.\./([^)]+)\)", part, flags=re.MULTILINE)
    assert 1 < len(files) <= 12
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 2500
    assert len(re.findall(r"^\d+\. \*[^*]+\?\* ", part, flags=re.MULTILINE)) == 10
    named = {
        word for words in re.findall(r"`([A-Za-z_.]+)`", part[part.index("1. *") :]) for word in [words.split(".")[-1]]
    }
    text = "".join((ROOT / file).read_text() for file in files)
    assert {word for word in named if word not in text} == {"train"} & named
