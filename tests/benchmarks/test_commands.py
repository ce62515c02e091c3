"""The benchmark of commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.commands import COMMANDS
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
ORPHAN = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while time.process_time() < 0.3: pass\n"
"""A process that goes on after the command's end, as a fork server may, for 0.3 processor seconds."""


def test_each_command_is_a_line_with_its_seconds() -> None:
    words = [sys.executable, "-m", "benchmarks.commands", "--rounds", "1", "--only", "pass", "bare", "version"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.stderr == ""
    line = re.compile(r"python (.+?) +(\d+\.\d\d) s, +(\d+\.\d\d) processor s")
    found = [match.group(1) for each in ran.stdout.splitlines() if (match := line.fullmatch(each))]
    assert found == [" ".join(COMMANDS[name]) for name in ("pass", "bare", "version")]


def test_a_process_that_outlives_its_command_is_counted(tmp_path: Path) -> None:
    code = (
        "import benchmarks.commands as measured\n"
        f"measured.COMMANDS['pass'] = ['-c', {ORPHAN!r}]\n"
        "measured.main(['--rounds', '1', '--only', 'pass'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert ran.stderr == ""
    assert float(re.findall(r"(\d+\.\d\d) processor s", ran.stdout)[0]) >= 0.3
