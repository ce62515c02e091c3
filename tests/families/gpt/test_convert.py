"""Hugging Face's GPT-2 imported and exported: both programs' logits are equal, and a round trip keeps all bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.config.schema import OptimizerSection
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.ranks.errors import CheckpointError, DataError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Sampling, generate_text
from meshwright.training.checkpoint import Checkpoint, restore
from meshwright.training.convert import export_folder, import_folder
from tests.harness import build
from tests.tools.evaluate.tiny import tiny_checkpoint, tiny_config
from tests.training.convert.folders import check_refused, check_round_trip, saved

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[5, 9, 200, 256, 31, 7], [1, 1, 2, 255, 0, 90]])
SIZES = {"vocab_size": 257, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def hugging_face(folder: Path, *, dtype: torch.dtype = torch.float64, shard: str = "1GB", **changes: Any) -> Any:
    """Save a random GPT-2 with transformers, and a tokenizer; return the model."""
    settings = transformers.GPT2Config(**{**SIZES, **changes}, bos_token_id=256, eos_token_id=256)
    model = saved(transformers.GPT2LMHeadModel, settings, folder, dtype, max_shard_size=shard)
    byte_tokenizer().save(folder / "tokenizer.json")
    return model


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    loaded = load_text(folder, "cpu")
    return loaded.head.logits(loaded.model.hidden(TOKENS))


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
def test_import_gives_the_same_logits(tmp_path: Path, tied: bool, shard: str) -> None:
    model = hugging_face(tmp_path / "hf", shard=shard, tie_word_embeddings=tied, layer_norm_epsilon=1e-3)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (shard == "4KB")
    made = import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert (made.model.tied, made.model.norm_epsilon, made.has_tokenizer) == (tied, 1e-3, True)
    ours, theirs = our_logits(tmp_path / "step-0"), their_logits(model)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_export_loads_in_transformers_with_the_same_logits(tmp_path: Path, tied: bool, dtype: str) -> None:
    step = tiny_checkpoint(tmp_path, tiny_config(tied=tied, dtype=dtype))
    assert export_folder(tmp_path, tmp_path / "hf") == step
    model, facts = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(facts.values()), facts
    assert model.config.tie_word_embeddings is tied
    assert (model.config.eos_token_id, model.config.resid_pdrop) == (256, 0.1)
    limit = 1e-11 if dtype == "float64" else 1e-5
    ours = our_logits(step)
    assert next(model.parameters()).dtype == ours.dtype == DTYPES[dtype]
    torch.testing.assert_close(their_logits(model.eval()), ours, rtol=limit, atol=limit)


def test_exported_tokenizer_is_understood(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    export_folder(tmp_path, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("é b")["input_ids"] == list("é b".encode())
    assert tokenizer.eos_token_id == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_keeps_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    hugging_face(tmp_path / "hf", dtype=dtype, tie_word_embeddings=False)
    check_round_trip(tmp_path, dtype)


def test_padding_rows_are_zero_here_and_gone_there(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert Checkpoint(tmp_path / "step-0").shapes["tokens.weight"] == (320, 16)
    table = dict(load_text(tmp_path / "step-0").model.named_parameters())["tokens.weight"]
    assert not table[257:].any()
    assert table[:257].any(1).all()


def test_fine_tuning_begins_from_an_import(tmp_path: Path) -> None:
    """A run's parts get the imported weights, and no optimizer state."""
    model = hugging_face(tmp_path / "hf")
    folder = tmp_path / "run" / "checkpoints" / "step-0"
    import_folder(tmp_path / "hf", folder)
    config = tiny_config(sequence=4).model_copy(update={"optimizer": OptimizerSection()})
    parts = build(config, solo_mesh(torch.device("cpu")))
    progress = restore(parts, Checkpoint(folder))
    assert (progress.step, progress.samples, progress.steps_taken) == (0, 0, 0)
    assert parts.optimizer.steps_taken == 0
    table = dict(parts.model.named_parameters())["tokens.weight"]
    assert torch.equal(table[:257], model.transformer.wte.weight)


def test_names_without_the_prefix_and_stored_masks(tmp_path: Path) -> None:
    """The first published folders have names without the prefix, and stored masks; both are read."""
    model = hugging_face(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    torch.testing.assert_close(our_logits(tmp_path / "step-0"), their_logits(model), rtol=1e-11, atol=1e-11)


def test_an_import_without_tokenizer_says_so(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert not import_folder(tmp_path / "hf", tmp_path / "step-0").has_tokenizer
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_text(tmp_path / "step-0")


def test_an_import_generates(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert list(generate_text(load_text(tmp_path / "step-0"), "a", 4, Sampling()))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, a pickle"):
        import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert not (tmp_path / "step-0").exists()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"activation_function": "relu"}, "activation_function=relu is not supported; valid: gelu_new"),
        ({"n_inner": 32}, "n_inner=32 is not supported: ours is 4 x n_embd = 64"),
        ({"model_type": "mamba"}, "model_type=mamba is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not supported"),
        ({"attn_pdrop": 0.5}, "attn_pdrop=0.5, resid_pdrop=0.1 differ"),
        ({"n_head": 3}, "n_head=3 does not divide n_embd=16"),
        ({"n_layer": 0}, "n_layer=0 is less than 1"),
        ({"n_layer": 3}, r"has no tensor transformer\.h\.2\."),
        ({"n_layer": 1}, r"has a tensor that GPT-2 has not: transformer\.h\.1\.attn\.c_attn\.bias \(and 11 more\)"),
        ({"vocab_size": 300}, r"wte\.weight is \[257, 16\], and config\.json makes it \[300, 16\]"),
        ({"tie_word_embeddings": False}, r"has no tensor lm_head\.weight"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    hugging_face(tmp_path / "hf")
    check_refused(tmp_path, change, message)


def test_the_same_inner_width_spelled_out_is_fine(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", n_inner=64, activation_function="gelu_pytorch_tanh")
    import_folder(tmp_path / "hf", tmp_path / "step-0")


def test_damaged_folders(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", shard="4KB")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name, file = next(iter(listed["weight_map"].items()))
    for wrong, message in (
        ({**listed["weight_map"], name: "../" + file}, "not a file of this folder"),
        ({**listed["weight_map"], name: "gone.safetensors"}, "is missing"),
        ({**listed["weight_map"], "more": file}, "does not hold more"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match=message):
            import_folder(tmp_path / "hf", tmp_path / "step-0")
    index.write_text(json.dumps(listed))
    (tmp_path / "hf" / file).write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match="no readable safetensors file"):
        import_folder(tmp_path / "hf", tmp_path / "step-0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        import_folder(tmp_path / "empty", tmp_path / "step-0")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    with pytest.raises(CheckpointError, match="exists"):
        import_folder(tmp_path / "hf", tmp_path / "step-0")
    with pytest.raises(CheckpointError, match="exists"):
        export_folder(tmp_path / "step-0", tmp_path / "hf")


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        import_folder(tmp_path / "hf", tmp_path / "step-0")
