"""Hugging Face's fine-tuned BERTs are imported and exported; a task from a pre-trained BERT is trained and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.compute.model import Batch
from meshwright.config import parse_run
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.bert.convert import with_specials
from meshwright.families.bert.specials import specials_of
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.evaluate.tasks import Question, measure
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.job import train
from tests.families.bert.pretrained import hugging_face as pretrained
from tests.families.bert.task_files import make_mnli, make_qqp, make_race, make_squad
from tests.families.bert.tuned import config_for
from tests.oracle.batches import BATCHES
from tests.training.convert.folders import saved
from tests.training.runs import lines_of

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 300, "max_position_embeddings": 12, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 12, "intermediate_size": 96,
}  # fmt: skip
CLASSES = {
    "bert-pairs": "BertForSequenceClassification",
    "bert-spans": "BertForQuestionAnswering",
    "bert-choice": "BertForMultipleChoice",
}
READS = {"bert-pairs": "classified pairs", "bert-spans": "answered passages", "bert-choice": "answered choices"}


def hugging_face(folder: Path, family: str, prefix: str = "") -> Any:
    kind = getattr(transformers, prefix + CLASSES[family])
    model = saved(kind, kind.config_class(**SIZES, num_labels=3 if family == "bert-pairs" else 2), folder)
    tokenizer = byte_tokenizer()
    (folder / "tokenizer.json").write_text(with_specials(tokenizer.to_json(), specials_of(tokenizer)))
    return model


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {"input_ids": batch["tokens"], "token_type_ids": batch["segments"], "attention_mask": batch["mask"]}


@torch.no_grad()
def their_loss(model: Any, family: str, batch: Batch) -> float:
    if family == "bert-spans":
        wanted = {"start_positions": batch["start"].flatten(), "end_positions": batch["end"].flatten()}
    else:
        wanted = {"labels": batch["answer"].flatten()}
    return float(model(**inputs(batch), **wanted).loss)


def labelled(family: str) -> Batch:
    """Return a batch without ignored answers, since transformers' model of choices has no ignored answer."""
    batch = BATCHES[family](config_for(family, {}), 3)
    answers = {name: x.clamp(min=0) for name, x in batch.items() if x.shape[1:] == (1,)}
    return batch | answers


@pytest.mark.parametrize(
    "family, prefix", [*((family, "") for family in CLASSES), ("bert-spans", "Megatron"), ("bert-pairs", "Megatron")]
)
def test_the_same_losses_here_and_there_and_back(tmp_path: Path, family: str, prefix: str) -> None:
    model = hugging_face(tmp_path / "hf", family, prefix)
    imported = import_folder(tmp_path / "hf", tmp_path / "run" / "checkpoints" / "step-0")
    assert imported.model.family == family
    loaded, batch = load_text(tmp_path / "run", "cpu", reads=READS[family]), labelled(family)
    labels = loaded.model.labels
    with torch.no_grad():
        ours = loaded.model.loss(
            loaded.model.hidden_states(batch)[0], batch, dict.fromkeys(labels, 1 / len(batch["tokens"]))
        )
    assert float(ours) == pytest.approx(their_loss(model, family, batch), rel=1e-12)
    export_folder(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    drop = {"qa_outputs.bias"} | ({"classifier.bias"} if family == "bert-choice" else set())
    if family == "bert-spans":  # the softmax after it is free of an addend that all tokens share
        drop.add("bert.encoder.ln.bias" if prefix else "bert.encoder.layer.1.output.LayerNorm.bias")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in drop else before[name]), name
    again = type(model).from_pretrained(tmp_path / "back", dtype=torch.float64)
    assert their_loss(again, family, batch) == pytest.approx(float(ours), rel=1e-12)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pairs": ("bert-pairs", {"tensor": {"kind": "megatron", "size": 2}}),
    "squad": ("bert-spans", {"tensor": {"kind": "tesseract", "q": 2, "d": 1}}),
    "race": ("bert-choice", {"pipeline": {"size": 2}}),
}


def make_source(folder: Path, task: str) -> Path:
    match task:
        case "pairs":
            return make_mnli(folder / "train.tsv")
        case "squad":
            return make_squad(folder / "train.json", version=2)
    return make_race(folder / "race")


@pytest.mark.parametrize(
    "task", ["squad", *(pytest.param(task, marks=pytest.mark.long) for task in RUNS if task != "squad")]
)
def test_a_task_from_a_pretrained_bert(tmp_path: Path, task: str) -> None:
    """The head is drawn from the seed, equally under every layout; then `eval --task` measures the trained run."""
    family, layout = RUNS[task]
    pretrained(tmp_path / "hf", max_position_embeddings=128)
    source = make_source(tmp_path, task)
    tree = {
        "model": {"from": str(tmp_path / "hf"), "family": family, "dropout": 0.0, "vocabulary_multiple": 4},
        "data": {"source": str(source), "sequence": 96, "validation": 0.3},
        "batch": {"global": 4, "micro": 2},
        "layout": {"transport": "torch"},
        "precision": {"level": "O0", "dtype": "float64"},
        "metrics": {"sinks": []},
        "device": "cpu",
        "steps": 2,
    }
    config = parse_run(tree)
    assert (config.model.family, config.data.tokenizer) == (family, str(tmp_path / "hf" / "tokenizer.json"))
    train(config, tmp_path / "one", resume=False)
    train(parse_run(tree | {"layout": layout | {"transport": "torch"}}), tmp_path / "many", resume=False)
    losses = [[line["loss"] for line in lines_of(tmp_path / run)] for run in ("one", "many")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert 0.1 < losses[0][0] < 20
    _, facts = measure(task, Question(tmp_path / "one", "cpu", str(source)), lambda *_: None)
    score = "f1" if task == "squad" else "accuracy"
    assert 0 <= float(facts[score]) <= 100
    assert facts["pairs" if task == "pairs" else "questions"] == {"pairs": 18, "squad": 24, "race": 16}[task]
    with pytest.raises(ConfigError, match=r"--data=none leaves --task .* without questions"):
        measure(task, Question(tmp_path / "one", "cpu"), lambda *_: None)


def test_what_does_not_go_is_refused(tmp_path: Path) -> None:
    pretrained(tmp_path / "hf")
    with pytest.raises(
        ConfigError, match=r"model_type=bert is no model.family=llama; valid: bert, bert-pairs, bert-sp"
    ):
        parse_run({"model": {"from": str(tmp_path / "hf"), "family": "llama"}})
    hugging_face(tmp_path / "tuned", "bert-pairs")
    tree = {"model": {"from": str(tmp_path / "tuned"), "classes": 2}, "data": {"sequence": 12}}
    tree["data"] |= {"source": str(make_qqp(tmp_path / "train.tsv"))}
    with pytest.raises(CheckpointError, match=r"weights are of model.classes=3, and the run has 2"):
        train(parse_run(tree), tmp_path / "out", resume=False)
    path = tmp_path / "tuned" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["BertForTokenClassification"]}))
    with pytest.raises(CheckpointError, match=r"has no tensor "):
        import_folder(tmp_path / "tuned", tmp_path / "step-0")
    assert not (tmp_path / "step-0").exists()
