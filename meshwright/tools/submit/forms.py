"""Forms of settings: a word of an engine's file is in its form, quoted, or refused."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line ends, other control characters, and bytes that are not UTF-8: no engine's file holds these in a word."""

CONTROLS_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""The same without tab and newline, which a text of several lines holds."""

_PLAIN = re.compile(r"[\w@%+=:,./&|*!\[\]()^~-]*", re.ASCII)


def in_form(pattern: str | re.Pattern[str], rule: str) -> AfterValidator:
    """Return a check of a setting's text, which says `rule` of a text that does not have the pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


def directive_word(text: str) -> str:
    """Return a value of an #SBATCH line, quoted if sbatch would read it as two words, or its rest as a comment.

    sbatch reads such lines by its own rule, and no shell reads them: quotes group, a backslash takes the next character
    as it is, also between quotes, and # begins a comment outside of quotes.
    """
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


Label = Annotated[
    str, in_form(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "is no name of a Kubernetes object: a-z, 0-9, - and .")
]
Variable = Annotated[str, in_form(r"[A-Za-z_][A-Za-z0-9_]*", "is no variable's name: letters, digits and _")]
