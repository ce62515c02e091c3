"""`@parity.check`: a function that says what is right and what is to be compared, run on CPU processes.

    collect(file) -> its checks        run_check(check) -> a ParityResult for each number of ranks

launch.launcher starts a check's processes; the starting process compares the files that they leave.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import currentframe, signature
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.parity.cases import PARAMETERS, Parameters, cases_of
from meshwright.ranks.errors import ConfigError, LaunchError, MeshwrightError
from meshwright.ranks.launch.failure import Interrupted
from meshwright.ranks.launch.launcher import launch
from meshwright.ranks.launch.scripts import load_script
from meshwright.ranks.launch.session import temporary_folder
from meshwright.ranks.launch.worker import Job

if TYPE_CHECKING:
    from meshwright.parity.compare import Row
    from meshwright.parity.judge import ModuleLine
    from meshwright.parity.kinds import Mistake

CHECK_PRECISIONS = ("float64", "float32", "bf16", "own")
ALLCLOSE = 1e-5
"""The relative tolerance of torch.allclose and numpy.allclose."""
PROGRAM = __package__.replace(".", " ").replace("_", "-")
"""How a user calls it: `meshwright parity`."""
CHECK_WORKER = f"{__package__}.worker:check_rank"


@dataclass(frozen=True)
class ParityCheck:
    """One run of a check's function.

    `axes`: names and sizes, outermost first; their product is the number of ranks. `number`: which of the functions
    that the file's import marks, `case`: which of its parameters; a rank finds both by these, since two functions may
    have one name.
    """

    name: str
    file: Path
    axes: tuple[tuple[str, int], ...]
    precision: str
    threads: int = 1
    number: int = 0
    line: int = 0
    """The first line of the function, or that of the mark if it is no plain function."""
    case: int = 0
    words: str = ""
    """The values of the case, as its name says them; empty without parameters."""
    preload: tuple[str, ...] = ()
    """Modules that ranks share one import of."""

    @property
    def title(self) -> str:
        grid = "x".join(f"{name}{size}" for name, size in self.axes)
        return f"{self.name}[{'-'.join(filter(None, (self.words, grid)))}]"


@dataclass(frozen=True)
class ParityResult:
    """A check's outcome. `finding`: the first mistake; `dead`: parameters with a zero gradient, about which nothing is
    proven; `error`: why there is no comparison; `modules`: in forward order; `narrow`: a type to which the reference
    itself rounds."""

    check: ParityCheck
    precision: str
    seconds: float
    rows: tuple[Row, ...] = ()
    finding: Mistake | None = None
    modules: tuple[ModuleLine, ...] = ()
    dead: tuple[str, ...] = ()
    error: str = ""
    notes: tuple[str, ...] = field(default=())
    narrow: str = ""

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.holds)

    @property
    def holds(self) -> bool:
        return not (self.error or self.finding or self.failed or self.dead)

    @property
    def remedy(self) -> str:
        """A line with the finding's remedy and a link; empty without a finding."""
        # Here, as verify's findings have a sentence of their own.
        from meshwright.parity.remedies import PAGE, REMEDIES

        if self.finding is None:
            return ""
        return f"{REMEDIES[self.finding.kind]} ({PAGE}#{self.finding.kind.replace(' ', '-')})"

    @property
    def seen_by_losses(self) -> str:
        """How `allclose` of the losses, the usual test, would have judged a failing program."""
        losses = [row for row in self.rows if row.kind == "loss"]
        if self.holds or not losses:
            return ""
        worst = max(losses, key=lambda row: (row.error != row.error, row.error))
        seen = "would have seen" if not worst.error <= ALLCLOSE else "would have missed"
        times = f", {ALLCLOSE / worst.error:.0e} times too small for it" if 0 < worst.error <= ALLCLOSE else ""
        return f"an allclose of the losses {seen} it: they differ by {worst.error:.1e} in {worst.label}{times}"

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


Checked = Callable[..., None]


def parity_check(
    ranks: int | Sequence[int] = 2,
    *,
    axes: Mapping[str, int] | None = None,
    precision: str = "float64",
    threads: int = 1,
) -> CheckMark:
    """Make a function of a `parity.Job` a check, which `meshwright parity` and pytest collect.

    `ranks`: how many processes; of several numbers each is a run of its own. `axes`: the sizes of named axes; where
    their product is not the number of ranks, one more axis, `data`, stands before them. `precision`: float64, float32,
    bf16, or own, which casts nothing. What it returns has `.parametrize(names, values)`, after which it is as well the
    mark: each row of values is a check. pytest's own `@pytest.mark.parametrize` on the function does the same.
    """
    if precision not in CHECK_PRECISIONS:
        raise ConfigError.of("precision", precision, "is not a precision of a check", ", ".join(CHECK_PRECISIONS))
    numbers = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    return CheckMark(tuple(grid_of(number, axes or {}) for number in numbers), precision, threads)


@dataclass(frozen=True)
class CheckMark:
    """`@parity.check(...)`: marks a function as a check on each of some grids."""

    grids: tuple[tuple[tuple[str, int], ...], ...]
    precision: str
    threads: int
    parameters: tuple[Parameters, ...] = ()

    def parametrize(
        self, names: str | Sequence[str], values: Iterable[Any],
        ids: Iterable[Any] | Callable[..., Any] | None = None,
    ) -> CheckMark:  # fmt: skip
        """The same mark, for a check of each row of values; `names`, `values` and `ids` are pytest's. Several follow
        each other, the first outermost. Raises ConfigError as `Parameters.of`."""
        return replace(self, parameters=(*self.parameters, Parameters.of(names, values, ids)))

    def __call__(self, function: Checked) -> Checked:
        name = name_of(function)
        # A callable that is no function (functools.partial, a bound method) has no place of its own for the checks.
        marked: Checked = function if isinstance(function, FunctionType) else partial_of(function)
        # The ranks import the file again, and its import marks the same functions in the same order.
        body = module_frame()
        made: list[Checked] = body.f_globals.setdefault(MARKED, [])
        made.append(marked)
        file = Path(body.f_code.co_filename)
        here = isinstance(function, FunctionType) and function.__code__.co_filename == body.f_code.co_filename
        line = function.__code__.co_firstlineno if here else body.f_lineno
        number = len(made) - 1
        checks = tuple(ParityCheck(name, file, grid, self.precision, self.threads, number, line) for grid in self.grids)
        vars(marked)["parity_checks"] = (*vars(marked).get("parity_checks", ()), *checks)
        vars(marked)[PARAMETERS] = {**vars(marked).get(PARAMETERS, {}), number: self.parameters}
        return marked


MARKED = f"__{__package__.replace('.', '_')}_checks__"
"""The name, in a module that marks functions as checks, of the list of these functions in the order of marking. The
package of parity alone has a list of its own."""


def module_frame() -> FrameType:
    """The frame of the module body that runs at present: the file whose import calls `@parity.check`.

    Not the file of the function's code: a factory in another file writes functions for every file that calls it.
    """
    frame = currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None:
        raise ConfigError.of("@parity.check", "a thread's function", "is no import of a file", "a line of a file")
    return frame


def name_of(function: Callable[..., Any]) -> str:
    """A name for people: that of the function inside of functools.partial; `lambda`; a callable object's class."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, FunctionType | MethodType | BuiltinFunctionType):
        return function.__name__.strip("<>")
    return type(function).__name__


def partial_of(function: Checked) -> Checked:
    """A function that calls `function`, any callable."""

    def call(job: Any, **given: Any) -> None:
        function(job, **given)

    vars(call).update(parity_signature=signature(function), parity_name=name_of(function))
    return call


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
    """The checks of a file, in order, those that it imports behind its own.

    Raises:
        ConfigError: If the file has none.
        LaunchError: If the file does not exist, or ends the interpreter while it is imported.
    """
    if file.is_file() and not MENTIONS.search(file.read_text(errors="replace")):
        raise without_checks(file)  # before its import: a training script without a main guard would train
    try:
        module = load_checks(file)
    except SystemExit as error:
        raise LaunchError(
            f"{file} ends the interpreter when it is imported (code {error.code}): {as_it_is(file)}"
        ) from error
    found = named_checks(vars(module))
    if not found:
        raise without_checks(file)
    return found


MENTIONS = re.compile(r"parity|\b\w*checks?\b")
"""A word that every file with checks has: the module's name, or that of a module of checks which it imports."""


def as_it_is(file: Path) -> str:
    """The remedy for a training script in place of checks."""
    return f"a training script as it is is recorded: {PROGRAM} record --out FOLDER {file}"


def without_checks(file: Path) -> ConfigError:
    return ConfigError.of(
        "FILE",
        file,
        "has no check",
        f"a function under @parity.check(ranks=2); {as_it_is(file)}, and {PROGRAM} compare",
    )


def named_checks(names: Mapping[str, Any]) -> list[ParityCheck]:
    """The checks of a module's names: those that its import has marked, then those of functions that it imports.

    Each function has a name of its own: the first of the module's names for it, or the function's own; a second
    function of one name is `check-2`.
    """
    bound = {id(value): name for name, value in reversed(list(names.items())) if isinstance(value, FunctionType)}
    own: Sequence[Any] = names.get(MARKED, ())
    imported = [value for value in names.values() if not any(value is function for function in own)]
    found, taken, seen = list[ParityCheck](), Counter[str](), set[int]()
    for function in (*own, *imported):
        checks = list(checks_of(function))
        if not checks or id(function) in seen:
            continue
        seen.add(id(function))
        name = bound.get(id(function), checks[0].name)
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}-{taken[name]}"
        found += [replace(check, name=unique) for check in checks]
    return found


def checks_of(value: object) -> Iterator[ParityCheck]:
    """The checks of a value of a module: those of a decorated function."""
    if isinstance(value, FunctionType):
        # Checks are kept in the function itself, not in a list of the module: an imported function has its checks.
        marked = vars(value).get("parity_checks", ())
        # The package of parity alone has a class of its own: its checks are its plugin's to collect, and run once.
        for check in (check for check in marked if isinstance(check, ParityCheck)):
            cases = cases_of(value, check.number)
            yield from (replace(check, case=case, words=words) for case, (words, _) in enumerate(cases))


_IMPORTING: ContextVar[bool] = ContextVar("importing", default=False)
"""Whether a rank imports a script of checks at this moment."""


def load_checks(file: Path, importing: bool = False) -> Any:
    """The module of a file of checks; what stands beside it can be imported. `importing`: by a rank, which takes what
    stands above the first `run_check` of a script without a main guard."""
    folder = str(file.resolve().parent)
    # Like `python FILE`, which puts the folder of the script first.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not file.is_file():
        raise LaunchError(f"{file} does not exist: give a Python file with a function under @parity.check")
    token = _IMPORTING.set(importing)
    try:
        return load_script(file.resolve(), StillImporting)
    finally:
        _IMPORTING.reset(token)


class StillImporting(BaseException):
    """Ends a rank's import of a script at the call that starts checks without a main guard."""

    # A BaseException, so that a script's `except Exception` does not swallow it.


def run_check(check: ParityCheck, precision: str | None = None) -> ParityResult:
    """Run a check on its ranks and compare. A check that fails to run gives a result with its error.

    In float64 a float32 inside hides all behind its rounding, so such a check is run once more in float32: the result
    is that one's, where the reference rounds itself or where another mistake shows there.
    """
    if _IMPORTING.get():
        # A rank that imports the script needs what stands above this call, and must not start ranks again.
        raise StillImporting
    return behind_rounding(_run_once(check, precision or check.precision), lambda: _run_once(check, "float32"))


def behind_rounding(result: ParityResult, again: Callable[[], ParityResult]) -> ParityResult:
    """The float64 result, or the float32 result `again()` if rounding to float32 hides a mistake behind it."""
    kind = "" if result.finding is None else result.finding.kind
    if result.precision != "float64" or result.error or not (result.narrow or kind == "lower precision"):
        return result
    behind = again()
    if result.narrow:
        return replace(behind, notes=(f"the reference rounds to {result.narrow} inside: compared in float32",))
    found, first = behind.finding, result.finding
    # The same place again is the same rounding: bf16's shows in float32 as well.
    same = found is not None and first is not None and found.module == first.module and found.kind == "wrong values"
    if found is None or found.kind == "lower precision" or same:
        return replace(result, notes=("equal in float32: nothing else is behind this rounding",) * behind.holds)
    return replace(behind, notes=(f"in float64 hidden behind {result.verdict}",))


def _run_once(check: ParityCheck, precision: str) -> ParityResult:
    start = time.monotonic()
    with temporary_folder() as folder:
        arguments = {"file": str(check.file.resolve()), "name": check.name, "number": check.number, "case": check.case,
                     "axes": check.axes, "out": str(folder)}  # fmt: skip
        job = Job(CHECK_WORKER, arguments | {"precision": precision}, preload=check.preload)
        try:
            with without_main():
                launch(job, math.prod(size for _, size in check.axes), "torch", threads=check.threads)
        # Ctrl-C ends the command; any other end of the ranks is this check's result, and the next check runs.
        except Interrupted:
            raise
        except MeshwrightError as error:
            return ParityResult(check, precision, time.monotonic() - start, error=str(error))
        return judged(check, precision, folder, start)


@contextmanager
def without_main() -> Iterator[None]:
    """A context with an empty main module, which multiprocessing imports in each process it starts: a script without a
    main guard would start its checks again there. Ranks find the check by its file."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def judged(check: ParityCheck, precision: str, folder: Path, start: float) -> ParityResult:
    """The result of what a check's ranks have left."""
    # Imported here, as these need torch, and pytest imports this module for every collection, with checks or without.
    from meshwright.parity.judge import Evidence, explain_modules, one_thread
    from meshwright.parity.kinds import first_finding
    from meshwright.parity.rows import compare_all

    evidence = Evidence(folder, math.prod(size for _, size in check.axes))
    with one_thread():
        # After the rows, and before the finding, which reads both.
        rows = tuple(compare_all(evidence))
        evidence.modules = explain_modules(evidence)
        finding = first_finding(evidence, rows)
    facts, seconds = evidence.reference.facts, time.monotonic() - start
    return ParityResult(
        check, precision, seconds, rows, finding, tuple(evidence.modules), tuple(facts.dead), narrow=facts.narrow
    )
