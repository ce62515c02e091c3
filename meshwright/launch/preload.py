"""Imported once by the process that workers are forked from, with the job's own module, so that each starts at once.

That process dies with the launcher, and the workers with it. It lives in the terminal's foreground group, so it must
outlive Ctrl-C and a hang-up, and so must a worker that has not got as far as `run_launched`: the launcher turns both
into a soft stop.
"""

from __future__ import annotations

import signal

import meshwright.launch.worker  # noqa: F401
from meshwright.launch.tether import die_with_parent

die_with_parent(None)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
