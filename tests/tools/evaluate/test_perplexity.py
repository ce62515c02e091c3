"""Perplexity counts every token once, with the context that the stride leaves, per token and per word."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.packing import prepare
from meshwright.ranks.errors import CheckpointError, ConfigError, DataError
from meshwright.tools.evaluate.load import LoadedText, load_text
from meshwright.tools.evaluate.perplexity import text_perplexity
from meshwright.tools.evaluate.scored import windows
from meshwright.tools.evaluate.tasks import finite, table_of
from meshwright.tools.evaluate.texts import stream_for
from tests.tools.evaluate.tiny import tiny_checkpoint, tiny_config

TEXT = "the cat sat on\nthe mat, and é\u00a0said   so.\n"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedText:
    return load_text(tiny_checkpoint(tmp_path_factory.mktemp("run")), "cpu")


@torch.no_grad()
def brute_force(loaded: LoadedText, stream: list[int], stride: int) -> list[float]:
    """Return the loss of each target, by one window of one token at a time."""
    losses = []
    for at in range(1, len(stream)):
        # The first window with this target begins on the grid of the stride, or ends with the text.
        begin = 0
        while at > begin + loaded.context:
            begin += stride
        begin = max(0, min(begin, len(stream) - 1 - loaded.context))
        h = loaded.model.hidden(torch.tensor([stream[begin:at]]))
        logits = loaded.head.logits(h)[0, -1].double()
        losses.append(float(F.cross_entropy(logits, torch.tensor(stream[at]))))
    return losses


@pytest.mark.parametrize("stride", [1, 3, 4, 8])
def test_equals_brute_force(loaded: LoadedText, tmp_path: Path, stride: int) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    stream = stream_for(loaded, str(path))
    result = text_perplexity(loaded, stream, stride)
    losses = brute_force(loaded, [256, *TEXT.encode()], stride)
    assert result["tokens"] == len(losses) == len(TEXT.encode())
    assert result["perplexity_per_token"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-10)
    assert result["words"] == len(TEXT.split()) == 10
    assert result["perplexity_per_word"] == pytest.approx(math.exp(sum(losses) / 10), rel=1e-10)
    assert (result["context"], result["stride"]) == (8, stride)


def test_more_context_is_the_exact_loss(loaded: LoadedText, tmp_path: Path) -> None:
    """A text within the context has the mean over one window, with any stride."""
    path = tmp_path / "short.txt"
    path.write_text("cats")
    stream = torch.tensor([256, *b"cats"])
    with torch.no_grad():
        logits = loaded.head.logits(loaded.model.hidden(stream[None, :-1]))[0]
    wanted = float(F.cross_entropy(logits, stream[1:]))
    for stride in (1, 8):
        assert text_perplexity(loaded, stream_for(loaded, str(path)), stride)["loss_per_token"] == pytest.approx(
            wanted, rel=1e-12
        )


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_windows_count_each_target_once(num: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    starts, counted, length = windows(num, context, stride)
    seen = [target for start, first in zip(starts, counted, strict=True) for target in range(first, start + length)]
    assert seen == list(range(num))
    assert length == min(context, num)
    assert (starts + length <= num).all()
    assert (counted[1:] - starts[1:] >= context - stride).all()


def test_batches_do_not_change_the_sum(loaded: LoadedText, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    stream = stream_for(loaded, str(path))
    whole = text_perplexity(loaded, stream, 3)
    reported: list[float | None] = []
    in_parts = text_perplexity(loaded, stream, 3, lambda text, done: reported.append(done), batch_tokens=24)
    assert in_parts["loss_per_token"] * in_parts["tokens"] == pytest.approx(
        whole["loss_per_token"] * whole["tokens"], rel=1e-12
    )
    assert len(reported) > 2
    assert reported[-1] == 1.0


def test_end_tokens_are_context_only(loaded: LoadedText, tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab c", "de")))
    stream = stream_for(loaded, str(path))
    assert stream.tokens.tolist() == [256, *b"ab c", 256, *b"de"]
    losses = brute_force(loaded, stream.tokens.tolist(), 4)
    result = text_perplexity(loaded, stream, 4)
    assert (result["tokens"], result["words"]) == (6, 3)
    assert result["loss_per_token"] * result["tokens"] == pytest.approx(sum(losses) - losses[4], rel=1e-10)


def test_prepared_folder_gives_its_validation_split(loaded: LoadedText, tmp_path: Path) -> None:
    source = tmp_path / "lines.txt"
    source.write_text("".join(f"line {number} of them\n" for number in range(40)))
    corpus = prepare(str(source), "bytes", tmp_path / "ready", 0.1)
    stream = stream_for(loaded, str(tmp_path / "ready"))
    assert stream.tokens.tolist() == [256, *np.asarray(corpus.tokens("validation")).tolist()]
    assert stream.words == corpus.header.validation.words
    assert "validation split" in stream.name
    prepare(str(source), "bpe:260", tmp_path / "other", 0.1)
    with pytest.raises(DataError, match="another tokenizer"):
        stream_for(loaded, str(tmp_path / "other"))


def test_without_data_the_run_s_own_split(tmp_path: Path) -> None:
    source = tmp_path / "lines.txt"
    source.write_text("".join(f"line {number} of them\n" for number in range(40)))
    corpus = prepare(str(source), "bytes", tmp_path / "ready", 0.1)
    config = tiny_config()
    data = config.data.model_copy(update={"source": str(tmp_path / "ready"), "validation": 0.1})
    folder = tiny_checkpoint(tmp_path / "run", config.model_copy(update={"data": data}))
    stream = stream_for(load_text(folder), None)
    assert stream.words == corpus.header.validation.words
    assert "held-out split" in stream.name


def test_an_untrained_checkpoint_has_no_split_of_its_own(tmp_path: Path) -> None:
    loaded = load_text(tiny_checkpoint(tmp_path, step=0))
    with pytest.raises(DataError, match="give --data"):
        stream_for(loaded, None)


def test_context_is_the_trained_one_unless_asked(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(sequence=4, positions=8))
    assert load_text(tmp_path).folder == folder
    assert load_text(folder).context == 4
    assert load_text(folder, context=6).context == 6
    with pytest.raises(ConfigError, match=r"--context=9 .*; valid: 1 to model.positions=8"):
        load_text(folder, context=9)


def test_mistakes(loaded: LoadedText, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a b")
    stream = stream_for(loaded, str(path))
    for stride in (0, 9):
        with pytest.raises(ConfigError, match=f"--stride={stride} .* valid: 1 to 8"):
            text_perplexity(loaded, stream, stride)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        stream_for(loaded, str(tmp_path / "blank.txt"))
    with pytest.raises(ConfigError, match="--device=tpu"):
        load_text(loaded.folder, "tpu")
    (loaded.folder / "tokenizer.json").rename(loaded.folder / "away")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_text(loaded.folder)
    (loaded.folder / "away").rename(loaded.folder / "tokenizer.json")


def test_report_names_what_was_done(loaded: LoadedText, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a b")
    facts = finite(text_perplexity(loaded, stream_for(loaded, str(path)), 2))
    assert facts["stride"] == 2
    assert facts["context"] == 8
    assert json.loads(json.dumps(facts)) == facts
    assert "perplexity per word" in table_of(facts)
