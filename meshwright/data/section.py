"""The base of the data sections of a config: the kinds of data, the form of batches of each kind, and sources.

| kind           | a sample                                                | gives             | read by         |
|----------------|---------------------------------------------------------|-------------------|-----------------|
| text           | a window of tokens, each labelled with the next         | tokens            | gpt2, llama     |
| messages       | dialogues with labels on the assistant's tokens         | tokens            | gpt2, llama     |
| preferences    | a chosen and a rejected answer to one prompt            | tokens            | gpt2, llama     |
| masked         | two texts with masked tokens                            | masked            | bert            |
| sentence-pairs | two texts and their class                               | classified pairs  | bert-pairs      |
| squad          | a question and a passage, and the answer's place        | answered passages | bert-spans      |
| race           | a passage, a question, answers, the right one's number  | answered choices  | bert-choice     |
| pairs          | a source text and a target text                         | sequences         | transformer, t5 |
| spans          | a text without some spans, and the spans                | sequences         | t5, transformer |
| images         | an image and its class                                  | images            | vit, resnext    |

To add a kind, write a subclass of DataSection and one line in the registry (docs/extending.md). No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field

from meshwright.config.registry import entries, load_entry
from meshwright.config.section import Positive, Rule, Section, at_most, rule
from meshwright.data.marks_section import NO_BEGIN, AskedMarks, marks_are_tokens
from meshwright.ranks.errors import ConfigError, Problem
from meshwright.ranks.foreign import read_json

if TYPE_CHECKING:
    from meshwright.compute.model import Samples
    from meshwright.config import Config
    from meshwright.data.chat import ChatTemplate
    from meshwright.data.corpus import Corpus
    from meshwright.data.dataset import Opened
    from meshwright.data.files import ShowProgress
    from meshwright.data.packed import PackedCorpus
    from meshwright.data.split import Split

STDLIB, UNICODE, DIGITS = "stdlib", "unicode", "digits"
"""Sources by name: the source code of Python's standard library, the names of Unicode's characters, scikit-learn's
images of digits."""
HUB = "hub:"
"""Prefix of a data set's name on the Hugging Face Hub: `hub:OWNER/NAME`, `hub:OWNER/NAME:CONFIGURATION`."""

PREPARED = "header.json"
"""The file that marks a folder as prepared."""

SENTINELS = 100
"""Number of tokens that replace spans cut out of a text (T5)."""

BUCKET_MULTIPLE = 8
"""Batches of pairs are padded to multiples of this length."""


class Lengths(NamedTuple):
    """Numbers of tokens to which a sample's source and target are padded; target 0 for a model that reads one text."""

    source: int
    target: int


class DataSection(Section):
    """Base of the kinds of data. Subclasses add fields and `kind`, a Literal."""

    kind: str
    """The kind of samples; by default the kind of the source, or of the model's family."""

    gives: ClassVar[str]
    """The form of batches; a family of models reads one form."""
    prepared_by: ClassVar[str]
    """The function of `prepare`, `module:attribute`. Like all functions below, the first argument is the section."""
    opened_by: ClassVar[str]
    """The function of `open`."""
    packed_by: ClassVar[str] = ""
    """The function of `pack`; empty if only runs prepare the kind."""
    template_by: ClassVar[str] = ""
    """The function of `chat_template`; empty without a template."""
    packs: ClassVar[Literal["", "text", "pairs", "messages", "preferences"]] = ""
    """The records of the packed corpus: documents, pairs of texts, dialogues, or pairs of dialogues; empty without a
    packed corpus."""
    rows: ClassVar[int] = 1
    """Rows of a batch that a sample fills: 2 for a pair of answers."""
    claimed_by: ClassVar[str] = ""
    """The function of `claims`, called with the user's config; empty if no source determines the kind."""
    source_names: ClassVar[tuple[str, ...]] = (STDLIB, UNICODE)
    """The sources that are names, not paths."""
    source_forms: ClassVar[str] = "a text, jsonl, json, csv, tsv or parquet file, a folder of these, a prepared folder"
    reads_folders_alone: ClassVar[bool] = False
    reads_hub: ClassVar[bool] = False
    header: ClassVar[str] = PREPARED
    """The file of a prepared folder with the checksums of other files."""
    sentinels: ClassVar[int] = 0
    """Number of tokens that replace spans, in addition to the model's special tokens."""
    lengths: ClassVar[Lengths] = Lengths(0, 0)
    """Tokens of a sample of the longest batch."""
    mixed: ClassVar[bool] = False
    """Whether samples are from a mixture of sources, not from `source`."""
    separate: ClassVar[bool] = False
    """Whether attention is limited to the documents of a sample."""
    begins: ClassVar[bool] = False
    """True if the kind has fields `begin` and `end` for tokens around a document (marks.py). False: the model's form of
    a sample has these tokens."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules on the fields, alone and with model and layout, checked for runs of this kind."""

    source: str = STDLIB
    """A name (stdlib, unicode, digits), a file or folder, hub:OWNER/NAME (text), or a prepared folder."""
    validation: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """The share of the documents (of each class's images) that is held out."""

    def chat_template(self, checkpoint: Path | None = None) -> ChatTemplate | None:
        """Return the template for samples, if any.

        Args:
            checkpoint: a checkpoint's folder; a template in this folder has priority.

        Raises:
            DataError: the template cannot be read.
        """
        return cast("ChatTemplate", load_entry(self.template_by)(self, checkpoint)) if self.template_by else None

    @classmethod
    def claims(cls, data: Mapping[str, Any]) -> bool:
        """Return True if a user's config without `kind` can only mean this kind."""
        return bool(cls.claimed_by and load_entry(cls.claimed_by)(data))

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the run."""
        return (self.source,)

    def prepare(self, config: Config, progress: ShowProgress) -> Path:
        """Build the data set unless it exists; returns the folder.

        Raises:
            DataError: the data set does not fit the run.
        """
        return cast(Path, load_entry(self.prepared_by)(self, config, progress))

    def pack(self, config: Config, out: Path, progress: ShowProgress) -> Path:
        """Build the data set in `out`, for use as a source of runs; returns the folder.

        Raises:
            ConfigError: only runs prepare this kind.
            DataError: as `prepare`.
        """
        if self.packed_by:
            return cast(Path, load_entry(self.packed_by)(self, config, out, progress))
        every = entries("data").items()
        kinds = [name for name, section in every if section.packed_by or section.pack is not DataSection.pack]
        raise ConfigError.of("data.kind", self.kind, "is prepared by its runs alone", ", ".join(kinds))

    def open(self, config: Config, folder: Path) -> Opened:
        """Open the splits of a prepared folder.

        Raises:
            DataError: a split is too small.
        """
        return cast("Opened", load_entry(self.opened_by)(self, config, folder))

    def fingerprint(self, folder: Path) -> str:
        """Return the hash of `contents`, the identity of the prepared data for checkpoints and for comparing ranks."""
        return hashlib.sha256(json.dumps(self.contents(folder), sort_keys=True).encode()).hexdigest()

    def contents(self, folder: Path) -> object:
        """Return the facts that identify the data: the checksums of a folder's files, by name."""
        return read_json(folder / self.header)["sha256"]


@rule("data.source", "data.mixture", "model.family")
def source_exists(config: Config) -> Iterator[Problem]:
    data, field = config.data, "data.mixture" if config.data.mixed else "data.source"
    valid = ", ".join((*data.source_names, data.source_forms, *([f"{HUB}OWNER/NAME"] * data.reads_hub)))
    for source in data.sources:
        path = Path(source).expanduser()
        if source in (STDLIB, UNICODE, DIGITS) or source.startswith(HUB):
            named = data.reads_hub if source.startswith(HUB) else source in data.source_names
            if not named:
                yield Problem(field, source, f"is not what a {config.model.family} reads", valid)
        elif not source or not path.exists():
            yield Problem(field, source, "is no such file or folder", valid)
        elif not path.is_file() and not path.is_dir():
            yield Problem(field, source, "is a pipe or a device, which may never end", valid)
        elif data.reads_folders_alone and not path.is_dir():
            yield Problem(field, source, "is no folder", valid)


@rule("data.sequence", "model.positions")
def sequence_fits_positions(config: Config) -> Iterator[Problem]:
    data, positions = config.data, config.model.longest
    assert isinstance(data, TokenSection), data
    sequence = data.sequence
    if sequence > positions:
        yield Problem("data.sequence", sequence, f"is longer than model.positions={positions}", at_most(positions))


@rule("data.tokenizer", "model.vocabulary", "model.family", "data.kind", "data.source", "data.target")
def tokenizer_fits(config: Config) -> Iterator[Problem]:
    data, model = config.data, config.model
    assert isinstance(data, TokenSection), data
    tokenizer = data.tokenizer
    if tokenizer != "bytes" and not tokenizer.startswith("bpe:"):
        if not Path(tokenizer).expanduser().is_file():
            yield Problem("data.tokenizer", tokenizer, "is no such file", "bytes, bpe:SIZE, a tokenizer.json file")
        return
    asked = "257" if tokenizer == "bytes" else tokenizer.removeprefix("bpe:")
    # Every vocabulary made here has 256 bytes and the end token.
    if not asked.isdigit() or int(asked) < 257:
        rule_text = "does not name a vocabulary of 257 tokens or more"
        yield Problem("data.tokenizer", tokenizer, rule_text, "bpe:257, bpe:4096 ...")
        return
    size = int(asked)
    rule_text = f"is smaller than the {size} tokens of data.tokenizer={tokenizer}"
    size += len(model.special_tokens) + data.sentinels  # a tokenizer.json may contain some of these already
    if model.special_tokens:
        rule_text += f" and {', '.join(model.special_tokens)}"
    if data.sentinels:
        rule_text += f" and {data.sentinels} sentinels"
    if size > model.num_tokens:
        yield Problem("model.vocabulary", model.num_tokens, rule_text, f"{size} or more")


@rule("weights", "data.tokenizer", "data.source", "data.mixture")
def weights_have_a_tokenizer(config: Config) -> Iterator[Problem]:
    """Refuse weights without a tokenizer: another tokenizer would give the ids another meaning."""
    data = config.data
    said = "tokenizer" in data.model_fields_set  # set by the run, or by the folder of the weights
    if (
        config.weights is None
        or said
        or all((Path(path).expanduser() / data.header).is_file() for path in data.sources)
    ):
        return
    rule_text = f"is given, and {config.weights} has no tokenizer.json"
    valid = "the model's tokenizer.json (transformers' AutoTokenizer writes one with save_pretrained)"
    yield Problem("data.tokenizer", "nothing", rule_text, valid)


class TokenSection(DataSection):
    """Base of the kinds with a packed corpus of text."""

    rules: ClassVar[tuple[Rule, ...]] = (
        sequence_fits_positions,
        source_exists,
        tokenizer_fits,
        marks_are_tokens,
        weights_have_a_tokenizer,
    )
    packs: ClassVar[Literal["", "text", "pairs", "messages", "preferences"]] = "text"
    prepared_by: ClassVar[str] = "meshwright.data.packing:prepare_corpus"
    packed_by: ClassVar[str] = "meshwright.data.packing:pack_corpus"
    opened_by: ClassVar[str] = "meshwright.data.dataset:open_corpus"
    corpus_by: ClassVar[str] = "meshwright.data.corpus:source_corpus"
    """The function of `corpus`."""
    samples_by: ClassVar[str]
    """The function of `samples`."""

    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (trained on the source), or a tokenizer.json file. A prepared folder contains a tokenizer."""
    sequence: Positive = 256
    """Tokens of a sample, at most model.positions."""

    @property
    def lengths(self) -> Lengths:  # type: ignore[override]
        return Lengths(self.sequence, self.sequence if self.packs == "pairs" else 0)

    @property
    def asked(self) -> AskedMarks:
        """The tokens around a document, by the fields `begin` and `end`, if the kind has these."""
        return AskedMarks(*(getattr(self, name) for name in AskedMarks._fields)) if self.begins else NO_BEGIN

    def corpus(self) -> Corpus:
        """Return the records to pack.

        Raises:
            DataError: there are no records.
        """
        return cast("Corpus", load_entry(self.corpus_by)(self))

    def samples(self, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
        """Return (samples of a split, note for the user).

        Raises:
            DataError: the split has no samples.
        """
        return cast("tuple[Samples, str]", load_entry(self.samples_by)(self, config, packed, split))
