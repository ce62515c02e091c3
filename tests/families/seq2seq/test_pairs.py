"""The data of encoder-decoders from a file to batches: both objectives, pairs left out, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compute.model import IGNORED, Batch
from meshwright.config import Config, parse_config
from meshwright.data.dataset import Opened
from meshwright.data.files import silent
from meshwright.data.packing import pack
from meshwright.data.tokenizer import Tokenizer, byte_tokenizer, parse_tokenizer
from meshwright.families.seq2seq.data_section import PairData
from meshwright.families.seq2seq.pairs import pair_corpus
from meshwright.families.seq2seq.specials import SequenceSpecials, sequence_specials, specials_for
from meshwright.ranks.errors import ConfigError, DataError

TEXTS = [(f"number {n} and its square", "=" * (n % 40) + str(n * n)) for n in range(300)]
SEQUENCE = 40
MODEL = {"layers": 1, "hidden": 8, "heads": 2, "feed_forward": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in TEXTS))
    return tmp_path / "a.tsv"


def config_of(source: Path | str, family: str = "transformer", vocabulary: int = 400, **data: Any) -> Config:
    data = {"source": str(source), "sequence": SEQUENCE, "validation": 0.2} | data
    model = MODEL | {"family": family, "vocabulary": vocabulary}
    return parse_config({"model": model, "data": data, "batch": {"global": 8}, "validation": {"every": 1}})


def prepared(config: Config) -> Path:
    return config.data.prepare(config, silent)


def opened(config: Config) -> Opened:
    return config.data.open(config, prepared(config))


def texts_of(batch: Batch, library: Tokenizer, specials: Any) -> list[tuple[str, str]]:
    """Return the pairs in a batch, after checking the tokens around each pair."""
    found = []
    for source, mask, target, labels in zip(*(batch[name].tolist() for name in batch), strict=True):
        read, written = sum(mask), sum(label != IGNORED for label in labels)
        assert mask == [1] * read + [0] * (len(mask) - read)
        assert source[read - 1 :] == [specials.end] + [specials.padding] * (len(mask) - read)
        assert labels[written - 1 :] == [specials.end] + [IGNORED] * (len(labels) - written)
        assert target == [specials.start, *labels[: written - 1]] + [specials.padding] * (len(labels) - written)
        found.append((library.decode(source[: read - 1]), library.decode(labels[: written - 1])))
    return found


@pytest.mark.parametrize(
    "family, tokenizer, buckets", [("transformer", "bytes", 1), ("t5", "bpe:300", 1), ("transformer", "bytes", 3)]
)
def test_every_short_pair_is_in_one_split(tsv: Path, family: str, tokenizer: str, buckets: int) -> None:
    config = config_of(tsv, family, tokenizer=tokenizer, buckets=buckets)
    data = opened(config)
    assert data.tokenizer is not None
    assert data.held_out is not None
    specials = specials_for(config, data.tokenizer)
    assert (specials.start == specials.padding) == (family == "t5")
    held_out = texts_of(data.held_out.held_out(0, len(data.held_out)), data.tokenizer, specials)
    batches = [data.train.samples(step * 8, 8) for step in range(120)]
    train = {pair for batch in batches for pair in texts_of(batch, data.tokenizer, specials)}
    assert not train & set(held_out)
    assert len(train) + len(held_out) == len(data.train) + len(data.held_out)
    assert train | set(held_out) <= set(TEXTS)
    lengths = {batch["source"].shape[1] for batch in batches}
    assert all(batch["source"].shape == batch["target"].shape == batch["labels"].shape for batch in batches)
    assert lengths == {SEQUENCE} if buckets == 1 else len(lengths) > 1
    if tokenizer == "bytes":  # a text's length is the number of tokens
        assert train | set(held_out) == {pair for pair in TEXTS if max(map(len, pair)) < SEQUENCE}


def test_pairs_too_long_are_counted(tsv: Path) -> None:
    notes = [note for note in opened(config_of(tsv)).notes if "left out" in note]
    counts = [int(note.split(": ")[1].split()[0]) for note in notes]
    assert sum(counts) == sum(max(map(len, pair)) >= SEQUENCE for pair in TEXTS) > 0
    assert notes[0].startswith("train: ")
    assert notes[0].endswith(" pairs left out, longer than data.sequence=40 tokens on one side")
    assert not any("left out" in note for note in opened(config_of(tsv, sequence=80)).notes)
    with pytest.raises(DataError, match=r"has no pair of at most data.sequence=20 tokens a side; the shortest of its"):
        prepared(config_of(tsv, sequence=20))


def same(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("buckets", [1, 3])
def test_parts_of_a_batch_make_the_batch(tsv: Path, buckets: int) -> None:
    data, again = (opened(config_of(tsv, buckets=buckets)) for _ in range(2))
    assert data.held_out is not None
    assert again.held_out is not None
    for step in (0, 5, 77):  # step 77 is in a later epoch
        whole = data.train.samples(step * 8, 8)
        parts = [again.train.samples(step * 8 + first, 2) for first in range(0, 8, 2)]
        assert same(whole, {name: torch.cat([part[name] for part in parts]) for name in whole})
    whole = data.held_out.held_out(8, 8)
    parts = [again.held_out.held_out(8 + first, 4) for first in (0, 4)]
    assert same(whole, {name: torch.cat([part[name] for part in parts]) for name in whole})


def test_spans_are_cut_out_of_a_text_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number} of a text\n" for number in range(400)))
    config = config_of(tmp_path / "a.txt", "t5", 358)
    assert config.data.kind == "spans"
    data = opened(config)
    batch = data.train.samples(0, 4)
    assert int((batch["labels"] >= 258).sum()) == 8  # two spans a window of 44 tokens
    assert (batch["target"][:, 0] == 257).all()
    assert data.held_out is not None
    assert prepared(parse_config({"data": config.data.model_dump() | {"kind": "text"}})) == prepared(config)


def test_the_objective_follows_the_family_and_the_form(tsv: Path, tmp_path: Path) -> None:
    for name, line in (("text.jsonl", {"text": "x"}), ("pairs.jsonl", {"translation": {}}), ("bad.jsonl", 3)):
        (tmp_path / name).write_text(json.dumps(line) + "\n")
    for family, source, expected in (
        ("transformer", "stdlib", "pairs"),
        ("t5", "stdlib", "spans"),
        ("t5", tsv, "pairs"),
        ("t5", tmp_path / "text.jsonl", "spans"),
        ("t5", tmp_path / "pairs.jsonl", "pairs"),
        ("t5", tmp_path / "bad.jsonl", "spans"),
    ):
        assert config_of(source, family).data.kind == expected
    assert config_of("stdlib", "t5", objective="pairs").data.kind == "pairs"
    assert config_of("stdlib", "transformer", objective="spans").data.kind == "spans"


def test_special_tokens_are_appended_or_the_tokenizers_own() -> None:
    plain = byte_tokenizer()
    made = sequence_specials(plain, ("<pad>", "<s>"), sentinels=2)
    assert made == SequenceSpecials(padding=257, start=258, end=256, sentinels=(259, 260), vocabulary_size=261)
    made = sequence_specials(plain, ("<pad>",), sentinels=1)
    assert (made.padding, made.start, made.sentinels, made.vocabulary_size) == (257, 257, (258,), 259)
    tree = json.loads(plain.to_json())
    template = tree["added_tokens"][0]
    tree["added_tokens"] += [template | {"id": 300, "content": "<extra_id_0>"}]
    tree["added_tokens"] += [template | {"id": 301, "content": "<pad>"}]
    tree["model"]["vocab"] |= {f"unused {number}": number for number in range(257, 300)} | {"<|endoftext|>": 256}
    made = sequence_specials(parse_tokenizer(json.dumps(tree), "text"), ("<pad>",), sentinels=2)
    assert (made.padding, made.sentinels, made.vocabulary_size) == (301, (300, 302), 303)


def test_a_prepared_folder_is_found_again_and_can_be_named(tsv: Path) -> None:
    config = config_of(tsv)
    folder = prepared(config)
    before = (folder / "header.json").stat().st_mtime_ns
    assert prepared(config_of(tsv, "t5", sequence=30)) == folder
    assert (folder / "header.json").stat().st_mtime_ns == before
    assert config_of(folder, "t5").data.kind == "pairs"
    assert same(opened(config_of(folder)).train.samples(0, 8), opened(config).train.samples(0, 8))
    with pytest.raises(DataError, match="was prepared of pairs, and text are wanted"):
        prepared(parse_config({"data": {"source": str(folder)}}))
    tsv.write_text("one\tmore\n" * 30 + tsv.read_text())
    assert prepared(config) != folder


def test_a_damaged_folder_is_refused(tsv: Path) -> None:
    folder = prepared(config_of(tsv))
    whole = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"train.bin: holds \d+ bytes, its header says"):
        prepared(config_of(tsv))
    end = bytes([0, 1])
    at = whole.rindex(end, 0, len(whole) - 2)
    (folder / "train.bin").write_bytes(whole[:at] + b"a\0" + whole[at + 2 :])
    with pytest.raises(DataError, match=r"train.bin: is damaged"):
        prepared(config_of(tsv))
    with pytest.raises(DataError, match=r"the train split of .*: has \d+ texts, which do not pair up"):
        config_of(tsv).data.open(config_of(tsv), folder)


def test_a_source_too_small_or_empty(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n" * 2)
    with pytest.raises(
        DataError, match=r"a.tsv: has 2 pairs \(1 of them different\), too few to hold out data.validation=0.2 of them"
    ):
        prepared(config_of(tmp_path / "a.tsv"))
    (tmp_path / "a.tsv").write_text("\tb\n")
    with pytest.raises(DataError, match=r"a.tsv: holds no text"):
        prepared(config_of(tmp_path / "a.tsv"))


def test_a_vocabulary_without_room_for_the_special_tokens(tsv: Path, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    config = config_of(tsv, vocabulary=258, tokenizer=str(tmp_path / "tokenizer.json"))
    message = r"model.vocabulary=258 is smaller than the 259 tokens of the corpus' tokenizer with the model's own"
    with pytest.raises(ConfigError, match=message):
        prepared(config)


def test_prepared_by_hand_or_by_the_run_is_the_same(tsv: Path, tmp_path: Path) -> None:
    made = pack(pair_corpus(PairData(kind="pairs", source=str(tsv))), "bytes", tmp_path / "made", 0.2)
    by_hand, by_run = opened(config_of(tmp_path / "made")), opened(config_of(tsv))
    assert made.header.kind == "pairs"
    assert all(torch.equal(x, by_run.train.samples(0, 8)[name]) for name, x in by_hand.train.samples(0, 8).items())
