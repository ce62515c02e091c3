"""Account of a job's file: fields that a plan reads, values that a plan assumes, fields that a plan leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from meshwright.ranks.errors import ConfigError

NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that count as not set."""


class Account:
    """A file's fields by dotted name. Each field is read, assumed or left out.

    Attributes:
        read: The fields that the plan takes, with their values.
        assumed: The fields that the file lacks, with the value and its source.
    """

    def __init__(self, tree: Mapping[str, Any], harmless: str = "") -> None:
        """Take a file's content: nested mappings, or flags by name.

        Args:
            tree: The content.
            harmless: Patterns (fnmatch), separated by spaces, of fields that change neither seconds nor memory.
        """
        self._fields = dict(fields_of(tree))
        self._harmless = harmless.split()
        self.read: dict[str, Any] = {}
        self.assumed: dict[str, tuple[Any, str]] = {}
        self._others: dict[str, Any] = {}

    def says(self, name: str) -> bool:
        """Return True if the file sets the field."""
        return self._fields.get(name) not in NOTHING

    def get(self, *names: str, default: Any = None, why: str = "") -> Any:
        """Return the value of the first of these fields that the file sets; else the default.

        Args:
            names: Names of one field in different versions of the program.
            default: The program's own value.
            why: The source of the default; with a source the default is listed as assumed.
        """
        for name in names:
            if self.says(name):
                self.read[name] = self._fields[name]
                return self.read[name]
        if why:
            self.assumed[names[0]] = (default, why)
        return default

    def number(self, *names: str, default: int = 1, why: str = "") -> int:
        """Return the value of a field as a whole number; the texts `none` and `null` give the default.

        Raises:
            ValueError: The value is no whole number.
        """
        value = self.get(*names, default=default, why=why)
        return default if str(value).lower() in ("none", "null") else int(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return the value of a boolean field; a text such as `yes` or `False` is read as in YAML 1.1."""
        value = self.get(*names, default=default)
        return value if isinstance(value, bool) else str(value).lower() in ("true", "yes", "on", "1")

    def word(self, *names: str, known: Sequence[tuple[Any, Any]], default: Any, why: str = "") -> Any:
        """Translate a field's word to our word.

        Args:
            names: Names of one field in different versions of the program.
            known: Pairs (the program's word in small letters, our word).
            default: Our word, if the file does not set the field.
            why: As in `get`.

        Raises:
            ConfigError: The word is not in `known`. A default would plan another job.
        """
        told = self.get(*names, default=None)
        if told is None:
            return self.get(*names, default=default, why=why)
        for theirs, ours in known:
            if str(told).lower() == str(theirs):
                return ours
        raise ConfigError.of(names[0], told, "has no word of ours", ", ".join(str(theirs) for theirs, _ in known))

    def agree(self, name: str, *values: Any) -> None:
        """Count a field as read if the file's value is one of these, as a plan assumes; else leave the field out."""
        if str(self._fields.get(name)).lower() in values:
            self.get(name)

    def leave(self, name: str) -> None:
        """List a field as left out, since a reader has read the value and cannot express it."""
        if self.says(name):
            self.read.pop(name, None)

    def section(self, prefix: str) -> Section:
        """Return the fields below a name as nested mappings. A field is read when the section is asked for it."""
        found = {name: value for name, value in self._fields.items() if name.startswith(f"{prefix}.")}
        section = Section(prefix, found, self.read)
        for name, value in found.items():
            *above, last = name.removeprefix(f"{prefix}.").split(".")
            holder: dict[str, Any] = section
            for key in above:
                holder = holder.setdefault(key, {})
            holder[last] = value
        return section

    def assume(self, name: str, value: Any, why: str) -> None:
        """List a value that no field of the file gives."""
        self.assumed[name] = (value, why)

    def assume_neither(self, conditions: Sequence[str]) -> None:
        """List conditions of a Python file that its text does not decide; neither branch was read."""
        for condition in conditions:
            self.assume(f"if {condition}", "neither branch", "the condition hangs on values that the file does not set")

    def merge(self, account: Account, prefix: str) -> None:
        """Add the account of a second file, with a prefix before each name."""
        self.read |= {f"{prefix}{name}": value for name, value in account.read.items()}
        self.assumed |= {f"{prefix}{name}": value for name, value in account.assumed.items()}
        self._others |= {f"{prefix}{name}": value for name, value in account.left_out.items()}

    @property
    def left_out(self) -> dict[str, Any]:
        """Fields that are set, may change a step, and are not read."""
        unread = {
            name: value
            for name, value in self._fields.items()
            if value not in NOTHING and name not in self.read
            and not any(fnmatchcase(name, pattern) for pattern in self._harmless)
        }  # fmt: skip
        return unread | self._others


class Section(dict[str, Any]):
    """Fields of a section of a file. A field that a reader asks for is written into `read`, with all inner fields."""

    def __init__(self, prefix: str, fields: Mapping[str, Any], read: dict[str, Any]) -> None:
        super().__init__()
        self._prefix, self._all, self._read = prefix, fields, read

    def __getitem__(self, key: str) -> Any:
        self._read |= self._below(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read |= self._below(key)
        return super().get(key, default)

    def _below(self, key: str) -> dict[str, Any]:
        name = f"{self._prefix}.{key}"
        return {each: value for each, value in self._all.items() if each == name or each.startswith(f"{name}.")}


def fields_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted name."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from fields_of(value, f"{name}.")
        else:
            yield name, value
