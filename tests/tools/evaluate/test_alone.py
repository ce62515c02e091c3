"""`eval` of a run measures the run's task: documents and dialogues alone, with marks as trained.

The references are the run's validation loss, and one forward pass a piece.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.config import parse_run
from meshwright.data.files import silent
from meshwright.data.packed import DIALOGUE, IDS, SAID, open_packed
from meshwright.data.tokenizer import load_tokenizer
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import Facts, LoadedText, load_text
from meshwright.tools.evaluate.tasks import Question, measure
from meshwright.training.job import train
from tests.data.dialogues import PLAIN, dialogue, make_dialogues, make_tokenizer
from tests.training.runs import lines_of

MODEL = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "feed_forward": 16, "positions": 64}
MODEL |= {"vocabulary": 320}


def trained(folder: Path, data: dict[str, Any]) -> Path:
    """Train for three steps, then validate on the whole held-out split; return the run's folder."""
    tree = {
        "model": MODEL, "data": {"sequence": 24, "validation": 0.2} | data, "batch": {"global": 1}, "steps": 3,
        "validation": {"every": 3, "batches": 10**6}, "precision": "float64", "optimizer": {"lr": 1e-2},
        "device": "cpu", "metrics": {"sinks": []},
    }  # fmt: skip
    train(parse_run(tree, []), folder, resume=False)
    return folder


def asked(run: Path, **options: Any) -> Facts:
    return measure("perplexity", Question(run, "cpu", **options), silent)[1]


def documents(folder: Path) -> Path:
    path = folder / "docs.jsonl"
    texts = (" ".join(["apple", "river", "seven"][number % 3 :] * (1 + number % 4)) for number in range(40))
    path.write_text("".join(json.dumps({"text": f"{text} {at}"}) + "\n" for at, text in enumerate(texts)))
    return path


def loss_of(loaded: LoadedText, ids: list[int], scored: list[bool]) -> tuple[float, int]:
    """Return the summed loss and the number of scored tokens of one piece, by one plain forward pass."""
    with torch.no_grad():
        logits = loaded.head.logits(loaded.model.hidden(torch.tensor([ids[:-1]])))[0].double()
    losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    kept = torch.tensor(scored[1:])
    return float(losses[kept].sum()), int(kept.sum())


MARKS = [
    {"begin": "auto", "end": "auto"},
    {"begin": "<|turn|>", "end": "auto"},
    {"begin": "none", "end": "<|over|>"},
    {"begin": "<|turn|>", "end": "<|over|>"},
    {"begin": "<|over|>", "end": "<|over|>"},
    {"begin": "none", "end": "none"},
    {"begin": "<|turn|>", "end": "none"},
]


@pytest.mark.parametrize("documents_are", ["joined", "separate"])
@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: "-".join(marks.values()))
def test_eval_holds_the_runs_own_validation_loss(tmp_path: Path, marks: dict[str, str], documents_are: str) -> None:
    if documents_are == "separate" and marks["end"] == "none":
        pytest.skip("refused: nothing tells such documents apart")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    data = {"source": str(documents(tmp_path)), "tokenizer": str(tokenizer), "documents": documents_are, **marks}
    run = trained(tmp_path / "run", data)
    facts, last = asked(run), lines_of(run)[-1]
    assert facts["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-9)
    assert ("documents" in facts) == (documents_are == "separate")
    if documents_are == "separate":
        loaded = load_text(run, "cpu")
        packed = open_packed(loaded.config.data.prepare(loaded.config, silent))
        end, begin = packed.header.end, packed.header.begin
        total, count, piece = 0.0, 0, list[int]()
        for token in packed.tokens("validation").tolist():
            if token != end:
                piece.append(token)
                continue
            text = [one for one in piece if one != begin]
            if text:
                loss, num = loss_of(loaded, [end if begin is None else begin, *text], [True] * (len(text) + 1))
                total, count = total + loss, count + num
            assert len(piece) < 64
            piece = []
        # Every document is whole; another test has windows of longer documents.
        facts = asked(run, context=64)
        assert facts["tokens"] == count
        assert facts["loss_per_token"] == pytest.approx(total / count, rel=1e-9)
        assert facts["perplexity_per_token"] == pytest.approx(math.exp(total / count), rel=1e-9)


def test_text_given_as_data_is_separate_too_and_windows_slide_in_a_document(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {"source": str(documents(tmp_path)), "documents": "separate"})
    (tmp_path / "two.jsonl").write_text('{"text": "apple river"}\n{"text": "seven"}\n')
    loaded = load_text(run, "cpu")
    pieces = [[256, *b"apple river"], [256, *b"seven"]]
    sums = [loss_of(loaded, ids, [True] * len(ids)) for ids in pieces]
    facts = asked(run, data=str(tmp_path / "two.jsonl"))
    assert (facts["documents"], facts["tokens"]) == (2, 16)
    assert facts["loss_per_token"] == pytest.approx(sum(loss for loss, _ in sums) / 16, rel=1e-9)
    assert "validation_loss" not in facts, "of a text that no run held out"
    # A document of 40 tokens in a context of 24: windows at 0, 8 and 16, the last two score 8 tokens each.
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "apple rive" * 4}) + "\n")
    ids = [256, *b"apple rive" * 4]
    parts = [(0, 0), (8, 16), (16, 16)]
    total = sum(loss_of(loaded, ids[at : at + 25], [place > before for place in range(25)])[0] for at, before in parts)
    facts = asked(run, data=str(tmp_path / "long.jsonl"), stride=8)
    assert (facts["documents"], facts["tokens"], facts["stride"]) == (1, 40, 8)
    assert facts["loss_per_token"] == pytest.approx(total / 40, rel=1e-9)
    assert asked(run, data=str(tmp_path / "long.jsonl"), stride=24)["documents"] == 1


@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_dialogues_have_the_perplexity_of_their_answers(tmp_path: Path, overlong: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    data = {"source": str(make_dialogues(tmp_path)), "tokenizer": str(tokenizer), "overlong": overlong, "sequence": 60}
    run = trained(tmp_path / "run", data)
    facts, last = asked(run), lines_of(run)[-1]
    # The scored tokens are equal, so the numbers are equal.
    assert facts["loss_per_token"] == pytest.approx(last["validation_loss"], rel=1e-9)
    assert facts["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-9)
    loaded = load_text(run, "cpu")
    tokens = open_packed(loaded.config.data.prepare(loaded.config, silent)).tokens("validation")
    starts = [at for at, token in enumerate(tokens.tolist()) if token & DIALOGUE]
    total, count = 0.0, 0
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        own = tokens[start:stop][:61] if overlong == "cut" or stop - start <= 61 else tokens[:0]
        if len(own):
            loss, num = loss_of(loaded, (own & IDS).tolist(), ((own & SAID) != 0).tolist())
            total, count = total + loss, count + num
    assert (facts["tokens"], facts["loss_per_token"]) == (count, pytest.approx(total / count, rel=1e-9))
    with pytest.raises(ConfigError, match="--stride=4 has no effect on dialogues"):
        asked(run, stride=4)


def test_dialogues_given_as_data_and_a_text_given_to_a_run_on_dialogues(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    run = trained(
        tmp_path / "run", {"source": str(make_dialogues(tmp_path)), "tokenizer": str(tokenizer)} | {"sequence": 60}
    )
    (tmp_path / "more.json").write_text(json.dumps([{"messages": dialogue(90)}, {"messages": dialogue(92)}]))
    facts = asked(run, data=str(tmp_path / "more.json"))
    assert (facts["dialogues"], facts["left_out"]) == (2, 0)
    answers = [f"{m['content'].strip()}<|over|>\n" for n in (90, 92) for m in dialogue(n) if m["role"] == "assistant"]
    known = load_tokenizer(tokenizer)
    assert facts["tokens"] == sum(len(known.encode_placed(answer, marked=True)[0]) for answer in answers)
    (tmp_path / "text.txt").write_text("apple river")
    assert asked(run, data=str(tmp_path / "text.txt"))["documents"] == 1


def test_a_run_that_held_nothing_out_says_so(tmp_path: Path) -> None:
    data = {"source": str(documents(tmp_path)), "validation": 0}
    tree = {"model": MODEL, "data": data | {"sequence": 24}, "batch": {"global": 1}, "steps": 1, "device": "cpu"}
    train(parse_run(tree, []), tmp_path / "run", resume=False)
    with pytest.raises(DataError, match=r"is empty, as data.validation=0 held nothing out: give --data"):
        asked(tmp_path / "run")
    for words, field in (
        (["validation.every=3"], "validation.every=3 measures on the share that is held out"),
        (["validation.every=3", "checkpoint.best=true"], "validation.every=3 measures"),
        (["validation.patience=2"], "validation.patience=2 has no effect with validation.every=0"),
    ):
        with pytest.raises(ConfigError, match=field):
            parse_run(tree, words)
