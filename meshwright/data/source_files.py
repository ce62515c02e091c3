"""The files of a source that are read: of one form and one split, chosen and never guessed.

In a folder hidden files are no data, nor are cards and licences (`is_no_data`). A file or folder shows the split by a
word of the name, as on the Hugging Face Hub: train-00000-of-00002.parquet, data/test/0.jsonl, wiki.valid.tokens. A
folder with several splits is read if one is named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from meshwright.data.forms_section import (
    CODE,
    SPLITS_BY_WORD,
    Form,
    compression_of,
    form_of,
    refusal_of,
    suffix_of,
)
from meshwright.data.section import STDLIB
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import plain, read_json

SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""The files that make a folder a data set that `datasets` saved, of one split or of several."""

_CARDS = frozenset(
    ("readme", "license", "licence", "copying", "notice", "citation", "authors", "contributing", "changelog")
)
_CARD_SUFFIXES = ("", ".md", ".txt", ".rst", ".cff", ".bib", ".html")
_FACTS = frozenset(("dataset_infos.json", "dataset_info.json", "_success", "sha256sums", "md5sums", "checksums.txt"))
_SHARD = re.compile(r"^(?P<name>.+?)[-._]\d+-of-\d+$")
_WORDS = "|".join(SPLITS_BY_WORD)
_FIRST = re.compile(rf"^(?P<word>{_WORDS})(?:[-._ \d].*)?$")
_LAST = re.compile(rf"^(?:.*[-._ \d])?(?P<word>{_WORDS})(?:[-._ ]?\d+)?$")
_SHOWN = 6
"""Files of a folder that a message names."""


@dataclass(frozen=True)
class Chosen:
    """The files of a source, in the order of reading."""

    root: Path
    files: tuple[Path, ...]
    form: Form | None
    """None for a data set that `datasets` saved."""
    split: str | None = None
    """The split that names of files show, or a saved data set has."""
    left_out: tuple[str, ...] = ()
    """Files of the folder that are not read, relative to the root. Hidden ones are not listed."""

    @property
    def names(self) -> list[str]:
        """The files, relative to the root; for a source that is a file the name."""
        return [file.name if file == self.root else file.relative_to(self.root).as_posix() for file in self.files]


def choose_files(source: str, split: str | None = None, field: str = "data.split") -> Chosen:
    """Choose the files of a source that is a path. `field`: the option that names a split, for messages.

    Raises DataError if there is none, if forms are mixed or unknown, or if the split is missing.
    """
    path = existing(source)
    if path.is_file():
        # Not resolved: in the Hub's cache a file is a link to one without a suffix.
        if split is not None:
            raise DataError(f"{field}={split}: {path} is one file, which has no splits; leave it out")
        form = form_of(path)
        if form is None:
            raise DataError(f"{path}: {'; '.join(refusal_of(path))}")
        return Chosen(path.absolute(), (path.absolute(),), form)
    path = path.resolve()
    if (path / SAVED).is_file():
        if split is not None:
            raise DataError(f"{field}={split}: {source} is one saved data set, which has no splits; leave it out")
        return Chosen(path, tuple(folder_files(path)), None)
    if (path / SAVED_SPLITS).is_file():
        name = _pick(source, saved_splits(path), split, field)
        return Chosen(path / name, tuple(folder_files(path / name)), None, name)
    files, left_out = _data_files(path)
    shown = {file: split_of(file.relative_to(path)) for file in files}
    if not show_splits(shown):
        if split is not None:
            raise DataError(f"{field}={split}: no file of {source} shows a split by its name; leave it out")
        return Chosen(path, tuple(files), _one_form(path, files), None, left_out)
    name = _pick(source, [shown[file] for file in files], split, field)
    chosen = [file for file in files if shown[file] == name]
    others = [file.relative_to(path).as_posix() for file in files if shown[file] != name]
    # Folders that each have shards of the split are configurations, data sets of their own.
    parents = {file.parent for file in chosen if _SHARD.match(_stem(file))}
    if len(parents) > 1:
        named = ", ".join(sorted(parent.relative_to(path).as_posix() for parent in parents)[:_SHOWN])
        raise DataError(f"{path}: holds several data sets, in {named}: give one of these folders as the source")
    return Chosen(path, tuple(chosen), _one_form(path, chosen), name, tuple(sorted((*left_out, *others))))


def plain_files(source: str, suffix: str) -> list[Path]:
    """List the files of a source that has files of one suffix alone. Raises DataError for another, or several splits.

    For official releases with one folder a split (RACE/train).
    """
    path = existing(source).resolve()
    every = [path] if path.is_file() else folder_files(path)
    files = [file for file in every if file == path or not is_no_data(file)]
    for file in files:
        if file.suffix.lower() != suffix:
            raise DataError(f"{file}: is no {suffix} file; move it out of the source")
    if not files:
        raise DataError(f"{path}: holds no file to read")
    shown = [split_of(file.relative_to(path)) for file in files if file != path]
    if len(set(shown)) > 1 and "train" in shown:
        _pick(source, shown, None, "")
    return files


def existing(source: str) -> Path:
    """Return a source's path. Raises DataError for a missing one, a pipe or a device."""
    path, valid = Path(source).expanduser(), f"(give `{STDLIB}`, a file, or a folder)"
    if not path.exists():
        raise DataError(f"{source}: no such file or folder {valid}")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{source}: is a pipe or a device, which may never end {valid}")
    return path


def folder_files(folder: Path) -> list[Path]:
    """List all files in a folder but hidden ones, sorted by relative path.

    Raises:
        DataError: A link to a folder, a pipe, a device.
        RefusedError: A link to a file; in the Hub's cache one out of the snapshot and its blobs.
    """
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if any(segment.startswith(".") or segment == "__pycache__" for segment in name.parts):
            continue
        if path.is_dir() and path.is_symlink():  # may lead back to a parent, an endless walk
            raise DataError(f"{path}: is a link to a folder, which is not followed; put the folder in its place")
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path}: is a pipe, a device or a link to nothing; move it out of the source")
        if path.is_file():
            files[name.as_posix()] = plain(path, folder)
    return [files[name] for name in sorted(files)]


def is_no_data(name: PurePath) -> bool:
    """Return whether a file accompanies data: a card, a licence, facts that libraries write."""
    lower = PurePosixPath(name.name.lower())
    return lower.name in _FACTS or (lower.stem in _CARDS and lower.suffix in _CARD_SUFFIXES)


def split_of(name: PurePath) -> str | None:
    """Return the split that a path within a folder shows: train, validation, test, or the name of shards."""
    if suffix_of(name) in CODE:
        return None
    text = _stem(name)
    if shards := _SHARD.match(text):
        named = shards["name"]
        word = re.split(r"[-. ]", named)[-1].lower()
        return SPLITS_BY_WORD.get(word, named)
    for segment in (text, *reversed(name.parts[:-1])):
        if found := _FIRST.match(segment.lower()) or _LAST.match(segment.lower()):
            return SPLITS_BY_WORD[found["word"]]
    return None


def _data_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """List the folder's data files, and the names of cards and licences. Raises DataError."""
    every = folder_files(folder)
    files = [file for file in every if not is_no_data(file.relative_to(folder))]
    for file in files:
        if form_of(file) is None:
            reason, remedy = refusal_of(file)
            raise DataError(f"{file}: {reason}; move it out of {folder}, or {remedy}")
    left_out = tuple(sorted({*every} - {*files}))
    names = tuple(file.relative_to(folder).as_posix() for file in left_out)
    if not files:
        others = f" but {', '.join(names[:_SHOWN])}, which is no data" if names else ""
        raise DataError(f"{folder}: holds no file to read{others}; a file is read where it is the source itself")
    return files, names


def show_splits(shown: dict[Path, str | None]) -> bool:
    """Return whether names show splits.

    Among texts a lone `test.md` is a note. Every file has a split there, or some are the train split.
    """
    splits = set(shown.values())
    records = any(form_of(file) != "text" for file, split in shown.items() if split is not None)
    return "train" in splits or None not in splits or (records and splits != {None})


def saved_splits(folder: Path) -> list[str]:
    path = folder / SAVED_SPLITS
    try:
        splits = [str(name) for name in read_json(path)["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: does not list the dataset's splits") from error
    if missing := [name for name in splits if PurePath(name).name != name or not (folder / name).is_dir()]:
        raise DataError(f"{path}: lists the split {missing[0]}, which has no folder there")
    return splits


def _pick(source: str | Path, splits: Sequence[str | None], split: str | None, field: str) -> str:
    """Return the split to read. Raises DataError if several could be meant, or the asked one is missing."""
    order = ("train", "validation", "test")
    distinct = {name for name in splits if name is not None}
    names = [name for name in order if name in distinct] + sorted(distinct - {*order})
    if split is None:
        if len(set(splits)) == 1:
            return names[0]
        others = " and files of none" if None in splits else ""
        by_field = f"as {field}={names[0]}, or " if field else ""
        held = f"holds the splits {', '.join(names)}{others}"
        raise DataError(f"{source}: {held}: give one of them, {by_field}by its own file or folder as the source")
    wanted = split if split in names else SPLITS_BY_WORD.get(split.lower(), split)
    if wanted not in names:
        raise DataError(f"{field}={split}: is no split of {source}; valid: {', '.join(names)}")
    return wanted


def _one_form(folder: Path, files: Sequence[Path]) -> Form:
    """Return the form of all files. Raises DataError if forms are mixed."""
    by_form: dict[Form | None, Path] = {}
    for file in files:
        by_form.setdefault(form_of(file), file)
    if len(by_form) > 1:
        named = ", ".join(f"{form} ({file.relative_to(folder).as_posix()})" for form, file in by_form.items())
        raise DataError(f"{folder}: holds files of several forms: {named}; give one file, or a folder of one form")
    [form] = by_form
    assert form is not None
    return form


def _stem(file: PurePath) -> str:
    """Return the name without the suffixes of form and compression. Of wiki.train the suffix is the split."""
    inner = PurePath(file.stem) if compression_of(file) else PurePath(file.name)
    return inner.stem if suffix_of(file) else inner.name
