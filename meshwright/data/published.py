"""The settings that weights and a tokenizer come with: a run keeps them beside its own, and an export writes them back.

| file                    | says                                                        | from the folder of |
|-------------------------|-------------------------------------------------------------|--------------------|
| config.json             | the model, its dtype, the ids of special tokens             | the weights        |
| generation_config.json  | how transformers generates, and at which tokens it ends     | the weights        |
| tokenizer_config.json   | the spellings of special tokens, often the chat template    | the tokenizer      |
| special_tokens_map.json | the spellings of special tokens                             | the tokenizer      |
| chat_template.jinja     | the chat template; a run's own (`data.template`) goes first | the tokenizer      |

No torch here: the launcher writes them into the run's folder, and rank 0 into every checkpoint.
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
"""The folder that holds them in a run's folder."""


def read_published(folder: Path) -> dict[str, str]:
    """The texts of those that a folder has, by file name. Raises DataError where one cannot be read."""
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
    """The texts that a run keeps. `weights`: the folder that its weights come from. Raises DataError."""
    texts = {} if weights is None else read_published(weights)
    tokenizer = Path(data.tokenizer).expanduser() if isinstance(data, TokenSection) else None
    # A tokenizer of its own brings its own settings; those of the weights' tokenizer would be wrong beside it.
    if tokenizer is not None and tokenizer.is_file() and (weights is None or not weights.samefile(tokenizer.parent)):
        of_weights = {name: text for name, text in texts.items() if name not in _OF_TOKENIZER}
        beside = read_published(tokenizer.parent)
        texts = of_weights | {name: text for name, text in beside.items() if name in _OF_TOKENIZER}
    template = None
    with suppress(DataError):  # of a prepared folder, which needs none any more
        template = data.chat_template()
    return texts if template is None else with_template(texts, template.text)


def with_template(texts: dict[str, str], template: str) -> dict[str, str]:
    """The texts with another chat template, which is in them once."""
    settings = parse_json(texts.get(SETTINGS, "{}"))
    named = settings.get("chat_template")
    if texts.get(TEMPLATE, named) == template or (TEMPLATE not in texts and isinstance(named, list)):
        return texts
    changed = {TEMPLATE: template}
    if settings.pop("chat_template", None) is not None:
        changed[SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return texts | changed
