"""Hugging Face's BERT imported and exported: both programs' logits are equal, and a round trip keeps all bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.compute.parameters.shard import shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config.schema import Config, Precision
from meshwright.families.bert.data_section import MaskedData
from meshwright.families.bert.model import BERT
from meshwright.families.bert.section import Bert
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import Checkpoint, load_weights
from meshwright.training.convert import export_folder, import_folder
from tests.families.bert.pretrained import KINDS, hugging_face
from tests.harness import build
from tests.tools.evaluate.tiny import lively, save
from tests.training.convert.folders import check_refused, check_round_trip

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[258, 5, 9, 259, 31, 259], [258, 1, 260, 259, 257, 257]])
INPUTS = {
    "tokens": TOKENS,
    "segments": torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]]),
    "mask": (TOKENS != 257).long(),
}
BOTH = pytest.mark.parametrize("order, pairs", KINDS)


@torch.no_grad()
def our_logits(folder: Path) -> list[torch.Tensor]:
    """Return the logits of the masked-language-model head and, if present, of the next-sentence head."""
    checkpoint = Checkpoint(folder)
    model, mesh = checkpoint.config.model, solo_mesh(torch.device("cpu"))
    assert isinstance(model, Bert)
    made: Any = BERT(model, SerialKit(mesh)).double().eval()
    load_weights(made, shard_specs(made), mesh, checkpoint)
    h = made.hidden_states(INPUTS)[0]
    logits = [made.head.logits(made.transformed(h))]
    return [*logits, made.next_sentence_head.logits(made.pooled(h))[:, 0]] if model.next_sentence else logits


@torch.no_grad()
def their_logits(model: Any, pairs: bool) -> list[torch.Tensor]:
    given = model(TOKENS, attention_mask=INPUTS["mask"], token_type_ids=INPUTS["segments"])
    return [given.prediction_logits, given.seq_relationship_logits] if pairs else [given.logits]


def our_checkpoint(folder: Path, order: Any, pairs: bool) -> Path:
    """Save a random model's step folder."""
    model = Bert(
        family="bert", layers=2, hidden=16, heads=2, positions=8, vocabulary=261, norm_order=order,
        next_sentence=pairs, dropout=0.25,
    )  # fmt: skip
    config = Config(
        model=model, data=MaskedData(kind="masked", sequence=8), precision=Precision(level="O0", dtype="float64")
    )
    return save(lively(build(config, solo_mesh(torch.device("cpu")))), folder)


@BOTH
def test_import_gives_the_same_logits(tmp_path: Path, order: str, pairs: bool) -> None:
    model = hugging_face(tmp_path / "hf", order, pairs, layer_norm_eps=1e-3)
    made = import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert isinstance(made.model, Bert)
    assert (made.model.norm_order, made.model.next_sentence, made.model.norm_epsilon) == (order, pairs, 1e-3)
    assert made.has_tokenizer
    for ours, theirs in zip(our_logits(tmp_path / "step-0"), their_logits(model, pairs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@BOTH
def test_export_loads_in_transformers_with_the_same_logits(tmp_path: Path, order: str, pairs: bool) -> None:
    step = our_checkpoint(tmp_path, order, pairs)
    assert export_folder(tmp_path, tmp_path / "hf") == step
    kind = getattr(transformers, KINDS[order, pairs])
    model, facts = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(facts.values()), facts
    assert model.config.architectures == [KINDS[order, pairs]]
    assert (model.config.pad_token_id, model.config.hidden_dropout_prob) == (257, 0.25)
    for ours, theirs in zip(our_logits(step), their_logits(model.eval(), pairs), strict=True):
        assert ours.dtype == theirs.dtype == torch.float64
        torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-11)


def test_exported_tokenizer_is_understood(tmp_path: Path) -> None:
    our_checkpoint(tmp_path, "original", True)
    export_folder(tmp_path, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("ab")["input_ids"] == [258, *b"ab", 259]
    assert tokenizer("a", "b")["input_ids"] == [258, *b"a", 259, *b"b", 259]
    assert tokenizer("a[MASK]")["input_ids"] == [258, *b"a", 260, 259]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (257, 260)


@BOTH
def test_round_trip_keeps_every_bit(tmp_path: Path, order: str, pairs: bool) -> None:
    hugging_face(tmp_path / "hf", order, pairs, dtype=torch.bfloat16)
    copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    check_round_trip(tmp_path, torch.bfloat16, *copies)


def test_old_names_and_copies(tmp_path: Path) -> None:
    """Names and copied tensors of the first published folders are read."""
    model = hugging_face(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(path).items():
        end = ".".join(name.split(".")[-2:])
        tensors[name.removesuffix(end) + old.get(end, end)] = tensor
    assert any(name.endswith("LayerNorm.gamma") for name in tensors)
    tensors["bert.embeddings.position_ids"] = torch.arange(8)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, path)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    for ours, theirs in zip(our_logits(tmp_path / "step-0"), their_logits(model, True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    tensors["cls.predictions.decoder.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"decoder\.weight is not bert\.embeddings\.word_embeddings\.weight"):
        import_folder(tmp_path / "hf", tmp_path / "other")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden_act": "relu"}, "hidden_act=relu is not supported; valid: gelu"),
        ({"intermediate_size": 32}, "intermediate_size=32 is not supported: ours is 4 x hidden_size = 64"),
        ({"type_vocab_size": 3}, "type_vocab_size=3 is not supported; valid: 2"),
        ({"is_decoder": True}, "is_decoder=true is not supported; valid: false"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false is not supported; valid: true"),
        ({"attention_probs_dropout_prob": 0.5}, "hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.5 differ"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=16"),
        ({"num_hidden_layers": 3}, r"has no tensor bert\.encoder\.layer\.2\."),
        ({"num_hidden_layers": 1}, r"has a tensor that BERT has not: bert\.encoder\.layer\.1\."),
        ({"vocab_size": 300}, r"is \[261, 16\], and config\.json makes it \[300, 16\]"),
        ({"model_type": "megatron-bert"}, r"has no tensor bert\.encoder\.l"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    hugging_face(tmp_path / "hf")
    check_refused(tmp_path, change, message)
