"""A single value in place of a section: `layout: {data: 4}`, `layout.tensor=megatron`, `validation: none`.

In a run file the value is replaced by the section. A word is replaced by the word of one field, so that
`layout.data=4` keeps the file's `layout.data.sync`. The JSON schema and the reference read the same table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "bf16": {"level": "O2", "dtype": "bf16"},
    "fp16": {"level": "O2", "dtype": "fp16"},
    "float32": {"level": "O0", "dtype": "float32"},
    "float64": {"level": "O0", "dtype": "float64"},
}
"""Precisions that a run file may name in a word: `precision: bf16`."""


@dataclass(frozen=True)
class Shorthand:
    """The fields that a bare value sets in a section.

    word: the field that a text sets.
    number: the field that a number sets.
    off: the field that `none`, `no`, `off`, null and false set to 0.
    """

    word: str = ""
    number: str = ""
    off: str = ""

    def field_of(self, value: object) -> tuple[str, object] | None:
        """Return the field that a bare value sets, and the field's value; None if the value sets no field."""
        if self.off and (value is None or value is False or value in ("none", "no", "off")):
            return self.off, 0
        if isinstance(value, str) and self.word:
            return self.word, value
        if isinstance(value, int | float) and not isinstance(value, bool) and self.number:
            return self.number, value
        return None


SHORTHANDS: Mapping[str, Shorthand] = {
    "data": Shorthand(word="source"),
    "layout.data": Shorthand(word="sync", number="size"),
    "layout.pipeline": Shorthand(word="schedule", number="size"),
    "layout.context": Shorthand(word="kind", number="size"),
    "layout.tensor": Shorthand(word="kind", number="size"),
    "memory.offload": Shorthand(word="to"),
    "optimizer": Shorthand(word="name"),
    "optimizer.schedule": Shorthand(word="decay"),
    "checkpoint": Shorthand(number="every"),
    "validation": Shorthand(number="every", off="every"),
    "bits": Shorthand(word="kind"),
    "check": Shorthand(number="every", off="every"),
    "logging": Shorthand(word="level"),
    "restarts": Shorthand(number="times", off="times"),
}
"""The sections with shorthands; a nested section follows the section that contains it."""

TAGS = ("layout.tensor.kind", "model.rope.kind")
"""Fields that decide a section's fields: a word with another value empties the section first."""


def in_words(field: str, value: object) -> tuple[str, object]:
    """Translate a word to the field that it sets: (layout.data, 4) -> (layout.data.size, 4)."""
    meant = SHORTHANDS[field].field_of(value) if field in SHORTHANDS else None
    return (field, value) if meant is None else (f"{field}.{meant[0]}", meant[1])


def spelt_out(field: str, value: object) -> object:
    """Return a run file's value of a field, with a shorthand replaced by the section."""
    if field == "model" and isinstance(value, str):
        return {"base": value}
    if field == "precision" and isinstance(value, str) and value in PRECISIONS:
        return dict(PRECISIONS[value])
    name, meant = in_words(field, value)
    return value if name == field else {name.rpartition(".")[2]: meant}


def spell_out(tree: dict[str, Any]) -> None:
    """Replace every shorthand in a run's tree by the section."""
    for field in ("precision", *SHORTHANDS):
        *parents, last = field.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            node[last] = spelt_out(field, node[last])


def begin_anew(section: dict[str, Any], field: str, value: object, words: Collection[str]) -> None:
    """Empty a section if a word changes its kind. Fields that earlier words have set are kept."""
    parent, _, tag = field.rpartition(".")
    if field in TAGS and section.get(tag, value) != value and parent not in words:
        for key in [key for key in section if f"{parent}.{key}" not in words]:
            del section[key]
