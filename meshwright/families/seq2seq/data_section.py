"""The data sections of encoder-decoders: pairs of texts, and spans cut out of a text. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.config.section import Positive, Rule, at_most, divisors, listed, rule
from meshwright.data.forms_section import form_of
from meshwright.data.records_section import RecordSection
from meshwright.data.section import (
    BUCKET_MULTIPLE,
    DIGITS,
    PREPARED,
    SENTINELS,
    STDLIB,
    Lengths,
)
from meshwright.data.text_section import MixedSection
from meshwright.families.seq2seq.spans_section import span_lengths
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


def pairs_form(source: str) -> str:
    """Return the form of a source with both texts of a pair: tsv or records; empty for a plain text."""
    path = Path(source).expanduser()
    form = form_of(path)
    if path.is_dir():
        return "records"
    return "" if form in ("text", None) else "tsv" if form == "tsv" else "records"


@rule("model.family", "data.kind", "data.source", "data.target", "data.languages")
def pairs_have_a_form(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, PairData), data
    if data.source == DIGITS:
        return
    # Forms that hold both texts of a pair; a plain text file needs its partner.
    form = STDLIB if data.source == STDLIB else pairs_form(data.source)
    alone = form != ""
    if data.target is not None and alone:
        rule_text = f"has no effect: data.source={data.source} holds both texts of a pair"
        yield Problem("data.target", data.target, rule_text, "leave it out")
    elif data.target is not None and not Path(data.target).expanduser().is_file():
        yield Problem("data.target", data.target, "is no such file", "a text file, whose line i goes with line i")
    elif data.target is None and not alone and Path(data.source).expanduser().exists():
        valid = "stdlib, a tsv file, records (jsonl, json, csv, parquet), a prepared folder, or a text with data.target"
        yield Problem("data.source", data.source, "holds no pairs of texts", valid)
    if data.languages is not None and (form != "records" or (Path(data.source).expanduser() / PREPARED).is_file()):
        named = f"[{', '.join(data.languages)}]"
        yield Problem("data.languages", named, "names keys of records, which data.source has not", "leave it out")


@rule("data.buckets", "data.sequence")
def buckets_differ_in_length(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, PairData), data
    most = math.ceil(data.sequence / BUCKET_MULTIPLE)
    if data.buckets > most:
        rule_text = f"is more than the multiples of {BUCKET_MULTIPLE} up to data.sequence={data.sequence}"
        yield Problem("data.buckets", data.buckets, rule_text, at_most(most))


@rule("data.buckets", "layout.pipeline.size")
def stages_send_one_shape(config: Config) -> Iterator[Problem]:
    data, size = config.data, config.layout.pipeline.size
    assert isinstance(data, PairData), data
    # Receives are posted before the batch is known, so all messages must have one shape.
    if data.buckets > 1 and size > 1:
        rule_text = f"makes batches of many lengths, and layout.pipeline.size={size} stages send messages of one"
        yield Problem("data.buckets", data.buckets, rule_text, "1, or layout.pipeline.size=1")


@rule("data.buckets", "layout.tensor", "data.sequence")
def buckets_are_cut_evenly(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, PairData), data
    for cut in config.layout.tensor.cuts(config) if data.buckets > 1 else ():
        # Every bucket's length is a multiple of BUCKET_MULTIPLE, and no larger divisor is guaranteed.
        if cut.field == "data.sequence" and BUCKET_MULTIPLE % cut.parts:
            rule_text = f"does not divide the lengths of data.buckets={data.buckets}, as sequence_parallel asks"
            yield Problem(cut.by, cut.parts, rule_text, listed(divisors(BUCKET_MULTIPLE)))


class PairData(RecordSection):
    """Pairs of texts: stdlib (functions and their docstrings), a tsv file, records, or a text file and `target`."""

    kind: Literal["pairs"]
    gives: ClassVar[str] = "sequences"
    packs: ClassVar[Literal["text", "pairs"]] = "pairs"
    corpus_by: ClassVar[str] = "meshwright.families.seq2seq.pairs:pair_corpus"
    samples_by: ClassVar[str] = "meshwright.families.seq2seq.pairs_samples:pair_samples"
    claimed_by: ClassVar[str] = "meshwright.families.seq2seq.pairs:claims_pairs"
    source_names: ClassVar[tuple[str, ...]] = (STDLIB,)
    source_forms: ClassVar[str] = (
        "a tsv, jsonl, json, csv or parquet file, a folder of these, a text file and its target, a prepared folder"
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        *(*RecordSection.rules, pairs_have_a_form),
        *(buckets_differ_in_length, stages_send_one_shape, buckets_are_cut_evenly),
    )

    target: str | None = None
    """The text file of targets: line i is the target of the source's line i."""
    languages: tuple[str, str] | None = None
    """The two keys of a record's pair, from and to: [en, de]; null: source, target."""
    buckets: Positive = 1
    """Lengths up to sequence that batches are padded to: pairs of like length share a batch."""

    @property
    def by_suffix(self) -> bool:
        # With `target`, source and target are two text files, whatever the suffixes: train.en, train.de.
        return self.target is None


class SpanData(MixedSection):
    """Spans cut out of a text, to be written by an encoder-decoder."""

    kind: Literal["spans"]
    gives: ClassVar[str] = "sequences"
    sentinels: ClassVar[int] = SENTINELS
    samples_by: ClassVar[str] = "meshwright.families.seq2seq.spans:span_samples"

    @property
    def lengths(self) -> Lengths:  # type: ignore[override]
        return span_lengths(self.sequence)
