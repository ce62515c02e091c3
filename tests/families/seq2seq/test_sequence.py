"""Answers of encoder-decoders: batches, caches and beams change no answer; losses equal the training's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.compute.model import scales_of
from meshwright.config.schema import BatchSection, Validation
from meshwright.data.files import silent
from meshwright.families.seq2seq.beam import Answer, Beam, beam_search
from meshwright.families.seq2seq.load import LoadedSequence, load_sequence
from meshwright.families.seq2seq.pair_texts import pairs_for
from meshwright.families.seq2seq.perplexity import target_perplexity
from meshwright.families.seq2seq.sequence import answers, source_ids, text_of
from meshwright.ranks.errors import CheckpointError, ConfigError, DataError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Request, generate
from tests.harness import build
from tests.tools.evaluate.tiny import lively, save, sequence_config, tiny_checkpoint

TEXTS = ["ab", "a longer one", "xyz", "", "the end of it all"]
FAMILIES = pytest.mark.parametrize("family", ["transformer", "t5"])


def checkpoint(folder: Path, family: str, **changes: str) -> Path:
    """Save a random model of a run that reads pairs or, with `objective`, spans of the same file."""
    source = folder / "pairs.tsv"
    source.write_text("".join(f"{text} {index}\t{text[::-1]}.\n" for index, text in enumerate(TEXTS * 6)))
    config = sequence_config(family, source, **changes)
    parts = lively(build(config, solo_mesh(torch.device("cpu"))))
    for name, weight in parts.model.named_parameters():
        if family == "t5" and name.endswith("cross.output.weight"):
            weight.data.mul_(8)  # else a token's embedding outweighs the source: one table reads and writes
    return save(parts, folder / family)


@torch.no_grad()
def without_cache(loaded: LoadedSequence, ids: list[int], beam: Beam, limit: int) -> Answer:
    """Return one source's answer; every step computes the whole target again."""
    source = torch.tensor([ids])
    mask = torch.ones_like(source)
    memory = loaded.model.encode(source, mask)

    def step(tokens: Tensor, origins: Tensor) -> Tensor:
        rows = len(tokens)
        h = loaded.model.decode(tokens, memory.expand(rows, -1, -1), mask.expand(rows, -1))
        logits = loaded.head.logits(h)[:, -1, : loaded.specials.vocabulary_size]
        logits[:, [loaded.specials.padding, loaded.specials.start]] = -torch.inf
        return logits.log_softmax(-1)

    return beam_search(step, loaded.specials.start, loaded.specials.end, torch.tensor([limit]), beam)[0]


@FAMILIES
def test_answers_are_those_of_one_source_without_cache(tmp_path: Path, family: str) -> None:
    loaded = load_sequence(checkpoint(tmp_path, family), "cpu")
    sources = [source_ids(loaded, text) for text in TEXTS]
    assert sources[0] == [97, 98, 256]
    for beam in (Beam(1), Beam(3)):
        found = answers(loaded, sources, beam, 9, batch_tokens=60)
        for ids, answer in zip(sources, found, strict=True):
            wanted = without_cache(loaded, ids, beam, 9)
            assert (answer.tokens, answer.ended) == (wanted.tokens, wanted.ended)
            assert answer.score == pytest.approx(wanted.score, abs=1e-10)
        assert len({tuple(answer.tokens) for answer in found}) > 2
    longest = answers(loaded, sources, Beam(1))
    assert max(len(answer.tokens) for answer in longest) <= 40


@FAMILIES
def test_the_loss_is_the_models_own_without_smoothing(tmp_path: Path, family: str) -> None:
    """The loss covers pairs in separate batches, and leaves out a pair that is too long."""
    step = checkpoint(tmp_path, family)
    source = tmp_path / "asked.tsv"
    source.write_text("ab\tcd\nabc\tdefghi\n" + "x" * 40 + "\ty\n\t\n")
    loaded = load_sequence(step, "cpu")
    found = target_perplexity(loaded, str(source))
    assert (found["samples"], found["left_out"], found["tokens"]) == (2, 1, 3 + 7)
    total = 0.0
    for read, written in (("ab", "cd"), ("abc", "defghi")):
        ids = torch.tensor([source_ids(loaded, read)])
        labels = torch.tensor([source_ids(loaded, written)])
        target = torch.cat([torch.tensor([[loaded.specials.start]]), labels[:, :-1]], 1)
        with torch.no_grad():
            h = loaded.model.decode(target, loaded.model.encode(ids, torch.ones_like(ids)), torch.ones_like(ids))
            logits = loaded.head.logits(h)
        total -= float(logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).sum())
    assert found["loss_per_token"] * found["tokens"] == pytest.approx(total, rel=1e-6)
    assert found["loss_per_token"] == pytest.approx(total / 10, rel=1e-6)


def test_held_out_spans_are_those_of_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    config = sequence_config("t5", tmp_path / "text.txt", objective="spans")
    parts = lively(build(config, solo_mesh(torch.device("cpu"))))
    loaded = load_sequence(save(parts, tmp_path / "run"), "cpu")
    found = target_perplexity(loaded, None)
    validating = config.model_copy(update={"validation": Validation(every=1), "batch": BatchSection(**{"global": 1})})
    held_out = validating.data.open(validating, validating.data.prepare(validating, silent)).held_out
    assert held_out is not None
    batch = held_out.held_out(0, len(held_out))
    parts.model.eval()
    with torch.no_grad():
        loss = float(parts.model(batch, scales_of(["labels"], [1], 1.0))[0])
    assert found["samples"] == len(held_out)
    assert found["loss_per_token"] * found["tokens"] == pytest.approx(loss, rel=1e-6)
    with pytest.raises(ConfigError, match=r"--data=none leaves .* without pairs: it learned spans; valid: a tsv file"):
        pairs_for(loaded, None)


def test_sentinels_are_read_and_written(tmp_path: Path) -> None:
    loaded = load_sequence(checkpoint(tmp_path, "t5", objective="spans"), "cpu")
    first = loaded.tokenizer.vocabulary_size + 1  # after the padding
    ids = source_ids(loaded, "a<extra_id_0>b<extra_id_12><extra_id_99>")
    assert ids == [97, first, 98, first + 12, first + 99, 256]
    assert text_of(loaded, ids[:-1]) == "a<extra_id_0>b<extra_id_12><extra_id_99>"


def test_pairs_of_two_files_and_mistakes(tmp_path: Path) -> None:
    loaded = load_sequence(checkpoint(tmp_path, "transformer"), "cpu")
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    found = pairs_for(loaded, str(tmp_path / "a.en"), str(tmp_path / "a.de"))
    assert found.pairs == [("one", "eins"), ("two", "zwei")]
    with pytest.raises(ConfigError, match=r"--target=a\.de has no partner; valid: with --data"):
        pairs_for(loaded, None, "a.de")
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(DataError, match="holds no pair"):
        pairs_for(loaded, str(tmp_path / "empty.tsv"))
    with pytest.raises(ConfigError, match="--beams=0"):
        generate(loaded.folder, Request("a", beams=0))
    with pytest.raises(ConfigError, match=r"--length-penalty=0\.6 has no effect on one hypothesis"):
        generate(loaded.folder, Request("a", beams=1, length_penalty=0.6))
    with pytest.raises(ConfigError, match="has 41 tokens with its end, and the model reads 40"):
        generate(loaded.folder, Request("a" * 40))
    with pytest.raises(CheckpointError, match="is a gpt2: this needs a transformer or t5"):
        load_sequence(tiny_checkpoint(tmp_path / "gpt2"))
    with pytest.raises(CheckpointError, match="is a transformer: this needs a gpt2"):
        load_text(loaded.folder)
