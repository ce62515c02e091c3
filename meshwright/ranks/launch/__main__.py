"""`python -m meshwright.ranks.launch FOLDER`: one rank of a job that our mpiexec launcher started."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.ranks.environment import read_environment, restore_python_path
from meshwright.ranks.launch.mpiexec import STARTER
from meshwright.ranks.launch.output import SOCKET, receive_output
from meshwright.ranks.launch.tether import die_with_starter
from meshwright.ranks.launch.worker import run_launched

if __name__ == "__main__":
    folder, environment = Path(sys.argv[1]), read_environment()
    die_with_starter(folder / STARTER.format(attempt=environment.attempt))
    restore_python_path()
    receive_output(folder / SOCKET, environment.rank)
    run_launched(folder)
