"""BERT's samples: their tokens and their masked tokens depend on the sample's number alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compute.model import IGNORED, Batch
from meshwright.config import Config, parse_config
from meshwright.data.packed import PackedCorpus
from meshwright.data.packing import prepare
from meshwright.data.tokenizer import byte_tokenizer, parse_tokenizer
from meshwright.families.bert.convert import with_specials
from meshwright.families.bert.masked import MaskedSamples, runs
from meshwright.families.bert.specials import NAMES, Specials, specials_of
from meshwright.ranks.errors import ConfigError, DataError

END, T = 256, 32
SPECIALS = Specials(padding=257, first=258, separator=259, mask=260, end=END, vocabulary_size=261)


def stream(*lengths: int) -> np.ndarray:
    """Return documents of these lengths; token i of document d is (40 d + i) mod 256, so a place can be read off."""
    parts = [[*((40 * number + at) % 256 for at in range(length)), END] for number, length in enumerate(lengths)]
    return np.array([token for part in parts for token in part], dtype=np.uint16)


def made(tokens: np.ndarray, sequence: int = T, seed: int = 1, *, next_sentence: bool = True) -> MaskedSamples:
    return MaskedSamples(tokens, SPECIALS, sequence, seed, next_sentence=next_sentence, name="the stream")


def originals(batch: Batch) -> torch.Tensor:
    """Return the tokens before the masking."""
    return torch.where(batch["labels"] == IGNORED, batch["tokens"], batch["labels"])


@settings(deadline=None)
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 9), st.booleans(), st.booleans())
def test_runs_hold_every_token_of_text_once(lengths: list[int], longest: int, ended: bool, pairs: bool) -> None:
    tokens = stream(*lengths) if ended else stream(*lengths)[:-1]
    least = 2 if pairs and longest > 1 else 1
    starts, sizes = runs(tokens, END, least, longest)
    found = [place for start, size in zip(starts, sizes, strict=True) for place in range(start, start + size)]
    assert ((sizes >= least) & (sizes <= longest)).all()
    assert len(set(found)) == len(found)
    assert END not in tokens[found]
    lost = set(np.flatnonzero(tokens != END).tolist()) - set(found)
    if least == 1:
        assert not lost
    assert not any(place + 1 in lost for place in lost), "only a document's last token may be left over"


def test_a_sample_is_two_texts_between_its_special_tokens() -> None:
    data = made(stream(400, 7, 300, 2, 500))
    batch = data.samples(0, 3 * len(data))
    tokens = originals(batch)
    assert {name: tuple(x.shape[1:]) for name, x in batch.items()} == {
        "tokens": (T,), "segments": (T,), "mask": (T,), "labels": (T,), "next_sentence": (1,),
    }  # fmt: skip
    assert all(x.dtype == torch.int64 for x in batch.values())
    for row, segments, mask, answer in zip(
        tokens.tolist(),
        batch["segments"].tolist(),
        batch["mask"].tolist(),
        batch["next_sentence"].tolist(),
        strict=True,
    ):
        first = row.index(259)
        last = row.index(259, first + 1)
        assert row[0] == 258
        assert row[last + 1 :] == [257] * (T - last - 1)
        assert mask == [1] * (last + 1) + [0] * (T - last - 1)
        assert segments == [0] * (first + 1) + [1] * (last - first) + [0] * (T - last - 1)
        a, b = row[1:first], row[first + 1 : last]
        assert a and b  # noqa: PT018
        for text in (a, b):
            assert all((x + 1) % 256 == y for x, y in pairwise(text)), "a piece of one document"
        assert ((a[-1] + 1) % 256 == b[0]) == (answer == [0])


def test_half_of_the_second_texts_follow() -> None:
    data = made(stream(*[300] * 60))
    answers = data.samples(0, 2000)["next_sentence"].float()
    assert float(answers.mean()) == pytest.approx(0.5, abs=0.04)  # 3.6 standard deviations


def test_without_next_sentence_a_sample_is_one_text() -> None:
    data = made(stream(100, 3), next_sentence=False)
    batch = data.held_out(0, len(data))
    assert set(batch) == {"tokens", "segments", "mask", "labels"}
    tokens = originals(batch)
    assert len(data) == 4 + 1
    assert tokens[0].tolist() == [258, *range(30), 259]
    assert tokens[4].tolist() == [258, 40, 41, 42, 259] + [257] * 27
    assert not batch["segments"].any()
    assert batch["mask"].sum(1).tolist() == [32, 32, 32, 12, 5]


def test_what_is_asked_for_is_masked_replaced_or_left() -> None:
    data = made(stream(*[1000] * 20), sequence=128)
    batch = data.samples(0, 600)
    tokens, labels = batch["tokens"], batch["labels"]
    asked = labels != IGNORED
    text = (batch["mask"] == 1) & (originals(batch) < END)
    assert not (asked & ~text).any(), "a special token was asked for"
    assert (asked.sum(1) == torch.round(0.15 * text.sum(1)).clamp(min=1)).all()
    total = int(asked.sum())
    assert total > 9000
    masked, same = int((tokens[asked] == 260).sum()), int((tokens[asked] == labels[asked]).sum())
    other = total - masked - same
    assert masked / total == pytest.approx(0.8, abs=0.02)
    assert same / total == pytest.approx(0.1 + 0.1 / 256, abs=0.015)  # a random token may equal the masked token
    assert other / total == pytest.approx(0.1, abs=0.015)
    replaced = tokens[asked & (tokens != 260) & (tokens != labels)]
    assert int(replaced.max()) < END
    assert len(replaced.unique()) > 240, "every token of the text is a replacement"
    assert len(torch.nonzero(asked)[:, 1].unique()) >= 124, "every place is asked for"


def test_a_short_text_is_asked_for_one_token() -> None:
    labels = made(stream(2, 2, 3)).samples(0, 30)["labels"]
    assert (labels != IGNORED).sum(1).tolist() == [1] * 30


def same(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 60), st.integers(1, 20))
def test_a_sample_depends_on_the_seed_and_its_number_alone(first: int, count: int) -> None:
    tokens = stream(90, 200, 31)
    whole = made(tokens).samples(first, count)
    ones = [made(tokens).samples(number, 1) for number in range(first, first + count)]
    assert same(whole, {name: torch.cat([one[name] for one in ones]) for name in whole})


def test_every_epoch_has_every_run_once_and_asks_anew() -> None:
    data = made(stream(90, 200, 31), next_sentence=False)
    epochs = [data.samples(epoch * len(data), len(data)) for epoch in range(2)]
    texts = [sorted(map(tuple, originals(epoch).tolist())) for epoch in epochs]
    assert texts[0] == texts[1] == sorted(map(tuple, originals(data.held_out(0, len(data))).tolist()))
    assert originals(epochs[0]).tolist() != originals(epochs[1]).tolist()
    by_text = [dict(zip(map(tuple, originals(e).tolist()), e["labels"].tolist(), strict=True)) for e in epochs]
    assert by_text[0] != by_text[1]
    assert not same(epochs[0], made(stream(90, 200, 31), seed=2, next_sentence=False).samples(0, len(data)))


def test_held_out_samples_are_the_same_each_time_in_order() -> None:
    data = made(stream(90, 200, 31))
    whole = data.held_out(0, len(data))
    assert same(whole, made(stream(90, 200, 31)).held_out(0, len(data)))
    parts = [data.held_out(0, 4), data.held_out(4, len(data) - 4)]
    assert same(whole, {name: torch.cat([part[name] for part in parts]) for name in whole})


def test_a_corpus_too_small() -> None:
    with pytest.raises(DataError, match="the stream: has 5 tokens, too few for BERT's samples"):
        made(stream(2, 1))
    with pytest.raises(DataError, match="the stream: has 1 tokens"):
        made(stream(0), next_sentence=False)
    for sequence, pairs, least in ((4, True, 5), (2, False, 3)):
        with pytest.raises(ConfigError, match=rf"data.sequence={sequence} has no room .*; valid: {least} or more"):
            made(stream(50, 50), sequence, next_sentence=pairs)
        made(stream(50, 50), least, next_sentence=pairs).samples(0, 60)


def test_special_tokens_are_appended() -> None:
    assert specials_of(byte_tokenizer()) == SPECIALS
    no_text = {SPECIALS.padding, SPECIALS.first, SPECIALS.separator, SPECIALS.mask, SPECIALS.end}
    assert no_text == {256, 257, 258, 259, 260}


def test_special_tokens_of_a_tokenizer_are_its_own() -> None:
    text = with_specials(byte_tokenizer().to_json(), SPECIALS)
    assert specials_of(parse_tokenizer(text, "text")) == SPECIALS
    assert with_specials(text, SPECIALS) == text
    tree = json.loads(text)
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] != "[MASK]"]
    tree["post_processor"] = None
    partly = specials_of(parse_tokenizer(json.dumps(tree), "text"))
    assert (partly.padding, partly.first, partly.separator, partly.mask) == (257, 258, 259, 260)


def test_a_text_that_spells_a_special_token_is_text() -> None:
    tokenizer = parse_tokenizer(with_specials(byte_tokenizer().to_json(), SPECIALS), "text")
    for name in NAMES:
        assert tokenizer.encode(name) == list(name.encode())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PackedCorpus:
    folder = tmp_path_factory.mktemp("masked")
    texts = [f"document {number} says {number * number} and so on" for number in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare(str(folder / "a.jsonl"), "bytes", folder / "out", 0.1)


def config_of(corpus: PackedCorpus, **model: Any) -> Config:
    fields = {"family": "bert", "layers": 1, "hidden": 8, "heads": 2, "vocabulary": 261} | model
    data = {"source": str(corpus.folder), "sequence": 24, "validation": 0.1}
    return parse_config({"model": fields, "data": data, "batch": {"global": 4}, "validation": {"every": 1}})


def test_a_run_opens_both_splits(corpus: PackedCorpus, tmp_path: Path) -> None:
    config = config_of(corpus)
    folder = config.data.prepare(config, lambda text, done: None)
    opened = config.data.open(config, folder)
    assert opened.held_out is not None
    texts = bytes(token for token in originals(opened.train.samples(0, 50)).flatten().tolist() if token < 256)
    assert b"says" in texts
    assert opened.held_out.held_out(0, 2)["next_sentence"].shape == (2, 1)
    assert "next_sentence" not in config.data.open(config_of(corpus, next_sentence=False), folder).train.samples(0, 1)


def test_a_vocabulary_without_room_for_the_special_tokens(corpus: PackedCorpus) -> None:
    config = config_of(corpus)
    small = config.model_copy(update={"model": config.model.model_copy(update={"vocabulary": 260})})
    message = r"model.vocabulary=260 is smaller than the 261 tokens of the corpus' tokenizer \(bytes\) with BERT's"
    with pytest.raises(ConfigError, match=message):
        small.data.samples(small, corpus, "train")
