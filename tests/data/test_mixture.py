"""Mixtures have exact shares in every block, each source in a fixed order, equally for every way of asking."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from meshwright.compute.model import Batch
from meshwright.config import Config, dump_config, parse_config, parse_run
from meshwright.data.files import silent
from meshwright.data.mixture import MixedSamples, open_mixture
from meshwright.data.sampler import ShuffledSamples
from meshwright.data.text_section import BLOCK, shares_of
from meshwright.ranks.errors import ConfigError, DataError

MODEL = {"layers": 1, "hidden": 8, "heads": 1, "positions": 16, "vocabulary": 300, "dropout": 0.0}


class Numbers(ShuffledSamples):
    """Samples that hold their source and number."""

    def __init__(self, source: int, size: int) -> None:
        super().__init__(size, 7)
        self.source = source

    def read(self, rows: np.ndarray, draws: Any) -> Batch:
        return {"tokens": torch.tensor([[self.source, row] for row in rows.tolist()])}


def mixed(*sizes: int, weights: tuple[float, ...]) -> MixedSamples:
    shares = shares_of({str(index): weight for index, weight in enumerate(weights)})
    return MixedSamples([Numbers(index, size) for index, size in enumerate(sizes)], shares, 3)


def test_shares_are_exact_in_every_block_and_each_thing_comes_once_an_epoch() -> None:
    samples = mixed(500, 90, 7, weights=(0.7, 0.2, 0.1))
    rows = samples.samples(0, 3 * BLOCK)["tokens"]
    for block in rows.split(BLOCK):
        assert Counter(block[:, 0].tolist()) == {0: 700, 1: 200, 2: 100}
    for source, size in enumerate((500, 90, 7)):
        own = rows[rows[:, 0] == source][:, 1]
        earlier = samples.places(0, 3 * BLOCK)[1][(rows[:, 0] == source).numpy()]
        epoch = own[torch.from_numpy(earlier < size)]
        assert sorted(epoch.tolist()) == list(range(size)), "an epoch of its own"
    first, second = rows[:BLOCK, 0], rows[BLOCK : 2 * BLOCK, 0]
    assert not torch.equal(first, second), "blocks differ in order"


def test_a_sample_is_its_number_alone() -> None:
    samples = mixed(40, 60, weights=(1, 3))
    whole = samples.samples(900, 300)["tokens"]
    pieces = [samples.samples(first, 20)["tokens"] for first in range(900, 1200, 20)]
    assert torch.equal(torch.cat(pieces), whole)
    held = samples.held_out(0, 50)["tokens"]
    assert torch.equal(held, samples.held_out(0, 50)["tokens"])
    assert set(held[:, 0].tolist()) == {0, 1}


def test_shares_add_up_whatever_the_weights() -> None:
    assert shares_of({"a": 1, "b": 1, "c": 1}) == (334, 333, 333)
    assert shares_of({"a": 1e-9, "b": 1}) == (0, 1000)
    assert shares_of({"a": 5}) == (1000,)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    letters, digits = tmp_path / "letters.txt", tmp_path / "digits.txt"
    letters.write_text("\n".join("abc defg hij " * 8 for _ in range(40)))
    digits.write_text("\n".join("123 4567 890 " * 8 for _ in range(40)))
    return letters, digits


def config_of(texts: tuple[Path, Path], *words: str, tokenizer: str = "bpe:300") -> Config:
    data = {"mixture": {str(texts[0]): 3, str(texts[1]): 1}, "tokenizer": tokenizer, "sequence": 8}
    tree = {"model": MODEL, "data": data, "batch": {"global": 4}, "validation": {"every": 2}, "steps": 500}
    return parse_run(tree, list(words))


def test_sources_are_packed_once_with_one_tokenizer(texts: tuple[Path, Path]) -> None:
    config = config_of(texts)
    folder = config.data.prepare(config, silent)
    packs = [part.packed for part in open_mixture(folder)]
    assert packs[0].tokenizer.to_json() == packs[1].tokenizer.to_json()
    opened = config.data.open(config, folder)
    assert opened.held_out is not None
    told = [note.split(" epochs")[0] for note in opened.notes if " epochs" in note]
    assert told == ["train: letters.txt 75 % (12"], opened.notes
    batch = opened.train.samples(0, 400)
    spelled = [packs[0].tokenizer.decode(row.tolist()) for row in batch["tokens"]]
    share = sum(any(letter.isalpha() for letter in text) for text in spelled) / 400
    assert 0.65 < share < 0.85
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*.bin")}
    assert config.data.prepare(config, silent) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*.bin")} == before
    other = config_of(texts, f"data.mixture={{{texts[0]}: 1, {texts[1]}: 1}}")
    again = other.data.prepare(other, silent)
    assert other.data.fingerprint(again) != config.data.fingerprint(folder)


def test_a_config_of_a_mixture_is_a_key_of_tables(texts: tuple[Path, Path]) -> None:
    assert hash(config_of(texts)) == hash(config_of(texts))
    assert parse_config(yaml.safe_load(dump_config(config_of(texts)))) == config_of(texts)


def test_what_cannot_be_mixed_is_said(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.mixture=nowhere.txt is no such file or folder"):
        config_of(texts, "data.mixture={nowhere.txt: 1}")
    with pytest.raises(ConfigError, match=r"letters.txt=0.0001 is less than 1/1000 of the weights' sum"):
        config_of(texts, f"data.mixture={{{texts[0]}: 1e-4, {texts[1]}: 1}}")
    with pytest.raises(ConfigError, match=r"data.mixture.*-1"):
        config_of(texts, f"data.mixture={{{texts[0]}: -1}}")
    alone = parse_run({"model": MODEL}, [f"data.source={texts[0]}", "data.tokenizer=bpe:280", "data.sequence=8"])
    folder = alone.data.prepare(alone, silent)
    config = config_of(texts, f"data.mixture={{{folder}: 1, {texts[1]}: 1}}", tokenizer="bytes")
    with pytest.raises(DataError, match=r"tokeni"):
        config.data.prepare(config, silent)
