"""The settings for tokens around a document: `data.begin` and `data.end`. marks.py finds the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from meshwright.config.section import rule
from meshwright.ranks.errors import DataError, Problem
from meshwright.ranks.foreign import read_json

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.data.section import TokenSection

AUTO, NONE = "auto", "none"
END = "<|endoftext|>"
"""The end token of tokenizers made here."""


class AskedMarks(NamedTuple):
    """The two settings: auto, none, or a token's spelling."""

    begin: str = AUTO
    end: str = AUTO


NO_BEGIN = AskedMarks(begin=NONE)
"""The settings for models with a separate template of documents."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file; empty if the file does not exist.

    Raises:
        DataError: the file cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


@rule("data.begin", "data.end", "data.tokenizer", "data.source", "data.mixture")
def marks_are_tokens(config: Config) -> Iterator[Problem]:
    """Refuse unknown marks. A tokenizer made here has only the end token; a prepared folder contains a tokenizer."""
    data = cast("TokenSection", config.data)  # a rule of TokenSection
    path = Path(data.tokenizer).expanduser()
    if all((Path(source).expanduser() / data.header).is_file() for source in data.sources):
        return
    for field, name in (("data.begin", data.asked.begin), ("data.end", data.asked.end)):
        if name in (AUTO, NONE) or (name == END and not path.is_file()):
            continue
        if not path.is_file():
            yield Problem(field, name, f"is no token of data.tokenizer={data.tokenizer}", f"{AUTO}, {NONE}, {END}")
            continue
        tree = read_settings(path)
        added = [str(token["content"]) for token in tree.get("added_tokens", []) if token.get("special")]
        if name not in added and name not in tree.get("model", {}).get("vocab", ()):
            yield Problem(field, name, f"is no token of {path}", ", ".join((AUTO, NONE, *added[:12])))
