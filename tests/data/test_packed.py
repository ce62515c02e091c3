"""The prepared folder: content, determinism, errors, and a prepare that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.corpus import documents, text_corpus
from meshwright.data.files import silent
from meshwright.data.packed import PackedCorpus, open_packed
from meshwright.data.packing import corpus_for, prepare
from meshwright.data.split import plan_split, split_records
from meshwright.data.text_section import TextData
from meshwright.data.tokenizer import train_bpe
from meshwright.ranks.errors import ConfigError, DataError

TEXTS = [f"def function_{n}(value):\n    return value + {n}\n" for n in range(100)]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return make_source(tmp_path / "in")


def make_source(folder: Path) -> str:
    folder.mkdir()
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts_of(corpus: PackedCorpus) -> list[str]:
    """Return every document, found by the end tokens."""
    texts = []
    for split in ("train", "validation"):
        tokens = corpus.tokens(split)
        ends = np.flatnonzero(tokens == corpus.tokenizer.end)
        assert ends[-1] == len(tokens) - 1
        texts += [corpus.tokenizer.decode(part.tolist()[:-1]) for part in np.split(tokens, ends + 1)[:-1]]
    return texts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_folder_holds_every_document_once(source: str, tmp_path: Path, tokenizer: str) -> None:
    said: list[tuple[str, float | None]] = []
    corpus = prepare(source, tokenizer, tmp_path / "out", 0.1, lambda text, done: said.append((text, done)))
    header = corpus.header
    assert sorted(texts_of(corpus)) == sorted(TEXTS)
    assert header.train.documents + header.validation.documents == 100
    assert header.train.words + header.validation.words == sum(len(text.split()) for text in TEXTS)
    assert (header.train.tokens, header.validation.tokens) == (
        len(corpus.tokens("train")),
        len(corpus.tokens("validation")),
    )
    assert (header.tokenizer, header.dtype, header.source) == (tokenizer, "uint16", "texts.jsonl")
    assert header.vocabulary_size == corpus.tokenizer.vocabulary_size == (257 if tokenizer == "bytes" else 300)
    assert said[-1] == ("tokenizing", 1.0)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_document_encoded_in_many_pieces_stays_one(tmp_path: Path) -> None:
    text = "".join(f"line number {number}\n" for number in range(150_000))
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "out", 0.4)
    assert len(text) > 2 * 2**20
    assert texts_of(corpus)[0] + texts_of(corpus)[1] == text
    assert (corpus.header.train.documents, corpus.header.validation.documents) == (1, 1)
    assert corpus.header.train.words + corpus.header.validation.words == 3 * 150_000


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_same_corpus_gives_the_same_bytes(tmp_path: Path, tokenizer: str) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        prepare(make_source(tmp_path / place / "in"), tokenizer, tmp_path / place / "out")
    first, second = read_all(tmp_path / "here" / "out"), read_all(tmp_path / "there" / "out")
    assert set(first) == {"train.bin", "validation.bin", "tokenizer.json", "header.json"}
    assert first == second
    assert str(tmp_path).encode() not in first["header.json"]


def test_the_tokenizer_learns_from_the_train_split_alone(source: str, tmp_path: Path) -> None:
    made = prepare(source, "bpe:600", tmp_path / "out", 0.4).tokenizer.to_json()
    corpus = text_corpus(source)
    of_split = split_records(corpus, plan_split(corpus, 0.4, silent))
    assert made == train_bpe([text for split, [text] in of_split if split == "train"], 600).to_json()
    assert made != train_bpe(TEXTS, 600).to_json()


def test_a_tokenizer_file_and_wide_tokens(source: str, tmp_path: Path) -> None:
    made = prepare(source, "bytes", tmp_path / "bytes").tokenizer
    wide = json.loads(made.to_json())
    wide["added_tokens"][0]["id"] = 70000
    wide["model"]["vocab"] = {**wide["model"]["vocab"], **{f"unused {n}": n for n in range(256, 70000)}}
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    corpus = prepare(source, str(tmp_path / "wide.json"), tmp_path / "wide")
    assert (corpus.header.dtype, corpus.header.tokenizer, corpus.header.end) == ("uint32", "file", 70000)
    assert corpus.tokens("train").dtype == np.dtype("<u4")
    assert sorted(texts_of(corpus)) == sorted(TEXTS)
    with pytest.raises(ConfigError, match=r"model.vocabulary=50257 is smaller than the 70001 tokens .*70001 or more"):
        corpus.check_vocabulary(50257)
    corpus.check_vocabulary(70001)


def test_a_folder_of_the_same_request_is_reused(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, "bytes", out)
    made = (out / "header.json").stat()
    prepare(source, "bytes", out)
    assert os.path.samestat((out / "header.json").stat(), made)
    with pytest.raises(DataError, match="out: was prepared with tokenizer bytes, not bpe:300; give another folder"):
        prepare(source, "bpe:300", out)
    with pytest.raises(DataError, match=r"out: holds out a share of 0\.05, not 0\.1"):
        prepare(source, "bytes", out, 0.1)
    Path(source).write_text(Path(source).read_text().replace("function_7", "function_seven"))
    with pytest.raises(DataError, match=r"out: holds the tokens of another corpus \(texts.jsonl\)"):
        prepare(source, "bytes", out)


def test_a_folder_of_something_else_is_left_alone(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    prepare(source, "bytes", tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="mine: exists and is no prepared folder"):
        prepare(source, "bytes", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "tokenizer, validation, message",
    [
        ("bpe:9", 0.1, "tokenizer bpe:9: .*SIZE >= 257"),
        ("gone.json", 0.1, "tokenizer gone.json: no such file; valid: bytes"),
        ("bytes", -0.1, "validation=-0.1: is no share"),
    ],
)
def test_bad_requests_are_refused(source: str, tmp_path: Path, tokenizer: str, validation: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(source, tokenizer, tmp_path / "out", validation)
    assert not (tmp_path / "out").exists()


def test_a_failed_prepare_leaves_nothing(source: str, tmp_path: Path) -> None:
    Path(source).write_text(Path(source).read_text() + '{"body": "no text"}\n')
    with pytest.raises(DataError, match="line 101: has no key `text`"):
        prepare(source, "bytes", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


KILLED = """
import os, signal, sys
from pathlib import Path
from meshwright.data.packing import prepare
def progress(text, done):
    if done is not None and done > 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
prepare(sys.argv[1], "bytes", Path(sys.argv[2]), 0.05, progress)
"""


def test_a_killed_prepare_leaves_nothing_that_looks_done(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, source, str(out)], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert (tmp_path / ".out.partial").is_dir()
    prepare(source, "bytes", out)
    open_packed(out, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_processes_that_prepare_the_same_folder_agree(source: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import sys; from pathlib import Path; from meshwright.data.text_section import TextData\n"
    code += "from meshwright.data.packing import corpus_for\n"
    code += "corpus_for(TextData(source=sys.argv[1], tokenizer='bpe:300'), Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, source, str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, cwd=root) for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    [folder] = (path for path in (tmp_path / "cache").iterdir() if path.name != "checked")
    open_packed(folder, verify=True)


def test_a_place_that_cannot_be_written_is_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"preparing .*file/out: .*: .*file"):
        prepare(source, "bytes", tmp_path / "file" / "out")


def damaged(source: str, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    prepare(source, "bytes", out)
    return out


def test_damage_is_named_by_file(source: str, tmp_path: Path) -> None:
    out = damaged(source, tmp_path)
    good = read_all(out)

    def damage(name: str, data: bytes) -> None:
        for path, content in good.items():
            (out / path).write_bytes(content)
        (out / name).write_bytes(data)

    flipped = bytearray(good["train.bin"])
    flipped[100] ^= 1
    damage("train.bin", bytes(flipped))
    open_packed(out)
    with pytest.raises(DataError, match=r"out/train\.bin: is damaged \(its checksum"):
        open_packed(out, verify=True)
    damage("validation.bin", good["validation.bin"][:-2])
    with pytest.raises(DataError, match=r"out/validation\.bin: holds \d+ bytes, its header says \d+; move the folder"):
        open_packed(out)
    damage("tokenizer.json", good["tokenizer.json"] + b" ")
    with pytest.raises(DataError, match=r"out/tokenizer\.json: is damaged"):
        open_packed(out)
    damage("header.json", good["header.json"][:-10])
    with pytest.raises(DataError, match=r"out/header\.json: is damaged"):
        open_packed(out)
    damage("header.json", good["header.json"].replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(DataError, match=r"out/header\.json: has format 2, this version reads 1"):
        open_packed(out)
    damage("header.json", good["header.json"].replace(b'"end": 256', b'"end": 255'))
    with pytest.raises(DataError, match=r"out/header\.json: does not agree with tokenizer\.json"):
        open_packed(out)
    damage("header.json", good["header.json"].replace(b'"dtype"', b'"d_type"'))
    with pytest.raises(
        DataError, match=r"out/header\.json: is no header of a prepared folder \(dtype: Field required\)"
    ):
        open_packed(out)
    damage("header.json", good["header.json"].replace(b'"train.bin"', b'"../a.bin"'))
    with pytest.raises(DataError, match=r"out/header\.json: does not list the folder's files"):
        open_packed(out)


def test_missing_files_are_named(source: str, tmp_path: Path) -> None:
    out = damaged(source, tmp_path)
    for name in ("tokenizer.json", "train.bin"):
        (out / name).unlink()
        with pytest.raises(DataError, match=f"out/{name}: is missing"):
            open_packed(out)
    with pytest.raises(DataError, match=r"in: is no prepared folder \(it has no header\.json\)"):
        open_packed(tmp_path / "in")


def test_the_cache_is_used_until_the_request_changes(source: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = corpus_for(TextData(source=source, validation=0.1), cache)
    assert first.header.validation_share == 0.1
    assert corpus_for(TextData(source=source, validation=0.1, sequence=8), cache).folder == first.folder
    others = [
        corpus_for(TextData(source=source, validation=0.2), cache).folder,
        corpus_for(TextData(source=source, validation=0.1, tokenizer="bpe:300"), cache).folder,
    ]
    shutil.copy(first.folder / "tokenizer.json", tmp_path / "t.json")
    by_file = corpus_for(TextData(source=source, validation=0.1, tokenizer=str(tmp_path / "t.json")), cache)
    assert texts_of(by_file) == texts_of(first)
    Path(source).write_text(Path(source).read_text() + json.dumps({"text": "another"}) + "\n")
    changed = corpus_for(TextData(source=source, validation=0.1), cache)
    assert "another" in texts_of(changed)
    assert len({first.folder, *others, by_file.folder, changed.folder}) == 5


def test_a_prepared_folder_is_a_source_with_its_own_tokenizer(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = prepare(source, "bpe:300", out, 0.1)
    for tokenizer in ("bytes", "bpe:300", str(out / "tokenizer.json")):
        opened = corpus_for(TextData(source=str(out), tokenizer=tokenizer), tmp_path / "cache")
        assert (opened.folder, opened.header) == (out, made.header)
    with pytest.raises(DataError, match=r"data\.tokenizer=bpe:301: .*out was prepared with bpe:300; leave data\.tok"):
        corpus_for(TextData(source=str(out), tokenizer="bpe:301"), tmp_path / "cache")
    with pytest.raises(DataError, match=r"data\.validation=0\.2: .*out was prepared with 0\.1"):
        corpus_for(TextData(source=str(out), validation=0.2), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["checked"], "nothing was prepared again"


def test_the_standard_library_is_a_corpus() -> None:
    characters = 0
    for text in documents("stdlib"):
        characters += len(text)
        if characters > 5_000_000:
            return
    pytest.fail(f"the standard library holds {characters} characters only")
