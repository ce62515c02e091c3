"""SQuAD's answers, and their exact match and F1 by the official rules (Rajpurkar et al., arXiv 1606.05250, 1806.03822).

An answer and what annotators wrote are compared in lower case, without punctuation, articles and spare white space;
of several annotators the best match counts. Exact match: they are equal. F1: of their words as bags. A question that
has no answer (version 2.0) is right if none is given; there both numbers are 0 or 1.

The answer is BERT's (Devlin et al., section 4.2): the span of at most 30 tokens whose beginning and end score highest
together, out of the 20 best of each. Where windows overlap, a token counts in the one that shows most around it. In a
file that has questions without an answer, none is given where [CLS] scores higher.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from meshwright.data.files import ShowProgress, silent
from meshwright.errors import DataError
from meshwright.families.bert.data_section import SquadData
from meshwright.families.bert.evaluate_choices import fine_tuned
from meshwright.families.bert.specials import specials_of
from meshwright.families.bert.task_files import SquadQuestion, squad_questions
from meshwright.families.bert.tasks import SquadWindow, row_tokens, squad_windows, task_batch
from meshwright.model import to_device
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText
from meshwright.tools.evaluate.tasks import Task

BEST, LONGEST = 20, 30
"""Beginnings and ends that are combined; tokens of an answer."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalised(answer: str) -> str:
    """An answer as it is compared."""
    plain = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(given: str, wanted: str) -> float:
    """1 where both are the same answer."""
    return float(normalised(given) == normalised(wanted))


def f1(given: str, wanted: str) -> float:
    """The harmonic mean of the shares of their words that both have."""
    ours, theirs = normalised(given).split(), normalised(wanted).split()
    if not ours or not theirs:
        # The official script's rule for an answer of no words.
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


@dataclass(frozen=True)
class Scored:
    """A window with the scores of its row's tokens, [T] each."""

    window: SquadWindow
    starts: np.ndarray
    ends: np.ndarray


def answer_of(question: SquadQuestion, scored: Sequence[Scored], *, may_be_none: bool) -> str:
    """The best span's text, or nothing where `may_be_none` and [CLS] scores higher."""
    best, text = -np.inf, ""
    for at, (window, starts, ends) in enumerate((one.window, one.starts, one.ends) for one in scored):
        count, shift = len(window.places), window.shift
        # A span counts once, in the window that shows most around its first token.
        own = starts[shift : shift + count].copy()
        own[[_max_context_window(scored, window.begin + place) != at for place in range(count)]] = -np.inf
        # Twenty of each, not all pairs, as published figures have it.
        firsts = np.argsort(-own, kind="stable")[:BEST]
        lasts = np.argsort(-ends[shift : shift + count], kind="stable")[:BEST]
        for first, last in product(firsts.tolist(), lasts.tolist()):
            score = own[first] + ends[shift + last]
            if first <= last < first + LONGEST and score > best:
                best, text = score, question.passage[window.places[first][0] : window.places[last][1]]
    # The least of all windows, as in BERT's script: one window that sees an answer is enough.
    nothing = min(float(one.starts[0] + one.ends[0]) for one in scored)
    return "" if may_be_none and nothing > best else text


def _max_context_window(scored: Sequence[Scored], place: int) -> int:
    """The window with the most context around a passage's token, as BERT's own evaluation chooses."""

    def around(window: SquadWindow) -> float:
        inside = place - window.begin
        after = len(window.places) - 1 - inside
        # The lesser side counts; of equal ones a longer window wins by BERT's own hundredth.
        return min(inside, after) + 0.01 * len(window.places) if inside >= 0 and after >= 0 else -np.inf

    return max(range(len(scored)), key=lambda at: around(scored[at].window))


@torch.inference_mode()
def squad_scores(loaded: LoadedText, source: str, progress: ShowProgress = silent) -> Facts:
    """Answer every question of a file. Raises DataError where the file is not SQuAD's, or has none."""
    data = loaded.config.data
    assert isinstance(data, SquadData), data
    questions = list(squad_questions(Path(source).expanduser()))
    if not questions:
        raise DataError(f"{source}: holds no question")
    has_none = any(not question.answers for question in questions)
    matches, overlaps = [], []
    for done, (question, scored) in enumerate(_scored(loaded, questions, data.stride), start=1):
        given = answer_of(question, scored, may_be_none=has_none)
        # Answers of articles and punctuation alone are no answers to the official script.
        wanted = [text for text, _ in question.answers if normalised(text)] or [""]
        matches.append(max(exact_match(given, text) for text in wanted))
        overlaps.append(max(f1(given, text) for text in wanted))
        progress("squad", done / len(questions))
    facts: Facts = {"data": source, "questions": len(questions), "context": loaded.context}
    facts |= {"exact_match": 100 * sum(matches) / len(questions), "f1": 100 * sum(overlaps) / len(questions)}
    if has_none:
        for name, wanted_any in (("answerable", True), ("unanswerable", False)):
            chosen = [at for at, question in enumerate(questions) if bool(question.answers) == wanted_any]
            if chosen:
                facts |= {f"{name}_questions": len(chosen)}
                facts |= {f"{name}_exact_match": 100 * sum(matches[at] for at in chosen) / len(chosen)}
                facts |= {f"{name}_f1": 100 * sum(overlaps[at] for at in chosen) / len(chosen)}
    return facts


def _scored(
    loaded: LoadedText, questions: Sequence[SquadQuestion], stride: int
) -> Iterator[tuple[SquadQuestion, list[Scored]]]:
    """The questions with the scores of their windows."""
    specials, length = specials_of(loaded.tokenizer), loaded.context
    rows = max(1, BATCH_TOKENS // length)
    for question in questions:
        windows = squad_windows(question, loaded.tokenizer, length, stride)
        scored = []
        for first in range(0, len(windows), rows):
            part = windows[first : first + rows]
            tokens = np.full((len(part), length), specials.padding, dtype=np.int64)
            ends = np.zeros((len(part), 2), dtype=np.int64)
            for at, window in enumerate(part):
                ids = row_tokens(window.row, specials)
                tokens[at, : len(ids)] = ids
                ends[at] = window.shift, len(ids)
            h = loaded.model.trunk(to_device(task_batch(tokens, ends), loaded.device))
            scores = loaded.model.spans(h).double().cpu().numpy()
            scored += [Scored(window, *scores[at].T) for at, window in enumerate(part)]
        yield question, scored


SQUAD = Task(fine_tuned("answered passages", squad_scores), ("context",))
