"""How long ranks wait for each other, as a run's config says it."""

from __future__ import annotations

from meshwright.section import Seconds, Section


class Timeout(Section):
    """How long ranks wait for each other. Then every rank says where it is, and the job ends."""

    join: Seconds = 30.0
    """Seconds for all ranks to come, at the start."""
    wait: Seconds = 600.0
    """Seconds that one rank may wait for another in a collective or for a message."""
