"""The request to stop softly, as a worker sees it: finish the step, write a checkpoint, return.

Under our own launcher the request is a file in the launch folder. Unlike a signal it cannot be lost, cannot kill a
worker that is still importing, and takes the same road through mpiexec and torch. Inside somebody else's launcher
(torchrun, srun, mpirun) the request is SIGTERM, SIGINT or SIGUSR1, which those forward.
"""

from __future__ import annotations

import signal
from pathlib import Path

STOP_FILE = "stop"
JOINED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Passed to the entry function. Ranks may see the request at different steps: agree on it before acting on it."""

    def __init__(self, marker: Path | None = None) -> None:
        """`marker`: the file whose existence is the request; None where only signals ask."""
        self._marker = marker
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether somebody asked; once true, it stays true. Costs a few microseconds: ask once a step."""
        if not self._requested and self._marker is not None:
            self._requested = self._marker.exists()
        return self._requested

    def request(self) -> None:
        """Ask this process to stop."""
        self._requested = True

    def listen(self) -> None:
        """Let the signals of JOINED_SIGNALS ask. Main thread only."""
        for number in JOINED_SIGNALS:
            signal.signal(number, lambda *_: self.request())
