"""From a corpus to a prepared folder: plan the split, make the tokenizer, write the token files, publish the folder.

The same corpus, tokenizer and share give the same bytes in every file, on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config.schema import Data
from meshwright.data.corpus import source_identity, source_name
from meshwright.data.format import (
    FORMAT,
    HEADER,
    TOKENIZER,
    Header,
    Kind,
    PackedCorpus,
    file_sha256,
    is_prepared,
    open_packed,
    token_file,
)
from meshwright.data.progress import ShowProgress, silent
from meshwright.data.split import SPLITS, Plan, Split, plan_split, split_documents
from meshwright.data.staging import folder_lock, staged_folder
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, tokenizer_kind
from meshwright.data.writer import SplitWriter
from meshwright.environment import cache_folder
from meshwright.errors import DataError

__all__ = ["PackedCorpus", "ShowProgress", "Split", "corpus_for", "open_packed", "prepare"]


@dataclass(frozen=True)
class Material:
    """What is packed: texts that can be read again and again."""

    kind: Kind
    source: str
    """As given, for messages."""
    name: str
    """A short one that holds no path of this machine."""
    identity: list[object]
    """What changes when the source changes, found without reading it."""
    plan: Callable[[float, ShowProgress], Plan]
    """plan(validation, progress): which part is held out."""
    texts: Callable[[Plan], Iterator[tuple[Split, str]]]
    """Every text in order, with the split it belongs to; of pairs the two texts in turn."""


def text_material(data: Data) -> Material:
    """The documents of `data.source`."""
    return _documents(data.source)


def _documents(source: str) -> Material:
    return Material(
        kind="text",
        source=source,
        name=source_name(source),
        identity=source_identity(source),
        plan=lambda validation, progress: plan_split(source, validation, progress),
        texts=lambda plan: split_documents(source, plan),
    )


def prepare(
    source: str, tokenizer: str, out: Path, validation: float = 0.05, progress: ShowProgress = silent
) -> PackedCorpus:
    """Tokenize `source` into the folder `out`; a folder that already holds just this is used as it is.

    `tokenizer`: bytes, bpe:SIZE (trained on the train split), or a tokenizer.json file. `validation`: the share of the
    characters that is held out, in whole documents where that is possible. Raises DataError if the source or tokenizer
    cannot be read, if the corpus is too small for two splits, or if `out` holds something else.
    """
    return pack(_documents(source), tokenizer, Path(out), validation, progress)


def pack(material: Material, tokenizer: str, out: Path, validation: float, progress: ShowProgress) -> PackedCorpus:
    """As `prepare`, of any material."""
    if not 0 < validation < 1:
        raise DataError(f"validation={validation}: is no share; valid: between 0 and 1, such as 0.05")
    kind = tokenizer_kind(tokenizer)
    if out.exists() and not is_prepared(out) and (out.is_file() or any(out.iterdir())):
        raise DataError(f"{out}: exists and is no prepared folder; give another folder, or remove it")
    try:
        with folder_lock(out, progress):
            plan = material.plan(validation, progress)
            if is_prepared(out):
                return _reuse(out, material.source, tokenizer, validation, plan)
            with staged_folder(out) as folder:
                learned = (text for split, text in material.texts(plan) if split == "train")
                made = make_tokenizer(tokenizer, learned, progress)
                facts = {"tokenizer": kind, "validation_share": validation}
                header = _write(folder, material, made, plan, facts, progress)
                (folder / HEADER).write_text(header.to_json(), encoding="utf-8")
    except OSError as error:  # no right to write there, a full disk
        where = "; MESHWRIGHT_CACHE names another folder for what runs prepare" if out.parent == cache_folder() else ""
        raise DataError(f"preparing {out}: {error.strerror}: {error.filename or out}{where}") from error
    return open_packed(out)


def corpus_for(
    data: Data,
    cache: Path,
    progress: ShowProgress = silent,
    kind: Kind = "text",
    material: Callable[[Data], Material] = text_material,
) -> PackedCorpus:
    """The packed corpus that a config asks for: a prepared folder is opened, anything else is prepared once in `cache`.

    Raises DataError if a prepared folder is damaged, of another kind, or was made with another tokenizer or share than
    the config names.
    """
    source = Path(data.source).expanduser()
    if is_prepared(source):
        corpus = open_packed(source)
        if corpus.header.kind != kind:
            raise DataError(f"data.source={data.source}: was prepared of {corpus.header.kind}, and {kind} are wanted")
        _check_agrees(corpus, data)
    else:
        found = material(data)
        out = Path(cache) / _cache_key(data, found)
        packed = is_prepared(out)
        corpus = open_packed(out) if packed else pack(found, data.tokenizer, out, data.validation, progress)
    corpus.check_files(Path(cache))
    return corpus


def _write(
    folder: Path, material: Material, tokenizer: Tokenizer, plan: Plan, facts: dict[str, Any], progress: ShowProgress
) -> Header:
    """Write the tokenizer and both token files; returns the header that describes them, with `facts` in it."""
    tokenizer.save(folder / TOKENIZER)
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 2**16 else "<u4")
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(folder / token_file(split), tokenizer, dtype)) for split in SPLITS
        }
        done = 0
        for split, text in material.texts(plan):
            writers[split].add(text)
            done += len(text)
            progress("tokenizing", min(1.0, done / plan.num_characters))
    return Header(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocabulary_size=tokenizer.vocabulary_size,
        end=tokenizer.end,
        kind=material.kind,
        source=material.name,
        corpus_sha256=plan.corpus_sha256,
        train=writers["train"].facts,
        validation=writers["validation"].facts,
        sha256={
            TOKENIZER: file_sha256(folder / TOKENIZER),
            **{token_file(split): writers[split].sha256 for split in SPLITS},
        },
        regions={token_file(split): writers[split].regions for split in SPLITS},
        **facts,
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
    kind = tokenizer_kind(tokenizer)
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


def _cache_key(data: Data, material: Material) -> str:
    """A name that changes with all that the prepared files depend on, found without reading the corpus."""
    kind = tokenizer_kind(data.tokenizer)
    tokenizer = [kind, file_sha256(Path(data.tokenizer).expanduser())] if kind == "file" else [kind]
    facts = [FORMAT, material.identity, tokenizer, data.validation]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
