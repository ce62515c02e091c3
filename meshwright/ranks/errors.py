"""Exceptions for a user's mistakes. Each text names the mistake, the place and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from meshwright.ranks.remedies import Remedy

NOTHING = "nothing"
"""The value of a field that must be given and is not."""


class MeshwrightError(Exception):
    """Base of every error that the user can mend: the command line prints the text, not a traceback."""

    restartable: ClassVar[bool] = False
    """True if the same run, started again from the newest checkpoint, may succeed: then `restarts` apply.

    False for most: a wrong config, a damaged file or a diverging run would fail again."""

    exit_code = 1
    """The exit code of a command that raises the error."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: the field, the value, the broken rule, and valid values.

    `reads`: further fields that the rule reads; a problem of one of these hides this problem. `mend`: remedies that
    `valid` states only as text for people; `remedies.of_problem` returns all remedies.
    """

    field: str
    value: object
    rule: str
    valid: str = ""
    reads: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    mend: tuple[Remedy, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        hint = f"; valid: {self.valid}" if self.valid else ""
        value = "" if self.value == NOTHING and self.rule.startswith("is missing") else f"={self.value}"
        return f"{self.field}{value} {self.rule}{hint}"


class ConfigError(MeshwrightError):
    """A config with mistakes, so that the run cannot start: every mistake found, one a line."""

    exit_code = 2
    """The same code as for a wrong command-line option: nothing was begun."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle the problems. By default an exception is rebuilt from its message, which is no list of problems."""
        return type(self), (self.problems,)

    @classmethod
    def of(cls, field: str, value: object, rule: str, valid: str = "") -> ConfigError:
        """Make a config error with a single problem."""
        return cls([Problem(field, value, rule, valid)])


class PluginError(MeshwrightError):
    """A strategy of another package that cannot be used: names the package, the entry point and the cause."""


class SumError(MeshwrightError):
    """A layout with wrong sums, found before ranks start: names the module, the axis and the remedy."""


class DataError(MeshwrightError):
    """A corpus, tokenizer or token file that cannot be read."""


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, or of another run, model or version."""


class DamagedError(CheckpointError):
    """A checkpoint with files that differ from the written ones, or that contradict each other."""


class LaunchError(MeshwrightError):
    """Workers that could not be started, or that died: names the rank and the cause."""


class LostRankError(LaunchError):
    """A lost rank that others were connected to: names the rank and the host. A restart may succeed, since the run
    itself made no mistake."""

    restartable: ClassVar[bool] = True


class DivergedError(MeshwrightError):
    """A run with values that are not finite: names the first such parameter, and the rank."""


class CorruptionError(MeshwrightError):
    """Different bits on ranks that must hold equal bits: names the odd rank. A restart uses an earlier checkpoint."""

    restartable: ClassVar[bool] = True


class MismatchError(MeshwrightError):
    """A layout with results that differ from one device's."""


class UndecidedError(MeshwrightError):
    """A comparison without a difference, but incomplete, so that equality is not shown: names the missing parts."""

    exit_code = 3
    """Neither equal (0) nor different (1), and no wrong option (2)."""


class ParityError(MeshwrightError):
    """A parity check that cannot be carried out: names the parts that the two programs lack."""


class ZeroGradientError(MeshwrightError):
    """A comparison that proves nothing: a gradient that is zero on both sides."""
