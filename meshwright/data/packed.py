"""From a corpus to a prepared folder: plan the split, make the tokenizer, write the token files, publish the folder.

The same corpus, tokenizer and share give the same bytes in every file, on every machine.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from meshwright.config.schema import Data
from meshwright.data.corpus import source_identity, source_name
from meshwright.data.format import (
    FORMAT,
    HEADER,
    TOKENIZER,
    Header,
    PackedCorpus,
    file_sha256,
    is_prepared,
    open_packed,
    token_file,
)
from meshwright.data.progress import Progress, silent
from meshwright.data.split import SPLITS, Plan, Split, plan_split, split_documents
from meshwright.data.staging import folder_lock, staged_folder
from meshwright.data.tokenizer import BYTES, Tokenizer, bpe_size, byte_tokenizer, load_tokenizer, train_bpe
from meshwright.data.writer import SplitWriter
from meshwright.errors import DataError

__all__ = ["PackedCorpus", "Progress", "Split", "corpus_for", "open_packed", "prepare"]


def prepare(
    source: str, tokenizer: str, out: Path, validation: float = 0.05, progress: Progress = silent
) -> PackedCorpus:
    """Tokenize `source` into the folder `out`; a folder that already holds just this is used as it is.

    `tokenizer`: bytes, bpe:SIZE (trained on the train split), or a tokenizer.json file. `validation`: the share of the
    characters that is held out, in whole documents where that is possible. Raises DataError if the source or tokenizer
    cannot be read, if the corpus is too small for two splits, or if `out` holds something else.
    """
    out = Path(out)
    if not 0 < validation < 1:
        raise DataError(f"validation={validation}: is no share; valid: between 0 and 1, such as 0.05")
    kind = _kind(tokenizer)
    if out.exists() and not is_prepared(out) and (out.is_file() or any(out.iterdir())):
        raise DataError(f"{out}: exists and is no prepared folder; give another folder, or remove it")
    try:
        with folder_lock(out, progress):
            plan = plan_split(source, validation, progress)
            if is_prepared(out):
                return _reuse(out, source, tokenizer, validation, plan)
            with staged_folder(out) as folder:
                made = _make_tokenizer(tokenizer, source, plan, progress)
                header = _write(folder, source, made, plan, validation, kind, progress)
                (folder / HEADER).write_text(header.to_json(), encoding="utf-8")
    except OSError as error:  # no right to write there, a full disk
        raise DataError(f"preparing {out}: {error.strerror}: {error.filename or out}") from error
    return open_packed(out)


def corpus_for(data: Data, cache: Path, progress: Progress = silent) -> PackedCorpus:
    """The packed corpus that a config asks for: a prepared folder is opened, anything else is prepared once in `cache`.

    Raises DataError if a prepared folder was made with another tokenizer or share than the config names.
    """
    source = Path(data.source).expanduser()
    if is_prepared(source):
        corpus = open_packed(source)
        _check_agrees(corpus, data)
        return corpus
    out = Path(cache) / _cache_key(data)
    return (
        open_packed(out) if is_prepared(out) else prepare(data.source, data.tokenizer, out, data.validation, progress)
    )


def _kind(tokenizer: str) -> str:
    """The tokenizer's kind as the header names it. Raises DataError where there is no such tokenizer."""
    if tokenizer == BYTES or bpe_size(tokenizer) is not None:
        return tokenizer
    if not Path(tokenizer).expanduser().is_file():
        raise DataError(f"tokenizer {tokenizer}: no such file; valid: bytes, bpe:SIZE, or a tokenizer.json file")
    return "file"


def _make_tokenizer(tokenizer: str, source: str, plan: Plan, progress: Progress) -> Tokenizer:
    if tokenizer == BYTES:
        return byte_tokenizer()
    size = bpe_size(tokenizer)
    if size is None:
        return load_tokenizer(Path(tokenizer).expanduser())
    progress(f"training a tokenizer of {size} tokens", None)
    return train_bpe((text for split, text in split_documents(source, plan) if split == "train"), size)


def _write(
    folder: Path, source: str, tokenizer: Tokenizer, plan: Plan, validation: float, kind: str, progress: Progress
) -> Header:
    """Write the tokenizer and both token files; returns the header that describes them."""
    tokenizer.save(folder / TOKENIZER)
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 2**16 else "<u4")
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(folder / token_file(split), tokenizer, dtype)) for split in SPLITS
        }
        done = 0
        for split, text in split_documents(source, plan):
            writers[split].add(text)
            done += len(text)
            progress("tokenizing", min(1.0, done / plan.num_characters))
    return Header(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocabulary_size=tokenizer.vocabulary_size,
        end=tokenizer.end,
        tokenizer=kind,
        source=source_name(source),
        validation_share=validation,
        corpus_sha256=plan.corpus_sha256,
        train=writers["train"].facts,
        validation=writers["validation"].facts,
        sha256={
            TOKENIZER: file_sha256(folder / TOKENIZER),
            **{token_file(split): writers[split].sha256 for split in SPLITS},
        },
    )


def _reuse(out: Path, source: str, tokenizer: str, validation: float, plan: Plan) -> PackedCorpus:
    """The folder that is already there, if it holds what is asked for. Raises DataError if not."""
    corpus = open_packed(out, verify=True)
    held, remedy = corpus.header, "give another folder, or remove it"
    if held.corpus_sha256 != plan.corpus_sha256:
        raise DataError(f"{out}: holds the tokens of another corpus ({held.source}), not of {source}; {remedy}")
    if not _same_tokenizer(corpus, tokenizer):
        raise DataError(f"{out}: was prepared with tokenizer {held.tokenizer}, not {tokenizer}; {remedy}")
    if held.validation_share != validation:
        raise DataError(f"{out}: holds out a share of {held.validation_share}, not {validation}; {remedy}")
    return corpus


def _same_tokenizer(corpus: PackedCorpus, tokenizer: str) -> bool:
    kind = _kind(tokenizer)
    if kind != "file":
        return corpus.header.tokenizer == kind
    return load_tokenizer(Path(tokenizer).expanduser()).to_json() == corpus.tokenizer.to_json()


def _check_agrees(corpus: PackedCorpus, data: Data) -> None:
    """A prepared folder has its own tokenizer and share: a config that names others would have no effect."""
    held = corpus.header
    if data.tokenizer != Data().tokenizer and not _same_tokenizer(corpus, data.tokenizer):
        wanted = f"data.tokenizer={data.tokenizer}: {data.source} was prepared with {held.tokenizer}"
        raise DataError(f"{wanted}; leave data.tokenizer out, or prepare it again")
    if data.validation != Data().validation and data.validation != held.validation_share:
        wanted = f"data.validation={data.validation}: {data.source} was prepared with {held.validation_share}"
        raise DataError(f"{wanted}; leave data.validation out, or prepare it again")


def _cache_key(data: Data) -> str:
    """A name that changes with all that the prepared files depend on, found without reading the corpus."""
    kind = _kind(data.tokenizer)
    tokenizer = [kind, file_sha256(Path(data.tokenizer).expanduser())] if kind == "file" else [kind]
    facts = [FORMAT, source_identity(data.source), tokenizer, data.validation]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
