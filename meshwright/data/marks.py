"""The tokens that stand in front of a document and behind it, and those at which a text that is generated ends.

A run says them (`data.begin`, `data.end`), or a tokenizer's own files do (`auto`). Each line is asked in turn:

| of    | asked                                                                                                      |
|-------|------------------------------------------------------------------------------------------------------------|
| end   | `eos_token` of tokenizer_config.json, of special_tokens_map.json; the first special token that is          |
|       | `eos_token_id` of generation_config.json, of config.json; `END`, which tokenizers made here have, their    |
|       | BERT's as well; the token at which the template of tokenizer.json's post-processor ends; the first of      |
|       | `SPELLINGS` that the vocabulary has                                                                        |
| begin | none where `add_bos_token` of tokenizer_config.json is false; where it is true `bos_token` of that file or |
|       | of special_tokens_map.json; else the token with which the post-processor's template begins, or none        |
| stops | `end`, and every `eos_token_id` of generation_config.json, or of config.json where that has none           |

`eos_token_id` is believed where it is a special token alone: transformers writes its class' default into config.json,
which may be any word of a small vocabulary.
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
"""The files beside a tokenizer.json that say which tokens are special."""

SPELLINGS = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""The end of a text as published tokenizers spell it, for a tokenizer.json with nothing beside it that says so."""

Beside = Mapping[str, Mapping[str, Any]]
"""The contents of the files beside a tokenizer.json, by file name."""


class Marks(NamedTuple):
    """Ids. `begin`: None where nothing stands in front of a document; `stops`: where generating ends, `end` among
    them."""

    begin: int | None
    end: int
    stops: frozenset[int]


UNASKED = Marks(None, 0, frozenset())
"""The marks of a tokenizer of which no text is asked, but its words."""


def spelling(token: object) -> str | None:
    """A special token's text, which may stand in a table of its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def ids_of(value: object) -> list[int]:
    """The ids of an `eos_token_id`: a number, several, or none."""
    values = value if isinstance(value, list) else [value]
    # True is an int to Python, and no id.
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def marks_of(library: tokenizers.Tokenizer, where: str, beside: Beside, asked: AskedMarks = AskedMarks()) -> Marks:
    """The marks of a tokenizer. `where`: its file. Raises DataError where a file or the run names a token that it does
    not have, and where nothing names an end."""

    def known(name: str, source: str) -> int:
        token: int | None = library.token_to_id(name)
        if token is None:
            raise DataError(f"{where}: has no token {name!r}, which {source} names")
        return token

    opening, closing = _template(library)
    # An `eos_token_id` that is a word of the vocabulary is a default that nobody has set.
    special = {number for number, token in library.get_added_tokens_decoder().items() if token.special}
    # transformers ends a text at its generation settings' ids, or where these are silent at the model's.
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
    """A token's spelling, and the file that has it."""
    for file in (SETTINGS, SPECIAL_TOKENS):
        if (text := spelling(beside.get(file, {}).get(key))) is not None:
            return text, f"{key} of {file}"
    return None


def _template(library: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """The special tokens with which the post-processor's template of one text begins and ends."""
    if library.post_processor is None:
        return None, None
    for one in _processors(json.loads(library.post_processor.__getstate__())):  # its JSON alone: a vocabulary is long
        if one["type"] == "TemplateProcessing":
            single = one["single"]
            ids = {name: token["ids"] for name, token in one["special_tokens"].items()}
            ends = (single[0].get("SpecialToken"), single[-1].get("SpecialToken")) if single else (None, None)
            first, last = (ids[end["id"]][-1] if end is not None else None for end in ends)
            return first, last
        if one["type"] in ("BertProcessing", "RobertaProcessing"):
            return int(one["cls"][1]), int(one["sep"][1])
    return None, None


def _processors(processor: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A post-processor, or those of a sequence of them."""
    if processor["type"] != "Sequence":
        yield processor
        return
    for inner in processor["processors"]:
        yield from _processors(inner)
