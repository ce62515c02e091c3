"""The forms of files that data is read from, by suffix.

| form    | suffixes                    | a record                                          |
|---------|-----------------------------|---------------------------------------------------|
| text    | TEXTS, CODE, no suffix      | the file                                          |
| jsonl   | .jsonl, .ndjson, .jsonlines | a line's JSON object                              |
| json    | .json                       | an element of a list, or a line's JSON object     |
| csv     | .csv                        | a row (RFC 4180); the first row names columns     |
| tsv     | .tsv, .tab                  | a row without quotes; the first row names columns |
| parquet | .parquet, .pq               | a row                                             |

Each form except parquet, which is compressed inside, may be compressed: docs.jsonl.gz. Any other suffix is refused.
No torch here, and no library.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

Form = Literal["text", "jsonl", "json", "csv", "tsv", "parquet"]

TEXTS = (".txt", ".text", ".md", ".rst", ".tex", ".tokens", ".raw")
CODE = (
    *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".php", ".pl"),
    *(".sh", ".sql", ".r", ".jl", ".lua", ".kt", ".swift", ".scala", ".hs", ".lean"),
)
"""Source code is text, and `test_x.py` is no test split."""
SUFFIXES: dict[Form, tuple[str, ...]] = {
    "text": (*TEXTS, *CODE),
    "jsonl": (".jsonl", ".ndjson", ".jsonlines"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "parquet": (".parquet", ".pq"),
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

SPLITS_BY_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The words for splits in names of files and folders."""


def compression_of(path: PurePath) -> str:
    """Return the suffix of the compression, or an empty text."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def suffix_of(path: PurePath) -> str:
    """Return the suffix that shows the form: .jsonl for docs.jsonl.gz."""
    inner = PurePath(path.stem) if compression_of(path) else path
    suffix = inner.suffix.lower()
    # wiki.train is a file without a suffix.
    return "" if suffix.removeprefix(".") in SPLITS_BY_WORD else suffix


def form_of(path: PurePath) -> Form | None:
    """Return the form of a file by the name; None for a suffix that is not read."""
    suffix = suffix_of(path)
    form = next((form for form, suffixes in SUFFIXES.items() if suffix in suffixes), None if suffix else "text")
    return None if form == "parquet" and compression_of(path) else form


def is_text(path: PurePath) -> bool:
    """Return whether a file is one text, and no file of records."""
    return form_of(path) == "text"


def refusal_of(path: PurePath) -> tuple[str, str]:
    """Return the reason for refusing a file without a form, and the remedy."""
    suffix = suffix_of(path)
    if suffix == ".arrow":
        return "is a part of a Hugging Face dataset", "give the folder that save_to_disk wrote"
    if suffix in (".tar", ".tgz", ".zip", ".7z", ".rar"):
        return "is an archive", "unpack it, and give its folder"
    if suffix in SUFFIXES["parquet"]:
        return "is a parquet file, which is compressed inside, compressed once more", f"unpack the {path.suffix}"
    listed = "; ".join(f"{form} {', '.join(suffixes)}" for form, suffixes in SUFFIXES.items())
    compressed = f"each but parquet also with {', '.join(COMPRESSIONS)} behind it"
    return f"has the suffix {suffix}, which is not read", f"rename it after its form: {listed}; {compressed}"
