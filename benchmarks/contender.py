"""A contender is a factory that, in each of its worker processes, makes a `step()`.

A factory is `module:function`; it is called as function(place, **options) in every worker and returns a context manager
that yields `step`. Leaving the context closes process groups and the like.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

Step = Callable[[], float]
"""One training step of the reference model, and all that it has set going; returns the loss that this rank knows."""

Option = str | int | float | bool
Launcher = Literal["torch", "mpi"]
Allocator = Literal["told", "glibc"]


@dataclass(frozen=True)
class Place:
    """A worker's rank in its contender, of `ranks`."""

    rank: int
    ranks: int


Factory = Callable[..., AbstractContextManager[Step]]


@dataclass(frozen=True)
class Contender:
    """`launcher`: torch forks workers that have torchrun's variables, mpi starts them with mpiexec.

    `allocator`: told to keep what a step frees, as `meshwright train` tells it (ranks/machine.py), or as it comes.
    """

    name: str
    factory: str
    options: dict[str, Option] = field(default_factory=dict)
    ranks: int = 1
    launcher: Launcher = "torch"
    allocator: Allocator = "told"


def find_factory(name: str) -> Factory:
    """The function of `module:function`."""
    module, _, function = name.partition(":")
    factory: Factory = vars(import_module(module))[function]
    return factory
