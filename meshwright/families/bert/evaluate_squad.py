"""Exact match and F1 on SQuAD by the official rules (Rajpurkar et al., arXiv 1606.05250, 1806.03822).

The predicted answer is compared with each annotator's in lower case, without punctuation, articles and extra white
space; the best match counts. Exact match: both are equal. F1: of both as bags of words. For a question without an
answer (version 2.0) both are 1 if no answer is predicted, else 0.

The prediction follows BERT (Devlin et al., section 4.2): the span of at most 30 tokens with the highest sum of start
and end score, out of the 20 best of each. If windows overlap, a token counts in the window with the most context
around it. In a file with unanswerable questions, no answer is predicted if [CLS] scores higher.
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

from meshwright.compute.model import to_device
from meshwright.data.files import ShowProgress, silent
from meshwright.families.bert.data_section import SquadData
from meshwright.families.bert.evaluate_choices import fine_tuned
from meshwright.families.bert.specials import specials_of
from meshwright.families.bert.task_files import SquadQuestion, squad_questions
from meshwright.families.bert.tasks import SquadWindow, row_arrays, squad_windows, task_batch
from meshwright.ranks.errors import DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText
from meshwright.tools.evaluate.tasks import Task

BEST, LONGEST = 20, 30
"""The number of starts, and of ends, that are combined; the most tokens of an answer."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalised(answer: str) -> str:
    """Normalise an answer as the official script does before a comparison."""
    plain = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def f1(given: str, wanted: str) -> float:
    """Compute the harmonic mean of precision and recall of the answer's words."""
    ours, theirs = normalised(given).split(), normalised(wanted).split()
    if not ours or not theirs:
        # The official script's rule for an answer of no words.
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


@dataclass(frozen=True)
class Scored:
    """A window with the scores of tokens as start and as end, [T] each."""

    window: SquadWindow
    starts: np.ndarray
    ends: np.ndarray


def answer_of(question: SquadQuestion, scored: Sequence[Scored], *, may_be_none: bool) -> str:
    """Return the text of the best span; "" if `may_be_none` and [CLS] scores higher."""

    def context(window: SquadWindow, token: int) -> float:
        """Count the tokens on the shorter side of a passage's token; -inf outside of the window."""
        before = token - window.begin
        after = len(window.places) - 1 - before
        # BERT's script prefers the longer window by a hundredth a token.
        return min(before, after) + 0.01 * len(window.places) if before >= 0 and after >= 0 else -np.inf

    best, text = -np.inf, ""
    for index, (window, starts, ends) in enumerate((entry.window, entry.starts, entry.ends) for entry in scored):
        count, shift = len(window.places), window.shift
        # A span counts once, in the window with the most context around its first token.
        here = starts[shift : shift + count].copy()
        for offset in range(count):
            contexts = [context(entry.window, window.begin + offset) for entry in scored]
            if contexts.index(max(contexts)) != index:
                here[offset] = -np.inf
        # Twenty of each, not all pairs, as in the published figures.
        firsts = np.argsort(-here, kind="stable")[:BEST]
        lasts = np.argsort(-ends[shift : shift + count], kind="stable")[:BEST]
        for first, last in product(firsts.tolist(), lasts.tolist()):
            score = here[first] + ends[shift + last]
            if first <= last < first + LONGEST and score > best:
                best, text = score, question.passage[window.places[first][0] : window.places[last][1]]
    # The least over all windows, as in BERT's script: one window that sees an answer is enough.
    nothing = min(float(entry.starts[0] + entry.ends[0]) for entry in scored)
    return "" if may_be_none and nothing > best else text


@torch.inference_mode()
def squad_scores(loaded: LoadedText, source: str, progress: ShowProgress = silent) -> Facts:
    """Measure exact match and F1 in percent. Raises DataError if the file is not SQuAD's, or has no question."""
    data = loaded.config.data
    assert isinstance(data, SquadData), data
    questions = list(squad_questions(Path(source).expanduser()))
    if not questions:
        raise DataError(f"{source}: holds no question")
    has_none = any(not question.answers for question in questions)
    matches, overlaps = [], []
    for done, (question, scored) in enumerate(_scored(loaded, questions, data.stride), start=1):
        given = answer_of(question, scored, may_be_none=has_none)
        # The official script ignores answers that consist of articles and punctuation.
        wanted = [text for text, _ in question.answers if normalised(text)] or [""]
        matches.append(float(normalised(given) in map(normalised, wanted)))
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
    """Yield each question with the scores of its windows."""
    specials, length = specials_of(loaded.tokenizer), loaded.context
    rows = max(1, BATCH_TOKENS // length)
    for question in questions:
        windows = squad_windows(question, loaded.tokenizer, length, stride)
        scored = []
        for first in range(0, len(windows), rows):
            group = windows[first : first + rows]
            tokens, ends = row_arrays([(window.row,) for window in group], specials, length)
            h = loaded.model.hidden_states(to_device(task_batch(tokens[:, 0], ends[:, 0]), loaded.device))[0]
            scores = loaded.model.spans(h).double().cpu().numpy()
            scored += [Scored(window, *scores[at].T) for at, window in enumerate(group)]
        yield question, scored


SQUAD = Task(fine_tuned("answered passages", squad_scores), ("context",))
