"""Files and habits of public users: what is read, which split, and the perplexity of a run's own task."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from tests.people.case import Case, Outcome, last_line, meshwright

RUN = """
model: {family: llama, layers: 2, hidden: 32, heads: 4, key_value_heads: 2, feed_forward: 64, positions: 64,
        vocabulary: 257, vocabulary_multiple: 1}
data: {source: docs.jsonl, sequence: 64, documents: separate, validation: 0.2}
batch: {global: 16}
optimizer: {lr: 3.0e-3}
validation: {every: 200, batches: 2}
steps: 200
device: cpu
threads: 1
"""


def text_of(seed: int) -> str:
    draw = random.Random(seed)
    return draw.choice("abcdefghij") * draw.randint(6, 14) + str(seed)


def records(count: int) -> str:
    return "".join(json.dumps({"text": text_of(number)}) + "\n" for number in range(count))


def separate_documents(folder: Path) -> Outcome:
    (folder / "docs.jsonl").write_text(records(800))
    (folder / "run.yaml").write_text(RUN)
    code, text = meshwright(folder, "train", "run.yaml", "--out", "out")
    if code:
        return Outcome(last_line(text), False)
    _, text = meshwright(folder, "eval", "out", "--task", "perplexity")
    found = dict(re.findall(r"^([a-z ]+?)  +([\d.,]+)$", text, re.MULTILINE))
    got = f"{found.get('loss per token')}, {found.get('perplexity per token')}, {found.get('tokens')} tokens"
    right = abs(float(found.get("loss per token", "9")) - 1.2501) < 2e-3 and found.get("tokens") == "2,072"
    return Outcome(got, right)


def prepared(
    source: str, fill: Callable[[Path], object], *words: str, says: str, code: int = 0
) -> Callable[[Path], Outcome]:
    """Return a case of `data prepare` on a source; `says` is a part of the output."""

    def run(folder: Path) -> Outcome:
        fill(folder)
        ended, text = meshwright(folder, "data", "prepare", "--source", source, "--out", "ready", *words)
        lines = [line for line in text.splitlines() if says in line]
        return Outcome((lines or [last_line(text)])[0][:200], ended == code and bool(lines))

    return run


def writes(name: str, data: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def snapshot(folder: Path) -> None:
    """Write a folder like a snapshot of the Hub: data/, a card."""
    inner = folder / "snapshot" / "data"
    inner.mkdir(parents=True)
    for split, count in (("train", 60), ("test", 20)):
        (inner / f"{split}-00000-of-00001.jsonl").write_text(records(count))
    (folder / "snapshot" / "README.md").write_text("# card\n" * 50)


def nothing_held_out(folder: Path) -> Outcome:
    (folder / "one.txt").write_text("the cat sat on a mat " * 500)
    words = ["data.source=one.txt", "data.documents=joined", "data.validation=0", "steps=1", "validation=none"]
    (folder / "run.yaml").write_text(RUN)
    code, text = meshwright(folder, "train", "run.yaml", *words, "--out", "out")
    said = [line for line in text.splitlines() if "(none held out)" in line]
    return Outcome((said or [last_line(text)])[0], code == 0 and bool(said))


LINE = '{"text": "the cat"}\n'
WORDS = "the cat sat on a mat " * 12000
CASES = [
    Case(
        "separate documents", "eval of a run with data.documents: separate lets tokens attend over documents",
        "loss per token 1.2501, perplexity 3.4907 over 2,072 tokens, as transformers computes from the export",
        separate_documents, slow=True,
    ),
    Case(
        "data folder with splits", "a snapshot's test rows and card are trained on",
        "refused with the list of splits", prepared("snapshot", snapshot, says="holds the splits train, test", code=1),
    ),
    Case(
        "data split by name", "a snapshot's test rows and card are trained on", "60 documents of the train split",
        prepared("snapshot", snapshot, "--split", "train", says="60 documents of 1 file"),
    ),
    Case(
        "data ndjson", "docs.ndjson is one document", "60 documents",
        prepared("docs.ndjson", writes("docs.ndjson", records(60)), says="60 documents of 1 file"),
    ),
    Case(
        "data gzip", "shards are compressed: docs.jsonl.gz", "60 documents",
        prepared("d.jsonl.gz", writes("d.jsonl.gz", gzip.compress(records(60).encode())), says="60 documents"),
    ),
    Case(
        "data json of lines", "a .json file of the Hub has a record a line", "60 documents",
        prepared("docs.json", writes("docs.json", records(60)), says="60 documents"),
    ),
    Case(
        "data csv with a large field", "field larger than field limit (131072)", "2 documents",
        prepared("a.csv", writes("a.csv", f'text\n"{"word " * 40000}"\nmore words\n'), "--validation", "0",
                 says="2 documents"),
    ),
    Case(
        "data tsv without names", "a tsv is one text", "60 documents",
        prepared("t.tsv", writes("t.tsv", "".join(f"{i}\tthe word {i}\n" for i in range(60))), says="60 documents"),
    ),
    Case(
        "data tsv of two texts", "a tsv is one text", "refused with the columns and data.column",
        prepared("t.tsv", writes("t.tsv", "0\tone\tun\n1\ttwo\tdeux\n"), says="name one as data.column", code=1),
    ),
    Case(
        "data column", "the texts are in the column `content`", "60 documents",
        prepared("c.jsonl", writes("c.jsonl", records(60).replace('"text"', '"content"')), "--column", "content",
                 says="60 documents"),
    ),
    Case(
        "data unknown suffix", "an unknown suffix is a text", "refused with the suffixes that are read",
        prepared("docs.xyz", writes("docs.xyz", LINE), says="has the suffix .xyz, which is not read", code=1),
    ),
    Case(
        "data archive", "a .zip is given as the source", "refused with the remedy",
        prepared("docs.zip", writes("docs.zip", b"PK"), says="is an archive; unpack it", code=1),
    ),
    Case(
        "data text of one line", "text8's form is too small to hold out a validation split", "cut at a space",
        prepared("one.txt", writes("one.txt", WORDS), says="1 document of 1 file (one.txt): 252,002 tokens (12,602"),
    ),
    Case(
        "data nothing held out", "data.validation cannot be 0", "the run trains and says so", nothing_held_out,
        slow=True,
    ),
]  # fmt: skip
