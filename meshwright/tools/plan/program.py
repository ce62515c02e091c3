"""What a rank does in a task, as numbers: kernels and collectives in the order in which they are begun. No torch.

| kind      | a kernel that                                                                    |
|-----------|----------------------------------------------------------------------------------|
| product   | multiplies matrices                                                              |
| attention | is a fused attention                                                             |
| special   | takes exponentials, logarithms, error functions: dear on a CPU                   |
| random    | draws random numbers                                                             |
| element   | does anything else, at the pace of the memory                                    |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.ranks.ledger import Traffic

KernelKind = Literal["product", "attention", "special", "random", "element"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`touched_bytes`: read and written. `elements`: of the largest tensor it touches. `side`: of a product of
    m x n x k the cube root of mnk (of one of a batch). `times`: so many of the kind, one after the other."""

    kind: KernelKind
    flops: float
    touched_bytes: int
    elements: int
    dtype: str
    side: float = 0.0
    times: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """A collective begins. `axes`: of its comm (`row`, `data+row`); `payload_bytes`: the whole tensor's, of which
    ledger.py says who sends what; `root`: of a rooted verb, its index; `times`: so many, one after the other."""

    number: int
    axes: str
    verb: str
    payload_bytes: int
    root: int | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """The collective of that number must have ended before the rank goes on."""

    number: int


Event = Kernel | Start | Wait


@dataclass(frozen=True)
class Program:
    """A task. `kept_bytes`: what it leaves in memory, less what it freed; `peak_bytes`: the most it held above what was
    there when it began. `traffic`: what it sent, as a run's ledger would say."""

    events: tuple[Event, ...] = ()
    kept_bytes: int = 0
    peak_bytes: int = 0
    traffic: Mapping[tuple[str, str], Traffic] = field(default_factory=dict)
    leads: int = 1
    """Of so many ranks this one alone is at work, but between a verb from it and the next one to it (cSub)."""

    @property
    def flops(self) -> float:
        return sum(event.times * event.flops for event in self.events if isinstance(event, Kernel))

    @property
    def touched_bytes(self) -> int:
        return sum(event.times * event.touched_bytes for event in self.events if isinstance(event, Kernel))
