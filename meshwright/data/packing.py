"""Preparation of a corpus: plan the split, make the tokenizer, write the token files, publish the folder.

The same corpus, tokenizer and share give the same bytes in every file, on every machine. For pairs, source and target
are written alternately, each as a document, and one tokenizer is trained on both sides of the train split. For
dialogues, tokens are flagged (messages.py), and no end token is added: the template ends a dialogue.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshwright.config import Config
from meshwright.data.corpus import Corpus, text_corpus
from meshwright.data.files import FileSum, Rate, ShowProgress, file_sha256, folder_lock, silent, staged_folder
from meshwright.data.long_text import Text
from meshwright.data.marks import UNASKED, Marks
from meshwright.data.marks_section import AUTO, NONE, AskedMarks
from meshwright.data.messages import flagged
from meshwright.data.packed import (
    FORMAT,
    HEADER,
    TOKEN_FILES,
    TOKENIZER,
    Header,
    PackedCorpus,
    SplitFacts,
    is_prepared,
    open_packed,
)
from meshwright.data.section import TokenSection
from meshwright.data.split import SPLITS, SplitPlan, plan_split, split_records
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, pieces, tokenizer_kind
from meshwright.data.told import read_facts
from meshwright.output.outputs import free_path
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.errors import DataError

# Characters encoded by one call of the library: enough for all cores, and small in memory.
_BATCH_CHARACTERS = 2**20


def prepare(
    source: str, tokenizer: str, out: Path, validation: float = 0.05, progress: ShowProgress = silent
) -> PackedCorpus:
    """Tokenize the documents of `source` into the folder `out`, as `pack`."""
    return pack(text_corpus(source), tokenizer, Path(out), validation, progress)


def pack(
    corpus: Corpus,
    tokenizer: str,
    out: Path,
    validation: float,
    progress: ShowProgress = silent,
    asked: AskedMarks = AskedMarks(),
) -> PackedCorpus:
    """Tokenize a corpus into the folder `out`, or reuse `out` if the folder holds the same already.

    Args:
        corpus: the documents, pairs, dialogues or pairs of answers.
        tokenizer: bytes, bpe:SIZE (trained on the train split), or a tokenizer.json file.
        out: the folder.
        validation: the held-out share of the characters, in whole records if possible.
        progress: shows progress.
        asked: the marks of documents; pairs have no begin mark.

    Raises:
        DataError: the source or tokenizer cannot be read, the corpus is too small for two splits, or `out` holds
            something else.
    """
    if not 0 <= validation < 1:
        raise DataError(f"validation={validation}: is no share; valid: 0, or a number below 1, such as 0.05")
    setting, asked = tokenizer_kind(tokenizer), asked if corpus.kind != "pairs" else asked._replace(begin=NONE)
    if out.exists() and not is_prepared(out) and (out.is_file() or any(out.iterdir())):
        raise DataError(f"{out}: exists and is no prepared folder; give another folder, such as {free_path(out)}")
    try:
        with folder_lock(out, progress):
            plan = plan_split(corpus, validation, progress)
            if is_prepared(out):
                return _reuse(out, corpus.where, tokenizer, validation, plan, asked)
            with staged_folder(out) as folder:
                # Train the tokenizer on the train split only: held-out text must be new to tokenizer and model.
                records = split_records(corpus, plan)
                # After a dialogue's text follows JSON, the spans of the assistant's text, which is not for training.
                every = 2 if corpus.kind in ("messages", "preferences") else 1
                learned = (text for split, texts in records if split == "train" for text in texts[::every])
                trained = make_tokenizer(tokenizer, learned, progress, asked, plan.num_characters)
                facts = {"tokenizer": setting, "validation_share": validation, "ends": asked.end != NONE}
                header = _write(folder, corpus, trained, plan, facts, progress)
                # Fields unknown to version 0.1.0 are left out if equal to that version's behaviour.
                was_so = {"begin": header.begin is None, "ends": header.ends, "ignored": not header.ignored}
                old = {name for name, same in was_so.items() if same}
                text = header.model_dump_json(indent=2, exclude=old) + "\n"
                (folder / HEADER).write_text(text, encoding="utf-8")
    except OSError as error:  # no right to write there, a full disk
        where = "; MESHWRIGHT_CACHE names another folder for what runs prepare" if out.parent == cache_folder() else ""
        raise DataError(f"preparing {out}: {error.strerror}: {error.filename or out}{where}") from error
    return open_packed(out)


def prepare_corpus(data: TokenSection, config: Config, progress: ShowProgress) -> Path:
    """Pack a run's corpus in the cache, and check that model and samples fit. Raises DataError, ConfigError."""
    corpus = corpus_for(data, cache_folder(), progress)
    corpus.check_vocabulary(config.model.num_tokens)
    data.open(config, corpus.folder)
    return corpus.folder


def pack_corpus(data: TokenSection, config: Config, out: Path, progress: ShowProgress) -> Path:
    """Pack a run's corpus into the folder `out`. Raises DataError, ConfigError."""
    packed = pack(data.corpus(), data.tokenizer, out, data.validation, progress, data.asked)
    packed.check_vocabulary(config.model.num_tokens)
    return packed.folder


def corpus_for(data: TokenSection, cache: Path, progress: ShowProgress = silent) -> PackedCorpus:
    """Open the config's packed corpus: a prepared folder as is; any other source is prepared once in `cache`.

    Raises DataError if a prepared folder is damaged, of another kind, or has another tokenizer, share or marks than
    the config.
    """
    source = Path(data.source).expanduser()
    if is_prepared(source):
        packed = open_packed(source)
        if packed.header.kind != data.packs:
            prepared = f"was prepared of {packed.header.kind}, and {data.packs} are wanted"
            raise DataError(f"data.source={data.source}: {prepared}")
        check_agrees(data, packed.header.tokenizer, packed.tokenizer, packed.header.validation_share)
        header, names = packed.header, packed.tokenizer.name_of
        begin = NONE if header.begin is None else names(header.begin)
        end = names(header.end) if header.ends else NONE
        for field, wanted, has in (("begin", data.asked.begin, begin), ("end", data.asked.end, end)):
            if wanted not in (AUTO, has) and data.begins:  # other marks than the folder's would have no effect
                text = f"data.{field}={wanted}: {data.source} was prepared with {has}"
                raise DataError(f"{text}; leave data.{field} out, or prepare it again")
    else:
        corpus, setting = data.corpus(), tokenizer_kind(data.tokenizer)
        tokenizer = [setting, file_sha256(Path(data.tokenizer).expanduser())] if setting == "file" else [setting]
        # The name changes with all that the prepared files depend on, and is known without reading the corpus.
        # Marks equal to version 0.1.0's are left out, so that folders of that version keep their names.
        marks = _marks(data.tokenizer, data.asked)
        told: list[object] = [] if data.asked.end != NONE else ["no end"]
        told += [] if marks is None else [marks.begin, marks.end]
        facts = [FORMAT, corpus.identity, tokenizer, data.validation, *told]
        out = cache / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        ready = is_prepared(out)
        packed = open_packed(out) if ready else pack(corpus, data.tokenizer, out, data.validation, progress, data.asked)
    packed.check_files(cache)
    return packed


class SplitWriter:
    """Writer of one split's token file: little-endian ids, each text between the tokenizer's marks.

    Counts and checksums are complete after the last `flush`.
    """

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, dtype: np.dtype, rate: Rate, *, ends: bool) -> None:
        """Write to `file`. `ends`: True to write the end token after a text. `rate`: counts the texts."""
        self._rate = rate
        self.sum = FileSum()
        self._file, self._tokenizer, self._dtype = file, tokenizer, dtype
        self._behind = [tokenizer.end] if ends else []
        self._batch: list[tuple[str, bool, bool]] = []
        self._batch_characters = 0
        self._tokens = self._documents = self._words = 0

    def add(self, text: Text) -> None:
        """Append one document."""
        is_first = True
        for chunk, following in pairwise(chain(pieces(text, self._tokenizer.piece_characters), [None])):
            assert chunk is not None
            self._words += len(chunk.split())  # exact: pieces are cut before a space
            self._batch.append((self._rate.counted(chunk), is_first, following is None))
            is_first = False
            self._batch_characters += len(chunk)
            if self._batch_characters >= _BATCH_CHARACTERS:
                self.flush()
        self._documents += 1

    def add_dialogue(self, text: str, spans: str) -> None:
        """Append one dialogue. `spans`: the spans of the assistant's text, as JSON."""
        data = flagged(self._tokenizer, text, json.loads(spans)).astype(self._dtype).tobytes()
        self._file.write(data)
        self.sum.update(data)
        self._tokens += len(data) // self._dtype.itemsize
        self._words += len(self._rate.counted(text).split())
        self._documents += 1

    @property
    def facts(self) -> SplitFacts:
        return SplitFacts(tokens=self._tokens, documents=self._documents, words=self._words)

    def flush(self) -> None:
        """Encode and write the documents added since the last call."""
        encoded = self._tokenizer.encode_batch(chunk for chunk, *_ in self._batch)
        for inside, (_, is_first, is_last) in zip(encoded, self._batch, strict=True):
            ids = [*(self._tokenizer.opening if is_first else ()), *inside, *(self._behind if is_last else ())]
            data = np.array(ids, dtype=self._dtype).tobytes()
            self._file.write(data)
            self.sum.update(data)
            self._tokens += len(ids)
        self._batch, self._batch_characters = [], 0


def _write(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, plan: SplitPlan, facts: dict[str, Any], progress: ShowProgress
) -> Header:
    """Write the tokenizer and both token files; return the header, including `facts`."""
    tokenizer.save(folder / TOKENIZER)
    flags = corpus.kind in ("messages", "preferences")
    # Two bytes a token if the vocabulary fits, for half the file size. Flags need the upper bits of four bytes.
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 2**16 and not flags else "<u4")
    with ExitStack() as stack:
        files = {split: stack.enter_context((folder / TOKEN_FILES[split]).open("wb")) for split in SPLITS}
        rate, ends = Rate(progress, "tokenizing", plan.num_characters), facts["ends"]
        writers = {split: SplitWriter(file, tokenizer, dtype, rate, ends=ends) for split, file in files.items()}
        for split, texts in split_records(corpus, plan):
            if flags:
                for text, spans in zip(texts[::2], texts[1::2], strict=True):
                    writers[split].add_dialogue(str(text), str(spans))
            else:
                for text in texts:
                    writers[split].add(text)
        for writer in writers.values():
            writer.flush()
        progress("tokenizing", 1.0)
    sums = {TOKEN_FILES[split]: writer.sum for split, writer in writers.items()}
    return Header(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocabulary_size=tokenizer.vocabulary_size,
        end=tokenizer.end,
        begin=tokenizer.begin,
        kind=corpus.kind,
        source=corpus.name,
        corpus_sha256=plan.corpus_sha256,
        train=writers["train"].facts,
        validation=writers["validation"].facts,
        sha256={TOKENIZER: file_sha256(folder / TOKENIZER), **{name: file.sha256 for name, file in sums.items()}},
        regions={name: file.regions for name, file in sums.items()},
        read=read_facts(corpus, plan),
        ignored=tuple(sorted(corpus.ignored)),
        **facts,
    )


def _reuse(
    out: Path, source: str, tokenizer: str, validation: float, plan: SplitPlan, asked: AskedMarks
) -> PackedCorpus:
    """Open the existing folder. Raises DataError if the content differs from the request."""
    packed, remedy = open_packed(out, verify=True), f"give another folder, such as {free_path(out)}"
    header = packed.header
    if header.corpus_sha256 != plan.corpus_sha256:
        raise DataError(f"{out}: holds the tokens of another corpus ({header.source}), not of {source}; {remedy}")
    if not _same_tokenizer(tokenizer, header.tokenizer, packed.tokenizer):
        raise DataError(f"{out}: was prepared with tokenizer {header.tokenizer}, not {tokenizer}; {remedy}")
    if header.validation_share != validation:
        raise DataError(f"{out}: holds out a share of {header.validation_share}, not {validation}; {remedy}")
    wanted = _marks(tokenizer, asked)
    if wanted is not None and (*wanted[:2], asked.end != NONE) != (header.begin, header.end, header.ends):
        raise DataError(f"{out}: was prepared with other tokens around documents; {remedy}")
    return packed


def _marks(tokenizer: str, asked: AskedMarks) -> Marks | None:
    """Return the config's marks for a tokenizer.json file; None for tokenizers made here, which have fixed marks."""
    path = Path(tokenizer).expanduser()
    return load_tokenizer(path, asked).marks if tokenizer_kind(tokenizer) == "file" else None


def _same_tokenizer(asked: str, setting: str, tokenizer: Tokenizer) -> bool:
    """Return whether a folder was prepared with the config's tokenizer. `setting`: the folder's tokenizer setting."""
    if tokenizer_kind(asked) != "file":
        return setting == tokenizer_kind(asked)
    return load_tokenizer(Path(asked).expanduser(), UNASKED).to_json() == tokenizer.to_json()


def check_agrees(data: TokenSection, setting: str, tokenizer: Tokenizer, share: float) -> None:
    """Raise DataError if a config names another tokenizer or share than a prepared folder's, without any effect.

    `setting`: the tokenizer setting of the folder's preparation.
    """
    again = "or prepare it again"
    defaults = {name: field.default for name, field in TokenSection.model_fields.items()}
    if data.tokenizer != defaults["tokenizer"] and not _same_tokenizer(data.tokenizer, setting, tokenizer):
        wanted = f"data.tokenizer={data.tokenizer}: {data.source} was prepared with {setting}"
        raise DataError(f"{wanted}; leave data.tokenizer out, {again}")
    if data.validation != defaults["validation"] and data.validation != share:
        wanted = f"data.validation={data.validation}: {data.source} was prepared with {share}"
        raise DataError(f"{wanted}; leave data.validation out, {again}")
