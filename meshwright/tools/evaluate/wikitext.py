"""Wikitext-103's perplexity as GPT-2 and Megatron-LM report it (Radford et al., 2019, section 3.1; arXiv 1909.08053,
section 5.2.1).

The corpus is published in tokens of its own: words, punctuation, `<unk>` and numbers' separators stand between spaces
(`the 1 @,@ 000 metres`). The markup is undone, so that the model reads plain text as in training; the text's summed
loss is then divided by the number of the corpus' own tokens:

    perplexity = exp(sum of losses / (corpus tokens - 1))

Corpus tokens are the words between spaces in the published file, and its line ends. The first token has no context and
is not scored; after a token that begins a text (data/marks.py) it is scored, and all corpus tokens count.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from meshwright.data.files import ShowProgress
from meshwright.data.tokenizer import pieces
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import read_named
from meshwright.tools.evaluate.load import Facts, LoadedText, load_text
from meshwright.tools.evaluate.perplexity import text_perplexity
from meshwright.tools.evaluate.tasks import Question, Task
from meshwright.tools.evaluate.texts import TokenStream

_PLAIN = (
    ("s '", "s'"),
    (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."),
    (" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
)  # fmt: skip
"""The separators of numbers, and the spaces before punctuation, in the order in which they go."""
_ENCLOSED = (
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
)
_REST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def plain_text(published: str) -> str:
    """The text of a published file without its markup."""
    text = published
    for marked, plain in _PLAIN:
        text = text.replace(marked, plain)
    for pattern, plain in _ENCLOSED:
        text = pattern.sub(plain, text)
    for marked, plain in _REST:
        text = text.replace(marked, plain)
    return text


def wikitext_stream(loaded: LoadedText, source: str) -> TokenStream:
    """A published file as a stream whose words are the corpus' tokens but the first. Raises DataError."""
    path = Path(source).expanduser()
    try:
        published = read_named(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a file of Wikitext: {error}") from error
    # Counted as in the published numbers: words between spaces, and each line end.
    words = len(published.strip().split(" "))
    encoded = [token for part in pieces(plain_text(published)) for token in loaded.tokenizer.encode(part)]
    if words < 2 or len(encoded) < 2:
        raise DataError(f"{path}: holds no text")
    # After a begin token the first token is scored as well, so every corpus token counts.
    if loaded.tokenizer.begin is not None:
        return TokenStream(np.array([loaded.tokenizer.begin, *encoded], dtype=np.int64), words, source)
    return TokenStream(np.array(encoded, dtype=np.int64), words - 1, source)


def measure_wikitext(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """The step folder, and the perplexity over the corpus' own tokens. Raises as `load_text` and `wikitext_stream`."""
    loaded = load_text(question.checkpoint, question.device, question.context)
    stream = wikitext_stream(loaded, str(question.data))
    return loaded.folder, text_perplexity(loaded, stream, question.stride, progress)


WIKITEXT = Task(measure_wikitext, ("stride", "context"), needs_data="the published file, such as wiki.test.tokens")
