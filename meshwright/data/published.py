"""Published settings of weights and a tokenizer. A run keeps a copy, and an export writes the copy.

| file                    | says                                                        | from the folder of |
|-------------------------|-------------------------------------------------------------|--------------------|
| config.json             | the model, its dtype, the ids of special tokens             | the weights        |
| generation_config.json  | transformers' settings of generation, and the end tokens    | the weights        |
| tokenizer_config.json   | the spellings of special tokens, often the chat template    | the tokenizer      |
| special_tokens_map.json | the spellings of special tokens                             | the tokenizer      |
| chat_template.jinja     | the chat template; a run's own (`data.template`) goes first | the tokenizer      |

This module imports no torch. The launcher writes the files into the run's folder, and rank 0 into every checkpoint.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from meshwright.data.chat import TEMPLATE
from meshwright.data.marks import GENERATION, MODEL, SETTINGS, SPECIAL_TOKENS
from meshwright.data.section import DataSection, TokenSection
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import parse_json, read_text

FILES = (MODEL, GENERATION, SETTINGS, SPECIAL_TOKENS, TEMPLATE)
_OF_TOKENIZER = (SETTINGS, SPECIAL_TOKENS, TEMPLATE)

SOURCE = "source"
"""The folder of the published files in a run's folder."""


def read_published(folder: Path) -> dict[str, str]:
    """Read the published files of a folder, by file name. Raises DataError if a file cannot be read."""
    texts = {}
    for name in FILES:
        path = folder / name
        if path.is_file():
            try:
                texts[name] = read_text(path)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: cannot be read: {error}") from error
    return texts


def published_for(data: DataSection, weights: Path | None) -> dict[str, str]:
    """Read the files that a run keeps. `weights`: the folder of initial weights, if any. Raises DataError."""
    texts = {} if weights is None else read_published(weights)
    tokenizer = Path(data.tokenizer).expanduser() if isinstance(data, TokenSection) else None
    # A tokenizer from another folder has other settings than the weights' tokenizer.
    if tokenizer is not None and tokenizer.is_file() and (weights is None or not weights.samefile(tokenizer.parent)):
        of_weights = {name: text for name, text in texts.items() if name not in _OF_TOKENIZER}
        beside = read_published(tokenizer.parent)
        texts = of_weights | {name: text for name, text in beside.items() if name in _OF_TOKENIZER}
    template = None
    with suppress(DataError):  # a prepared folder needs no template any more
        template = data.chat_template()
    return texts if template is None else with_template(texts, template.text)


def with_template(texts: dict[str, str], template: str) -> dict[str, str]:
    """Replace the chat template in the texts, so that only one file contains a template."""
    settings = parse_json(texts.get(SETTINGS, "{}"))
    named = settings.get("chat_template")
    if texts.get(TEMPLATE, named) == template or (TEMPLATE not in texts and isinstance(named, list)):
        return texts
    changed = {TEMPLATE: template}
    if settings.pop("chat_template", None) is not None:
        changed[SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return texts | changed
