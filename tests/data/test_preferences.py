"""Pairs of answers become two rows: the text that transformers renders, labels on the answers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.compute.model import IGNORED
from meshwright.config import parse_config
from meshwright.data.preference_records import pair_of
from meshwright.data.tokenizer import load_tokenizer
from meshwright.ranks.errors import DataError
from tests.data.dialogues import PLAIN, make_tokenizer, opened
from tests.data.preferences import FORMS, make_pairs, on_pairs, pair, said

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_texts_that_transformers_renders(tmp_path: Path, form: str) -> None:
    path = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    config = on_pairs(tmp_path, make_pairs(tmp_path, form), path, sequence=64, validation=0)
    assert config.data.kind == "preferences"
    data = opened(config)
    batch, tokenizer = data.train.held_out(0, 30), load_tokenizer(path)
    assert batch["tokens"].shape == batch["labels"].shape == (30, 2, 64)
    assert batch["pairs"].flatten().tolist() == list(range(30))
    for number in range(30):
        prompt, *answers = pair(number)
        for side, answer in enumerate(answers):
            asked = prompt if form != "texts" else prompt[1:]
            text = theirs.apply_chat_template([*asked, said("assistant", answer)], tokenize=False)
            ids = tokenizer.encode_placed(text, marked=True)[0]
            tokens, labels = batch["tokens"][number, side], batch["labels"][number, side]
            assert tokens.tolist() == ids[:-1] + [tokenizer.end] * (65 - len(ids))
            learned = labels[labels != IGNORED].tolist()
            assert tokenizer.decode(learned) == f"{answer}<|over|>\n"
            assert learned == ids[len(ids) - len(learned) :]


def test_long_pairs_are_left_out_or_cut_and_counted(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer")
    more = (
        {"prompt": "say", "chosen": "long " * 60, "rejected": "no"},
        {"prompt": "x " * 90, "chosen": "a", "rejected": "b"},
    )
    source = make_pairs(tmp_path, "texts", 30, *more)
    dropped = opened(on_pairs(tmp_path, source, path, sequence=64, validation=0))
    assert len(dropped.train) == 30
    assert "2 longer than data.sequence=64 left out (data.overlong=cut cuts them)" in dropped.notes[-1]
    cut = opened(on_pairs(tmp_path, source, path, sequence=64, validation=0, overlong="cut"))
    assert len(cut.train) == 31
    assert "2 longer than data.sequence=64 cut, 1 of them left out" in cut.notes[-1]
    assert (cut.train.held_out(30, 1)["labels"][0, 0, -1] != IGNORED).item()
    with pytest.raises(DataError, match=r"no pair fits data\.sequence=8; the longest takes"):
        opened(on_pairs(tmp_path, source, path, sequence=8, validation=0))


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "a", "chosen": "b"}, "here: has no rejected; wanted"),
        ({"chosen": "b", "rejected": "c"}, "here: has no prompt; wanted"),
        ({"chosen": [said("user", "a")], "rejected": [said("user", "b")]}, "have no first message in common"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "here chosen message 2: the assistant says nothing"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "here rejected: its completion is neither a text nor a list"),
        ({"prompt": "a", "chosen": "b", "rejected": "<|turn|>"}, "here rejected message 2: its content spells"),
    ],
)
def test_a_record_that_is_no_pair_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        pair_of(record, "here", ["<|turn|>"])
    assert message in str(raised.value)


def test_a_prepared_folder_is_a_source(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer")
    config = on_pairs(tmp_path, make_pairs(tmp_path), path, sequence=64)
    folder = config.data.pack(config, tmp_path / "packed", lambda *_: None)
    tree = config.model_dump(mode="json", by_alias=True) | {"data": {"source": str(folder), "sequence": 64}}
    again = parse_config(tree)
    assert again.data.kind == "preferences"
    first, second = opened(config).train, opened(again).train
    assert first.samples(0, 8)["tokens"].equal(second.samples(0, 8)["tokens"])
