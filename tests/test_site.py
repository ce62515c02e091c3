"""The site: every page has a place, every link into the repository holds, and the build has no warning."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent
ASIDE = {"decisions.md"}
"""Pages that the navigation leaves out: reasons of long ago."""


class Loader(yaml.SafeLoader):
    """A loader that reads a function's name as a word; mkdocs.yml names a function for its anchors."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def names_in(entry: Any) -> list[str]:
    """Return the files of an entry of the navigation, which may hold further entries."""
    if isinstance(entry, str):
        return [entry]
    return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in names_in(part)]


def navigation() -> list[str]:
    return names_in(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])


def test_every_page_has_one_place_in_the_navigation() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - ASIDE
    pages |= {f"course/{path.name}" for path in (ROOT / "docs/course").glob("*.md")}
    books = {f"notebooks/{path.stem}.md" for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    assert sorted(navigation()) == sorted(pages | books)


def test_the_reference_has_every_public_name() -> None:
    headings = re.findall(r"heading: mw\.(\w+)", (ROOT / "docs/reference.md").read_text())
    assert sorted(headings) == sorted(meshwright.__all__)


def test_links_into_the_repository_hold() -> None:
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    links = [(path, link) for path, text in pages.items() for link in re.findall(r"\]\((\.\./[^)#\s]+)", text)]
    assert len(links) > 50
    assert [(path.name, link) for path, link in links if not (path.parent / link).exists()] == []


def test_first_pages_say_what_the_table_of_bits_says() -> None:
    """The losses under 18 layouts are one number layout-free, and several in the usual mode."""
    part = (ROOT / "docs/bits.md").read_text().split("under 18 layouts\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| .* \| (\d\.\d{12}) \| (\d\.\d{12}) \|$", part, flags=re.MULTILINE)
    usual, free = ({row[place] for row in rows} for place in (0, 1))
    assert (len(rows), len(free)) == (18, 1)
    page = (ROOT / "README.md").read_text()
    assert f"is one number, {free.pop()}, where the usual mode has {len(usual)}" in page
    assert f"the usual mode has {len(usual)} of them" in (ROOT / "docs/index.md").read_text()


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs here: pip install 'meshwright[site]', or make site")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "docs/site/pictures.py"], cwd=ROOT, check=True, timeout=PATIENCE_SECONDS)
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    listed = re.findall(r"\]\(([^)]+\.md)\)", (tmp_path / "site/llms.txt").read_text())
    skills = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "skills").glob("*/SKILL.md"))]
    assert skills == listed[: len(skills)]
    assert len(listed) == len(skills) + len(navigation())
    assert all((tmp_path / "site" / name).is_file() for name in listed)
    assert "6.267791149206" in (tmp_path / "site/index.html").read_text(), "the table of bits.md"
