"""The likelihood of a text given a context, for requests of lm-evaluation-harness (tools/harness.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.tools.evaluate.load import BATCH_TOKENS, LoadedText
from meshwright.tools.evaluate.scored import windows


class Likelihood(NamedTuple):
    """Likelihood of a continuation. `log`: the log probability in nats; `greedy`: whether greedy decoding gives it."""

    log: float
    greedy: bool


class _Asked(NamedTuple):
    """A request: the tokens of a context and of the continuation `behind` the context."""

    context: list[int]
    behind: list[int]


def likelihoods(
    loaded: LoadedText, pairs: Sequence[tuple[str, str]], *, marked: bool = False, rows: int | None = None
) -> list[Likelihood]:
    """Score each (context, continuation).

    Context and continuation are tokenized together, as in the harness: spaces at the context's end belong to the
    continuation, and the token that begins a text is put in front. Without such a token an empty context becomes an end
    token. A context that is too long is cut from the left.

    Args:
        loaded: The model.
        pairs: (context, continuation) of each request.
        marked: Whether special tokens spelled in a text are encoded as special tokens, and no token is put in front.
            For a rendered chat, which begins with its own token.
        rows: The largest batch.
    """
    opening = [] if marked else loaded.tokenizer.opening

    def encode(text: str) -> list[int]:
        return loaded.tokenizer.encode_placed(text, marked=True)[0] if marked else loaded.tokenizer.encode(text)

    asked = []
    for context, continuation in pairs:
        # Spaces belong to the continuation, since tokens begin with a space: " word" is one token, "word" another.
        cut = len(context.rstrip())
        before = encode(context[:cut]) if cut else []
        whole = encode(context + continuation)
        asked.append(_Asked([*opening, *before] or [loaded.tokenizer.end], whole[len(before) :]))
    return _answered(loaded, asked, rows)


def text_likelihoods(loaded: LoadedText, texts: Sequence[str]) -> list[float]:
    """Return the log probability of each text.

    Every token is scored once. The first token follows the token that begins a text, or an end token. Long texts are
    scored in windows of the model's context; a window begins with the last token of the previous window.
    """
    told = []
    for text in texts:
        stream = [loaded.tokenizer.first, *loaded.tokenizer.encode(text)]
        if len(stream) < 2:
            told.append(0.0)
            continue
        starts, counted, length = windows(len(stream) - 1, loaded.context, loaded.context)
        parts = [
            _Asked(stream[start : first_scored + 1], stream[first_scored + 1 : start + length + 1])
            for start, first_scored in zip(starts.tolist(), counted.tolist(), strict=True)
        ]
        told.append(sum(answer.log for answer in _answered(loaded, parts)))
    return told


@torch.inference_mode()
def _answered(loaded: LoadedText, asked: Sequence[_Asked], rows: int | None = None) -> list[Likelihood]:
    """Score requests in batches of similar lengths and at most `rows` rows.

    Of a continuation longer than the model's context only the last part is scored.
    """
    inputs = [(request.context + request.behind)[:-1][-loaded.context :] for request in asked]
    order = sorted(range(len(asked)), key=lambda at: -len(inputs[at]))
    answers: dict[int, Likelihood] = {}
    while len(answers) < len(asked):
        longest = max(1, len(inputs[order[len(answers)]]))
        most = min(rows or len(asked), max(1, BATCH_TOKENS // longest))
        chosen = order[len(answers) : len(answers) + most]
        end = loaded.tokenizer.end  # padding on the right: no earlier token attends to it
        padded = torch.tensor([inputs[at] + [end] * (longest - len(inputs[at])) for at in chosen])
        h = loaded.model.hidden(padded.to(loaded.device))  # [B, T, H]
        for row, at in zip(h, chosen, strict=True):
            stop = len(inputs[at])
            target = torch.tensor(asked[at].behind[-stop:], device=loaded.device)
            logits = loaded.head.logits(row[stop - len(target) : stop]).double()  # [t, V]
            log = logits.log_softmax(-1).gather(-1, target[:, None]).sum()
            answers[at] = Likelihood(float(log), bool((logits.argmax(-1) == target).all()))
    return [answers[at] for at in range(len(asked))]
