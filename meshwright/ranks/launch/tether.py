"""Kill a process when its parent dies, so that a launcher killed by `kill -9` leaves no orphans (Linux).

Also a script that does not import meshwright: `python -I -S tether.py PARENT FILE COMMAND...` writes the process id to
FILE and executes COMMAND. COMMAND is killed when PARENT dies. Signals that request a stop are blocked, not ignored,
since mpiexec installs handlers of its own, and unblocks all signals for the ranks.
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
    """Ask the kernel for SIGKILL when the parent process dies, also after exec. Does nothing outside of Linux.

    `parent`: the expected parent's id; this process ends if the parent is another one, since the expected one is dead.
    None: any parent.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_starter(file: Path) -> None:
    """Call `die_with_parent`; end this process at once if the process with the id in `file` is dead.

    mpiexec may die after the start of a rank and before the rank's call to the kernel: the rank would wait for ever.
    """
    die_with_parent(None)
    if sys.platform == "linux":
        try:
            # The process's name precedes the state, in brackets, and may contain spaces and brackets.
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
