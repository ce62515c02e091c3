"""The mistakes a user can make, as exceptions whose text says what, where and what to do."""

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
    """Base of every error that is the user's to mend: the command line prints its text, not a traceback."""

    restartable: ClassVar[bool] = False
    """Whether the same run, started again from its newest checkpoint, may succeed: then `restarts` apply.

    False for most: a wrong config, a damaged file or a diverging run is the same the next time."""

    exit_code = 1
    """The exit code of the command that raises it."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: the field, what it holds, the rule it breaks, and what would work.

    `reads`: further fields that it rests on. Where one of them is mistaken itself, it is not reported. `mend`: its
    remedies, if the text of `valid` has them for people alone; `remedies.of_problem` has all.
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
    """A run that cannot start: every mistake found, one a line."""

    exit_code = 2
    """A command with a wrong option ends with the same: nothing was begun."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Exceptions are made again from their message, by default, which another process would take for problems."""
        return type(self), (self.problems,)

    @classmethod
    def of(cls, field: str, value: object, rule: str, valid: str = "") -> ConfigError:
        """A config error with a single problem."""
        return cls([Problem(field, value, rule, valid)])


class PluginError(MeshwrightError):
    """A strategy of another package that cannot be used: names the package, its entry point and the cause."""


class SumError(MeshwrightError):
    """A layout whose sums cannot be right: names the module, the axis and what would mend it, before ranks start."""


class DataError(MeshwrightError):
    """A corpus, tokenizer or token file that cannot be read."""


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, or of another run, model or version."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was written, or do not hold together."""


class LaunchError(MeshwrightError):
    """Workers that could not be started, or that died: names the rank and the cause."""


class LostRankError(LaunchError):
    """A rank that others were connected to is gone: names it and its host. A restart goes on without a mistake of its
    own."""

    restartable: ClassVar[bool] = True


class DivergedError(MeshwrightError):
    """A run whose numbers are no numbers any more: names the first parameter that is not finite, and its rank."""


class CorruptionError(MeshwrightError):
    """Ranks that must hold the same bits do not: names the odd one. A restart goes on from a checkpoint before it."""

    restartable: ClassVar[bool] = True


class MismatchError(MeshwrightError):
    """A layout that does not compute what one device computes."""


class UndecidedError(MeshwrightError):
    """A comparison without a difference that does not show that two runs are equal: says what was not there."""

    exit_code = 3
    """Neither equal (0) nor different (1), and no wrong option (2)."""


class ParityError(MeshwrightError):
    """A check of parity that cannot be carried out: says what the two programs lack for it."""


class ZeroGradientError(MeshwrightError):
    """A comparison that proves nothing: a gradient that is zero on both sides."""
