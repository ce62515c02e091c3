"""The files beside exported weights: those that the weights came with, changed where the model or its marks have
changed; of a run that drew its weights, our own.

config.json is the published one with the keys whose meaning the model has changed. An end of generation that
transformers would run past is added to its `eos_token_id`: the end token (data.end), and the token with which a chat
template closes an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.convert.family import Family, as_text
from meshwright.convert.folder import Settings
from meshwright.data.marks import GENERATION, MODEL, SETTINGS, ids_of
from meshwright.data.tokenizer import Tokenizer

DTYPE_KEYS = ("dtype", "torch_dtype")
"""transformers' key of the weights' dtype, and its older name."""
_OF_A_CLASS = ("architectures", "id2label", "label2id")
_EOS = "eos_token_id"


@dataclass(frozen=True)
class TokenizerOut:
    """A checkpoint's tokenizer, and its file's text. `closing`: the special tokens with which answers close."""

    text: str
    tokenizer: Tokenizer
    closing: Sequence[int] = ()

    @property
    def ends(self) -> list[int]:
        """The ids at which a text that is generated ends, the end token first."""
        end = self.tokenizer.end
        rest = sorted(self.tokenizer.marks.stops.union(self.closing) - {end})
        return [end, *rest]


def settings_texts(
    family: Family,
    model: Any,
    published: Mapping[str, str],
    tokenizer: TokenizerOut | None,
    dtype: str,
    same_family: bool,
    names: Set[str],
) -> dict[str, str]:
    """The texts by file name. `published`: those that the weights and the tokenizer came with; `same_family`: whether
    the weights came from a model of this family; `names`: the exported tensors; `dtype`: as torch names it."""
    kept = json.loads(published[MODEL]) if MODEL in published else None
    settings = family.settings(model)
    if kept is not None:
        # Both are our own words for a model, of the published file's and of the run's: where they agree the published
        # key stays as it is written, and every other key of the file stays, too. A list of harmless keys would age.
        before = family.settings(family.read(Settings(Path("the published config.json"), dict(kept)), names))
        changed = {key: value for key, value in settings.items() if key not in before or before[key] != value}
        other_class = {} if same_family else {key: settings[key] for key in _OF_A_CLASS if key in settings}
        settings = {**kept, **changed, **other_class}
    # Under the name that the file has; a new file takes the older one, which every transformers reads.
    key = next((name for name in DTYPE_KEYS if name in settings), DTYPE_KEYS[1])
    settings[key] = dtype
    texts = family.further_files(model) | dict(published)
    if tokenizer is not None:
        text, ids, tokens = family.with_tokenizer(model, tokenizer.text, tokenizer.tokenizer)
        # A published id is believed here: what is missing is written, nothing is overwritten.
        settings |= {key: token for key, token in ids.items() if key not in settings}
        if _EOS in ids:
            settings, texts = _with_ends(settings, texts, tokenizer)
        texts["tokenizer.json"] = text
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.positions, **tokens}
        if SETTINGS not in published:
            texts[SETTINGS] = as_text(about)
        elif kept is None or text != tokenizer.text:  # the model's special tokens were appended
            texts[SETTINGS] = as_text(about | json.loads(published[SETTINGS]))
    return texts | {MODEL: as_text(settings)}


def _with_ends(
    settings: dict[str, Any], texts: dict[str, str], tokenizer: TokenizerOut
) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json's settings and the texts, in which transformers ends a text where `generate` here does."""
    generation = json.loads(texts[GENERATION]) if GENERATION in texts else None
    # Without an eos_token_id there, transformers' generate takes config.json's.
    if generation is None or not ids_of(generation.get(_EOS)):
        return settings | _ended(settings, tokenizer, tokenizer.ends), texts
    texts = texts | {GENERATION: texts[GENERATION]}
    if ended := _ended(generation, tokenizer, tokenizer.ends):
        texts[GENERATION] = as_text(generation | ended)
    # config.json then needs the end token alone; who reads it only asks where a text ends.
    return settings | _ended(settings, tokenizer, [tokenizer.tokenizer.end]), texts


def _ended(settings: Mapping[str, Any], tokenizer: TokenizerOut, wanted: Sequence[int]) -> dict[str, Any]:
    """The `eos_token_id` with all that is wanted; nothing where it has it. Ids that are no special token go."""
    there = ids_of(settings.get(_EOS))
    if set(wanted) <= set(there):
        return {}
    special = tokenizer.tokenizer.special_tokens
    # transformers writes its class's default (LlamaConfig: 2) into every config.json: an id counts where the tokenizer
    # has a special token under it.
    believed = [token for token in there if tokenizer.tokenizer.name_of(token) in special]
    ids = list(dict.fromkeys([*believed, *wanted]))
    return {_EOS: ids[0] if len(ids) == 1 else ids}
