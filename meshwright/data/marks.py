"""Marks: the tokens before and after each document, and the tokens that end generation.

The config names the marks (`data.begin`, `data.end`), or the tokenizer's files do (`auto`). For `auto`, the first
source with an answer decides, in this order:

| mark  | sources in order                                                                                           |
|-------|------------------------------------------------------------------------------------------------------------|
| end   | `eos_token` of tokenizer_config.json, of special_tokens_map.json; the first special token of               |
|       | `eos_token_id` of generation_config.json, of config.json; `END`, in the vocabulary of all tokenizers made  |
|       | here; the last token of the template of tokenizer.json's post-processor; the first of `SPELLINGS` in the   |
|       | vocabulary                                                                                                 |
| begin | none if `add_bos_token` of tokenizer_config.json is false; if true `bos_token` of that file or of          |
|       | special_tokens_map.json; else the first token of the post-processor's template, or none                    |
| stops | `end`, and every `eos_token_id` of generation_config.json, or of config.json if the former has none        |

`eos_token_id` counts only if the id is a special token: transformers writes a class default into config.json, which may
be any word of a small vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers

from meshwright.data.marks_section import AUTO, END, NONE, AskedMarks
from meshwright.ranks.errors import DataError

SETTINGS, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"
BESIDE = (SETTINGS, SPECIAL_TOKENS, GENERATION, MODEL)
"""The files next to a tokenizer.json that name special tokens."""

SPELLINGS = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""Spellings of the end token in published tokenizers, for a tokenizer.json without other files that name the token."""

Beside = Mapping[str, Mapping[str, Any]]
"""The contents of the files next to a tokenizer.json, by file name."""


class Marks(NamedTuple):
    """Ids of the marks. `begin`: None if no token precedes a document. `stops`: the ids that end generation, including
    `end`."""

    begin: int | None
    end: int
    stops: frozenset[int]


UNASKED = Marks(None, 0, frozenset())
"""The marks of a tokenizer that is loaded only for its vocabulary."""


def spelling(token: object) -> str | None:
    """Return a special token's text, given as text or as `content` in a table; None if neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def ids_of(value: object) -> list[int]:
    """List the ids of an `eos_token_id`: a number, a list, or none."""
    values = value if isinstance(value, list) else [value]
    # True is an int in Python, and no id.
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def marks_of(library: tokenizers.Tokenizer, where: str, beside: Beside, asked: AskedMarks = AskedMarks()) -> Marks:
    """Find the marks of a tokenizer.

    Args:
        library: the tokenizer.
        where: the tokenizer's file, for messages.
        beside: contents of the files next to the tokenizer's.
        asked: the config's marks.

    Raises:
        DataError: a file or the config names a token missing from the vocabulary, or no source names an end.
    """

    def known(name: str, source: str) -> int:
        token: int | None = library.token_to_id(name)
        if token is None:
            raise DataError(f"{where}: has no token {name!r}, which {source} names")
        return token

    opening, closing = _template(library)
    # An `eos_token_id` that is an ordinary word of the vocabulary is an unchanged default.
    special = {token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special}
    # transformers ends generation at the ids of generation_config.json, or without these at config.json's.
    listed = (ids_of(beside.get(file, {}).get("eos_token_id")) for file in (GENERATION, MODEL))
    stops = [token for token in next(filter(None, listed), []) if token in special]
    if asked.end not in (AUTO, NONE):
        end = known(asked.end, "data.end")
    elif named := _named(beside, "eos_token"):
        end = known(*named)
    else:
        spelled = (library.token_to_id(name) for name in SPELLINGS)
        candidates = (*stops[:1], library.token_to_id(END), closing, *spelled)
        found = next((token for token in candidates if token is not None), None)
        if found is None:
            also = f"{SETTINGS} beside it would name another, as data.end does"
            raise DataError(f"{where}: has no end-of-text token; looked for {', '.join((END, *SPELLINGS))}; {also}")
        end = int(found)
    begin: int | None = None
    settings = beside.get(SETTINGS, {})
    if asked.begin not in (AUTO, NONE):
        begin = known(asked.begin, "data.begin")
    elif asked.begin == AUTO and settings.get("add_bos_token") is not False:
        begin = opening
        if settings.get("add_bos_token") and (named := _named(beside, "bos_token")):
            begin = known(*named)
    return Marks(begin, end, frozenset((end, *stops)))


def _named(beside: Beside, key: str) -> tuple[str, str] | None:
    """Return a token's spelling, and the key and file with that spelling; None if no file has one."""
    for file in (SETTINGS, SPECIAL_TOKENS):
        if (text := spelling(beside.get(file, {}).get(key))) is not None:
            return text, f"{key} of {file}"
    return None


def _template(library: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """Return the first and the last special token of the post-processor's template for one text."""
    if library.post_processor is None:
        return None, None
    for processor in _processors(json.loads(library.post_processor.__getstate__())):  # without the long vocabulary
        if processor["type"] == "TemplateProcessing":
            single = processor["single"]
            ids = {name: token["ids"] for name, token in processor["special_tokens"].items()}
            ends = (single[0].get("SpecialToken"), single[-1].get("SpecialToken")) if single else (None, None)
            first, last = (ids[end["id"]][-1] if end is not None else None for end in ends)
            return first, last
        if processor["type"] in ("BertProcessing", "RobertaProcessing"):
            return int(processor["cls"][1]), int(processor["sep"][1])
    return None, None


def _processors(processor: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a post-processor, or each post-processor of a sequence."""
    if processor["type"] != "Sequence":
        yield processor
        return
    for inner in processor["processors"]:
        yield from _processors(inner)
