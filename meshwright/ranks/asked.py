"""Ranks: the ranks that a job asks a launcher for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.ranks.timeouts import Timeouts
from meshwright.ranks.transports import TransportName


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job. `axes`: the grid, outermost axis first. `threads`: CPU threads of each rank.

    `restarts`: most restarts of a job that loses a rank. `status`: the folder of the ranks' records (hang.py); by
    default a folder that is removed with the job. `name`: identifies the job at the rendezvous. `copies`: (axis, c): c
    neighbours on the axis hold the same key-value heads. `nesting`: `axes` with some split into parts (ranks/grid.py).
    `modules`: imported once for all ranks of this machine, before the ranks are forked.
    """

    axes: tuple[tuple[str, int], ...]
    transport: TransportName = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    restarts: int = 0
    token_axes: tuple[str, ...] = ("data",)
    timeout: Timeouts = field(default_factory=Timeouts)
    status: Path | None = None
    name: str = ""
    copies: tuple[str, int] | None = None
    nesting: tuple[tuple[str, int], ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return math.prod(length for _, length in self.axes)
