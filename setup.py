"""The README with absolute links, which pyproject.toml cannot make: an index shows it away from the repository."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/meshwright/meshwright"
"""pyproject.toml has it too (project.urls): tests/test_packages.py holds them together."""
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)]+)\)")


def absolute(match: re.Match[str]) -> str:
    kind = "raw" if match["picture"] else "blob"
    return f"{match['picture']}[{match['text']}]({REPOSITORY}/{kind}/main/{match['target']})"


setup(
    long_description=LINK.sub(absolute, Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
