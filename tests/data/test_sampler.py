"""Every layout sees the same global batch, every epoch every window once, and a cursor is a number."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.packed import PackedCorpus
from meshwright.data.packing import prepare
from meshwright.data.sampler import Sampler, TokenBatches
from meshwright.ranks.errors import DataError

T = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PackedCorpus:
    folder = tmp_path_factory.mktemp("sampler")
    texts = [f"document {number} says {number * number}" for number in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare(str(folder / "a.jsonl"), "bytes", folder / "out", 0.1)


@pytest.fixture
def batches(corpus: PackedCorpus) -> TokenBatches:
    return TokenBatches(corpus, "train", T, seed=1)


@settings(deadline=None)
@given(num_windows=st.integers(1, 60), start=st.integers(0, 200), count=st.integers(0, 200))
def test_any_stretch_of_samples_is_the_same_read_at_once_or_one_by_one(
    num_windows: int, start: int, count: int
) -> None:
    sampler = Sampler(num_windows, seed=3)
    assert sampler.size == num_windows
    one_by_one = [int(sampler.rows(sample, 1)[0]) for sample in range(start, start + count)]
    assert sampler.rows(start, count).tolist() == one_by_one


def test_every_epoch_has_every_window_once_in_another_order() -> None:
    sampler = Sampler(50, seed=1)
    epochs = [sampler.rows(epoch * 50, 50).tolist() for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert Sampler(50, seed=2).rows(0, 50).tolist() != epochs[0]


def test_windows_are_the_tokens_and_labels_the_next_ones(corpus: PackedCorpus, batches: TokenBatches) -> None:
    tokens = np.asarray(corpus.tokens("train")).astype(np.int64)
    assert len(batches) == (len(tokens) - 1) // T
    inputs, labels = batches.samples(0, len(batches)).values()
    assert inputs.shape == labels.shape == (len(batches), T)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    for row, window in enumerate(Sampler(len(batches), seed=1).rows(0, len(batches)).tolist()):
        assert inputs[row].tolist() == tokens[window * T : window * T + T].tolist()
        assert labels[row].tolist() == tokens[window * T + 1 : window * T + T + 1].tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_ranks_slices_make_the_global_batch(batches: TokenBatches, num_ranks: int) -> None:
    for step in (0, 3, 50):  # step 50 is in a later epoch
        whole = batches.samples(step * 12 + 0, 12)
        part = 12 // num_ranks
        slices = [batches.samples(step * 12 + rank * part, part) for rank in range(num_ranks)]
        for name, expected in whole.items():
            assert torch.equal(torch.cat([part[name] for part in slices]), expected)


def test_a_run_resumed_in_the_middle_goes_on_alike(corpus: PackedCorpus, batches: TokenBatches) -> None:
    whole = [batches.samples(step * 10, 10)["tokens"] for step in range(2 * len(batches) // 10)]
    resumed = TokenBatches(corpus, "train", T, seed=1)
    for step in range(len(whole) // 2, len(whole)):
        assert torch.equal(resumed.samples(step * 10, 10)["tokens"], whole[step])
    assert not torch.equal(whole[0], whole[1])


def test_validation_goes_through_the_first_windows_in_order(corpus: PackedCorpus) -> None:
    held_out = TokenBatches(corpus, "validation", T, seed=1)
    tokens = np.asarray(corpus.tokens("validation")).astype(np.int64)
    assert len(held_out) >= 8
    parts = [held_out.held_out(row, 2)["tokens"] for row in (0, 2, 4, 6)]
    assert torch.cat(parts).flatten().tolist() == tokens[: 8 * T].tolist()


def test_a_split_shorter_than_a_window_is_refused(corpus: PackedCorpus) -> None:
    held = corpus.header.validation.tokens
    message = rf"the validation split of .*out: data\.sequence={held} needs windows of {held + 1} tokens, and there are"
    with pytest.raises(DataError, match=message):
        TokenBatches(corpus, "validation", held, seed=1)
    assert len(TokenBatches(corpus, "validation", held - 1, seed=1)) == 1
