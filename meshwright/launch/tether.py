"""Kill a process when its parent dies, so that a launcher killed by `kill -9` leaves no orphans (Linux).

Runs as a script as well, without importing meshwright: `python -I -S tether.py PARENT COMMAND...` becomes COMMAND,
which is killed when PARENT dies, and which no request to stop reaches: those are blocked, not ignored, since mpiexec
has handlers of its own, and unblocks everything for the ranks that it starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def die_with_parent(parent: int | None) -> None:
    """Ask the kernel for SIGKILL when the parent process dies; survives exec. Does nothing outside of Linux.

    `parent`: the expected parent's id; this process ends if that one has died already. None: any parent.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    os.execv(sys.argv[2], sys.argv[2:])
