"""The data sections of encoder-decoders: pairs of texts, and spans cut out of a text. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.data.section import (
    BUCKET_MULTIPLE,
    DIGITS,
    PREPARED,
    SENTINELS,
    STDLIB,
    Lengths,
    TokenSection,
)
from meshwright.data.text_section import MixedSection
from meshwright.errors import Problem
from meshwright.families.seq2seq.spans_section import span_lengths
from meshwright.section import Positive, Rule, at_most, divisors, listed, rule

if TYPE_CHECKING:
    from meshwright.config import Config


GZIP = ".gz"


def suffix(source: str) -> str:
    """The form that a file's name tells: .tsv for wmt.tsv.gz."""
    return Path(source.removesuffix(GZIP)).suffix.lower()


@rule("model.family", "data.kind", "data.source", "data.target", "data.languages")
def pairs_have_a_form(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, PairData), data
    if data.source == DIGITS:
        return
    form = STDLIB if data.source == STDLIB else suffix(data.source)
    prepared = (Path(data.source).expanduser() / PREPARED).is_file()
    # Forms that hold both texts of a pair; a plain text file needs its partner.
    alone = form in (STDLIB, ".tsv", ".jsonl") or prepared
    if data.target is not None and alone:
        rule_text = f"has no effect: data.source={data.source} holds both texts of a pair"
        yield Problem("data.target", data.target, rule_text, "leave it out")
    elif data.target is not None and not Path(data.target).expanduser().is_file():
        yield Problem("data.target", data.target, "is no such file", "a text file, whose line i goes with line i")
    elif data.target is None and not alone and Path(data.source).expanduser().exists():
        valid = "stdlib, a tsv or jsonl file, a prepared folder, or a text file with data.target"
        yield Problem("data.source", data.source, "holds no pairs of texts", valid)
    if data.languages is not None and form != ".jsonl":
        named = f"[{', '.join(data.languages)}]"
        yield Problem("data.languages", named, "names keys of a jsonl file, which data.source is not", "leave it out")


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
    # Receives are posted ahead of the messages, so their shape must be known before the batch is.
    if data.buckets > 1 and size > 1:
        rule_text = f"makes batches of many lengths, and layout.pipeline.size={size} stages send messages of one"
        yield Problem("data.buckets", data.buckets, rule_text, "1, or layout.pipeline.size=1")


@rule("data.buckets", "layout.tensor", "data.sequence")
def buckets_are_cut_evenly(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, PairData), data
    for cut in config.layout.tensor.cuts(config) if data.buckets > 1 else ():
        # Every bucket's length is a multiple of BUCKET_MULTIPLE, and of nothing more.
        if cut.field == "data.sequence" and BUCKET_MULTIPLE % cut.parts:
            rule_text = f"does not divide the lengths of data.buckets={data.buckets}, as sequence_parallel asks"
            yield Problem(cut.by, cut.parts, rule_text, listed(divisors(BUCKET_MULTIPLE)))


class PairData(TokenSection):
    """Pairs of texts: stdlib (functions and their docstrings), a tsv or jsonl file, or a text file and `target`."""

    kind: Literal["pairs"]
    gives: ClassVar[str] = "sequences"
    packs: ClassVar[Literal["text", "pairs"]] = "pairs"
    corpus_by: ClassVar[str] = "meshwright.families.seq2seq.pairs:pair_corpus"
    samples_by: ClassVar[str] = "meshwright.families.seq2seq.pairs_samples:pair_samples"
    claimed_by: ClassVar[str] = "meshwright.families.seq2seq.pairs:claims_pairs"
    source_names: ClassVar[tuple[str, ...]] = (STDLIB,)
    source_forms: ClassVar[str] = "a tsv or jsonl file, a text file and its target, a prepared folder"
    rules: ClassVar[tuple[Rule, ...]] = (
        *(*TokenSection.rules, pairs_have_a_form),
        *(buckets_differ_in_length, stages_send_one_shape, buckets_are_cut_evenly),
    )

    target: str | None = None
    """The text file whose line i is the target of the source's line i."""
    languages: tuple[str, str] | None = None
    """The two keys of a jsonl file's pairs, from and to: [en, de]; null: source, target."""
    buckets: Positive = 1
    """Lengths up to sequence that batches are padded to: pairs of like length share a batch."""


class SpanData(MixedSection):
    """Spans cut out of a text, to be written by an encoder-decoder."""

    kind: Literal["spans"]
    gives: ClassVar[str] = "sequences"
    sentinels: ClassVar[int] = SENTINELS
    samples_by: ClassVar[str] = "meshwright.families.seq2seq.spans:span_samples"

    @property
    def lengths(self) -> Lengths:  # type: ignore[override]
        return span_lengths(self.sequence)
