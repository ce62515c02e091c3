"""Hugging Face's T5 imported and exported: both programs' logits are equal, and a round trip keeps all bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.compute.parameters.shard import shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config.schema import Config, Precision
from meshwright.data.tokenizer import byte_tokenizer, parse_tokenizer
from meshwright.families.seq2seq.convert import T5Family
from meshwright.families.seq2seq.data_section import SpanData
from meshwright.families.seq2seq.section import T5
from meshwright.families.seq2seq.t5 import T5Model
from meshwright.ranks.errors import CheckpointError, DataError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.generate import Request, generate
from meshwright.training.checkpoint import Checkpoint, load_weights
from meshwright.training.convert import export_folder, import_folder
from tests.harness import build
from tests.tools.evaluate.tiny import lively, save
from tests.training.convert.folders import check_refused, check_round_trip, saved

transformers = pytest.importorskip("transformers")

SOURCE = torch.tensor([[5, 9, 299, 31, 2, 1], [7, 1, 0, 0, 0, 0]])
TARGET = torch.tensor([[0, 298, 9, 4], [0, 17, 17, 2]])
BATCH = {"source": SOURCE, "source_mask": (SOURCE != 0).long(), "target": TARGET}
SIZES = {
    "vocab_size": 300, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 5, "layer_norm_epsilon": 1e-3,
}  # fmt: skip


def hugging_face(folder: Path, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Save a random T5 with transformers; return the model."""
    config = transformers.T5Config(**{**SIZES, **changes}, decoder_start_token_id=0)
    return saved(transformers.T5ForConditionalGeneration, config, folder, dtype)


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    model, mesh = checkpoint.config.model, solo_mesh(torch.device("cpu"))
    assert isinstance(model, T5)
    made: Any = T5Model(model, SerialKit(mesh)).double().eval()
    load_weights(made, shard_specs(made), mesh, checkpoint)
    logits: torch.Tensor = made.head.logits(made.hidden_states(BATCH)[0])
    return logits


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    """Return transformers' logits with norms in float64; transformers' norms compute in float32 for every dtype."""
    norms = [(name, module) for name, module in model.named_modules() if name.endswith("layer_norm")]
    for name, norm in norms:
        exact = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
        exact.weight = norm.weight
        model.set_submodule(name, exact)
    assert len(norms) == 12
    given = model(input_ids=SOURCE, attention_mask=BATCH["source_mask"], decoder_input_ids=TARGET)
    logits: torch.Tensor = given.logits
    return logits


def test_import_gives_the_same_logits(tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf")
    made = import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert made.model == T5(
        family="t5", vocabulary=300, hidden=16, head_width=6, feed_forward=24, layers=2, heads=3,
        distance_buckets=8, distance_max=5, norm_epsilon=1e-3,
    )  # fmt: skip
    torch.testing.assert_close(our_logits(tmp_path / "step-0"), their_logits(model), rtol=1e-11, atol=1e-11)


def our_checkpoint(folder: Path) -> Path:
    """Save a random model's step folder."""
    model = T5(
        family="t5", layers=2, hidden=16, heads=3, head_width=6, feed_forward=24, vocabulary=300, dropout=0.25,
        distance_buckets=8, distance_max=5, positions=8,
    )  # fmt: skip
    config = Config(
        model=model, data=SpanData(kind="spans", sequence=8), precision=Precision(level="O0", dtype="float64")
    )
    return save(lively(build(config, solo_mesh(torch.device("cpu")))), folder)


def test_export_loads_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    step = our_checkpoint(tmp_path)
    assert export_folder(tmp_path, tmp_path / "hf") == step
    kind = transformers.T5ForConditionalGeneration
    model, facts = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(facts.values()), facts
    assert (model.config.architectures, model.config.dropout_rate) == ([kind.__name__], 0.25)
    ours, theirs = our_logits(step), their_logits(model.eval())
    assert ours.dtype == theirs.dtype == torch.float64
    torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-11)


def with_tokens(model: T5, text: str) -> str:
    return T5Family().with_tokenizer(model, text, parse_tokenizer(text, "its own")).text


def test_exported_tokenizer_and_model_go_together(tmp_path: Path) -> None:
    """A vocabulary of 300 fits padding after the 257 tokens, and no sentinels; a vocabulary of 360 fits both."""
    our_checkpoint(tmp_path)
    export_folder(tmp_path, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("ab")["input_ids"] == [*b"ab", 256]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (257, 256, 258)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf")
    assert model.generation_config.decoder_start_token_id == 257
    import_folder(tmp_path / "hf", tmp_path / "again")
    for text in ("ab", "xyz"):
        theirs = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=5, do_sample=False)[0]
        ours = generate(tmp_path / "again", Request(text, tokens=5, beams=1), "cpu")
        assert "".join(ours.parts) == tokenizer.decode(theirs, skip_special_tokens=True)
    text = byte_tokenizer().to_json()
    larger = T5(family="t5", vocabulary=360)
    (tmp_path / "tokenizer.json").write_text(with_tokens(larger, text))
    spans = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert spans("a<extra_id_0>b<extra_id_99>")["input_ids"] == [97, 258, 98, 357, 256]
    again = (tmp_path / "tokenizer.json").read_text()
    assert with_tokens(larger, again) == again
    with pytest.raises(DataError, match="has 258 tokens with the model's own, and the model knows 257"):
        with_tokens(T5(family="t5", vocabulary=257), text)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", torch.bfloat16)
    check_round_trip(tmp_path, torch.bfloat16)


def test_old_folders_hold_copies_and_what_none_reads(tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    bias = "layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[f"decoder.block.0.{bias}"] = torch.ones(8, 3)
    save_file(tensors, path)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    torch.testing.assert_close(our_logits(tmp_path / "step-0"), their_logits(model), rtol=1e-11, atol=1e-11)
    tensors["lm_head.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not shared\.weight"):
        import_folder(tmp_path / "hf", tmp_path / "other")


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"feed_forward_proj": "gated-gelu"},
            r"feed_forward_proj=gated-gelu is not supported: T5 1\.1 .*; valid: relu",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false is not supported; valid: true"),
        ({"scale_decoder_outputs": False}, "scale_decoder_outputs=false is not supported; valid: true"),
        ({"num_decoder_layers": 3}, "num_decoder_layers=3 is not num_layers=2: ours has one number for both"),
        ({"num_heads": 4}, r"relative_attention_bias\.weight is \[8, 3\], and config\.json makes it \[8, 4\]"),
        ({"num_layers": 3, "num_decoder_layers": 3}, r"has no tensor decoder\.block\.2\."),
        ({"num_layers": 1, "num_decoder_layers": 1}, r"has a tensor that T5 has not: decoder\.block\.1\."),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0 is not above 0"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    hugging_face(tmp_path / "hf")
    check_refused(tmp_path, change, message)
