"""A single value in place of a section: `layout: {data: 4}`, `layout.tensor=megatron`, `validation: none`.

A run file's value is spelt out into the section; a word's becomes the field's own word, so that `layout.data=4` leaves
the file's `layout.data.sync` as it is. JSON's schema and the reference read the same table.
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
    """The fields of a section that a bare value may stand for: `word` a text, `number` a number.

    `off`: the field that `none`, `no`, `off`, null and false make 0.
    """

    word: str = ""
    number: str = ""
    off: str = ""

    def field_of(self, value: object) -> tuple[str, object] | None:
        """The field, and what it is set to; None for a value that stands for none."""
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
"""The sections that a bare value may stand for, those that lie in others behind these."""

TAGS = ("layout.tensor.kind", "model.rope.kind")
"""Fields that say which fields a section has: a word with another value begins the section anew."""


def in_words(field: str, value: object) -> tuple[str, object]:
    """The field that a word sets, and its value: (layout.data, 4) -> (layout.data.size, 4)."""
    meant = SHORTHANDS[field].field_of(value) if field in SHORTHANDS else None
    return (field, value) if meant is None else (f"{field}.{meant[0]}", meant[1])


def spelt_out(field: str, value: object) -> object:
    """The value that a run file has under a field, as a section where it is a bare value that stands for one."""
    if field == "model" and isinstance(value, str):
        return {"base": value}
    if field == "precision" and isinstance(value, str) and value in PRECISIONS:
        return dict(PRECISIONS[value])
    name, meant = in_words(field, value)
    return value if name == field else {name.rpartition(".")[2]: meant}


def spell_out(tree: dict[str, Any]) -> None:
    """Replace every bare value that stands for a section."""
    for field in ("precision", *SHORTHANDS):
        *parents, last = field.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            node[last] = spelt_out(field, node[last])


def begin_anew(section: dict[str, Any], field: str, value: object, words: Collection[str]) -> None:
    """Empty a section to which a word gives another kind, but for what earlier words have set in it."""
    parent, _, tag = field.rpartition(".")
    if field in TAGS and section.get(tag, value) != value and parent not in words:
        for key in [key for key in section if f"{parent}.{key}" not in words]:
            del section[key]
