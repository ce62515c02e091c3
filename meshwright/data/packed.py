"""A prepared folder: packed token files, and a header with facts about these files.

| file | content |
|---|---|
| train.bin, validation.bin | token ids, each document between marks (marks.py); little-endian uint16, or uint32 |
| tokenizer.json | the tokenizer, in Hugging Face's form |
| header.json | the facts below; no time and no path of the machine, so that the same corpus gives the same bytes |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from meshwright.config.section import Count, Positive, Section
from meshwright.data.files import DAMAGE_REMEDY, check_file, check_once
from meshwright.data.marks import Marks
from meshwright.data.split import SPLITS, Split
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.foreign import plain, read_json

IDS, DIALOGUE, SAID = 2**30 - 1, 2**30, 2**31
"""The bits of a token in a folder of messages or preferences: the id, and two flags (messages.py)."""

FORMAT: Literal[1] = 1
HEADER, TOKENIZER = "header.json", "tokenizer.json"
TOKEN_FILES: dict[Split, str] = {split: f"{split}.bin" for split in SPLITS}
_SCAN_TOKENS = 2**22


class SplitFacts(Section):
    """Counts of one split. `words` are separated by white space, for perplexity per word."""

    tokens: Count
    documents: Count
    words: Count


class ReadFacts(Section):
    """The files and records that a corpus was read from."""

    files: Count
    """0 for a source that is a name."""
    names: tuple[str, ...] = ()
    """The first files, relative to the source."""
    split: str | None = None
    """The split that was read, if the source has splits."""
    left_out: tuple[str, ...] = ()
    """The first files of the source's folder that were not read."""
    records: Positive
    first: str
    last: str
    """The beginnings of the first and the last record, in printable characters."""


class Header(Section):
    """The content of header.json."""

    format: Literal[1] = FORMAT
    dtype: Literal["uint16", "uint32"]
    byte_order: Literal["little"] = "little"
    kind: Literal["text", "pairs", "messages", "preferences"] = "text"
    """pairs: source and target in turn, each packed as a document; messages: dialogues of flagged tokens; preferences:
    dialogues with a chosen and with a rejected answer in turn."""
    vocabulary_size: Positive
    end: Count
    """The id of the end token."""
    begin: Count | None = None
    """The id before every document of text; null: none. A chat template writes this token of a dialogue itself."""
    ends: bool = True
    """Whether the end token is after every document."""
    tokenizer: str
    """bytes, bpe:SIZE as asked for, or file."""
    source: str
    validation_share: float
    """The wanted share; the counts give the actual share."""
    corpus_sha256: str
    train: SplitFacts
    validation: SplitFacts
    """All counts are 0 if validation_share is 0."""
    read: ReadFacts | None = None
    """The files and records; null in folders that version 0.1.0 prepared."""
    sha256: dict[str, str]
    """Checksums of the folder's other files."""
    regions: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """CRC-32 of every region of the token files (files.py); none in folders that version 0.1.0 prepared."""
    ignored: tuple[str, ...] = ()
    """Keys of messages that the chat template does not mention."""

    def facts(self, split: Split) -> SplitFacts:
        return self.train if split == "train" else self.validation

    @property
    def flags(self) -> bool:
        """Whether tokens have the flags DIALOGUE and SAID."""
        return self.kind in ("messages", "preferences")

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True)
class PackedCorpus:
    """An opened prepared folder."""

    folder: Path
    header: Header
    tokenizer: Tokenizer

    def tokens(self, split: Split) -> np.ndarray:
        """Return the split's token ids [num_tokens], mapped from the file, read-only."""
        if not self.header.facts(split).tokens:  # an empty file cannot be mapped
            return np.empty(0, self.header.numpy_dtype)
        return np.asarray(np.memmap(self.folder / TOKEN_FILES[split], dtype=self.header.numpy_dtype, mode="r"))

    def name(self, split: Split) -> str:
        """Return the split's name for messages."""
        return f"the {split} split of {self.folder}"

    def check_files(self, cache: Path) -> None:
        """Check the files' checksums and token ids. Costs nothing if `cache` has a record of a passed check.

        Raises:
            DataError: a file has changed, or has ids outside of the vocabulary.
        """
        check_once(self.folder, self.header.sha256, self.header.regions, cache, self._unknown_token)

    def _unknown_token(self, file: str, offset: int, data: bytes) -> str | None:
        if file not in TOKEN_FILES.values():
            return None
        ids, size = np.frombuffer(data, dtype=self.header.numpy_dtype), self.header.vocabulary_size
        ids = ids & IDS if self.header.flags else ids
        if not len(ids) or int(ids.max()) < size:
            return None
        # argmax of booleans gives the first True.
        index = int(np.argmax(ids >= size))
        where = f"byte {offset + index * ids.itemsize}"
        return f"holds token {ids[index]} at {where}, and the vocabulary ends at {size - 1}"

    def check_vocabulary(self, vocabulary: int, size: int = 0, besides: str = "") -> None:
        """Check that a model of `vocabulary` tokens covers the corpus' tokens.

        Args:
            vocabulary: the model's number of tokens.
            size: the corpus' number of tokens, if there are more than the tokenizer's.
            besides: the text for the further tokens in the error.

        Raises:
            ConfigError: the vocabulary is too small.
        """
        size = size or self.header.vocabulary_size
        if vocabulary < size:
            rule = f"is smaller than the {size} tokens of the corpus' tokenizer ({self.header.tokenizer}){besides}"
            raise ConfigError.of("model.vocabulary", vocabulary, rule, f"{size} or more")


def is_prepared(folder: Path) -> bool:
    """Whether this is a folder that `prepare` wrote."""
    return (folder / HEADER).is_file()


def open_packed(folder: Path, verify: bool = False) -> PackedCorpus:
    """Open a prepared folder: header, sizes and tokenizer are checked, with `verify` every file's checksum too.

    Raises DataError naming the file that is missing or damaged.
    """
    header = _read_header(folder)
    for split in SPLITS:
        path = plain(folder / TOKEN_FILES[split])
        wanted = header.facts(split).tokens * header.numpy_dtype.itemsize
        if not path.is_file():
            raise DataError(f"{path}: is missing; {DAMAGE_REMEDY}")
        if path.stat().st_size != wanted:
            raise DataError(f"{path}: holds {path.stat().st_size} bytes, its header says {wanted}; {DAMAGE_REMEDY}")
    # The tokenizer is always checked: it is small, and a wrong one would change every text.
    for name in sorted(header.sha256) if verify else [TOKENIZER]:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: is missing; {DAMAGE_REMEDY}")
        check_file(folder / name, header.sha256[name], header.regions.get(name, ()))
    marks = Marks(header.begin, header.end, frozenset((header.end,)))
    tokenizer = load_tokenizer(plain(folder / TOKENIZER), marks)
    packed = PackedCorpus(folder, header, tokenizer)
    # Cheap signs of files that were mixed from two folders, without reading either: the vocabulary's size, and whether
    # the first document begins, and the last one ends, as the header says.
    agrees = tokenizer.vocabulary_size == header.vocabulary_size
    for split in SPLITS if not header.flags else ():
        tokens = packed.tokens(split)
        if not len(tokens):
            agrees &= split == "validation" and header.validation_share == 0
            continue
        agrees &= header.begin is None or int(tokens[0]) == header.begin
        agrees &= not header.ends or int(tokens[-1]) == header.end
    if not agrees:
        raise DataError(f"{folder / HEADER}: does not agree with {TOKENIZER} or the tokens; {DAMAGE_REMEDY}")
    return packed


def document_ends(tokens: np.ndarray, end: int) -> np.ndarray:
    """The places [documents] (int64) of the end tokens in `tokens` [n].

    Scanned in parts, so that a corpus larger than the memory stays on the disk.
    """
    parts = range(0, len(tokens), _SCAN_TOKENS)
    ends = [start + np.flatnonzero(tokens[start : start + _SCAN_TOKENS] == end) for start in parts]
    return np.concatenate([np.empty(0, np.int64), *ends])


def _read_header(folder: Path) -> Header:
    path = folder / HEADER
    if not path.is_file():
        raise DataError(f"{folder}: is no prepared folder (it has no {HEADER})")
    try:
        tree = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is damaged ({error}); {DAMAGE_REMEDY}") from error
    # The format before the fields: of another format the fields mean something else.
    if isinstance(tree, dict) and tree.get("format", FORMAT) != FORMAT:
        raise DataError(f"{path}: has format {tree['format']}, this version reads {FORMAT}; {DAMAGE_REMEDY}")
    try:
        header = Header.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"is no header of a prepared folder ({where}: {first['msg']})"
        raise DataError(f"{path}: {what}; {DAMAGE_REMEDY}") from error
    if header.sha256.keys() != {TOKENIZER, *TOKEN_FILES.values()}:
        raise DataError(f"{path}: does not list the folder's files; {DAMAGE_REMEDY}")
    return header
