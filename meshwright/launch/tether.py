"""Tie a process's life to its parent's, so that a launcher killed with `kill -9` leaves no orphans (Linux).

Runs as a script as well, without importing meshwright: `python -I -S tether.py PARENT COMMAND...` becomes COMMAND,
which is sent SIGTERM when PARENT dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Be sent `death_signal` when the parent process dies; survives exec. Elsewhere than on Linux: does nothing.

    `parent`: the process that should be the parent; if it has died already, so do we. None: whoever it is.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.argv[2], sys.argv[2:])
