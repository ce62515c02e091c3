"""`python -m meshwright.launch FOLDER`: one rank of a job that our mpiexec launcher started."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.environment import read_environment, restore_python_path
from meshwright.launch.output import SOCKET, receive_output
from meshwright.launch.tether import die_with_parent
from meshwright.launch.worker import run_launched

if __name__ == "__main__":
    die_with_parent(None)
    restore_python_path()
    folder = Path(sys.argv[1])
    receive_output(folder / SOCKET, read_environment().rank)
    run_launched(folder)
