"""torch's distributed checkpoints, imported and exported: torch reads and writes the other side, and forged tables run
no code."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.convert.dcp import (
    Piece,
    StoredTensor,
    from_torchtitan,
    halves_of,
    pairs_of,
    read_table,
    single_experts,
    wrapper_of,
)
from meshwright.training.convert.folder import Place
from meshwright.training.convert.inert_pickle import Made, inert
from tests.families.llama.logits import hugging_face
from tests.workers import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def settings_beside(hf: Path, folder: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(hf / name, folder / name)


def check_equal(folder: Path, hf: Path) -> None:
    """Assert that a checkpoint has the tensors of a folder of transformers, to the bit."""
    export_folder(folder, folder / "again")
    ours, theirs = load_file(folder / "again" / "model.safetensors"), load_file(hf / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


OPTIMIZER = {"state": {"model.norm.weight": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
WRAPPED: dict[str, Any] = {
    "the Trainer under FSDP": lambda weights: {"model": weights},
    "AutoModel": lambda weights: weights,
    "an application's state": lambda weights: {"app": {"model": weights, "optim": OPTIMIZER}},
    "with optimizer and step": lambda weights: {"model": weights, "optimizer": OPTIMIZER, "train_state": {"step": 3}},
}


@pytest.mark.parametrize("wrapped", list(WRAPPED))
def test_what_torch_saved_is_read(wrapped: str, tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf", "llama")
    save(WRAPPED[wrapped](model.state_dict()), tmp_path / "dcp")
    import_folder(tmp_path / "dcp", tmp_path / "step", beside=tmp_path / "hf")
    check_equal(tmp_path / "step", tmp_path / "hf")


def save_slices(mesh: Mesh, hf: str, folder: str) -> None:
    """Save each tensor in slices of two ranks: rows, columns, and whole."""
    slices = DeviceMesh("cpu", list(range(mesh.grid.world_size)))
    weights = load_file(Path(hf) / "model.safetensors")
    state = {}
    for number, (name, tensor) in enumerate(sorted(weights.items())):
        placement = [Shard(0), Shard(tensor.dim() - 1), Replicate()][number % 3]
        state[name] = distribute_tensor(tensor, slices, [placement])
    dcp.save({"model": state}, checkpoint_id=folder)


def test_slices_of_ranks_are_put_together(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", "qwen3")
    run_ranks(save_slices, Grid((("data", 2),)), str(tmp_path / "hf"), str(tmp_path / "dcp"), transport="torch")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    settings_beside(tmp_path / "hf", tmp_path / "dcp")
    import_folder(tmp_path / "dcp", tmp_path / "step")
    check_equal(tmp_path / "step", tmp_path / "hf")


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # llama's head is tied
@pytest.mark.parametrize("form", ["dcp", "torchtitan"])
def test_an_export_is_read_by_torch_and_by_us(name: str, form: str, tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf", name)
    import_folder(tmp_path / "hf", tmp_path / "step")
    export_folder(tmp_path / "step", tmp_path / "out", form=form)
    import_folder(tmp_path / "out", tmp_path / "back")
    check_equal(tmp_path / "back", tmp_path / "hf")
    if form == "dcp":
        state = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_torchtitans_names_and_rows() -> None:
    assert from_torchtitan("layers.3.attention.qkv_linear.wq.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert from_torchtitan("layers.3.attention.wq.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert from_torchtitan("output.weight") == from_torchtitan("lm_head.weight") == "lm_head.weight"
    assert from_torchtitan("layers.3.moe.router.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert from_torchtitan("layers.3.moe.shared_experts.w1.weight") == "layers.3.moe.shared_experts.w1.weight"
    # A head of width 6: pairs (0, 1), (2, 3), (4, 5) in torchtitan; halves 0, 2, 4 and 1, 3, 5 in Meshwright.
    rows = torch.arange(12.0)[:, None]
    halves = halves_of(lambda: rows, 6)
    assert halves.flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(pairs_of(halves, 6), rows)


def test_words_before_names() -> None:
    layers = ["model.embed_tokens", "lm_head"]
    assert wrapper_of(["model.embed_tokens.weight", "lm_head.weight"], layers) == ""
    assert wrapper_of(["model.model.embed_tokens.weight", "model.lm_head.weight"], layers) == "model."
    assert wrapper_of(["app.model.lm_head.weight"], layers) == "app.model."
    with pytest.raises(CheckpointError, match=r"several models: 'a\.', 'b\.'"):
        wrapper_of(["a.lm_head.weight", "b.lm_head.weight"], layers)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_experts_go_out_as_transformers_has_them_in_memory(name: str, tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf", name)
    import_folder(tmp_path / "hf", tmp_path / "step")
    export_folder(tmp_path / "step", tmp_path / "out", form="dcp")
    state = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    import_folder(tmp_path / "out", tmp_path / "back")
    check_equal(tmp_path / "back", tmp_path / "hf")


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_that_transformers_has_in_memory_are_read(name: str, tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf", name)
    save({"model": model.state_dict()}, tmp_path / "dcp")
    import_folder(tmp_path / "dcp", tmp_path / "step", beside=tmp_path / "hf")
    check_equal(tmp_path / "step", tmp_path / "hf")


@pytest.mark.parametrize("older", [False, True])
def test_torchtitans_experts_are_read(older: bool, tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", "qwen3-moe")
    import_folder(tmp_path / "hf", tmp_path / "step")
    export_folder(tmp_path / "step", tmp_path / "out", form="torchtitan")
    state = {name: stored.read(name) for name, stored in read_table(tmp_path / "out").items()}
    if older:
        new = "moe.routed_experts.inner_experts."
        state = {re.sub(r"_E\w*$", "", name.replace(new, "moe.experts.")): value for name, value in state.items()}
        assert "layers.1.moe.experts.w1" in state
        assert "layers.1.moe.expert_bias" in state
    state["layers.0.moe.tokens_per_expert" + "_E" * (not older)] = torch.ones(4)
    save(state, tmp_path / "dcp")
    import_folder(tmp_path / "dcp", tmp_path / "back", beside=tmp_path / "hf")
    check_equal(tmp_path / "back", tmp_path / "hf")
    bias = next(name for name in state if "expert_bias" in name)
    save(state | {bias: torch.tensor([0.0, 0.0, 0.0, 1.0])}, tmp_path / "biased")
    with pytest.raises(CheckpointError, match=r"expert_bias.* is not zero, and our experts have no bias"):
        import_folder(tmp_path / "biased", tmp_path / "none", beside=tmp_path / "hf")


def test_a_tensor_of_all_experts_is_read_once() -> None:
    reads = []

    def read() -> torch.Tensor:
        reads.append(1)
        return torch.arange(24.0).view(3, 4, 2)

    stored = StoredTensor((3, 4, 2), torch.float32, (Piece((0, 0, 0), (3, 4, 2), Path(), 0, 96),))
    name, linears = "model.layers.5.mlp.experts.gate_up_proj", ("gate", "up", "down")
    found = single_experts(name, stored, Place(Path(), read), "mlp", linears)
    assert list(found) == [f"model.layers.5.mlp.experts.{i}.{name}.weight" for i in range(3) for name in ("gate", "up")]
    parts = [place.read() for place in found.values()]
    assert torch.equal(torch.cat(parts), torch.arange(24.0).view(12, 2))
    assert len(reads) == 1
    odd = replace(stored, lengths=(3, 3, 2), pieces=(Piece((0, 0, 0), (3, 3, 2), Path(), 0, 96),))
    assert list(single_experts(name, odd, Place(Path(), read), "mlp", linears)) == [name], "no row is dropped"
    empty = replace(stored, lengths=(10**12, 0, 2), pieces=())
    assert list(single_experts(name, empty, Place(Path(), read), "mlp", linears)) == [name]
    forged = replace(stored, lengths=(10**12, 4, 2), pieces=(Piece((0, 0, 0), (10**12, 4, 2), Path(), 0, 96),))
    with pytest.raises(CheckpointError, match="its files hold 96 bytes"):
        single_experts(name, forged, Place(Path(), read), "mlp", linears)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_experts_that_torchtitans_qwen3_lacks_are_refused(name: str, tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", name)
    import_folder(tmp_path / "hf", tmp_path / "step")
    with pytest.raises(CheckpointError, match="has no counterpart in torchtitan's Llama 3 and Qwen3"):
        export_folder(tmp_path / "step", tmp_path / "out", form="torchtitan")


def test_torchtitan_has_a_tensor_of_all_experts(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", "qwen3-moe")
    import_folder(tmp_path / "hf", tmp_path / "step")
    export_folder(tmp_path / "step", tmp_path / "out", form="torchtitan")
    stored, theirs = read_table(tmp_path / "out"), load_file(tmp_path / "hf" / "model.safetensors")
    for ours, name in (("w1_EFD", "gate_proj"), ("w3_EFD", "up_proj"), ("w2_EDF", "down_proj")):
        whole = stored[f"layers.1.moe.routed_experts.inner_experts.{ours}"].read(ours)
        wanted = [theirs[f"model.layers.1.mlp.experts.{number}.{name}.weight"] for number in range(4)]
        assert torch.equal(whole, torch.stack(wanted))
    assert torch.equal(stored["layers.0.moe.expert_bias_E"].read("bias"), torch.zeros(4))
    assert "layers.0.moe.router.gate.weight" in stored


def test_a_folder_without_settings_says_which_files_to_copy(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"without config.json: copy the model's config.json and tokenizer.json"):
        import_folder(tmp_path / "dcp", tmp_path / "step")


class Runs:
    """A pickle that creates a folder when Python's unpickler reads the pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    made = inert(pickle.dumps(Runs(trap)))
    assert isinstance(made, Made)
    assert made.name == "posix.mkdir"
    pickle.loads(pickle.dumps(Runs(trap)))  # noqa: S301 - the pickle is one that runs
    trap.rmdir()
    save({"model.norm.weight": torch.ones(2)}, tmp_path / "dcp")
    table = tmp_path / "dcp" / ".metadata"
    table.write_bytes(pickle.dumps(Runs(trap)))
    with pytest.raises(CheckpointError, match=r"is no table of a distributed checkpoint"):
        read_table(tmp_path / "dcp")
    assert not trap.exists()


def test_code_in_a_tensors_header_is_never_run(tmp_path: Path) -> None:
    trap, folder = tmp_path / "trap", tmp_path / "dcp"
    save({"norm.weight": torch.ones(2)}, folder)
    stream = io.BytesIO()
    torch.save(Runs(trap), stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue() + bytes(4096))
    with pytest.raises(CheckpointError, match=r"norm.weight cannot be read|norm.weight is not in torch.save's form"):
        read_table(folder)["norm.weight"].read("norm.weight")
    assert not trap.exists()


def forged(folder: Path, change: Any) -> None:
    """Change the table of a checkpoint with torch's own format."""
    table = folder / ".metadata"
    metadata: Metadata = pickle.loads(table.read_bytes())  # noqa: S301 - from this test
    change(metadata)
    table.write_bytes(pickle.dumps(metadata))


def lengths(metadata: Metadata, *sizes: int) -> None:
    entry: Any = metadata.state_dict_metadata["norm.weight"]
    entry.size = torch.Size(sizes)
    entry.chunks[0].sizes = torch.Size(sizes)


def place(metadata: Metadata, **fields: Any) -> None:
    for info in metadata.storage_data.values():
        for field, value in fields.items():
            object.__setattr__(info, field, value)


def double(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["norm.weight"]
    entry.chunks.append(entry.chunks[0])


def function_for_dtype(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["norm.weight"]
    entry.properties.dtype = torch.save


def test_a_tensor_under_an_old_and_a_new_name_is_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", "qwen3")
    names = ("layers.0.attention.wq.weight", "layers.0.attention.qkv_linear.wq.weight", "tok_embeddings.weight")
    save({name: torch.ones(2, 2) for name in names}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight twice, under an old and a new name"):
        import_folder(tmp_path / "dcp", tmp_path / "step", beside=tmp_path / "hf")


FORGED: dict[str, tuple[Any, str]] = {
    "a length that would take all memory": (lambda it: lengths(it, 2**40), "and its files hold"),
    "other lengths": (lambda it: lengths(it, 3), r"is \[2\], and .metadata says \[3\]"),
    "a piece twice": (double, "has pieces that do not make"),
    "a file elsewhere": (lambda it: place(it, relative_path="../hf/config.json"), "no file of this folder"),
    "bytes before the file": (lambda it: place(it, offset=-5), "bytes, and not"),
    "bytes after the end": (lambda it: place(it, offset=10**6), "bytes, and not"),
    "lengths and bytes that would take all memory": (
        lambda it: (lengths(it, 2**40), place(it, length=2**50)),
        "bytes, and not 1125899906842624 from 0 on",
    ),
    "a function for a dtype": (function_for_dtype, "has no dtype of torch"),
    "a transform": (lambda it: place(it, transform_descriptors=["zstd"]), "stored with"),
}


@pytest.mark.parametrize("case", list(FORGED))
def test_forged_tables_are_refused(case: str, tmp_path: Path) -> None:
    change, message = FORGED[case]
    folder = tmp_path / "dcp"
    save({"norm.weight": torch.ones(2)}, folder)
    forged(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_table(folder)["norm.weight"].read("norm.weight")


@pytest.mark.parametrize("cut", range(1, 600, 37))
def test_a_cut_table_is_refused(cut: int, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save({"norm.weight": torch.ones(2)}, folder)
    table = folder / ".metadata"
    table.write_bytes(table.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"is no table of a distributed checkpoint"):
        read_table(folder)
