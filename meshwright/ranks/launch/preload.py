"""Imported by the fork server, with the job's modules, so that each worker starts at once.

The server dies with the launcher, and workers with it. It is in the terminal's foreground group, so it must survive
Ctrl-C, SIGHUP and a SIGTERM to all, which the launcher turns into a soft stop; so must a worker that has not reached
`run_launched`. A worker that dies while importing the user's script leaves its stderr in a file.
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
