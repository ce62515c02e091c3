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
    """A factory with options, ranks and launcher."""

    name: str
    factory: str
    options: dict[str, Option] = field(default_factory=dict)
    ranks: int = 1
    launcher: Launcher = "torch"
    """torch: workers are forked with torchrun's variables; mpi: mpiexec starts workers."""
    allocator: Allocator = "told"
    """told: keeps memory that a step frees, as `meshwright train` does (ranks/machine.py); glibc: glibc's defaults."""


def find_factory(name: str) -> Factory:
    """Return the function of `module:function`."""
    module, _, function = name.partition(":")
    factory: Factory = vars(import_module(module))[function]
    return factory
