"""`@parity.check`: a function with a reference and a parallel program, run on CPU processes and compared.

    collect(file) -> the file's checks        run_check(check) -> a ParityResult

launch.launcher starts a check's processes; the starting process compares the files of these processes.
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
"""The command for users: `meshwright parity`."""
CHECK_WORKER = f"{__package__}.worker:check_rank"


@dataclass(frozen=True)
class ParityCheck:
    """One run of a check's function."""

    name: str
    file: Path
    axes: tuple[tuple[str, int], ...]
    """Names and sizes, outermost first; the product of the sizes is the number of ranks."""
    precision: str
    threads: int = 1
    number: int = 0
    """Index of the function among the functions that the file's import marks; names may not be unique."""
    line: int = 0
    """The first line of the function, or the line of the mark if the check is no plain function."""
    case: int = 0
    """Index of the case of parameters."""
    words: str = ""
    """The values of the case, as in the check's title; empty without parameters."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once for all ranks."""

    @property
    def title(self) -> str:
        grid = "x".join(f"{name}{size}" for name, size in self.axes)
        return f"{self.name}[{'-'.join(filter(None, (self.words, grid)))}]"


@dataclass(frozen=True)
class ParityResult:
    """The outcome of a check."""

    check: ParityCheck
    precision: str
    seconds: float
    rows: tuple[Row, ...] = ()
    """The comparisons."""
    finding: Mistake | None = None
    """The first mistake."""
    modules: tuple[ModuleLine, ...] = ()
    """Calls of modules in forward order."""
    dead: tuple[str, ...] = ()
    """Parameters with a zero gradient; the check proves nothing for these."""
    error: str = ""
    """The reason for a missing comparison."""
    notes: tuple[str, ...] = field(default=())
    narrow: str = ""
    """A narrower type to which the reference itself rounds."""

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.holds)

    @property
    def holds(self) -> bool:
        return not (self.error or self.finding or self.failed or self.dead)

    @property
    def remedy(self) -> str:
        """A line with the finding's remedy and a link; empty without a finding."""
        # Imported here, since verify has separate texts.
        from meshwright.parity.remedies import PAGE, REMEDIES

        if self.finding is None:
            return ""
        return f"{REMEDIES[self.finding.kind]} ({PAGE}#{self.finding.kind.replace(' ', '-')})"

    @property
    def seen_by_losses(self) -> str:
        """The verdict that `allclose` of the losses, the usual test, gives on a failing program; else empty."""
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

    Args:
        ranks: number of processes; a sequence gives one run per number.
        axes: sizes of named axes. If the product is not the number of ranks, an outer axis `data` is added.
        precision: float64, float32, bf16, or own (no casts).
        threads: torch threads of a process.

    Returns:
        The decorator. Its method `.parametrize(names, values)` returns a decorator with one check per row of values;
        `@pytest.mark.parametrize` on the function does the same.
    """
    if precision not in CHECK_PRECISIONS:
        raise ConfigError.of("precision", precision, "is not a precision of a check", ", ".join(CHECK_PRECISIONS))
    numbers = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    return CheckMark(tuple(grid_of(count, axes or {}) for count in numbers), precision, threads)


@dataclass(frozen=True)
class CheckMark:
    """The decorator `@parity.check(...)`: marks a function as one check per grid."""

    grids: tuple[tuple[tuple[str, int], ...], ...]
    precision: str
    threads: int
    parameters: tuple[Parameters, ...] = ()

    def parametrize(
        self, names: str | Sequence[str], values: Iterable[Any],
        ids: Iterable[Any] | Callable[..., Any] | None = None,
    ) -> CheckMark:  # fmt: skip
        """Return the mark with one check per row of values. Repeated calls nest, the first outermost.

        Args:
            names: as in pytest.
            values: as in pytest.
            ids: as in pytest.

        Raises:
            ConfigError: as in `Parameters.of`.
        """
        return replace(self, parameters=(*self.parameters, Parameters.of(names, values, ids)))

    def __call__(self, function: Checked) -> Checked:
        name = name_of(function)
        # A callable that is no function (functools.partial, a bound method) cannot store attributes for the checks.
        marked: Checked = function if isinstance(function, FunctionType) else partial_of(function)
        # Ranks import the file again, and the import marks the same functions in the same order.
        body = module_frame()
        made: list[Checked] = body.f_globals.setdefault(MARKED, [])
        made.append(marked)
        file = Path(body.f_code.co_filename)
        here = isinstance(function, FunctionType) and function.__code__.co_filename == body.f_code.co_filename
        line = function.__code__.co_firstlineno if here else body.f_lineno
        mark_index = len(made) - 1
        checks = tuple(
            ParityCheck(name, file, grid, self.precision, self.threads, mark_index, line) for grid in self.grids
        )
        vars(marked)["parity_checks"] = (*vars(marked).get("parity_checks", ()), *checks)
        vars(marked)[PARAMETERS] = {**vars(marked).get(PARAMETERS, {}), mark_index: self.parameters}
        return marked


MARKED = f"__{__package__.replace('.', '_')}_checks__"
"""The name of a module's list of marked functions, in the order of marking. The stand-alone parity package has another
name."""


def module_frame() -> FrameType:
    """Return the frame of the module body that is being imported, which calls `@parity.check`.

    The file of the function's code may differ: a factory in another file makes functions for several files.
    """
    frame = currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None:
        raise ConfigError.of("@parity.check", "a thread's function", "is no import of a file", "a line of a file")
    return frame


def name_of(function: Callable[..., Any]) -> str:
    """Return a name for people: of the function inside of functools.partial, `lambda`, or a callable object's class."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, FunctionType | MethodType | BuiltinFunctionType):
        return function.__name__.strip("<>")
    return type(function).__name__


def partial_of(function: Checked) -> Checked:
    """Return a function that calls `function`, any callable."""

    def call(job: Any, **given: Any) -> None:
        function(job, **given)

    vars(call).update(parity_signature=signature(function), parity_name=name_of(function))
    return call


def grid_of(ranks: int, axes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return axes with sizes that multiply to `ranks`."""
    # Most checks mean data parallelism by more ranks, so the axis `data` is implied.
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
    """Return the checks of a file in order, then the checks that the file imports.

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
"""A word in every file with checks: the name of parity, or of an imported module of checks."""


def as_it_is(file: Path) -> str:
    """Return the advice for a training script in place of checks."""
    return f"a training script as it is is recorded: {PROGRAM} record --out FOLDER {file}"


def without_checks(file: Path) -> ConfigError:
    return ConfigError.of(
        "FILE",
        file,
        "has no check",
        f"a function under @parity.check(ranks=2); {as_it_is(file)}, and {PROGRAM} compare",
    )


def named_checks(names: Mapping[str, Any]) -> list[ParityCheck]:
    """Return the checks of a module: functions that its import has marked, then imported functions with marks.

    Names are unique: the first name of a function in the module, or the function's name. A second function with an
    equal name is `check-2`.
    """
    bound = {id(value): name for name, value in reversed(list(names.items())) if isinstance(value, FunctionType)}
    marked: Sequence[Any] = names.get(MARKED, ())
    imported = [value for value in names.values() if not any(value is function for function in marked)]
    found, taken, seen = list[ParityCheck](), Counter[str](), set[int]()
    for function in (*marked, *imported):
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
    """Yield the checks of a decorated function; none for other values."""
    if isinstance(value, FunctionType):
        # Checks are stored in the function, not in the module, so that an imported function keeps its checks.
        marked = vars(value).get("parity_checks", ())
        # The stand-alone parity package has another class; its plugin collects these checks.
        for check in (check for check in marked if isinstance(check, ParityCheck)):
            cases = cases_of(value, check.number)
            yield from (replace(check, case=case, words=words) for case, words in enumerate(cases))


_IMPORTING: ContextVar[bool] = ContextVar("importing", default=False)
"""Whether a rank is importing a script of checks."""


def load_checks(file: Path, importing: bool = False) -> Any:
    """Import a file of checks as a module, with the folder of the file on the path.

    `importing`: a rank imports the file; the import of a script without a main guard ends at the first `run_check`.
    """
    folder = str(file.resolve().parent)
    # As `python FILE`, which puts the script's folder first.
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
    """Exception that ends a rank's import of a script without a main guard at the call that starts checks."""

    # A BaseException, so that an `except Exception` in the script does not catch it.


def run_check(check: ParityCheck, precision: str | None = None) -> ParityResult:
    """Run a check on its ranks and compare. A check that fails to run gives a result with an error.

    In a float64 check, a rounding to float32 hides other mistakes. Such a check runs again in float32. The float32
    result is returned if the reference itself rounds, or if another mistake is visible in float32.
    """
    if _IMPORTING.get():
        # A rank that imports the script needs only the definitions above this call, and must not start ranks again.
        raise StillImporting
    return behind_rounding(_run_once(check, precision or check.precision), lambda: _run_once(check, "float32"))


def behind_rounding(result: ParityResult, again: Callable[[], ParityResult]) -> ParityResult:
    """Return the float64 result, or the float32 result `again()` if a rounding to float32 hides a mistake."""
    category = "" if result.finding is None else result.finding.kind
    if result.precision != "float64" or result.error or not (result.narrow or category == "lower precision"):
        return result
    behind = again()
    if result.narrow:
        return replace(behind, notes=(f"the reference rounds to {result.narrow} inside: compared in float32",))
    found, first = behind.finding, result.finding
    # An equal place is the same rounding: a rounding to bf16 is visible in float32 too.
    same = found is not None and first is not None and found.module == first.module and found.kind == "wrong values"
    if found is None or found.kind == "lower precision" or same:
        return replace(result, notes=("equal in float32: nothing else is behind this rounding",) * behind.holds)
    return replace(behind, notes=(f"in float64 hidden behind {result.verdict}",))


def _run_once(check: ParityCheck, precision: str) -> ParityResult:
    start = time.monotonic()
    with temporary_folder() as folder:
        arguments = {"file": str(check.file.resolve()), "name": check.name, "mark_index": check.number,
                     "case": check.case, "axes": check.axes, "out": str(folder)}  # fmt: skip
        job = Job(CHECK_WORKER, arguments | {"precision": precision}, preload=check.preload)
        try:
            with without_main():
                launch(job, math.prod(size for _, size in check.axes), "torch", threads=check.threads)
        # Ctrl-C ends the command. Any other failure of ranks is this check's result, and the next check runs.
        except Interrupted:
            raise
        except MeshwrightError as error:
            return ParityResult(check, precision, time.monotonic() - start, error=str(error))
        return judged(check, precision, folder, start)


@contextmanager
def without_main() -> Iterator[None]:
    """Replace the main module by an empty one in a context.

    multiprocessing imports the main module in each new process, and a script without a main guard would start checks
    again there. Ranks find the check by the file.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def judged(check: ParityCheck, precision: str, folder: Path, start: float) -> ParityResult:
    """Return the result of the records of a check's ranks."""
    # Imported here, since these need torch, and pytest imports this module in every collection.
    from meshwright.parity.judge import Evidence, explain_modules, one_thread
    from meshwright.parity.kinds import first_finding
    from meshwright.parity.rows import compare_all

    evidence = Evidence(folder, math.prod(size for _, size in check.axes))
    with one_thread():
        # The finding reads rows and modules.
        rows = tuple(compare_all(evidence))
        evidence.modules = explain_modules(evidence)
        finding = first_finding(evidence, rows)
    facts, seconds = evidence.reference.facts, time.monotonic() - start
    return ParityResult(
        check, precision, seconds, rows, finding, tuple(evidence.modules), tuple(facts.dead), narrow=facts.narrow
    )
