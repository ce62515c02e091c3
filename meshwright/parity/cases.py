"""A check's parameters: `parity.check(...).parametrize(names, values)`, or pytest's mark on the function.

Both are read at collection, so marks may have any order. A rank finds the values of a case by its number in the order
of the product, with the first parameters outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from itertools import islice, product
from typing import Any

from meshwright.ranks.errors import ConfigError

PARAMETERS = "parity_parameters"
"""The attribute of a function with the parameters of each mark, by the number of the mark."""


@dataclass(frozen=True)
class Parameters:
    """Names of a function's arguments, and rows of values, each with the word for the check's title."""

    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Any, ...]], ...]

    @staticmethod
    def of(
        argnames: str | Sequence[str], argvalues: Iterable[Any], ids: Iterable[Any] | Callable[..., Any] | None = None,
        indirect: Any = False, scope: Any = None,
    ) -> Parameters:  # fmt: skip
        """Make parameters from the arguments of pytest's parametrize.

        Args:
            argnames: Names, or one text of names with commas.
            argvalues: A value for each case, or a row of values for several names; also `pytest.param`.
            ids: A word for each case (None: made of the values), or a function of a value.
            indirect: Must be False: values for fixtures are not supported.
            scope: Has no effect: each rank's import makes the values.

        Raises:
            ConfigError: The number of values is not the number of names, the number of `ids` is not the number of
                cases, a case has pytest marks, or values are for fixtures.
        """
        if indirect:
            raise ConfigError.of("parametrize", "indirect", "needs fixtures, which ranks do not have", "values")
        names = argnames.split(",") if isinstance(argnames, str) else argnames
        named = tuple(name.strip() for name in names)
        values, by_value = list(argvalues), ids if callable(ids) else None
        given = [None] * len(values) if ids is None or callable(ids) else list(ids)
        if len(given) != len(values):
            raise ConfigError.of("parametrize", f"{len(given)} ids", f"are no word for each of {len(values)} cases",
                                 f"{len(values)} ids")  # fmt: skip
        rows = []
        for index, (value, told) in enumerate(zip(values, given, strict=True)):
            row, word = value if len(named) > 1 else (value,), told
            if isinstance(value, tuple) and getattr(value, "_fields", ()) == ("values", "marks", "id"):  # pytest.param
                row, marks, word = value[0], value[1], value[2] or told
                if marks:
                    rule = "has a case with marks of pytest's"
                    raise ConfigError.of("parametrize", named, rule, "a case without marks")
            if len(row) != len(named):
                raise ConfigError.of("parametrize", row, f"has no value for each of {', '.join(named)}", "one each")
            words = [word_of(x, f"{name}{index}", by_value) for name, x in zip(named, row, strict=True)]
            rows.append((str(word or "-".join(words)), tuple(row)))
        return Parameters(named, tuple(rows))


def word_of(value: Any, otherwise: str, by_value: Callable[..., Any] | None) -> str:
    """Return the word for a value in a check's title: numbers, texts and names of functions; else `otherwise`."""
    if by_value is not None and (word := by_value(value)) is not None:
        return str(word)
    if value is None or isinstance(value, (str, int, float, bool)):
        return str(value)
    return str(getattr(value, "__name__", otherwise))


def parameters_of(function: Callable[..., Any], mark_index: int) -> list[Parameters]:
    """The parameters of mark `mark_index` of a function, the outermost first.

    Raises:
        ConfigError: The function has other arguments than the job and the parameters.
    """
    told = getattr(function, PARAMETERS, {}).get(mark_index, ())
    marks: Any = getattr(function, "pytestmark", ())
    of_pytest = [mark for mark in (marks if isinstance(marks, list) else [marks])
                 if getattr(mark, "name", "") == "parametrize"]  # fmt: skip
    parameters = [*told, *(Parameters.of(*mark.args, **mark.kwargs) for mark in reversed(of_pytest))]
    shape: Signature = getattr(function, "parity_signature", None) or signature(function)
    given = dict.fromkeys(name for each in parameters for name in each.names)
    try:
        shape.bind(None, **given)
    except TypeError as error:
        name = getattr(function, "parity_name", function.__name__)
        raise ConfigError.of(
            "@parity.check",
            f"{name}{shape}",
            f"is called with the job alone{' and ' + ', '.join(given) if given else ''}",
            "a function of one argument; .parametrize, functools.partial, or a function that makes such functions, "
            "gives the others",
        ) from error
    return parameters


def cases_of(function: Callable[..., Any], mark_index: int) -> list[str]:
    """The words of the cases of mark `mark_index` of a function. Raises ConfigError as `parameters_of`."""
    parameters = parameters_of(function, mark_index)
    return ["-".join(word for word, _ in rows) for rows in product(*(each.rows for each in parameters))]


def case_of(function: Callable[..., Any], mark_index: int, case: int) -> dict[str, Any]:
    """The arguments of one case beside the job. Raises ConfigError as `parameters_of`."""
    # One of many: a register has ten thousands of cases, and each rank of a check asks for its own.
    parameters = parameters_of(function, mark_index)
    rows = next(islice(product(*(each.rows for each in parameters)), case, None))
    return {name: x for each, (_, row) in zip(parameters, rows, strict=True)
            for name, x in zip(each.names, row, strict=True)}  # fmt: skip
