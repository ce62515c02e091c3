"""A reader of torch's distributed checkpoints (DCP): `.metadata`, and files of tensors in torch.save's form.

| written by | names of tensors |
|---|---|
| Accelerate and the Trainer under FSDP (`pytorch_model_fsdp_0`), NeMo AutoModel | transformers', behind `model.` |
| torchtitan: Llama 3, Qwen3 | its own (`TORCHTITAN`); Llama's query and key rows in pairs, as in Meta's weights |

Folders of safetensors have a tensor for each expert's linear; in memory, both programs have one of all n experts:

| an expert's, [N, H] or [H, N] | transformers, in memory                               | torchtitan (Qwen3)     |
|-------------------------------|-------------------------------------------------------|------------------------|
| gate_proj (w1)                | mlp.experts.gate_up_proj, first N rows of [n, 2 N, H] | moe...w1_EFD [n, N, H] |
| up_proj (w3)                  | mlp.experts.gate_up_proj, last N rows                 | moe...w3_EFD [n, N, H] |
| down_proj (w2)                | mlp.experts.down_proj [n, H, N]                       | moe...w2_EDF [n, H, N] |

torchtitan also has a bias of each expert's choice, which has to be zero.

The folder has no settings: config.json and the tokenizer's files are copied into the folder, or named beside it.
Pickles are read as inert values (`inert_pickle`): nothing of a file is imported or called.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.foreign import open_plain
from meshwright.training.convert.family import Family
from meshwright.training.convert.folder import Place, Settings, Source
from meshwright.training.convert.inert_pickle import Made, inert

TABLE = ".metadata"
TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens",
    "layers.N.attention.qkv_linear.wq": "model.layers.N.self_attn.q_proj",
    "layers.N.attention.qkv_linear.wk": "model.layers.N.self_attn.k_proj",
    "layers.N.attention.qkv_linear.wv": "model.layers.N.self_attn.v_proj",
    "layers.N.attention.wo": "model.layers.N.self_attn.o_proj",
    "layers.N.attention.q_norm": "model.layers.N.self_attn.q_norm",
    "layers.N.attention.k_norm": "model.layers.N.self_attn.k_norm",
    "layers.N.feed_forward.w1": "model.layers.N.mlp.gate_proj",
    "layers.N.feed_forward.w2": "model.layers.N.mlp.down_proj",
    "layers.N.feed_forward.w3": "model.layers.N.mlp.up_proj",
    "layers.N.moe.router.gate": "model.layers.N.mlp.gate",
    "layers.N.attention_norm": "model.layers.N.input_layernorm",
    "layers.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
"""transformers' layers by torchtitan's (version 0.3), N the number of the block."""
PAIRED = ("self_attn.q_proj", "self_attn.k_proj")
"""Layers of a Llama 3 whose rows torchtitan stores in pairs, and transformers in halves."""
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
GROUPED = tuple(f"moe.routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
"""Names of all experts' gates, ups and downs in a block, of transformers and of torchtitan."""
_OLDER_EXPERTS = {f"moe.experts.w{name[1]}": f"{GROUPED[0][:-6]}{name}" for name in ("w1_EFD", "w3_EFD", "w2_EDF")}
_ALL_EXPERTS = re.compile(
    r"(model\.layers\.\d+)\.(?:mlp\.experts|block_sparse_moe\.experts|moe\.routed_experts\.inner_experts)"
    r"\.(gate_up_proj|down_proj|w1_EFD|w3_EFD|w2_EDF)"
)
_CHOICE = re.compile(r"layers\.\d+\.moe\.expert_bias(_E)?")
_COUNTED = re.compile(r"layers\.\d+\.moe\.tokens_per_expert(_E)?")
"""torchtitan's buffers of a mixture of experts: biases of the choice, and counts."""
_OLDER = {
    "attention.wq": "attention.qkv_linear.wq", "attention.wk": "attention.qkv_linear.wk",
    "attention.wv": "attention.qkv_linear.wv", "output": "lm_head",
}  # fmt: skip
"""Names of torchtitan before version 0.3."""
_NO_WEIGHTS = re.compile(r"(.*\.)?(optim|optimizer|optimizers|lr_scheduler|dataloader|train_state)\..*")
_STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: the first element's position and the lengths, and the bytes of a file."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: Path
    start: int
    size: int

    def overlaps(self, piece: Piece) -> bool:
        """Return whether the pieces have a common element."""
        return all(
            max(a, b) < min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.lengths, piece.offsets, piece.lengths, strict=True)
        )

    def read(self) -> Tensor:
        """Read the part, in torch.save's form. Raises ValueError for another form, and OSError."""
        with open_plain(self.file) as file:
            file.seek(self.start)
            content = file.read(self.size)
        archive = zipfile.ZipFile(io.BytesIO(content))
        files = {name.rpartition("/")[2] if "/data/" not in name else "0": name for name in archive.namelist()}
        if sum(info.file_size for info in archive.infolist()) > len(content):
            raise ValueError("is compressed, and torch.save does not compress")
        if "byteorder" in files and archive.read(files["byteorder"]) != b"little":
            raise ValueError("is of a big-endian machine")
        made = inert(archive.read(files["data.pkl"]))
        if not isinstance(made, Made) or made.name != "torch._utils._rebuild_tensor_v2":
            raise ValueError(f"holds {getattr(made, 'name', type(made).__name__)}, which is no plain tensor")
        storage, first, lengths, strides = made.arguments[:4]
        storage_type = storage.arguments[0][1].text
        if storage_type not in _STORAGES:
            raise ValueError(f"holds {storage_type}; valid: {', '.join(_STORAGES)}")
        if lengths != self.lengths:
            raise ValueError(f"is {list(lengths)}, and {TABLE} says {list(self.lengths)}")
        if not prod(lengths):
            return torch.empty(lengths, dtype=_STORAGES[storage_type])
        values = torch.frombuffer(bytearray(archive.read(files["0"])), dtype=_STORAGES[storage_type])
        return values.as_strided(lengths, strides, first)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a distributed checkpoint: lengths, dtype, and all pieces."""

    lengths: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def check(self) -> None:
        """Raise ValueError unless the pieces make the whole tensor, each element once, from enough bytes."""
        inside = all(
            len(piece.offsets) == len(piece.lengths) == len(self.lengths)
            and all(
                min(at, n) >= 0 and at + n <= length
                for at, n, length in zip(piece.offsets, piece.lengths, self.lengths, strict=True)
            )
            for piece in self.pieces
        )
        filled = sum(prod(piece.lengths) for piece in self.pieces)
        if not inside or filled != prod(self.lengths) or any(a.overlaps(b) for a, b in combinations(self.pieces, 2)):
            raise ValueError(f"has pieces that do not make {list(self.lengths)}")
        # Before memory is taken: a forged length would take all of it.
        stored = sum(piece.size for piece in self.pieces)
        if filled * self.dtype.itemsize > stored:
            raise ValueError(f"is {list(self.lengths)} of {self.dtype}, and its files hold {stored:,} bytes")

    def read(self, named: str) -> Tensor:
        """Return the whole tensor. Raises CheckpointError with the name `named`."""
        try:
            self.check()
            whole = torch.empty(self.lengths, dtype=self.dtype)
            for piece in self.pieces:
                slices = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.lengths, strict=True))
                whole[slices] = piece.read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{named} cannot be read: {error}") from error
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise CheckpointError(f"{named} is not in torch.save's form: {error}") from error
        return whole


def read_table(folder: Path) -> dict[str, StoredTensor]:
    """Read the tensors' table of a distributed checkpoint, by stored name; values that are no tensors are left out.

    Raises CheckpointError if the table is no such table, or names a file outside of the folder.
    """
    path = folder / TABLE
    try:
        with open_plain(path) as file:
            table = inert(file.read()).fields()
        places = {
            (key.fields()["fqn"], _sizes(key.fields().get("offset"))): info.fields()
            for key, info in table["storage_data"].items()
        }
        tensors = {}
        for name, entry in table["state_dict_metadata"].items():
            if not entry.name.endswith(".TensorStorageMetadata"):
                continue
            fields = entry.fields()
            dtype = vars(torch).get(fields["properties"].state[0].text.removeprefix("torch."))
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype of torch")
            pieces = [
                (_sizes(chunk.fields()["offsets"]), _sizes(chunk.fields()["sizes"])) for chunk in fields["chunks"]
            ]
            tensors[str(name)] = StoredTensor(
                _sizes(fields["size"]),
                dtype,
                tuple(Piece(at, lengths, *bytes_of(folder, places[name, at])) for at, lengths in pieces),
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no table of a distributed checkpoint: {error}") from error
    return tensors


def _sizes(made: Any) -> tuple[int, ...]:
    """Return the lengths of a torch.Size; () for None."""
    lengths = () if made is None else tuple(made.arguments[0])
    if not all(isinstance(length, int) and length >= 0 for length in lengths):
        raise ValueError(f"has the lengths {lengths}")
    return lengths


def bytes_of(folder: Path, info: Mapping[str, Any]) -> tuple[Path, int, int]:
    """Return the file, the first byte and the number of bytes of a stored piece. Raises ValueError."""
    name, start, size = str(info["relative_path"]), info["offset"], info["length"]
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is stored with {info['transform_descriptors']}, which is not supported")
    if Path(name).name != name or not (folder / name).is_file():
        raise ValueError(f"names {name!r}, which is no file of this folder")
    held = (folder / name).stat().st_size
    if not (isinstance(start, int) and isinstance(size, int) and min(start, size) >= 0 and start + size <= held):
        raise ValueError(f"{name} has {held:,} bytes, and not {size} from {start} on")
    return folder / name, start, size


def tensors_of(folder: Path, family: Family, settings: Settings) -> Source:
    """Find the tensors of a folder: a distributed checkpoint, or safetensors files. Raises CheckpointError."""
    if not (folder / TABLE).is_file():
        return family.source(folder)
    table = {name: stored for name, stored in read_table(folder).items() if not _NO_WEIGHTS.fullmatch(name)}
    ours = [name for names in family.outside.values() for name in ([names] if isinstance(names, str) else names)]
    titan = any(name.endswith("tok_embeddings.weight") for name in table)
    wrapper = wrapper_of(table, ["tok_embeddings"] if titan else ours)
    pairs = titan and not any(".q_norm." in name for name in table)
    module, linears = family.expert_linears(settings)
    places: dict[str, Place] = {}
    for stored, tensor in table.items():
        name = stored.removeprefix(wrapper)
        read = partial(tensor.read, f"{folder}: {stored}")
        if titan and _CHOICE.fullmatch(name) and read().any():
            raise CheckpointError(f"{folder}: {stored} is not zero, and our experts have no bias of the choice there")
        if titan and (_CHOICE.fullmatch(name) or _COUNTED.fullmatch(name)):
            continue
        name = (from_torchtitan(name) if titan else family.full_name(name)).replace(".mlp.", f".{module}.")
        if pairs and name.rpartition(".")[0].endswith(PAIRED):
            read = partial(halves_of, read, head_size(settings))
        for key, location in single_experts(name, tensor, Place(folder, read), module, linears).items():
            if key in places:
                raise CheckpointError(f"{folder} holds {key} twice, under an old and a new name")
            places[key] = location
    return Source(folder, places)


class AllExperts:
    """A tensor of all experts, read once for all of its parts."""

    def __init__(self, read: Callable[[], Tensor], parts: int) -> None:
        """Make the tensor. `parts`: number of parts that are read; memory is freed after the last one."""
        self.read, self.parts = read, parts
        self.whole: Tensor | None = None
        self.left = parts

    def part(self, expert: int, rows: slice) -> Tensor:
        """Return rows of an expert, [rows, ...]."""
        if self.whole is None:
            self.whole, self.left = self.read(), self.parts
        expert_rows = self.whole[expert, rows].clone()
        self.left -= 1
        if not self.left:
            self.whole = None
        return expert_rows


def single_experts(
    name: str, tensor: StoredTensor, location: Place, module: str, linears: tuple[str, ...]
) -> dict[str, Place]:
    """Return the places of an expert's linears by the names of folders; another tensor's own place by its name.

    Args:
        name: The tensor's name, `.mlp.` as in folders.
        tensor: The tensor, of all experts [n, rows, columns].
        location: The tensor's place.
        module: The module of router and experts in folders.
        linears: Names of an expert's gate, up and down in folders; empty: folders have tensors of all experts.

    Raises:
        CheckpointError: The files have fewer bytes than the tensor, so a forged number of experts takes no memory.
    """
    found, lengths = _ALL_EXPERTS.fullmatch(name), tensor.lengths
    if found is None or not linears or len(lengths) != 3 or not prod(lengths):
        return {name: location}
    try:
        tensor.check()
    except ValueError as error:
        raise CheckpointError(f"{location.path}: {name} cannot be read: {error}") from error
    ours = [index for index, (fused, grouped) in enumerate(zip(FUSED, GROUPED, strict=True))
            if found[2] in (fused.rpartition(".")[2], grouped.rpartition(".")[2])]  # fmt: skip
    if lengths[1] % len(ours):
        return {name: location}  # the converter refuses the name
    rows, whole = lengths[1] // len(ours), AllExperts(location.read, lengths[0] * len(ours))
    return {
        f"{found[1]}.{module}.experts.{expert}.{linears[linear]}.weight": Place(
            location.path, partial(whole.part, expert, slice(rows * block, rows * (block + 1)))
        )
        for expert in range(lengths[0])
        for block, linear in enumerate(ours)
    }


def wrapper_of(names: Iterable[str], layers: Iterable[str]) -> str:
    """Return the words before a model's names in a checkpoint: "", "model.", "app.model.", ...

    Args:
        names: Stored names.
        layers: The model's own names of some layers.

    Raises:
        CheckpointError: The names are of two models.
    """
    ends = tuple(f"{layer}.weight" for layer in layers)
    found = {name.removesuffix(end) for name in names for end in ends if name == end or name.endswith("." + end)}
    # A layer's name may end with another's, such as model.norm and norm: the longest layer, so the shortest words.
    shortest = sorted(
        wrapper for wrapper in found if not any(wrapper != shorter and wrapper.startswith(shorter) for shorter in found)
    )
    if len(shortest) > 1:
        raise CheckpointError(f"the checkpoint holds several models: {', '.join(map(repr, shortest))}")
    return shortest[0] if shortest else ""


def from_torchtitan(name: str) -> str:
    """Return transformers' name of a tensor, by torchtitan's; an unknown name stays, experts' in a block's."""
    for older, newer in _OLDER_EXPERTS.items():
        name = newer.join(name.rsplit(older, 1)) if name.endswith(older) else name
    if name.endswith(GROUPED):
        return f"model.{name}"
    layer, _, suffix = name.rpartition(".")
    for older, newer in _OLDER.items():
        if layer == older or layer.endswith("." + older):
            layer = layer.removesuffix(older) + newer
    found = re.match(r"layers\.(\d+)\.", layer)
    general = layer if found is None else layer.replace(f"layers.{found[1]}.", "layers.N.", 1)
    if general not in TORCHTITAN:
        return name
    return f"{TORCHTITAN[general].replace('.N.', f'.{found[1]}.' if found else '.N.')}.{suffix}"


def head_size(settings: Settings) -> int:
    """Return the width of an attention head. Raises CheckpointError if config.json has none."""
    values = settings.values
    size = values.get("head_dim") or values.get("hidden_size", 0) // max(1, values.get("num_attention_heads") or 1)
    if not isinstance(size, int) or size < 2 or size % 2:
        raise settings.refused(f"makes heads of width {size}, which rotary positions do not halve")
    return size


def halves_of(read: Callable[[], Tensor], width: int) -> Tensor:
    """Return rows [heads x width, hidden] in halves of a head (transformers), from rows in pairs (Meta, torchtitan)."""
    rows = read()
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def pairs_of(rows: Tensor, width: int) -> Tensor:
    """Return rows [heads x width, hidden] in pairs, from rows in halves: the inverse of `halves_of`."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)
