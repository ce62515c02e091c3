"""Write llms.txt, which leads agents to the skills and to all pages in a clone: `python docs/site/llms.py`.

The site's own llms.txt is written by hooks.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a tag names a function."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def names_in(entry: Any) -> Iterator[str]:
    """Yield the files of an entry of the navigation; entries may be nested."""
    if isinstance(entry, str):
        yield entry
        return
    for inner in entry.values() if isinstance(entry, dict) else entry:
        yield from names_in(inner)


def linked(name: str) -> str:
    """Return the line of a page: its title and path. Notebooks are pages of the site and files in the repository."""
    path = ROOT / "docs" / name
    if path.exists():
        text = path.read_text()
    else:
        path = path.with_suffix(".ipynb")
        text = "".join(json.loads(path.read_text())["cells"][0]["source"])
    title = re.findall(r"^# (.+)$", text, re.MULTILINE)[0]
    return f"- [{title}]({path.relative_to(ROOT).as_posix()})"


def text() -> str:
    """Return the text of llms.txt."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    lines = [
        f"# {site['site_name']}", "", f"> {site['site_description']}", "",
        "Commands: `meshwright --help`. Rules for changes: [AGENTS.md](AGENTS.md), [CONTRIBUTING.md](CONTRIBUTING.md).",
        "", "## Skills", "", "Each is a procedure that ends in PASS or FAIL by an exit code.", "",
    ]  # fmt: skip
    for path in sorted((ROOT / "skills").glob("*/SKILL.md")):
        head = yaml.safe_load(path.read_text().split("---\n")[1])
        purpose = head["description"].split(" Use when ")[0]
        lines.append(f"- [{head['name']}]({path.relative_to(ROOT).as_posix()}): {purpose}")
    for entry in site["nav"]:
        ((section, pages),) = entry.items()
        lines += ["", f"## {section}", "", *map(linked, names_in(pages))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(text())
