"""The accuracy of fine-tuned BERTs in classifying pairs (MNLI, QQP) and in choosing an answer (RACE).

QQP also has the F1 of class "1", as GLUE reports it; RACE also the accuracy by level, middle and high school.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np
import torch

from meshwright.compute.model import to_device
from meshwright.data.files import ShowProgress, silent
from meshwright.families.bert.data_section import TaskSection
from meshwright.families.bert.section import BertChoice
from meshwright.families.bert.specials import specials_of
from meshwright.families.bert.task_files import pair_form, race_questions
from meshwright.families.bert.tasks import TaskExample, examples, row_arrays, task_batch
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText, load_text
from meshwright.tools.evaluate.tasks import Question, Task


@torch.inference_mode()
def _answers(loaded: LoadedText, asked: Iterable[TaskExample], progress: ShowProgress) -> Iterator[tuple[int, int]]:
    """Yield (predicted class, label) of each example."""
    specials, length = specials_of(loaded.tokenizer), loaded.context
    source = iter(asked)
    *choices, _ = loaded.model.sample_shapes(loaded.config)["tokens"]  # [] if a sample is one row
    several = bool(choices)
    while examples := list(islice(source, max(1, BATCH_TOKENS // (length * prod(choices))))):
        tokens, ends = row_arrays([example.rows for example in examples], specials, length)
        batch = to_device(task_batch(tokens, ends) if several else task_batch(tokens[:, 0], ends[:, 0]), loaded.device)
        h = loaded.model.hidden_states(batch)[0]
        scores = (
            loaded.model.answers(h, batch)["answer"] if several else loaded.head.logits(loaded.model.pooled(h))[:, 0]
        )
        progress("answers", None)
        yield from zip(scores.argmax(-1).tolist(), (example.answers[0] for example in examples), strict=True)


def _all_answers(loaded: LoadedText, source: str, progress: ShowProgress) -> np.ndarray:
    """Return (predicted class, label) of all examples of a source, [n, 2]. Raises DataError if there are none."""
    data = loaded.config.data
    assert isinstance(data, TaskSection), data
    # --context may differ from the length that the run trained with.
    data = data.model_copy(update={"sequence": loaded.context})
    answers = np.array(list(_answers(loaded, examples(loaded.config, data, source, loaded.tokenizer), progress)))
    if not len(answers):
        raise DataError(f"{source}: holds no question")
    return answers


def pair_accuracy(loaded: LoadedText, source: str, progress: ShowProgress = silent) -> Facts:
    """Measure the accuracy on a tsv file of pairs; with two classes also the F1 of class 1."""
    given, right = _all_answers(loaded, source, progress).T
    facts: Facts = {"data": source, "pairs": len(right), "correct": int((given == right).sum())}
    facts["accuracy"] = float((given == right).mean())
    if len(pair_form(Path(source).expanduser()).classes) == 2:
        both, either = int((given * right).sum()), int(given.sum() + right.sum())
        # Precision and recall of class 1 in one quotient: 2 TP / (2 TP + FP + FN).
        facts["f1"] = 2 * both / either if either else 0.0
    return facts


def race_accuracy(loaded: LoadedText, source: str, progress: ShowProgress = silent) -> Facts:
    """Measure the accuracy on a folder of questions, over all questions and by level."""
    model = loaded.config.model
    assert isinstance(model, BertChoice), model
    given, right = _all_answers(loaded, source, progress).T
    # In the order of the files, like the examples.
    levels = np.array([asked.level for asked in race_questions(Path(source).expanduser(), model.choices)])
    facts: Facts = {"data": source, "questions": len(right), "correct": int((given == right).sum())}
    facts["accuracy"] = float((given == right).mean())
    for level in sorted(set(levels.tolist()) - {""}):
        facts[f"{level}_accuracy"] = float((given == right)[levels == level].mean())
    return facts


def fine_tuned(
    reads: str, score: Callable[[LoadedText, str, ShowProgress], Facts]
) -> Callable[[Question, ShowProgress], tuple[Path, Facts]]:
    """Make the measure of a task. The source is --data, or the run's held-out file; without either: ConfigError.

    Args:
        reads: the form of batches that the task's models read (Network.reads).
        score: computes the facts of a source.
    """

    def measure(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
        loaded = load_text(question.checkpoint, question.device, question.context, reads)
        data, valid = loaded.config.data, "the official file or folder"
        assert isinstance(data, TaskSection), data
        source = question.data or data.held_out
        if source is None:
            raise ConfigError.of("--data", "none", f"leaves --task {question.task} without questions", valid)
        if not Path(source).expanduser().exists():
            raise ConfigError.of("--data", source, "is no such file or folder", valid)
        return loaded.folder, score(loaded, source, progress)

    return measure


PAIRS = Task(fine_tuned("classified pairs", pair_accuracy), ("context",))
RACE = Task(fine_tuned("answered choices", race_accuracy), ("context",))
