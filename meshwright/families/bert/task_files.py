"""Readers of the official files of MNLI, QQP, SQuAD and RACE, in the published form.

A mistake in a file raises DataError with the file, the line or question, and the cause. An answer that is not at the
stated place of the passage is such a mistake, since training would silently learn other words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.records import checked_text
from meshwright.data.source_files import plain_files
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import open_named, parse_json, read_named

LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class PairForm:
    """The columns of a tsv file of sentence pairs, and the classes in the order of numbers."""

    name: str
    first: str
    second: str
    label: str
    classes: tuple[str, ...]


PAIR_FORMS = (
    PairForm("MNLI", "sentence1", "sentence2", "gold_label", ("contradiction", "entailment", "neutral")),
    PairForm("QQP", "question1", "question2", "is_duplicate", ("0", "1")),
)
NO_CONSENSUS = "-"
"""MNLI's label of pairs without an agreement of the annotators. Such pairs are left out, as usual."""


@dataclass(frozen=True)
class LabelledPair:
    """Two texts and the number of the pair's class."""

    first: str
    second: str
    answer: int


def pair_form(path: Path) -> PairForm:
    """Return the form of a tsv file from the first line. Raises DataError for an unknown form."""
    # GLUE's test files lack the column of labels, and cannot be used.
    columns = next(_lines(path), "").split("\t")
    for form in PAIR_FORMS:
        if {form.first, form.second, form.label} <= set(columns):
            return form
    wanted = " or ".join(f"{form.name}'s {form.first}, {form.second}, {form.label}" for form in PAIR_FORMS)
    raise DataError(f"{path} line 1: has the columns {', '.join(columns)[:200]}; wanted {wanted}")


def labelled_pairs(path: Path) -> Iterator[LabelledPair]:
    """Yield the pairs of a tsv file, without those that have no consensus. As in GLUE, quotes have no meaning."""
    form = pair_form(path)
    lines = _lines(path)
    columns = next(lines).split("\t")
    first, second, label = (columns.index(name) for name in (form.first, form.second, form.label))
    for line_number, line in enumerate(lines, start=2):
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise DataError(f"{path} line {line_number}: has {len(fields)} columns, and the first line {len(columns)}")
        if fields[label] == NO_CONSENSUS:
            continue
        if fields[label] not in form.classes:
            valid = ", ".join(form.classes)
            raise DataError(f"{path} line {line_number}: {form.label}={fields[label]!r:.40} is none of {valid}")
        yield LabelledPair(fields[first], fields[second], form.classes.index(fields[label]))


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; only a line feed ends a line."""
    try:
        with open_named(path) as file:
            for line in file:
                # Not splitlines(): texts contain other line separators of Unicode, and these end no record.
                yield line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 text; convert it to UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class SquadQuestion:
    """A question about a passage. `answers`: each annotator's text and the place of its first character; () if
    unanswerable."""

    id: str
    question: str
    passage: str
    answers: tuple[tuple[str, int], ...]
    title: str


def squad_questions(path: Path) -> Iterator[SquadQuestion]:
    """Yield the questions of SQuAD's json, version 1.1 or 2.0. Raises DataError for a misplaced answer."""
    tree = _json(path)
    try:
        articles = [(article.get("title", ""), article["paragraphs"]) for article in tree["data"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{path}: is no file of SQuAD; wanted {{"data": [{{"paragraphs": [...]}}]}}') from error
    for article_number, (title, paragraphs) in enumerate(articles, start=1):
        for paragraph in paragraphs:
            try:
                passage = checked_text(paragraph["context"], f"{path} article {article_number}", "context")
                for question in paragraph["qas"]:
                    yield _question(path, str(title), passage, question)
            except (KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{path} article {article_number}: lacks {error} of SQuAD's form") from error


def _question(path: Path, title: str, passage: str, entry: Mapping[str, Any]) -> SquadQuestion:
    name = str(entry["id"])
    where = f"{path} question {name}"
    answers = () if entry.get("is_impossible", False) else entry["answers"]
    told = []
    for answer in answers:
        text, start = checked_text(answer["text"], where), answer["answer_start"]
        there = passage[start : start + len(text)] if isinstance(start, int) and start >= 0 else ""
        # With a shifted offset (bytes for characters, a cleaned passage) training would learn other words.
        if not text or there != text:
            stands = f"where the passage has {there!r:.60}"
            raise DataError(f"{where}: its answer {text!r:.60} is not at character {start}, {stands}")
        told.append((text, start))
    if not told and not entry.get("is_impossible", False):
        raise DataError(f"{where}: has no answer, and does not say is_impossible")
    return SquadQuestion(name, checked_text(entry["question"], where, "question"), passage, tuple(told), title)


@dataclass(frozen=True)
class RaceQuestion:
    """A question about a passage, with options.

    answer: the number of the right option.
    level: middle, high or "".
    """

    passage: str
    question: str
    options: tuple[str, ...]
    answer: int
    level: str
    file: str

    @property
    def asked(self) -> tuple[str, ...]:
        """The question with each option: in the question's gap (`_`), or appended if there is no gap."""
        gap = "_" in self.question
        return tuple(
            self.question.replace("_", option, 1) if gap else f"{self.question} {option}" for option in self.options
        )


def race_questions(folder: Path, choices: int) -> Iterator[RaceQuestion]:
    """Yield the questions of RACE's folder, each with `choices` options, by file name. Raises DataError."""
    for path in plain_files(str(folder), ".txt"):
        entry = _json(path)
        try:
            passage = checked_text(entry["article"], str(path), "article")
            asked = list(zip(entry["questions"], entry["options"], entry["answers"], strict=True))
        except (KeyError, TypeError, ValueError) as error:
            wanted = "a passage of RACE with article, questions, options and answers, as many of each"
            raise DataError(f"{path}: is not {wanted}") from error
        # Searched from the end of the path, since a parent folder may be called "middle" or "high" by chance.
        level = next(
            (folder_name for folder_name in reversed(path.parent.parts) if folder_name in ("middle", "high")), ""
        )
        for question_number, (question, options, answer) in enumerate(asked, start=1):
            where = f"{path} question {question_number}"
            if not isinstance(options, list) or len(options) != choices:
                has = len(options) if isinstance(options, list) else "no"
                raise DataError(f"{where}: has {has} options, and the model has model.choices={choices}")
            if not isinstance(answer, str) or len(answer) != 1 or answer not in LETTERS[:choices]:
                raise DataError(f"{where}: its answer {answer!r:.20} is none of {', '.join(LETTERS[:choices])}")
            texts = tuple(checked_text(option, where, "options") for option in options)
            asks = checked_text(question, where, "questions")
            yield RaceQuestion(passage, asks, texts, LETTERS.index(answer), level, path.name)


def _json(path: Path) -> Any:
    try:
        return parse_json(read_named(path))
    except ValueError as error:
        raise DataError(f"{path}: is no JSON: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
