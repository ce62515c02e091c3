"""The pytest plugin, an entry point of this package: functions under `@parity.check` are tests, one per grid.

A check is found in any file that pytest collects, under any function name. A failed check shows the mistake and the
place, without a traceback. The option --parity-precision replaces the precision of every check.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.parity.check import CHECK_PRECISIONS, MARKED, ParityCheck, checks_of, named_checks, run_check


class ParityFailure(Exception):
    """Error of a check that does not hold."""


class ParityItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: ParityCheck, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.check = check

    def runtest(self) -> None:
        result = run_check(self.check, self.config.getoption("--parity-precision"))
        if not result.holds:
            # Eight rows are enough to show a pattern; all follow from one mistake.
            rows = [f"  {row.kind} of {row.label}: {row.error:.1e} > {row.allowed:.1e}" for row in result.failed[:8]]
            told = [text for text in (result.remedy and f"remedy: {result.remedy}", result.seen_by_losses) if text]
            raise ParityFailure("\n".join([result.error or result.verdict, *rows, *told]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        # No traceback: it would show this plugin, not the failed program.
        if isinstance(excinfo.value, ParityFailure):
            return f"{self.check.title} does not compute what one process computes\n{excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.check.title


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--parity-precision`."""
    group = parser.getgroup("parity")
    # With meshwright and the stand-alone package installed, the plugin is loaded twice; one option serves both.
    if not any("--parity-precision" in option.names() for option in group.options):
        group.addoption(
            "--parity-precision", choices=CHECK_PRECISIONS, default=None, help="instead of what each check says"
        )


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[ParityItem] | None:
    """Collect a module's checks at the module's list of marked functions.

    Returns an empty list for a check's function, so that pytest does not call it as a test, and None for other objects.
    """
    module = collector.getparent(pytest.Module)
    names = {} if module is None else vars(module.obj)
    if name == MARKED and collector is module:
        local_checks = {(check.file, check.number) for function in names[MARKED] for check in checks_of(function)}
        checks = [check for check in named_checks(names) if (check.file, check.number) in local_checks]
    else:
        checks = list(checks_of(obj))
        if not checks:
            return None
        # A check of another file, imported under another name, is collected with that file.
        made_here = any(obj is function for function in names.get(MARKED, ()))
        checks = [] if made_here or checks[0].name != name else checks
    return [ParityItem.from_parent(collector, name=check.title, check=check) for check in checks]
