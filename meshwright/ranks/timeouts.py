"""Timeouts: how long ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """Limits of waiting, in seconds. After a limit every rank says which call it waits in, and the job ends."""

    join: float = 30.0
    """For all ranks to join the job, at the start."""
    wait: float = 600.0
    """For another rank in a collective, or for a message."""
