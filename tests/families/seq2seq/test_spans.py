"""T5's spans: source and target together are the text, and a sample depends on its number alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compute.model import IGNORED, Batch
from meshwright.data.section import Lengths
from meshwright.families.seq2seq.spans import SpanSamples, parts_of
from meshwright.families.seq2seq.spans_section import Window, span_lengths, window_of
from meshwright.families.seq2seq.specials import SequenceSpecials
from meshwright.ranks.errors import ConfigError, DataError

END, PAD, S0 = 256, 257, 258
SPECIALS = SequenceSpecials(PAD, PAD, END, tuple(range(S0, S0 + 100)), S0 + 100)
T = 64


def made(tokens: int = 1000, sequence: int = T, seed: int = 1) -> SpanSamples:
    """Return samples of a stream in which a token equals its place (modulo 251)."""
    stream = np.arange(tokens, dtype=np.uint16) % 251
    return SpanSamples(stream, SPECIALS, span_lengths(sequence), seed, "the stream")


def put_back(source: list[int], target: list[int]) -> list[int]:
    """Return the text: each sentinel of the source is replaced by the span after the sentinel in the target."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token >= S0:
            spans[token] = []
        else:
            spans[max(spans)].append(token)
    return [token for at in source for token in (spans.pop(at) if at >= S0 else [at])]


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return (source, labels) of each sample without padding and end."""
    sources = [row[mask == 1].tolist() for row, mask in zip(batch["source"], batch["source_mask"], strict=True)]
    targets = [row[row != IGNORED].tolist() for row in batch["labels"]]
    assert all(row[-1] == END for row in (*sources, *targets))
    return [(source[:-1], target[:-1]) for source, target in zip(sources, targets, strict=True)]


@settings(deadline=None, max_examples=60)
@given(st.integers(4, 600), st.integers(0, 40))
def test_source_and_target_make_the_text(sequence: int, first: int) -> None:
    data = made(3000, sequence)
    size = window_of(sequence, 100)
    for source, target in rows(data.samples(first, 2)):
        text = put_back(source, target)
        assert len(text) == size.text
        assert all((x + 1) % 251 == y for x, y in pairwise(text)), "a stretch of the stream"
        sentinels = [token for token in source if token >= S0]
        assert sentinels == [token for token in target if token >= S0] == list(range(S0, S0 + size.spans))
        assert len(target) == size.cut + size.spans
        assert source[0] < S0, "the first token stays"


def test_entries() -> None:
    batch = made(sequence=48).samples(0, 3)
    assert list(batch) == ["source", "source_mask", "target", "labels"]
    assert [tuple(x.shape) for x in batch.values()] == [(3, 48), (3, 48), (3, 16), (3, 16)]
    assert {x.dtype for x in batch.values()} == {torch.int64}
    assert (batch["target"][:, 0] == PAD).all()
    counted = batch["labels"] != IGNORED
    assert torch.equal(batch["target"][:, 1:][counted[:, 1:]], batch["labels"][:, :-1][counted[:, 1:]])
    assert (batch["source"][batch["source_mask"] == 0] == PAD).all()
    assert (batch["target"][~counted] == PAD).all()


def test_the_papers_sizes() -> None:
    """512 tokens of source need 568 of text. 85 tokens are cut in 28 spans, for a target of 114 (T5's public code)."""
    size = window_of(512, 100)
    assert (size.text, size.cut, size.spans, size.lengths) == (568, 85, 28, Lengths(512, 114))
    assert max(Window(size.text + 1).lengths) > 512
    assert span_lengths(512) == (512, 120)  # a multiple of 8


def test_every_way_of_cutting_is_as_likely() -> None:
    draws = np.random.Generator(np.random.PCG64(1))
    counts = Counter(tuple(parts_of(draws, 5, 3)) for _ in range(3000))
    assert set(counts) == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}
    assert all(400 < count < 600 for count in counts.values())
    assert parts_of(draws, 4, 1) == [4]
    assert parts_of(draws, 3, 3) == [1, 1, 1]


def test_every_window_once_an_epoch_and_other_spans_in_the_next() -> None:
    data = made(3000)
    epochs = [rows(data.samples(epoch * len(data), len(data))) for epoch in range(2)]
    texts = [sorted(put_back(*row) for row in epoch) for epoch in epochs]
    assert len(data) == 3000 // window_of(T, 100).text
    assert texts[0] == texts[1] == sorted(put_back(*row) for row in rows(data.held_out(0, len(data))))
    assert sorted(epochs[0]) != sorted(epochs[1])
    assert rows(made(3000, seed=2).samples(0, 5)) != epochs[0][:5]


def same(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 60), st.integers(1, 12))
def test_a_sample_depends_on_the_seed_and_its_number_alone(first: int, count: int) -> None:
    ones = [made().samples(number, 1) for number in range(first, first + count)]
    assert same(made().samples(first, count), {name: torch.cat([one[name] for one in ones]) for name in ones[0]})


def test_held_out_samples_are_the_same_each_time() -> None:
    data = made()
    parts = [data.held_out(0, 3), data.held_out(3, len(data) - 3)]
    assert same(data.held_out(0, len(data)), {name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def test_sequences_too_short_and_too_long() -> None:
    least = max(Window(2).lengths)
    with pytest.raises(ConfigError, match=rf"data.sequence={least - 1} has no room .*; valid: {least} or more"):
        made(sequence=least - 1)
    made(sequence=least).samples(0, 3)
    with pytest.raises(ConfigError, match=r"more spans than there are sentinels, 100; valid: \d+ or less") as caught:
        made(9000, sequence=4000)
    (problem,) = caught.value.problems
    most = int(problem.valid.split()[0])
    made(9000, sequence=most).samples(0, 1)
    with pytest.raises(ConfigError, match="more spans"):
        made(9000, sequence=most + 1)
    with pytest.raises(DataError, match=r"the stream: has 20 tokens, and data.sequence=64 needs windows of \d+"):
        made(20)
