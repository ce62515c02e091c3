"""Imported once by the process that workers are forked from, with the job's own module, so that each starts at once.

That process dies with the launcher, and the workers with it. It lives in the terminal's foreground group, so it must
outlive Ctrl-C, a hang-up and a SIGTERM to all, and so must a worker that has not got as far as `run_launched`: the
launcher turns them into a soft stop. A worker that dies while it imports the user's script leaves its words in a file.
"""

from __future__ import annotations

from meshwright.environment import early_errors_folder
from meshwright.launch.output import keep_early_errors
from meshwright.launch.tether import die_with_parent
from meshwright.launch.worker import ignore_stop_signals

die_with_parent(None)
ignore_stop_signals()
if (folder := early_errors_folder()) is not None:
    keep_early_errors(folder)
