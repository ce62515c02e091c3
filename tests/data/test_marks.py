"""The tokens around a document: the marks that a run names, in packed tokens, checkpoints and measured texts.

Some marks are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config, parse_run
from meshwright.data.files import silent
from meshwright.data.packed import open_packed
from meshwright.data.tokenizer import load_tokenizer, parse_tokenizer, train_bpe
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.evaluate.perplexity import text_perplexity
from meshwright.tools.evaluate.texts import stream_for
from meshwright.training.convert import export_folder
from meshwright.training.job import train

MODEL = {"family": "gpt2", "layers": 1, "hidden": 8, "heads": 2, "vocabulary": 300}
END = "<|endoftext|>"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Thirty texts, and a tokenizer with three more special tokens, which no file explains."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    texts = [f"piece {number} of words" for number in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree = json.loads(train_bpe(texts, 290).to_json())
    at = max(tree["model"]["vocab"].values())
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, name in enumerate(("<s>", "<|im_end|>", "<｜end▁of▁sentence｜>"), start=1):
        tree["added_tokens"].append({"id": at + number, "content": name, **special})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    return tmp_path


def run_of(folder: Path, *words: str, **data: Any) -> Config:
    data = {
        "source": str(folder / "texts.jsonl"), "tokenizer": str(folder / "tokenizer.json"), "sequence": 16,
        "validation": 0.2,
    } | data  # fmt: skip
    tree = {
        "model": MODEL, "data": data, "batch": {"global": 2}, "validation": {"every": 0}, "steps": 1,
        "layout": {"transport": "torch"}, "metrics": {"sinks": []}, "device": "cpu",
    }  # fmt: skip
    return parse_run(tree, words)


def documents_of(config: Config) -> tuple[Path, list[str]]:
    """Return the packed folder, and the text of the held-out tokens, cut after each `words`."""
    packed = open_packed(config.data.prepare(config, silent))
    text = packed.tokenizer.decode(packed.tokens("validation").tolist())
    return packed.folder, text.split("words")


@pytest.mark.parametrize(
    "words, between",
    [
        ((), END),
        (("data.begin=<s>",), f"{END}<s>"),
        (("data.end=<|im_end|>",), "<|im_end|>"),
        (("data.begin=<s>", "data.end=none"), "<s>"),
        (("data.end=none",), ""),
    ],
)
def test_documents_stand_between_what_the_run_names(folder: Path, words: tuple[str, ...], between: str) -> None:
    found, documents = documents_of(run_of(folder, *words))
    assert len(documents) > 3
    assert {text.partition("piece")[0] for text in documents[1:-1]} == {between}
    for other in ((), ("data.begin=<s>",), ("data.end=none",)):
        assert (documents_of(run_of(folder, *other))[0] == found) == (other == words), "another cache for other tokens"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("spelt", ["<｜end▁of▁sentence｜>", {"content": "<｜end▁of▁sentence｜>", "lstrip": False}])
def test_the_files_beside_a_tokenizer_name_its_end(folder: Path, file: str, spelt: object) -> None:
    """The end token may have any spelling, and replaces a known one."""
    before = documents_of(run_of(folder))[0]
    (folder / file).write_text(json.dumps({"eos_token": spelt}))
    found, documents = documents_of(run_of(folder))
    assert {text.partition("piece")[0] for text in documents[1:-1]} == {"<｜end▁of▁sentence｜>"}
    assert found != before


def test_ids_are_believed_of_special_tokens_alone(folder: Path) -> None:
    end = load_tokenizer(folder / "tokenizer.json").id_of("<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert load_tokenizer(folder / "tokenizer.json").end == 0, "2 is a word, and transformers' default"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert (tokenizer.end, tokenizer.marks.stops) == (end, {end, 0})


def test_add_bos_token_and_a_token_that_is_not_there(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    for adds, begin in ((True, "<s>"), (False, None), (None, None)):
        path.write_text(json.dumps({"bos_token": "<s>", "add_bos_token": adds}))
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        assert (None if tokenizer.begin is None else tokenizer.name_of(tokenizer.begin)) == begin
    path.write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(DataError, match=r"has no token '<nowhere>', which eos_token of tokenizer_config\.json names"):
        load_tokenizer(folder / "tokenizer.json")
    text = (folder / "tokenizer.json").read_text().replace(END, "<stop>")
    with pytest.raises(DataError, match=r"has no end-of-text token; .*data\.end does"):
        parse_tokenizer(text, "x")


@pytest.mark.parametrize(
    "words, message",
    [
        (("data.end=<nowhere>",), r"data.end=<nowhere> is no token of .*tokenizer.json; valid: auto, none, <\|endoft"),
        (("data.begin=<s>", "data.tokenizer=bytes"), r"data.begin=<s> is no token of data.tokenizer=bytes; valid: a"),
        (("data.end=none", "data.documents=separate"), "data.end=none leaves nothing by which data.documents=separat"),
    ],
)
def test_mistakes(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(folder, *words)


def test_a_prepared_folder_has_its_own(folder: Path) -> None:
    config = run_of(folder, "data.begin=<s>")
    config.data.pack(config, folder / "packed", silent)
    asked = run_of(folder, source=str(folder / "packed"))
    assert documents_of(asked)[0] == folder / "packed"
    other = run_of(folder, source=str(folder / "packed"), begin="none")
    with pytest.raises(DataError, match=r"data\.begin=none: .*packed was prepared with <s>; leave data\.begin out"):
        other.data.prepare(other, silent)


def test_a_run_is_measured_and_exported_as_it_was_trained(folder: Path) -> None:
    """A measured or exported run has the marks that the run named, by the checkpoint's folder alone."""
    config = run_of(folder, "data.begin=<s>", "data.end=<|im_end|>")
    train(config, folder / "out", resume=False)
    loaded = load_text(folder / "out", "cpu")
    names = [loaded.tokenizer.name_of(token) for token in (loaded.tokenizer.first, loaded.tokenizer.end)]
    assert names == ["<s>", "<|im_end|>"]
    held_out = stream_for(loaded, None)
    (folder / "again.jsonl").write_text((folder / "texts.jsonl").read_text())
    given = stream_for(loaded, str(folder / "again.jsonl"))
    for stream in (held_out, given):
        text = loaded.tokenizer.decode(stream.tokens.tolist())
        assert text.startswith("<s>piece")
        assert "words<|im_end|><s>piece" in text
    marks = [loaded.tokenizer.first, loaded.tokenizer.end]
    counted = [token for token in given.tokens.tolist() if token not in marks]
    assert text_perplexity(loaded, given)["tokens"] == len(counted)
    export_folder(folder / "out", folder / "hf")
    settings, told = (
        json.loads((folder / "hf" / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    assert (told["bos_token"], told["eos_token"], told["add_bos_token"]) == ("<s>", "<|im_end|>", True)
    assert (settings["bos_token_id"], settings["eos_token_id"]) == tuple(marks)
