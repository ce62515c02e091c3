"""`@parity.check`: a function that says what is right and what is to be compared, run on CPU processes.

    collect(file) -> its checks        run_check(check) -> a ParityResult for each number of ranks

A check's processes are started by launch.run, as everything's here; the comparison is made by the process that started
them, from the files that they leave.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, LaunchError, MeshwrightError
from meshwright.launch import Interrupted, Ranks, run
from meshwright.launch.function import load_script
from meshwright.launch.session import temporary_folder
from meshwright.ranks.section import Timeout

if TYPE_CHECKING:
    from meshwright.parity.compare import Row
    from meshwright.parity.judge import ModuleLine
    from meshwright.parity.kinds import Mistake

CHECK_PRECISIONS = ("float64", "float32", "bf16", "own")
CHECK_WORKER = "meshwright.parity.worker:check_rank"
# seconds; models of checks are small: who waits longer waits for a rank that will not come
PATIENCE = Timeout(join=60.0, wait=120.0)


@dataclass(frozen=True)
class ParityCheck:
    """`axes`: names and sizes, outermost first; their product is the number of ranks."""

    name: str
    file: Path
    axes: tuple[tuple[str, int], ...]
    precision: str
    threads: int = 1

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def title(self) -> str:
        return f"{self.name}[{'x'.join(f'{name}{size}' for name, size in self.axes)}]"


@dataclass(frozen=True)
class ParityResult:
    """A check's outcome. `finding`: the first mistake; `dead`: parameters about which nothing is proven; `error`: why
    there is no comparison; `modules`: in forward order."""

    check: ParityCheck
    precision: str
    seconds: float
    rows: tuple[Row, ...] = ()
    finding: Mistake | None = None
    modules: tuple[ModuleLine, ...] = ()
    dead: tuple[str, ...] = ()
    error: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.holds)

    @property
    def holds(self) -> bool:
        return not (self.error or self.finding or self.failed or self.dead)

    @property
    def verdict(self) -> str:
        """The result in one line: the cause before its consequences."""
        if self.error:
            return f"cannot be compared: {self.error.splitlines()[0]}"
        if self.finding is not None:
            return f"{self.finding.kind} at {self.finding.module}: {self.finding.text}"
        if self.failed:
            row = self.failed[0]
            return f"the {row.kind} of {row.label} is off by {row.error:.1e} (allowed: {row.allowed:.1e})"
        if self.dead:
            more = f" (and {len(self.dead) - 1} more)" if len(self.dead) > 1 else ""
            return f"the reference's gradient of {self.dead[0]}{more} is zero everywhere: equal zeros prove nothing"
        return "equal to the reference"


Checked = Callable[[Any], None]


def parity_check(
    ranks: int | Sequence[int] = 2,
    *,
    axes: Mapping[str, int] | None = None,
    precision: str = "float64",
    threads: int = 1,
) -> Callable[[Checked], Checked]:
    """Make a function of a `parity.Job` a check, which `meshwright parity` and pytest collect.

    `ranks`: how many processes; of several numbers each is a run of its own. `axes`: the sizes of named axes; where
    their product is not the number of ranks, one more axis, `data`, stands before them. `precision`: float64, float32,
    bf16, or own, which casts nothing.
    """
    if precision not in CHECK_PRECISIONS:
        raise ConfigError.of("precision", precision, "is not a precision of a check", ", ".join(CHECK_PRECISIONS))
    numbers = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    grids = tuple(grid_of(number, axes or {}) for number in numbers)

    def mark(function: Checked) -> Checked:
        # The ranks load this file again by its path: a function may have no importable module.
        file = Path(function.__code__.co_filename)
        vars(function)["parity_checks"] = tuple(
            ParityCheck(function.__name__, file, grid, precision, threads) for grid in grids
        )
        return function

    return mark


def grid_of(ranks: int, axes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Axes whose sizes multiply to `ranks`."""
    # An axis of data is what most checks mean by "more ranks", so that it need not be written.
    product = math.prod(axes.values())
    if ranks < 2:
        raise ConfigError.of("ranks", ranks, "has nothing to compare with one process", "2 or more")
    if ranks % product:
        raise ConfigError.of("ranks", ranks, f"cannot be cut into axes {dict(axes)}", f"a multiple of {product}")
    rest = (("data", ranks // product),) if ranks != product else ()
    if rest and "data" in axes:
        raise ConfigError.of(
            "axes", dict(axes), f"do not multiply to {ranks} ranks", f"data={axes['data'] * ranks // product}"
        )
    return (*rest, *axes.items())


def collect(file: Path) -> list[ParityCheck]:
    """The checks of a file, in order. Raises ConfigError where it has none, LaunchError where it does not exist."""
    found = [one for value in vars(load_checks(file)).values() for one in checks_of(value)]
    if not found:
        raise ConfigError.of("FILE", file, "has no check", "a function under @parity.check(ranks=2)")
    return found


def checks_of(value: object) -> Iterator[ParityCheck]:
    """The checks of a value of a module: those of a decorated function."""
    if isinstance(value, FunctionType):
        # Checks lie in the function itself, not in a list of the module: one that is imported comes with its checks.
        yield from vars(value).get("parity_checks", ())


def load_checks(file: Path) -> Any:
    """The module of a file of checks; what stands beside it can be imported."""
    folder = str(file.resolve().parent)
    # Like `python FILE`, which puts the folder of the script first.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not file.is_file():
        raise LaunchError(f"{file} does not exist: give a Python file with a function under @parity.check")
    return load_script(file.resolve())


def run_check(check: ParityCheck, precision: str | None = None) -> ParityResult:
    """Run a check on its ranks and compare. A check that fails to run gives a result with its error."""
    precision = precision or check.precision
    start = time.monotonic()
    with temporary_folder() as folder:
        ranks = Ranks(check.axes, threads=check.threads, timeout=PATIENCE)
        try:
            run(CHECK_WORKER, ranks, file=check.file.resolve(), name=check.name, precision=precision, out=folder)
        # Ctrl-C ends the command; every other end of the ranks is this check's result, and the next check runs.
        except Interrupted:
            raise
        except MeshwrightError as error:
            return ParityResult(check, precision, time.monotonic() - start, error=str(error))
        return judged(check, precision, folder, start)


def judged(check: ParityCheck, precision: str, folder: Path, start: float) -> ParityResult:
    """The result of what a check's ranks have left."""
    # Imported here, as these need torch, and pytest imports this module for every collection, with checks or without.
    from meshwright.parity.judge import Evidence, explain_modules
    from meshwright.parity.kinds import first_finding
    from meshwright.parity.rows import compare_all

    evidence = Evidence.read(folder, check.num_ranks)
    # Modules are explained after the rows and before the finding, which reads both.
    rows = tuple(compare_all(evidence))
    evidence.modules = explain_modules(evidence)
    finding, dead = first_finding(evidence, rows), tuple(evidence.reference.facts.dead)
    return ParityResult(check, precision, time.monotonic() - start, rows, finding, tuple(evidence.modules), dead)
