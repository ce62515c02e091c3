"""Batches and prepared folders have the bits of version 0.1.0, so a resumed run reads on in equal data.

The hashes were computed by 0.1.0's code (commit a733e7a) on the same sources.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config import parse_config
from meshwright.data.files import silent

WORDS = ["stage", "gradient", "ring", "naïve", "batch", "moments,", "a", "of", "tensor", "kit.", "日本", "depth"]
TEXT_MODEL = {"family": "gpt2", "layers": 1, "hidden": 8, "heads": 2, "vocabulary": 500}
BERT = TEXT_MODEL | {"family": "bert"}
T5 = {"family": "t5", "layers": 1, "hidden": 8, "heads": 2, "feed_forward": 16, "vocabulary": 500}
TRANSFORMER = T5 | {"family": "transformer"}
VIT = {"family": "vit", "layers": 1, "image": 8, "patch": 2, "channels": 1, "classes": 10, "hidden": 8, "heads": 2}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text file, bytes": (TEXT_MODEL, {"source": "text.txt"}),
    "text file, bpe": (TEXT_MODEL, {"source": "text.txt", "tokenizer": "bpe:300"}),
    "jsonl": (TEXT_MODEL, {"source": "texts.jsonl", "sequence": 24}),
    "parquet": (TEXT_MODEL, {"source": "texts.parquet"}),
    "folder": (TEXT_MODEL, {"source": "folder", "tokenizer": "bpe:300"}),
    "masked": (BERT, {"source": "texts.jsonl"}),
    "masked, no next sentence": (BERT | {"next_sentence": False}, {"source": "text.txt"}),
    "spans of t5": (T5, {"source": "texts.jsonl", "sequence": 48}),
    "spans of a transformer": (TRANSFORMER, {"source": "text.txt", "objective": "spans", "tokenizer": "bpe:300"}),
    "pairs in tsv": (TRANSFORMER, {"source": "pairs.tsv", "sequence": 72}),
    "pairs in tsv.gz, buckets": (TRANSFORMER, {"source": "pairs.tsv.gz", "sequence": 72, "buckets": 3}),
    "pairs in jsonl, t5": (T5, {"source": "pairs.jsonl", "sequence": 72, "tokenizer": "bpe:300"}),
    "pairs by language": (TRANSFORMER, {"source": "translations.jsonl", "sequence": 72, "languages": ["en", "de"]}),
    "pairs in two files": (
        T5,
        {"source": "left.txt", "sequence": 72, "target": "right.txt", "objective": "pairs", "buckets": 2},
    ),
    "digits": (VIT, {"source": "digits"}),
    "class folders": (VIT | {"channels": 3, "classes": 2}, {"source": "classes"}),
}
NEEDS = {"parquet": "pyarrow.parquet", "digits": "sklearn", "class folders": "PIL.Image"}


def line(number: int) -> str:
    digest = hashlib.sha256(str(number).encode()).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest[: 3 + digest[0] % 12])


def write_sources(folder: Path) -> None:
    """Write a source of each form that a user may have."""
    texts = ["\n".join(line(100 * n + at) for at in range(2 + n % 5)) for n in range(60)]
    pairs = [(line(n), line(7000 + n)) for n in range(200)]
    (folder / "text.txt").write_text("\n".join(map(line, range(400))))
    records = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
    (folder / "texts.jsonl").write_text(records)
    (folder / "folder" / "deep").mkdir(parents=True)
    more = json.dumps({"text": "\n".join(map(line, range(900, 960)))})
    (folder / "folder" / "deep" / "b.jsonl").write_text(more + "\n")
    (folder / "folder" / "a.jsonl").write_text(records)
    lines = "".join(f"{source}\t{target}\n" for source, target in pairs)
    (folder / "pairs.tsv").write_text(lines)
    with gzip.open(folder / "pairs.tsv.gz", "wt") as file:
        file.write(lines)
    named = [{"source": source, "target": target} for source, target in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in named))
    translated = [{"translation": {"en": source, "de": target}} for source, target in pairs]
    (folder / "translations.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in translated))
    (folder / "left.txt").write_text("".join(f"{source}\n" for source, _ in pairs))
    (folder / "right.txt").write_text("".join(f"{target}\n" for _, target in pairs))


def write_optional(folder: Path, case: str) -> None:
    if case == "parquet":
        import pyarrow
        import pyarrow.parquet

        texts = [line(n) for n in range(300)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "texts.parquet")
    elif case == "class folders":
        from PIL import Image

        for name, grey in (("dark", 30), ("light", 200)):
            for number in range(12):
                path = folder / "classes" / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (9 + number, 8), (grey + number, grey, 255 - grey)).save(path)


def hashes_of(case: str, folder: Path) -> tuple[str, str]:
    """Return hashes of a case's batches and of the prepared folder."""
    model, data = CASES[case]
    paths = {key: str(folder / data[key]) for key in ("source", "target") if key in data and data[key] != "digits"}
    data = {"validation": 0.2} | ({} if model["family"] == "vit" else {"sequence": 32}) | data | paths
    tree = {"model": model, "data": data, "batch": {"global": 4}, "validation": {"every": 1}, "seed": 5}
    config = parse_config(tree)
    dataset = config.data
    prepared = dataset.prepare(config, silent)
    opened = dataset.open(config, prepared)
    assert opened.held_out is not None
    batches = [opened.train.samples(4 * step + 1, 4) for step in (0, 1, 2, 50)]
    batches += [opened.held_out.held_out(0, 4), opened.held_out.held_out(2, 2)]
    found, files = hashlib.sha256(), hashlib.sha256()
    for batch in batches:
        for name, entry in batch.items():
            value = np.ascontiguousarray(entry.numpy())
            found.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
    for path in sorted(prepared.iterdir()):
        files.update(path.name.encode() + as_before(path))
    return found.hexdigest()[:16], files.hexdigest()[:16]


def as_before(path: Path) -> bytes:
    """Return a file's bytes; of a header, the bytes of 0.1.0, which had no list of read files."""
    if path.name != "header.json":
        return path.read_bytes()
    header = json.loads(path.read_bytes())
    header.pop("read")
    return (json.dumps(header, indent=2, ensure_ascii=False) + "\n").encode()


GOLDEN = {
    "text file, bytes": ("34770d86aca3ba98", "e5e48271e2ca0be0"),
    "text file, bpe": ("b9392c0477e80a70", "9395756f46ca752c"),
    "jsonl": ("79dcf1b3a2e820e2", "2d316975ec369886"),
    "parquet": ("239644c7d606bede", "9273ea34fc49392c"),
    "folder": ("0f8868220640f67a", "65d16c57748976eb"),
    "masked": ("ea2bf086101d99ed", "2d316975ec369886"),
    "masked, no next sentence": ("51c451386443565a", "e5e48271e2ca0be0"),
    "spans of t5": ("b4af23ac08949702", "2d316975ec369886"),
    "spans of a transformer": ("e9a971082ad31109", "9395756f46ca752c"),
    "pairs in tsv": ("b80fe0abba13015e", "e09c5facd8cda5bc"),
    "pairs in tsv.gz, buckets": ("f1921118e0707002", "0f575c8b82c41cdc"),
    "pairs in jsonl, t5": ("d01b5da583ec3061", "f0d5426a4f2389a3"),
    "pairs by language": ("b80fe0abba13015e", "7a864c562986c2b9"),
    "pairs in two files": ("41046a4154bddd6a", "7e1c3945ecfee700"),
    "digits": ("814cc61b22d59d04", "954c69c5f0295cb4"),
    "class folders": ("8803d56c27dbda43", "7e659f99f2cb1a54"),
}
"""The hashes of the batches and of the files."""


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_before(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS.get(case, "numpy"), reason="pip install 'meshwright[hf,images]'")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    write_sources(tmp_path)
    write_optional(tmp_path, case)
    assert hashes_of(case, tmp_path) == GOLDEN[case]
