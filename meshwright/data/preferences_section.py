"""The data section of pairs of answers, rendered by a chat template; only the answers are learned. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshwright.data.messages_section import ChatSection


class PreferenceData(ChatSection):
    """Two answers to one prompt: records with the keys chosen and rejected (preference_records.py)."""

    kind: Literal["preferences"]
    gives: ClassVar[str] = "tokens"
    packs: ClassVar[Literal["", "text", "pairs", "messages", "preferences"]] = "preferences"
    rows: ClassVar[int] = 2
    corpus_by: ClassVar[str] = "meshwright.data.preferences:preference_corpus"
    samples_by: ClassVar[str] = "meshwright.data.preferences:preference_samples"
    claimed_by: ClassVar[str] = "meshwright.data.preference_records:claims_preferences"
    source_forms: ClassVar[str] = "a jsonl, json or parquet file of pairs, a folder of these, a prepared folder"
