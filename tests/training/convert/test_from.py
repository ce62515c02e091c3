"""`model: {from: FOLDER}`: a run starts from existing weights with their tokenizer, under any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.api import load
from meshwright.config import Config, parse_run
from meshwright.config.load import load_config
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.training.job import train
from tests.families.llama.logits import hugging_face
from tests.training.runs import lines_of, make_corpus

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def config_of(hf: Path | str, corpus: Path, *words: str, **model: Any) -> Config:
    tree = {
        "model": {"from": str(hf)} | model,
        "data": {"source": str(corpus), "sequence": 12},
        "batch": {"global": 4, "micro": 2},
        "layout": {"transport": "torch"},  # forked ranks import no module again; each rank of MPI imports torch
        "precision": {"level": "O0", "dtype": "float64"},
        "metrics": {"sinks": []},
        "device": "cpu",
        "steps": 2,
    }
    return parse_run(tree, words)


def test_a_run_starts_from_them_on_every_layout(tmp_path: Path, corpus: Path) -> None:
    theirs = hugging_face(tmp_path / "hf", "qwen3")
    config = config_of(tmp_path / "hf", corpus)
    assert (config.weights, config.model.family) == (str(tmp_path / "hf"), "llama")
    assert config.data.tokenizer == str(tmp_path / "hf" / "tokenizer.json")
    train(config, tmp_path / "one", resume=False)
    batch = config.data.open(config, config.data.prepare(config, lambda *_: None)).train.samples(0, 4)
    with torch.no_grad():
        first = F.cross_entropy(theirs(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
    losses = [line["loss"] for line in lines_of(tmp_path / "one")]
    assert losses[0] == pytest.approx(float(first), rel=1e-5)
    layout = "layout={tensor: {kind: megatron, size: 2}, pipeline: {size: 2}, transport: torch}"
    train(config_of(tmp_path / "hf", corpus, layout, vocabulary_multiple=128), tmp_path / "four", resume=False)
    assert [line["loss"] for line in lines_of(tmp_path / "four")] == pytest.approx(losses, rel=1e-10)
    kept = load_config(tmp_path / "one" / "config.yaml")
    shutil.rmtree(tmp_path / "hf")
    assert kept == config, "a run's own config says the model, and needs the folder no more"


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the Hub is read from an earlier download. Without a network, a name without a download is refused."""
    snapshot = tmp_path / "hub" / "models--some--llama" / "snapshots" / ("0" * 40)
    hugging_face(snapshot, "llama")
    (tmp_path / "hub" / "models--some--llama" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--llama" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = load({"model": {"from": "some/llama"}, "data": {"sequence": 8}})
    assert config.weights == "some/llama"
    assert config.model.tied
    with pytest.raises(ConfigError, match=r"model.from=some/other cannot be read: some/other is no folder here, and"):
        load({"model": {"from": "some/other"}})


def test_mistakes(tmp_path: Path, corpus: Path) -> None:
    hugging_face(tmp_path / "hf", "llama")
    with pytest.raises(ConfigError, match=r"model.from=.* cannot be read: .*nowhere is no Hugging Face folder"):
        config_of(tmp_path / "nowhere", corpus)
    with pytest.raises(ConfigError, match=r"model.base=gpt2-mini has no effect beside model.from"):
        config_of(tmp_path / "hf", corpus, base="gpt2-mini")
    with pytest.raises(CheckpointError, match=r"weights are of model.layers=2, and the run has 1"):
        train(config_of(tmp_path / "hf", corpus, layers=1), tmp_path / "out", resume=False)
    assert not list((tmp_path / "out").rglob("step-*"))
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"data.tokenizer=nothing is given, and .*hf has no tokenizer.json; valid: "):
        load({"model": {"from": str(tmp_path / "hf")}, "data": {"source": "stdlib", "sequence": 8}})
    assert config_of(tmp_path / "hf", corpus).data.tokenizer == "bytes", "a prepared folder has its own"
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings | {"hidden_act": "relu"}))
    with pytest.raises(ConfigError, match=r"hidden_act=relu is not supported; valid: silu"):
        config_of(tmp_path / "hf", corpus)
