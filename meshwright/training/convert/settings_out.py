"""The JSON files of an export: published files, with changes if the model or the special tokens have changed, or new
files for a model trained from random weights.

Only keys of the published config.json with a changed meaning are rewritten. Tokens that end generation are added to
`eos_token_id`: the end token (data.end), and the token that closes an answer in the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.marks import GENERATION, MODEL, SETTINGS, ids_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.ranks.foreign import parse_json
from meshwright.training.convert.family import Family, as_text
from meshwright.training.convert.folder import Settings

DTYPE_KEYS = ("dtype", "torch_dtype")
"""transformers' key of the weights' dtype, and the key's older name."""
_OF_A_CLASS = ("architectures", "id2label", "label2id")
_EOS = "eos_token_id"


@dataclass(frozen=True)
class TokenizerOut:
    """A checkpoint's tokenizer and the text of its tokenizer.json. `closing`: ids of tokens that close an answer."""

    text: str
    tokenizer: Tokenizer
    closing: Sequence[int] = ()


def settings_texts(
    family: Family,
    model: Any,
    published: Mapping[str, str],
    tokenizer: TokenizerOut | None,
    dtype: str,
    same_family: bool,
    names: Set[str],
) -> dict[str, str]:
    """Return the texts of an export's JSON files, by file name.

    Args:
        family: the exported form.
        model: the model's section.
        published: texts of the files imported with the weights.
        tokenizer: the checkpoint's tokenizer, if any.
        dtype: torch's name of the weights' dtype.
        same_family: whether the published files are of a model of this family.
        names: the exported tensors.
    """
    original = parse_json(published[MODEL]) if MODEL in published else None
    settings = family.settings(model)
    if original is not None:
        # Our form of the settings is compared for the published model and for the run's. Keys with equal values keep
        # the published value, and so do all keys that we do not write.
        before = family.settings(family.read(Settings(Path("the published config.json"), dict(original)), names))
        changed = {key: value for key, value in settings.items() if key not in before or before[key] != value}
        other_class = {} if same_family else {key: settings[key] for key in _OF_A_CLASS if key in settings}
        settings = {**original, **changed, **other_class}
        settings = {key: value for key, value in settings.items() if key not in family.of_storage}
    # A new file has the older key, which every version of transformers reads.
    key = next((name for name in DTYPE_KEYS if name in settings), DTYPE_KEYS[1])
    settings[key] = dtype
    texts = family.further_files(model) | dict(published)
    if tokenizer is not None:
        text, ids, tokens = family.with_tokenizer(model, tokenizer.text, tokenizer.tokenizer)
        # Published ids stay; only missing ones are added, and in a new file also the absence of a token.
        missing = {key: token for key, token in ids.items() if key not in settings}
        settings |= {key: token for key, token in missing.items() if token is not None or original is None}
        if _EOS in ids:
            settings, texts = _with_ends(settings, texts, tokenizer)
        texts["tokenizer.json"] = text
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.positions, **tokens}
        if SETTINGS not in published:
            texts[SETTINGS] = as_text(about)
        elif original is None or text != tokenizer.text:  # the model's special tokens were appended
            texts[SETTINGS] = as_text(about | parse_json(published[SETTINGS]))
    return texts | {MODEL: as_text(settings)}


def _with_ends(
    settings: dict[str, Any], texts: dict[str, str], tokenizer: TokenizerOut
) -> tuple[dict[str, Any], dict[str, str]]:
    """Add to config.json's settings and the files' texts every `eos_token_id` that transformers' generate needs to stop
    at the same tokens as `generate` here."""
    generation, end = parse_json(texts[GENERATION]) if GENERATION in texts else None, tokenizer.tokenizer.end
    # Generation stops at these ids, the end token first.
    ends = [end, *sorted(tokenizer.tokenizer.marks.stops.union(tokenizer.closing) - {end})]
    # Without an eos_token_id in generation_config.json, transformers' generate reads config.json's.
    if generation is None or not ids_of(generation.get(_EOS)):
        return settings | _ended(settings, tokenizer, ends), texts
    texts = texts | {GENERATION: texts[GENERATION]}
    if ended := _ended(generation, tokenizer, ends):
        texts[GENERATION] = as_text(generation | ended)
    # config.json then needs only the end token, since generate does not read config.json.
    return settings | _ended(settings, tokenizer, [end]), texts


def _ended(settings: Mapping[str, Any], tokenizer: TokenizerOut, wanted: Sequence[int]) -> dict[str, Any]:
    """Return a new `eos_token_id` with the `wanted` ids; {} if the settings have all of these already."""
    stored = ids_of(settings.get(_EOS))
    if set(wanted) <= set(stored):
        return {}
    special = tokenizer.tokenizer.special_tokens
    # transformers writes the class's default (LlamaConfig: 2) into every config.json: a stored id is kept only if the
    # tokenizer has a special token with that id.
    special_ids = [token for token in stored if tokenizer.tokenizer.name_of(token) in special]
    ids = list(dict.fromkeys([*special_ids, *wanted]))
    return {_EOS: ids[0] if len(ids) == 1 else ids}
