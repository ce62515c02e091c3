"""Fine-tuning tasks as samples: rows of [CLS] A [SEP] B [SEP], padded to T tokens, and the answer's number.

| kind           | rows a sample | A        | B                        | cut to fit                               |
|----------------|---------------|----------|--------------------------|------------------------------------------|
| sentence-pairs | 1             | one text | the other                | the end of the longer text               |
| squad          | 1             | question | a window of the passage  | windows, `stride` apart; A: 64 tokens    |
| race           | K             | passage  | the question and answer  | the passage's end; B: 128 tokens         |

A window of SQuAD that does not hold the whole answer is labelled with [CLS], as in BERT's fine-tuning. A prepared
folder has three arrays of each split: tokens [N, K, T], ends of A and of B [N, K, 2], answers [N, labels].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.data.corpus import path_identity
from meshwright.data.dataset import Opened, open_splits
from meshwright.data.files import DAMAGE_REMEDY, ShowProgress, check_once, file_sha256, folder_lock, staged_folder
from meshwright.data.marks_section import NO_BEGIN
from meshwright.data.packed import TOKENIZER
from meshwright.data.packing import check_agrees
from meshwright.data.sampler import ShuffledSamples
from meshwright.data.split import Split
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, tokenizer_kind
from meshwright.families.bert.data_section import RaceData, SentencePairData, SquadData, TaskSection
from meshwright.families.bert.section import BertChoice, BertPairs
from meshwright.families.bert.specials import Specials, specials_of
from meshwright.families.bert.task_files import (
    SquadQuestion,
    labelled_pairs,
    pair_form,
    race_questions,
    squad_questions,
)
from meshwright.output.outputs import free_path
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.foreign import read_json

if TYPE_CHECKING:
    from meshwright.compute.model import Batch
    from meshwright.config import Config

_FORMAT = 2
_HEADER = "task.json"
LONGEST_QUESTION, LONGEST_CHOICE = 64, 128
_ARRAYS = ("tokens", "ends", "answers")


class TaskRow(NamedTuple):
    """The tokens of the texts A and B, cut to fit a row."""

    first: Sequence[int]
    second: Sequence[int]


class TaskExample(NamedTuple):
    """A sample: its rows and answers. Examples of one `group` go into the same split."""

    rows: tuple[TaskRow, ...]
    answers: tuple[int, ...]
    group: str


class SquadWindow(NamedTuple):
    """A window over a passage: its row, and each token's (start, stop) in the passage's characters."""

    row: TaskRow
    places: list[tuple[int, int]]
    begin: int
    """The number of the window's first token among the passage's tokens."""

    @property
    def shift(self) -> int:
        """The position of the window's first token in the row."""
        return len(self.row.first) + 2


def squad_windows(question: SquadQuestion, tokenizer: Tokenizer, sequence: int, stride: int) -> list[SquadWindow]:
    """Cut a question's passage into windows, each after the question. Raises DataError if no window fits."""
    asked = tokenizer.encode(question.question.strip())[:LONGEST_QUESTION]
    # [CLS] and two [SEP].
    room = sequence - 3 - len(asked)
    if room < 1:
        raise DataError(f"question {question.id}: its {len(asked)} tokens leave no room in data.sequence={sequence}")
    ids, places = tokenizer.encode_placed(question.passage)
    windows, start = [], 0
    while True:
        windows.append(SquadWindow(TaskRow(asked, ids[start : start + room]), places[start : start + room], start))
        if start + room >= len(ids):
            return windows
        # A stride above the room would leave tokens between two windows.
        start += min(stride, room)


def squad_labels(window: SquadWindow, question: SquadQuestion) -> tuple[int, int]:
    """Return the positions in the row of the first answer's first and last token.

    (0, 0), the position of [CLS], if the window does not contain the whole answer.
    """
    # Training learns the first annotator's answer; an evaluation compares with all answers.
    for text, start in question.answers[:1]:
        end = start + len(text)
        # Answers are placed by characters, and a token may reach beyond an answer's end.
        inside = [at for at, (begin, stop) in enumerate(window.places) if begin < end and stop > start]
        if inside and window.places[inside[0]][0] <= start and window.places[inside[-1]][1] >= end:
            return inside[0] + window.shift, inside[-1] + window.shift
    return 0, 0


def pair_row(first: Sequence[int], second: Sequence[int], sequence: int) -> TaskRow:
    """Cut two texts to fit a row of `sequence` tokens."""
    a, b, room = len(first), len(second), sequence - 3
    # As in BERT's code, the longer text loses a token until both fit.
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return TaskRow(first[:a], second[:b])


def examples(config: Config, data: TaskSection, source: str, tokenizer: Tokenizer) -> Iterator[TaskExample]:
    """Yield the samples of a source, in the source's order. Raises DataError, ConfigError."""
    path, model, encode = Path(source).expanduser(), config.model, tokenizer.encode
    match data:
        case SentencePairData():
            assert isinstance(model, BertPairs), model
            form = pair_form(path)
            if model.classes != len(form.classes):
                rule = f"is not the {len(form.classes)} classes of {form.name}, which {source} is"
                raise ConfigError.of("model.classes", model.classes, rule, str(len(form.classes)))
            for index, pair in enumerate(labelled_pairs(path)):
                row = pair_row(encode(pair.first), encode(pair.second), data.sequence)
                yield TaskExample((row,), (pair.answer,), str(index))
        case SquadData():
            for question in squad_questions(path):
                for window in squad_windows(question, tokenizer, data.sequence, data.stride):
                    yield TaskExample((window.row,), squad_labels(window, question), question.passage)
        case RaceData():
            assert isinstance(model, BertChoice), model
            for asked in race_questions(path, model.choices):
                passage = encode(asked.passage)
                # The passage is cut to make room for each choice, but keeps at least one token.
                cut = [encode(text)[: min(LONGEST_CHOICE, data.sequence - 4)] for text in asked.asked]
                rows = tuple(TaskRow(passage[: data.sequence - 3 - len(choice)], choice) for choice in cut)
                yield TaskExample(rows, (asked.answer,), asked.passage)
        case _:
            raise AssertionError(f"{type(data).__name__} is no section of a task")


def texts_of(config: Config, data: TaskSection) -> Iterator[str]:
    """Yield the source's texts for the training of a tokenizer."""
    path = Path(data.source).expanduser()
    match data:
        case SentencePairData():
            yield from (text for pair in labelled_pairs(path) for text in (pair.first, pair.second))
        case SquadData():
            yield from (text for asked in squad_questions(path) for text in (asked.passage, asked.question))
        case RaceData():
            assert isinstance(config.model, BertChoice), config.model
            for asked in race_questions(path, config.model.choices):
                yield from (asked.passage, *asked.asked)


def prepare_task(data: TaskSection, config: Config, progress: ShowProgress) -> Path:
    """Return the prepared folder of a run, checked against the run's fields; written into the cache if missing.

    Raises DataError, ConfigError.
    """
    cache = cache_folder()
    prepared = Path(data.source).expanduser()
    if (prepared / _HEADER).is_file():
        _check_prepared(config, data, prepared)
        out = prepared
    else:
        tokenizer_type = tokenizer_kind(data.tokenizer)
        tokenizer = (
            [tokenizer_type, file_sha256(Path(data.tokenizer).expanduser())]
            if tokenizer_type == "file"
            else [tokenizer_type]
        )
        sources = [path_identity(source) for source in (data.source, data.held_out) if source is not None]
        # The folder's name is a hash of everything that the rows depend on, so no stale folder is read.
        facts = [_FORMAT, sources, tokenizer, data.validation, _fields(config, data)]
        out = cache / f"task-{hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]}"
        if not (out / _HEADER).is_file():
            _pack(config, data, out, progress)
    check_once(out, read_json(out / _HEADER)["sha256"], {}, cache)
    data.open(config, out)
    return out


def open_task(data: TaskSection, config: Config, folder: Path) -> Opened:
    """Open the splits of a prepared folder. Raises DataError if a split is too small."""
    tokenizer, counts = load_tokenizer(folder / TOKENIZER, NO_BEGIN), read_json(folder / _HEADER)
    return open_splits(
        config,
        lambda split: (TaskSamples(folder, split, data, config.seed), f"{counts['samples'][split]} samples"),
        tokenizer,
    )


def pack_task(data: TaskSection, config: Config, out: Path, progress: ShowProgress) -> Path:
    """Prepare the folder `out`, which must be new or empty. Raises DataError, ConfigError."""
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise DataError(f"{out}: exists and is not empty; give another folder, such as {free_path(out)}")
    if (Path(data.source).expanduser() / _HEADER).is_file():
        raise DataError(f"{data.source}: is a prepared folder already; name it as data.source of a run")
    _pack(config, data, out, progress)
    return out


def _pack(config: Config, data: TaskSection, out: Path, progress: ShowProgress) -> None:
    try:
        with folder_lock(out, progress):
            if not (out / _HEADER).is_file():  # else another process has written the folder
                with staged_folder(out) as folder:
                    _write(folder, config, data, progress)
    except OSError as error:  # no right to write there, a full disk
        raise DataError(f"preparing {out}: {error.strerror}: {error.filename or out}") from error


def _fields(config: Config, data: TaskSection) -> dict[str, object]:
    """Return the fields that a prepared folder depends on, except for sources, tokenizer and validation share."""
    of_data = data.model_dump(exclude={"source", "held_out", "tokenizer", "validation"})
    of_model = config.model.model_dump(include={"classes", "choices"})
    return {f"data.{name}": value for name, value in of_data.items()} | {
        f"model.{name}": value for name, value in of_model.items()
    }


def _check_prepared(config: Config, data: TaskSection, folder: Path) -> None:
    """Raise ConfigError if a folder was prepared with other fields than the run's, DataError if a file is damaged."""
    try:
        header = read_json(folder / _HEADER)
        if header["format"] != _FORMAT:
            raise DataError(f"{folder}: has format {header['format']}, this version reads {_FORMAT}; {DAMAGE_REMEDY}")
        missing = [name for name in header["sha256"] if not (folder / name).is_file()]
        fields, tokenizer_type, share, size = (
            header[key] for key in ("fields", "tokenizer", "validation_share", "vocabulary")
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{folder / _HEADER}: is damaged ({error!r:.80}); {DAMAGE_REMEDY}") from error
    if missing:
        raise DataError(f"{folder / missing[0]}: is missing; {DAMAGE_REMEDY}")
    for field, value in _fields(config, data).items():
        if fields.get(field) != value:
            rule = f"is not what {data.source} was prepared with"
            raise ConfigError.of(field, value, rule, f"{fields.get(field)}, or prepare it again")
    if data.held_out is not None:
        rule = f"has no effect: {data.source} was prepared with what is held out"
        raise ConfigError.of("data.held_out", data.held_out, rule, "leave it out, or prepare it again")
    check_agrees(data, tokenizer_type, load_tokenizer(folder / TOKENIZER), share)
    _check_vocabulary(config, size)


def _check_vocabulary(config: Config, size: int) -> None:
    if size > config.model.num_tokens:
        rule = f"is smaller than the {size} tokens of data.tokenizer with BERT's"
        raise ConfigError.of("model.vocabulary", config.model.num_tokens, rule, f"{size} or more")


def _write(folder: Path, config: Config, data: TaskSection, progress: ShowProgress) -> None:
    """Write the tokenizer and both splits, and the header last."""
    tokenizer = make_tokenizer(data.tokenizer, texts_of(config, data), progress)
    specials = specials_of(tokenizer)
    _check_vocabulary(config, specials.vocabulary_size)
    tokenizer.save(folder / TOKENIZER)
    splits: dict[Split, list[TaskExample]] = {"train": [], "validation": []}
    for source, split in ((data.source, "train"), (data.held_out, "validation")):
        for example in examples(config, data, source, tokenizer) if source is not None else ():
            # A hash of the group, in [0, 1), decides the split: equal passages are held out together, in any order.
            digest = hashlib.blake2b(example.group.encode(), digest_size=8).digest()
            share = int.from_bytes(digest, "little") / 2**64
            held_out = split == "validation" or (data.held_out is None and share < data.validation)
            splits["validation" if held_out else "train"].append(example)
            progress(f"reading: {len(splits['train'])} samples", None)
    for name, some in splits.items():
        if not some:
            raise DataError(f"{data.source}: leaves no sample for the {name} split; give more, or data.held_out")
        # uint16 holds every vocabulary of BERT.
        dtype = np.uint16 if specials.vocabulary_size <= 2**16 else np.uint32
        tokens, ends = row_arrays([example.rows for example in some], specials, data.sequence, dtype)
        answers = np.array([example.answers for example in some], dtype=np.int64)
        for array, values in zip(_ARRAYS, (tokens, ends.astype(np.int32), answers), strict=True):
            np.save(folder / f"{name}-{array}.npy", np.asarray(values))
    # Listed before the header exists, since the header contains the hashes of the other files.
    files = sorted(path.name for path in folder.iterdir())
    header = {
        "format": _FORMAT,
        "fields": _fields(config, data),
        "tokenizer": tokenizer_kind(data.tokenizer),
        "vocabulary": specials.vocabulary_size,
        "validation_share": data.validation,
        "samples": {name: len(some) for name, some in splits.items()},
        "sha256": {name: file_sha256(folder / name) for name in files},
    }
    (folder / _HEADER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")


def row_arrays(
    samples: Sequence[Sequence[TaskRow]], specials: Specials, sequence: int, dtype: type[np.integer] = np.int64
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [N, K, T] of N samples of K rows, in `dtype`, and the ends of A and of B in each row [N, K, 2]."""
    shape = (len(samples), len(samples[0]))
    tokens = np.full((*shape, sequence), specials.padding, dtype=dtype)
    ends = np.zeros((*shape, 2), dtype=np.int64)
    for index, rows in enumerate(samples):
        for at, row in enumerate(rows):
            ids = [specials.first, *row.first, specials.separator, *row.second, specials.separator]
            tokens[index, at, : len(ids)] = ids
            ends[index, at] = len(row.first) + 2, len(ids)
    return tokens, ends


def task_batch(tokens: np.ndarray, ends: np.ndarray) -> Batch:
    """Make `tokens`, `segments` and `mask` of rows [..., T], all int64. `ends` [..., 2]: the ends of A and B."""
    import torch

    places = np.arange(tokens.shape[-1])
    mask = places < ends[..., 1:]
    segments = mask & (places >= ends[..., :1])
    entries = {"tokens": tokens, "segments": segments, "mask": mask}
    return {name: torch.from_numpy(x.astype(np.int64)) for name, x in entries.items()}


class TaskSamples(ShuffledSamples):
    """The samples of one split of a prepared folder."""

    def __init__(self, folder: Path, split: Split, data: TaskSection, seed: int) -> None:
        self._tokens, self._ends, self._answers = (
            np.lib.format.open_memmap(folder / f"{split}-{array}.npy", mode="r") for array in _ARRAYS
        )
        self._labels = ("start", "end") if isinstance(data, SquadData) else ("answer",)
        self._several = isinstance(data, RaceData)
        super().__init__(len(self._answers), seed)

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        import torch

        tokens, ends = self._tokens[rows], self._ends[rows]
        batch = task_batch(tokens, ends) if self._several else task_batch(tokens[:, 0], ends[:, 0])
        answers = self._answers[rows]
        for at, name in enumerate(self._labels):
            batch[name] = torch.from_numpy(answers[:, at : at + 1].copy())
        return batch
