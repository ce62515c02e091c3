"""Text to token ids and back: one thin class around the `tokenizers` library, for all kinds.

| kind | vocabulary | end of text |
|---|---|---|
| `bytes` | the 256 bytes, id = byte | 256 |
| `bpe:SIZE` | byte-level pairs, trained on the corpus | 0 |
| a tokenizer.json file | its own (GPT-2: 50257) | its own (GPT-2: 50256) |

`bytes` and `bpe` lose nothing: decode(encode(text)) == text for every text, also one that spells out the end token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from meshwright.data.files import ShowProgress
from meshwright.errors import DataError

BYTES = "bytes"
BPE_PREFIX = "bpe:"
END = "<|endoftext|>"

# How published tokenizers spell the end of a text, in order of preference.
_END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


class Tokenizer:
    """A tokenizer with an end-of-text token. Build one with the functions below."""

    def __init__(self, library: tokenizers.Tokenizer, where: str = "tokenizer") -> None:
        """Raises DataError naming `where` if no end-of-text token is known to the library's tokenizer."""
        # A text that spells out a special token is still text: only the packer writes the real end token.
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        self._library = library
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        """One more than the largest id."""
        known = [name for name in _END_NAMES if name in vocabulary]
        if not known:
            raise DataError(f"{where}: has no end-of-text token; looked for {', '.join(_END_NAMES)}")
        self.end_name, self.end = known[0], vocabulary[known[0]]
        """The spelling and the id of what follows every document."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token."""
        return [token for ids in self.encode_batch(pieces(text)) for token in ids]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, on all cores. Long texts: cut them with `pieces` first, to bound the memory."""
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_placed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, as `encode` gives them, and the characters of each."""
        encoding = self._library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Like `encode_placed` for a text whose special tokens are marks, as in a rendered chat."""
        encoding = self._marking.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _marking(self) -> tokenizers.Tokenizer:
        """This tokenizer as one to which a special token's spelling is that token."""
        library = tokenizers.Tokenizer.from_str(self._library.to_str())
        library.encode_special_tokens = False
        return library

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The spellings of the special tokens."""
        added = self._library.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; bytes that form no character become U+FFFD. Raises DataError on an unknown id."""
        for token in ids:
            if not 0 <= token < self.vocabulary_size:
                raise DataError(f"token {token} is not in the tokenizer's vocabulary of {self.vocabulary_size}")
        return str(self._library.decode(list(ids), skip_special_tokens=False))

    def id_of(self, name: str) -> int | None:
        """The id of a token by its spelling; None where there is no such token."""
        token: int | None = self._library.token_to_id(name)
        return token

    def to_json(self) -> str:
        """The tokenizer as Hugging Face's tokenizer.json. The same tokenizer always gives the same text."""
        return str(self._library.to_str(pretty=True)) + "\n"

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        path.write_text(self.to_json(), encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Every byte a token: id = byte, 256 ends a text."""
    # The byte-level alphabet in the order of its bytes: printable Latin-1 is itself, the rest follows from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    library = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END])
    return Tokenizer(library)


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens (fewer if the texts are too small to give as many pairs).

    The same texts in the same order give the same tokenizer, byte for byte.
    """
    if size < 257:
        raise DataError(f"{BPE_PREFIX}{size}: a vocabulary holds at least the 256 bytes and the end token: 257 or more")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(library)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a tokenizer.json: {error}") from error
    return parse_tokenizer(text, str(path))


def parse_tokenizer(text: str, where: str) -> Tokenizer:
    """A tokenizer from tokenizer.json's text. Raises DataError naming `where`."""
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every defect
        raise DataError(f"{where}: is no tokenizer.json of Hugging Face: {error}") from error
    return Tokenizer(library, where)


def tokenizer_kind(tokenizer: str) -> str:
    """The tokenizer's kind as headers name it. Raises DataError where there is no such tokenizer."""
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


def make_tokenizer(tokenizer: str, texts: Iterable[str], progress: ShowProgress) -> Tokenizer:
    """The tokenizer that a config names; only bpe:SIZE reads `texts`, to be trained on them."""
    if tokenizer == BYTES:
        return byte_tokenizer()
    if tokenizer_kind(tokenizer) == "file":
        return load_tokenizer(Path(tokenizer).expanduser())
    size = int(tokenizer.removeprefix(BPE_PREFIX))
    progress(f"training a tokenizer of {size} tokens", None)
    return train_bpe(texts, size)


def pieces(text: str, characters: int = 2**20) -> Iterator[str]:
    """The text in parts of about `characters`, so that a huge document needs no huge memory.

    The cut lies in front of a space that a word follows, where GPT-2's splitting rule begins a new token whatever
    stands before it: the parts' tokens are the whole text's tokens. A text without such a place stays whole.
    """
    start = 0
    boundary = re.compile(r"(?= \S)")
    while len(text) - start > characters:
        space = boundary.search(text, start + characters)
        if space is None:
            break
        yield text[start : space.start()]
        start = space.start()
    yield text[start:]
