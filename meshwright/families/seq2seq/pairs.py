"""Pairs of texts, read from each supported form.

| `data.source` | other fields | a pair |
|---|---|---|
| stdlib | | a function of Python's standard library without its docstring, and the docstring's first paragraph |
| FILE.tsv | | a line's two columns, without a row of names |
| records (data/records.py) | | a record's {"source": ..., "target": ...} |
| | languages: [en, de] | a record's {"en": ..., "de": ...}, or {"translation": {"en": ..., "de": ...}} as WMT has it |
| FILE | target: FILE | line i of one file, and line i of the other |

Files may be compressed (FILE.tsv.gz); records may be in a folder of one split. Pairs with a blank text are left out.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.data.corpus import STDLIB, Corpus, documents, path_identity, source_identity, source_name, told_of
from meshwright.data.records import checked_text, first_record, read_records, text_lines
from meshwright.data.records_section import Picks
from meshwright.data.section import DIGITS, HUB, PREPARED, UNICODE
from meshwright.data.source_files import choose_files, existing
from meshwright.families.seq2seq.data_section import PairData, pairs_form
from meshwright.ranks.errors import DataError

Pair = tuple[str, str]
"""A source, the input of the model, and a target, the text to be written."""

_KEYS = ("source", "target")
TRANSLATION = "translation"

MOST_CHARACTERS = 4096
"""The most characters of a function's source. Longer functions, a few in a hundred, are left out."""


def pair_corpus(data: PairData) -> Corpus:
    """Return the pairs that a config names, in the order of the source, equal on every machine.

    Raises DataError for a missing file; `read()` of the result raises DataError at a bad line.
    """
    files = [data.source] if data.target is None else [data.source, data.target]
    for path in (Path(file).expanduser() for file in files if file != STDLIB):
        if not existing(str(path)).is_file() and (data.target is not None or not path.is_dir()):
            raise DataError(f"{path}: is no file; pairs are in a tsv file, in records, or in two text files")
    pairs = _reader(data)  # called here to refuse an invalid form before any reading
    if data.target is None:
        facts, told = [source_identity(data.source, data.picks)], told_of(data.source, data.picks)
    else:
        facts, told = [path_identity(file) for file in files], (tuple(Path(file).name for file in files), None, ())
    identity: list[object] = ["pairs", facts, data.languages]
    name = ", ".join(source_name(file) for file in files)
    return Corpus(
        "pairs", ", ".join(files), name, identity,
        lambda: ((source, target) for source, target in pairs() if source.strip() and target.strip()), *told,
    )  # fmt: skip


def _reader(data: PairData) -> Callable[[], Iterable[Pair]]:
    source = Path(data.source).expanduser()
    if data.source == STDLIB:
        return cache(lambda: tuple(docstring_pairs()))  # cached, since parsing takes longer than all later steps
    if data.target is not None:
        target = Path(data.target).expanduser()
        return lambda: _partners(source, target)
    match pairs_form(data.source):
        case "tsv":
            return lambda: _columns(source)
        case "records":
            return lambda: _records(data.source, data.picks, data.languages)
    hint = "name that as data.target, or give a tsv file, or records (jsonl, json, csv, parquet)"
    raise DataError(f"{source}: is a text without its partner: {hint}")


def claims_pairs(data: Mapping[str, Any]) -> bool:
    """True if the fields and the source's form leave pairs as the only kind of data."""
    if data.get("target") is not None or data.get("languages") is not None:
        return True
    source = str(data.get("source", STDLIB))
    if source in (STDLIB, UNICODE, DIGITS) or source.startswith(HUB):
        return False
    header = Path(source).expanduser() / PREPARED
    if header.is_file():
        return '"kind": "pairs"' in header.read_text(encoding="utf-8")
    form, split = pairs_form(source), data.get("split")
    keys = first_record(source, split if isinstance(split, str) else None) if form == "records" else {}
    return form == "tsv" or not keys.keys().isdisjoint((*_KEYS, TRANSLATION))


def _partners(source: Path, target: Path) -> Iterator[Pair]:
    # zip would drop the rest silently. A missing line shifts all later pairs, and shows only as a missing last partner.
    for line_number, (left, right) in enumerate(zip_longest(text_lines(source), text_lines(target)), start=1):
        if left is None or right is None:
            longer, shorter = (target, source) if left is None else (source, target)
            raise DataError(
                f"{longer} line {line_number}: has no partner, {shorter} ends after {line_number - 1} lines"
            )
        yield left, right


def _columns(path: Path) -> Iterator[Pair]:
    for line_number, line in enumerate(text_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) == 2:
            yield columns[0], columns[1]
        # A blank line is no mistake: editors leave one at the end.
        elif line.strip():
            raise DataError(f"{path} line {line_number}: has {len(columns)} columns; wanted: source, tab, target")


def _records(source: str, picks: Picks, languages: tuple[str, str] | None) -> Iterator[Pair]:
    keys = languages or _KEYS
    wanted = f'{{"{keys[0]}": ..., "{keys[1]}": ...}}'
    for where, record in read_records(choose_files(source, picks.split)):
        if not isinstance(record, dict):
            raise DataError(f"{where}: is no JSON object; wanted {wanted}")
        # WMT's records are nested one level deeper.
        texts = record.get(TRANSLATION, record)
        if not isinstance(texts, dict):
            raise DataError(f"{where}: `{TRANSLATION}` is no JSON object; wanted {wanted}")
        for key in keys:
            if key not in texts:
                has = f"has no key `{key}`; its keys: {', '.join(texts) or 'none'}"
                raise DataError(f"{where}: {has}; name two of them as data.languages=[FROM, TO]")
        left, right = (checked_text(texts[key], where, key) for key in keys)
        yield left, right


def docstring_pairs() -> Iterator[Pair]:
    """Yield (function, summary) for all functions of the standard library, in the order of files and lines."""
    for text in documents(STDLIB):
        yield from function_pairs(str(text))


def function_pairs(text: str) -> Iterator[Pair]:
    """Yield (function, summary) for each documented function of a module, including nested functions and methods.

    Functions without a body except for the docstring, functions of more than MOST_CHARACTERS, and modules that this
    version of Python cannot parse are left out.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the user cannot correct the standard library
            module = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines(keepends=True)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # ast.walk goes level by level; pairs are in the order of the text.
    for function in sorted(functions, key=lambda node: (node.lineno, node.col_offset)):
        documented = ast.get_docstring(function)
        # A function with nothing but a docstring has no code to read.
        if documented is None or len(function.body) == 1:
            continue
        docstring = function.body[0]
        first, last = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
        code_lines = lines[function.lineno - 1 : first] + lines[last : function.end_lineno]
        code = textwrap.dedent("".join(code_lines)).strip()
        summary = " ".join(inspect.cleandoc(documented).split("\n\n")[0].split())
        if summary and len(code) <= MOST_CHARACTERS:
            yield code, summary
