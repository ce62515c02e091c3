"""MNLI, QQP, SQuAD and RACE from the official forms to batches; a bad file is named, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli.weights import data_prepare
from meshwright.compute.model import Batch
from meshwright.config import Config, parse_run
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.bert.specials import specials_of
from meshwright.families.bert.task_files import race_questions, squad_questions
from meshwright.families.bert.tasks import squad_labels, squad_windows
from meshwright.ranks.errors import ConfigError, DataError
from tests.families.bert.task_files import make_mnli, make_qqp, make_race, make_squad, squad_paragraph

BYTES = byte_tokenizer()
SPECIALS = specials_of(BYTES)


def config_for(family: str, source: Path, *words: str, **data: Any) -> Config:
    tree = {
        "model": {"family": family, "layers": 1, "hidden": 16, "heads": 2, "positions": 128, "vocabulary": 300},
        "data": {"source": str(source), "sequence": 96, "validation": 0.3} | data,
        "batch": {"global": 2},
    }
    return parse_run(tree, words)


def opened(config: Config) -> Any:
    return config.data.open(config, config.data.prepare(config, lambda *_: None))


def texts(batch: Batch, row: tuple[int, ...]) -> tuple[str, str]:
    """Return both texts of a row, after checking the row's form."""
    tokens, segments, mask = (batch[name][row].tolist() for name in ("tokens", "segments", "mask"))
    length = sum(mask)
    assert mask == [1] * length + [0] * (len(mask) - length)
    assert set(tokens[length:]) <= {SPECIALS.padding}
    first = length - sum(segments)
    assert segments == [0] * first + [1] * (length - first) + [0] * (len(mask) - length)
    assert (tokens[0], tokens[first - 1], tokens[length - 1]) == (SPECIALS.first, *[SPECIALS.separator] * 2)
    return BYTES.decode(tokens[1 : first - 1]), BYTES.decode(tokens[first : length - 1])


def test_mnli(tmp_path: Path) -> None:
    data = opened(config_for("bert-pairs", make_mnli(tmp_path / "train.tsv")))
    batch = data.train.samples(0, len(data.train))
    wanted = {"it is not so": 0, "it is so": 1, "who knows": 2}
    for row in range(len(data.train)):
        first, second = texts(batch, (row,))
        assert '"' in first, "quotes are text in GLUE's files"
        assert wanted[second] == batch["answer"][row]
    assert len(data.train) < 18, "a quarter has no consensus, and some are held out"


def test_qqp_and_a_file_that_is_held_out(tmp_path: Path) -> None:
    train, dev = make_qqp(tmp_path / "train.tsv"), make_qqp(tmp_path / "dev.tsv", 6)
    words = ("model.classes=2", "validation.every=5")
    data = opened(config_for("bert-pairs", train, *words, held_out=str(dev), validation=0.05))
    assert (len(data.train), len(data.held_out)) == (20, 6)
    batch = data.held_out.held_out(0, 6)
    assert [texts(batch, (row,))[1].split()[0] == "what" for row in range(6)] == batch[
        "answer"
    ].flatten().bool().tolist()
    with pytest.raises(
        ConfigError, match=r"model.classes=3 is not the 2 classes of QQP, which .*train.tsv is; valid: 2"
    ):
        opened(config_for("bert-pairs", train))


def test_squad_spans_are_the_answers(tmp_path: Path) -> None:
    data = opened(config_for("bert-spans", make_squad(tmp_path / "train.json", version=2), sequence=128))
    batch = data.train.samples(0, len(data.train))
    for row in range(len(data.train)):
        question, passage = texts(batch, (row,))
        start, end = int(batch["start"][row]), int(batch["end"][row])
        if question == "Who built it?":
            assert (start, end) == (0, 0)
        else:
            said = BYTES.decode(batch["tokens"][row, start : end + 1].tolist())
            assert f"door is {said}," in passage


def test_windows_over_a_long_passage(tmp_path: Path) -> None:
    [question] = squad_questions(make_squad(tmp_path / "a.json", 1))
    windows = squad_windows(question, BYTES, 60, 16)
    room = 60 - 3 - len(question.question)
    assert [window.begin for window in windows] == list(range(0, len(question.passage) - room + 16, 16))
    held = [squad_labels(window, question) for window in windows]
    assert any(labels != (0, 0) for labels in held)
    for window, (start, end) in zip(windows, held, strict=True):
        text = question.passage[window.begin : window.begin + room]
        whole = window.begin <= question.answers[0][1] and "red" in text
        assert (start, end) == ((0, 0) if not whole else (start, start + 2))
        assert not whole or window.row.second[start - window.shift : end + 1 - window.shift] == list(b"red")


def test_race(tmp_path: Path) -> None:
    data = opened(config_for("bert-choice", make_race(tmp_path / "race"), sequence=80))
    batch = data.train.samples(0, len(data.train))
    for row in range(len(data.train)):
        passage, right = texts(batch, (row, int(batch["answer"][row])))
        assert right in (f"Tom's hat is {passage.split()[3]} .", "What does Tom have? a hat")
        assert {texts(batch, (row, choice))[0] for choice in range(4)} == {passage}
    levels = [asked.level for asked in race_questions(tmp_path / "race", 4)]
    assert sorted(set(levels)) == ["high", "middle"]


MAKE: dict[str, tuple[str, Callable[..., Path]]] = {
    "bert-pairs": ("a.tsv", make_mnli), "bert-spans": ("a.json", make_squad), "bert-choice": ("race", make_race),
}  # fmt: skip


@pytest.mark.parametrize(
    "family, given, changes, message",
    [
        ("bert-pairs", (4, "1\t2"), {}, "a.tsv line 6: has 2 columns, and the first line 12"),
        (
            "bert-pairs",
            (4, "\t".join(["x"] * 11 + ["maybe"])),
            {},
            "line 6: gold_label='maybe' is none of contradiction",
        ),
        (
            "bert-spans",
            (),
            {"answers": [{"text": "red", "answer_start": 5}]},
            " question q0: its answer 'red' is not at character 5, where the passage has ' 0 '",
        ),
        ("bert-spans", (), {"answers": []}, " question q0: has no answer, and does not say is_impossible"),
        ("bert-choice", (), {"answers": ["E", "B"]}, "0.txt question 1: its answer 'E' is none of A, B, C, D"),
        ("bert-choice", (), {"answers": ["A"]}, "0.txt: is not a passage of RACE with article, questions, options and"),
        ("bert-choice", (), {"options": [["a"], ["b"] * 4]}, "0.txt question 1: has 1 options, and the model has"),
    ],
)
def test_bad_files_are_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: tuple[Any, ...], changes: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    name, make = MAKE[family]
    source = make(tmp_path / name, *given, **changes)
    with pytest.raises(DataError) as refusal:
        opened(config_for(family, source))
    assert message in str(refusal.value)
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == []


def test_the_form_is_told_by_the_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(
        DataError, match=r"a.tsv line 1: has the columns a, b; wanted MNLI's sentence1, sentence2, gold_"
    ):
        opened(config_for("bert-pairs", tmp_path / "a.tsv"))
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match=r"a.json: is no file of SQuAD; wanted"):
        opened(config_for("bert-spans", tmp_path / "a.json"))
    with pytest.raises(ConfigError, match=r"data.held_out=nowhere is no such file or folder"):
        config_for("bert-spans", make_squad(tmp_path / "b.json"), held_out="nowhere")
    assert squad_paragraph(1)["qas"][0]["answers"][0]["text"] == "green"


SHAPES = {"bert-pairs": {"sequence": 64}, "bert-spans": {"sequence": 96, "stride": 32}, "bert-choice": {"sequence": 80}}


@pytest.mark.parametrize("family", MAKE)
def test_a_task_is_prepared_once_for_many_runs(tmp_path: Path, family: str, capsys: pytest.CaptureFixture) -> None:
    name, make = MAKE[family]
    source, out = make(tmp_path / name), tmp_path / "prepared"
    given = config_for(family, source, **SHAPES[family])
    run = tmp_path / "run.yaml"
    run.write_text(given.model_dump_json(by_alias=True, include={"model", "data", "batch"}))
    data_prepare(out, run, ["validation.every=0"])
    assert f"{out}: {given.data.kind}; train on it with data.source={out}" in capsys.readouterr().out
    read = config_for(family, out, **SHAPES[family])
    batches = [opened(config).train.samples(0, 6) for config in (given, read)]
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])
    sums = {path.name: path.read_bytes() for path in out.iterdir()}
    data_prepare(tmp_path / "again", run, ["validation.every=0"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == sums
    with pytest.raises(DataError, match=r"prepared: exists and is not empty"):
        data_prepare(out, run)
    with pytest.raises(ConfigError, match=r"--source=x is the run file's to say; valid: data.source=... behind RUN"):
        data_prepare(tmp_path / "new", run, source="x")


def test_a_prepared_task_is_not_read_with_another_meaning(tmp_path: Path) -> None:
    given, out = config_for("bert-spans", make_squad(tmp_path / "a.json")), tmp_path / "prepared"
    given.data.pack(given, out, lambda *_: None)
    for more, message in (
        (
            {"sequence": 64},
            r"data.sequence=64 is not what .*prepared was prepared with; valid: 96, or",
        ),
        ({"held_out": str(tmp_path / "a.json")}, r"data.held_out=.* has no effect: .*prepared was prepared with what"),
        ({"tokenizer": "bpe:270"}, r"data.tokenizer=bpe:270: .*prepared was prepared with bytes; leave data.tokenizer"),
        ({"validation": 0.4}, r"data.validation=0.4: .*prepared was prepared with 0.3; leave data.validation out"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            opened(config_for("bert-spans", out, **more))
    with pytest.raises(ConfigError, match=r"data.kind=sentence-pairs is not what .* prepared with; valid: squad"):
        opened(config_for("bert-pairs", out))
    larger = config_for("bert-spans", tmp_path / "a.json", tokenizer="bpe:270")
    larger.data.pack(larger, tmp_path / "larger", lambda *_: None)
    with pytest.raises(ConfigError, match=r"model.vocabulary=261 is smaller than the 274 tokens"):
        opened(config_for("bert-spans", tmp_path / "larger", "model.vocabulary=261"))
    damaged = out / "train-answers.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"train-answers.npy: .*"):
        opened(config_for("bert-spans", out))
    damaged.unlink()
    with pytest.raises(DataError, match=r"train-answers.npy: is missing"):
        opened(config_for("bert-spans", out))
    (out / "task.json").write_text("{}")
    with pytest.raises(DataError, match=r"task.json: is damaged \(KeyError\('format'\)\)"):
        opened(config_for("bert-spans", out))
