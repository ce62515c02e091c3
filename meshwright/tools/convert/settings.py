"""Hugging Face's config.json, read with suspicion: what our models cannot compute is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from meshwright.config.messages import problems_of
from meshwright.errors import CheckpointError
from meshwright.models.section import Transformer
from meshwright.section import shown

AnyTransformer = TypeVar("AnyTransformer", bound=Transformer)


class Settings:
    """The settings of a folder."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where there is no such file, or it holds no settings."""
        self.path = path
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path.parent} is no Hugging Face folder: it has no {path.name}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{path} holds no settings")
        self.values: dict[str, Any] = settings

    def refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}")

    def get(self, key: str, default: object) -> Any:
        return self.values.get(key, default)

    def require(self, *keys: str) -> None:
        """Raises CheckpointError where a key is missing."""
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise CheckpointError(f"{self.path} lacks {', '.join(missing)}")

    def only(self, key: str, *valid: object) -> None:
        """Raises CheckpointError unless the key has a valid value; a missing one means the first."""
        value = self.values.get(key, valid[0])
        if value not in valid:
            raise self.refused(f"{key}={value} is not supported; valid: {', '.join(map(str, valid))}")

    def one_number(self, keys: Sequence[str], default: float) -> float:
        """The one value of several keys: ours is one number for all of them."""
        values = {key: self.values.get(key, default) for key in keys}
        for key, value in values.items():
            if not isinstance(value, int | float):
                raise self.refused(f"{key}={shown(value)} is not a number")
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{key}={value}" for key, value in values.items())
            raise self.refused(f"{listed} differ, and ours is one number: make them equal in the file")
        return values[keys[0]]

    def section(self, kind: type[AnyTransformer], names: Mapping[str, str], **fields: object) -> AnyTransformer:
        """The model section: `names` are fields under their keys here; a missing key leaves the field's default.

        `inner` is no field of ours, but four times the width.
        """
        read = {field: self.values[key] for field, key in names.items() if key in self.values and field != "inner"}
        try:
            model = kind.model_validate(read | fields, strict=True)  # JSON has types: "2" is no number
        except ValidationError as error:
            first = problems_of(error, [], kind)[0]
            raise self.refused(str(replace(first, field=names.get(first.field, first.field)))) from error
        if "inner" in names:
            heads, hidden = names["heads"], names["hidden"]
            if model.hidden % model.heads:
                raise self.refused(f"{heads}={model.heads} does not divide {hidden}={model.hidden}")
            inner = self.values.get(names["inner"])
            if inner not in (None, model.inner):
                ours = f"ours is 4 x {hidden} = {model.inner}"
                raise self.refused(f"{names['inner']}={inner} is not supported: {ours}")
        return model


def as_text(content: dict[str, object]) -> str:
    """A JSON file's text."""
    return json.dumps(content, indent=2) + "\n"
