"""Setup of the fork server, which imports this module and the job's modules so that each worker starts at once.

The server dies with the launcher, and workers die with the server. The terminal's foreground group contains the server.
So the server ignores Ctrl-C, SIGHUP and a SIGTERM sent to all; the launcher turns these signals into a soft stop.
Workers inherit this before `run_launched`. A worker that dies while importing the user's script leaves a stderr file.
"""

from __future__ import annotations

from meshwright.ranks.environment import early_errors_folder, restore_python_path
from meshwright.ranks.launch.output import keep_early_errors
from meshwright.ranks.launch.tether import die_with_parent
from meshwright.ranks.launch.worker import ignore_stop_signals

die_with_parent(None)
ignore_stop_signals()
restore_python_path()
if (folder := early_errors_folder()) is not None:
    keep_early_errors(folder)
