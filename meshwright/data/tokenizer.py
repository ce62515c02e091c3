"""Tokenizers: a thin class around the `tokenizers` library, for all kinds.

| kind | vocabulary | end of text |
|---|---|---|
| `bytes` | the 256 bytes, id = byte | 256 |
| `bpe:SIZE` | byte-level pairs, trained on the corpus | 0 |
| a tokenizer.json file | of the file (GPT-2: 50257) | found by marks.py (GPT-2: 50256) |

`bytes` and `bpe` are lossless: decode(encode(text)) == text for every text, also if the text spells the end token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from meshwright.data.files import Rate, ShowProgress, silent
from meshwright.data.long_text import Text, chunks_of
from meshwright.data.marks import BESIDE, SETTINGS, SPECIAL_TOKENS, Beside, Marks, marks_of
from meshwright.data.marks_section import END, AskedMarks, read_settings
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import parse_json, read_named

BYTES = "bytes"
BPE_PREFIX = "bpe:"
SHORT_PIECE, LONG_PIECE = 2**13, 2**20
"""Characters of a piece: short if a tokenizer splits texts before spaces, else long. An encoding of the library has 100
bytes per character, and a short one stays in a cache."""


class Tokenizer:
    """A tokenizer with marks, made by the functions below."""

    def __init__(self, library: tokenizers.Tokenizer, marks: Marks) -> None:
        # A text that spells a special token is still text: only the packer writes the real end token.
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.vocabulary_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest id."""
        self.marks, self.begin, self.end = marks, marks.begin, marks.end
        """The ids of the tokens before (None: no token) and after every document."""
        self.opening: tuple[int, ...] = () if self.begin is None else (self.begin,)
        """`begin` as a tuple of ids to prepend; empty without one."""
        self.first = self.end if self.begin is None else self.begin
        """The id before a text's first token: the begin token, or the end token of the preceding text."""
        self.piece_characters = SHORT_PIECE if splits_at_spaces(library) else LONG_PIECE
        """The characters of the `pieces` for encoding."""

    def name_of(self, token: int) -> str:
        """Return a token's spelling in the vocabulary."""
        return str(self._library.id_to_token(token))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end token."""
        return [token for ids in self.encode_batch(pieces(text, self.piece_characters)) for token in ids]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of each text, computed on all cores. Cut long texts by `pieces` first, to bound the memory."""
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_placed(self, text: str, *, marked: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Return (ids of a text, (begin, end) of each id in characters).

        `marked`: spellings of special tokens in the text are special tokens, as in a rendered chat.
        """
        encoding = (self._marking if marked else self._library).encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _marking(self) -> tokenizers.Tokenizer:
        """A copy of the library's tokenizer that reads spellings of special tokens as special tokens."""
        # A copy, since the setting belongs to the library's object, and packing uses the other setting.
        library = tokenizers.Tokenizer.from_str(self._library.to_str())
        library.encode_special_tokens = False
        return library

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The spellings of the special tokens."""
        added = self._library.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; bytes that form no character become U+FFFD.

        Raises:
            DataError: an id is unknown.
        """
        for token in ids:
            if not 0 <= token < self.vocabulary_size:
                raise DataError(f"token {token} is not in the tokenizer's vocabulary of {self.vocabulary_size}")
        return str(self._library.decode(list(ids), skip_special_tokens=False))

    def id_of(self, name: str) -> int | None:
        """Return the id of a token by the spelling; None for an unknown token."""
        token: int | None = self._library.token_to_id(name)
        return token

    def to_json(self) -> str:
        """Return the text of tokenizer.json; equal tokenizers give equal texts."""
        return str(self._library.to_str(pretty=True)) + "\n"

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        path.write_text(self.to_json(), encoding="utf-8")

    def settings_beside(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of the files next to a tokenizer.json, by name, so that `auto` finds this tokenizer's marks.

        The texts are changed only if a run set other marks.
        """
        beside = {name: parse_json(text) for name, text in texts.items() if name.endswith(".json")}
        if marks_of(self._library, "tokenizer.json", beside)[:2] == self.marks[:2]:
            return dict(texts)
        # `auto` of a later run, and transformers, read these files, and must find the marks of the training.
        names: dict[str, object] = {"eos_token": self.name_of(self.end)}
        if self.begin is not None:
            names["bos_token"] = self.name_of(self.begin)
        changed = {SETTINGS: beside.get(SETTINGS, {}) | names | {"add_bos_token": self.begin is not None}}
        if SPECIAL_TOKENS in beside:
            changed[SPECIAL_TOKENS] = beside[SPECIAL_TOKENS] | names
        return {**texts, **{name: json.dumps(tree, indent=2) + "\n" for name, tree in changed.items()}}


def byte_tokenizer(asked: AskedMarks = AskedMarks()) -> Tokenizer:
    """Make a tokenizer with one token per byte: id = byte; 256 is the end token."""
    # The byte-level alphabet in the order of bytes: printable Latin-1 unchanged, other bytes from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    library = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END])
    return Tokenizer(library, marks_of(library, "tokenizer", {}, asked))


def train_bpe(
    texts: Iterable[Text],
    size: int,
    asked: AskedMarks = AskedMarks(),
    progress: ShowProgress = silent,
    characters: int | None = None,
) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens (fewer if the texts have too few pairs).

    Equal texts in equal order give equal tokenizers, byte for byte.

    Args:
        texts: the texts.
        size: size of the vocabulary.
        asked: the marks of the run.
        progress: shows progress.
        characters: number of characters of all texts, if known.
    """
    if size < 257:
        raise DataError(f"{BPE_PREFIX}{size}: a vocabulary holds at least the 256 bytes and the end token: 257 or more")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        # Every byte is in the vocabulary, so that every text can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rate = Rate(progress, f"training a tokenizer of {size} tokens", characters)
    parts = (piece for text in texts for piece in pieces(text, SHORT_PIECE))
    library.train_from_iterator((rate.counted(piece) for piece in parts), trainer)
    return Tokenizer(library, marks_of(library, "tokenizer", {}, asked))


def load_tokenizer(path: Path, asked: AskedMarks | Marks = AskedMarks()) -> Tokenizer:
    """Read a tokenizer.json with the marks that a run asks for.

    Raises:
        DataError: the file cannot be read; the error names the file.
    """
    try:
        text = read_named(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a tokenizer.json: {error}") from error
    names = () if isinstance(asked, Marks) else BESIDE
    return parse_tokenizer(text, str(path), {name: read_settings(path.parent / name) for name in names}, asked)


def parse_tokenizer(
    text: str, where: str, beside: Beside | None = None, asked: AskedMarks | Marks = AskedMarks()
) -> Tokenizer:
    """Make a tokenizer from the text of tokenizer.json and the files next to it.

    Raises:
        DataError: the text is no tokenizer.json; the error names `where`.
    """
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every defect
        raise DataError(f"{where}: is no tokenizer.json of Hugging Face: {error}") from error
    return Tokenizer(library, asked if isinstance(asked, Marks) else marks_of(library, where, beside or {}, asked))


def tokenizer_kind(tokenizer: str) -> str:
    """Return the tokenizer's kind for headers: bytes, bpe:SIZE or file.

    Raises:
        DataError: there is no such tokenizer.
    """
    if tokenizer.startswith(BPE_PREFIX):
        size = tokenizer.removeprefix(BPE_PREFIX)
        if not size.isdecimal() or int(size) < 257:
            raise DataError(
                f"tokenizer {tokenizer}: asks for a vocabulary of no size; valid: bpe:SIZE with SIZE >= 257"
            )
    elif tokenizer != BYTES:
        if not Path(tokenizer).expanduser().is_file():
            raise DataError(f"tokenizer {tokenizer}: no such file; valid: bytes, bpe:SIZE, or a tokenizer.json file")
        return "file"
    return tokenizer


def make_tokenizer(
    tokenizer: str,
    texts: Iterable[Text],
    progress: ShowProgress,
    asked: AskedMarks = AskedMarks(),
    characters: int | None = None,
) -> Tokenizer:
    """Make the tokenizer of a config.

    Args:
        tokenizer: bytes, bpe:SIZE or a file.
        texts: read only to train bpe:SIZE.
        progress: shows progress.
        asked: the marks of the run.
        characters: number of characters of all texts, if known.
    """
    if tokenizer_kind(tokenizer) == "file":
        return load_tokenizer(Path(tokenizer).expanduser(), asked)
    if tokenizer == BYTES:
        return byte_tokenizer(asked)
    return train_bpe(texts, int(tokenizer.removeprefix(BPE_PREFIX)), asked, progress, characters)


def splits_at_spaces(library: tokenizers.Tokenizer) -> bool:
    """Return True if the library begins a new piece at every space before a word (GPT-2, Llama 3, Qwen).

    No token then contains such a space after another character. False with a normalizer, which may read the whole text,
    or with an added token across spaces (GPT-NeoX has tokens of two spaces).
    """
    added = [token for token in library.get_added_tokens_decoder().values() if not token.special]
    spanning = any(" " in token.content[1:] or token.lstrip or token.rstrip for token in added)
    if library.pre_tokenizer is None or library.normalizer is not None or spanning:
        return False
    starts = {start for _, (start, _) in library.pre_tokenizer.pre_tokenize_str(_PROBE)}
    return starts >= {space.start() for space in _BOUNDARY.finditer(_PROBE)}


_BOUNDARY = re.compile(r"(?= \S)")
_PROBE = "a b 1 22, 333 - x\n y  z\t é ü。 日本 'll don't 4th #! \u00a0 q A Bc"
"""A text with different kinds of characters before and after a space."""


def pieces(text: Text, characters: int = LONG_PIECE) -> Iterator[str]:
    """Yield the text in parts of about `characters`, so that the memory for a huge document is bounded.

    A cut is before a space that a word follows. GPT-2's splitting rule always begins a new token there, so the tokens
    of the parts are the tokens of the text. A text without such a place is not cut.
    """
    rest = ""
    for chunk in chunks_of(text):
        text, start = rest + chunk, 0
        while len(text) - start > characters:
            # Searched from the wanted length on, so a part is a little longer.
            space = _BOUNDARY.search(text, start + characters)
            if space is None:
                break
            yield text[start : space.start()]
            start = space.start()
        rest = text[start:]
    yield rest
