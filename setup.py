"""What pyproject.toml cannot say: the README with absolute links, and a wheel without the boxes of other wheels.

An index shows the README away from the repository. Of a clone, and of the source distribution, one distribution is made
that has all. With MESHWRIGHT_APART=1, as a release is made, the wheel leaves the face of the package and its boxes
`ranks` and `parity` to meshwright-ranks and meshwright-parity (packaging/), and asks for both.
"""

import os
import re
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup

REPOSITORY = "https://github.com/meshwright/meshwright"
"""pyproject.toml has it too (project.urls): tests/test_packages.py holds them together."""
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)]+)\)")
OTHERS = re.compile(r"meshwright|meshwright\.(ranks|parity)(\..*)?")


def absolute(match: re.Match[str]) -> str:
    kind = "raw" if match["picture"] else "blob"
    return f"{match['picture']}[{match['text']}]({REPOSITORY}/{kind}/main/{match['target']})"


class Apart(Distribution):
    """The distribution without the packages that other distributions bring."""

    def parse_config_files(self, *args: Any, **words: Any) -> None:
        """Read pyproject.toml, and ask for the others in place of these packages."""
        super().parse_config_files(*args, **words)
        version = self.metadata.version
        self.packages = [name for name in self.packages or [] if not OTHERS.fullmatch(name)]
        self.install_requires += [f"meshwright-ranks=={version}", f"meshwright-parity=={version}"]


setup(
    distclass=Apart if os.environ.get("MESHWRIGHT_APART") == "1" else Distribution,
    long_description=LINK.sub(absolute, Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
