"""Kill a process when its parent dies, so that a launcher killed by `kill -9` leaves no orphans (Linux).

Runs as a script as well, without importing meshwright: `python -I -S tether.py PARENT FILE COMMAND...` writes its id
to FILE and becomes COMMAND, which is killed when PARENT dies, and which no request to stop reaches: those are blocked,
not ignored, since mpiexec has handlers of its own, and unblocks everything for the ranks that it starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

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


def die_with_starter(file: Path) -> None:
    """Die with the parent, as `die_with_parent`; end at once if the process whose id is in `file` is dead.

    A rank that mpiexec has just started may lose mpiexec before the rank has asked the kernel: it would wait for ever.
    """
    die_with_parent(None)
    if sys.platform == "linux":
        try:
            # The name stands in brackets before the state, and may hold spaces and brackets itself.
            state = Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = ""
        if state in ("", "Z", "X"):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    Path(sys.argv[2]).write_text(str(os.getpid()))
    os.execv(sys.argv[3], sys.argv[3:])
