"""Write docs/course/layout.html by the command that docs/course/index.md shows: `python docs/site/pictures.py`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parents[1] / "course"


def command() -> list[str]:
    """Return the words after `meshwright` in the last command of the course's first page."""
    blocks = re.findall(r"```sh\n(.*?)```", (COURSE / "index.md").read_text(), re.DOTALL)
    return shlex.split(blocks[-1])[1:]


if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "meshwright", *command()], cwd=COURSE, check=True)
