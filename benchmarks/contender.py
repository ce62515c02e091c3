"""A contender is a factory that makes a `step()` in each worker process.

A factory, `module:function`, is called as function(place, **options) in every worker and returns a context manager that
yields `step`. The exit of the context closes process groups and the like.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

Step = Callable[[], float]
"""Run one training step of the reference model to the end; return the loss that this rank knows."""

Option = str | int | float | bool
Launcher = Literal["torch", "mpi"]
Allocator = Literal["told", "glibc"]


@dataclass(frozen=True)
class Place:
    """A worker's rank, of `ranks` in the contender."""

    rank: int
    ranks: int


Factory = Callable[..., AbstractContextManager[Step]]


@dataclass(frozen=True)
class Contender:
    """A factory with options, ranks and launcher.

    `launcher`: torch forks workers with torchrun's variables, mpi starts workers by mpiexec. `allocator`: `told` keeps
    the memory that a step frees, as in `meshwright train` (ranks/machine.py); `glibc` keeps glibc's defaults.
    """

    name: str
    factory: str
    options: dict[str, Option] = field(default_factory=dict)
    ranks: int = 1
    launcher: Launcher = "torch"
    allocator: Allocator = "told"


def find_factory(name: str) -> Factory:
    """Return the function of `module:function`."""
    module, _, function = name.partition(":")
    factory: Factory = vars(import_module(module))[function]
    return factory
