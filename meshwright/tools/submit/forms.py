"""Checks of setting values: a word in an engine's file must match a form, is quoted, or is refused."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line ends, other control characters, and bytes that are not UTF-8: refused in every word of an engine's file."""

CONTROLS_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""The same without tab and newline, which a text of several lines may have."""

_PLAIN = re.compile(r"[\w@%+=:,./&|*!\[\]()^~-]*", re.ASCII)


def in_form(pattern: str | re.Pattern[str], rule: str) -> AfterValidator:
    """Return a validator that raises ValueError with `rule` for a text that does not match the whole pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


def directive_word(text: str) -> str:
    """Return a value for an #SBATCH line, quoted if sbatch would otherwise split the value or find a comment.

    No shell reads these lines; sbatch has rules of its own. Quotes group words; a backslash escapes the next character,
    also between quotes; # begins a comment outside of quotes.
    """
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


Label = Annotated[
    str, in_form(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "is no name of a Kubernetes object: a-z, 0-9, - and .")
]
Variable = Annotated[str, in_form(r"[A-Za-z_][A-Za-z0-9_]*", "is no variable's name: letters, digits and _")]
