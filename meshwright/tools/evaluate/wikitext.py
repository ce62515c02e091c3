"""Perplexity on Wikitext-103 as reported for GPT-2 and Megatron-LM (Radford et al., 2019, section 3.1; arXiv
1909.08053, section 5.2.1).

The published corpus has its own tokens: words, punctuation, `<unk>` and separators of numbers, with spaces in between
(`the 1 @,@ 000 metres`). The markup is removed, so that the model reads plain text as in training. The summed loss of
the text is divided by the number of the corpus' own tokens:

    perplexity = exp(sum of losses / (corpus tokens - 1))

Corpus tokens are the words between spaces in the published file, and the line ends. The first token has no context and
is not scored. After a token that begins a text (data/marks.py) the first token is scored, and all corpus tokens count.
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
"""Replacements for separators of numbers and for spaces before punctuation, in the order of application."""
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
    """Return the text of a published file without markup."""
    text = published
    for marked, plain in _PLAIN:
        text = text.replace(marked, plain)
    for pattern, plain in _ENCLOSED:
        text = pattern.sub(plain, text)
    for marked, plain in _REST:
        text = text.replace(marked, plain)
    return text


def wikitext_stream(loaded: LoadedText, source: str) -> TokenStream:
    """Return a published file as a stream; `words` counts the scored corpus tokens.

    Raises DataError if the file cannot be read or has no text.
    """
    path = Path(source).expanduser()
    try:
        published = read_named(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a file of Wikitext: {error}") from error
    # Counted as in the published numbers: words between spaces, and each line end.
    words = len(published.strip().split(" "))
    encoded = [token for segment in pieces(plain_text(published)) for token in loaded.tokenizer.encode(segment)]
    if words < 2 or len(encoded) < 2:
        raise DataError(f"{path}: holds no text")
    # After a begin token the first token is scored as well, so every corpus token counts.
    if loaded.tokenizer.begin is not None:
        return TokenStream(np.array([loaded.tokenizer.begin, *encoded], dtype=np.int64), words, source)
    return TokenStream(np.array(encoded, dtype=np.int64), words - 1, source)


def measure_wikitext(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Return the step folder and the perplexity per corpus token. Raises as `load_text` and `wikitext_stream`."""
    loaded = load_text(question.checkpoint, question.device, question.context)
    stream = wikitext_stream(loaded, str(question.data))
    return loaded.folder, text_perplexity(loaded, stream, question.stride, progress)


WIKITEXT = Task(measure_wikitext, ("stride", "context"), needs_data="the published file, such as wiki.test.tokens")
