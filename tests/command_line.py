"""Runs the command line in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_SECONDS


def environment_for(folder: Path) -> dict[str, str]:
    own = {"MESHWRIGHT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TERM": "dumb"}
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **own, **allow_root}


def meshwright(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright.cli", *words],
        cwd=folder,
        env=environment_for(folder) | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
