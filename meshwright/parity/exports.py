"""Compares an export of adapters with the trained values: finds tensors that differ, and the cause."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from meshwright.parity.probes import ProbeFinding, shared
from meshwright.parity.tensors import TensorFile, bytes_of
from meshwright.ranks.dtensor import from_all_ranks, from_rank
from meshwright.ranks.errors import ParityError
from meshwright.ranks.foreign import parse_json

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rank's part."""


def export_findings(
    wholes: Mapping[str, Tensor],
    boxes: Mapping[str, Box | None],
    initial: Mapping[str, Tensor],
    source: Mapping[str, Tensor] | str | Path | None,
    parts: Sequence[str],
    rename: Callable[[str], str] | None,
) -> list[ProbeFinding]:
    """Find each adapter that an export lacks or changes. Collective; returns equal findings on all ranks."""
    facts = {
        name: [str(x.dtype).removeprefix("torch."), list(x.shape), boxes[name],
               hashlib.sha256(bytes_of(x)).hexdigest()] for name, x in wholes.items()
    }  # fmt: skip
    per_rank = [parse_json(text) for text in from_all_ranks(json.dumps(facts).encode())]
    export = opened(source) if source is not None else None
    if not any(parse_json(text) for text in from_all_ranks(json.dumps(export is not None).encode())):
        raise ParityError("exported() got no export on any rank: give a state dict or a folder on one at least")
    found, names = [], dict.fromkeys(name for each in per_rank for name in each)
    for name in names:
        variants = values_of(name, wholes.get(name), per_rank)
        if export is None:
            continue
        cuts = {rank: each[name][2] for rank, each in enumerate(per_rank) if name in each and each[name][2]}
        are_parts = any(fnmatch(name, pattern) for pattern in parts)
        key = key_in(export, name, rename)
        if key is None:
            cause = "missing", "the export lacks it; save all parameters that require gradients", 1.0
        else:
            exported = export[key]
            cause = difference(exported, variants, cuts, are_parts, initial.get(name)) or ("", "", 1.0)
            if cause[0] == "wrong values" and (
                owner := next((n for n, x in wholes.items() if n != name and is_equal(exported, x)), "")
            ):
                cause = "other adapter", f"the export has the values of {owner} under its name; save it by its own", 1.0
        if cause[0]:
            found.append(ProbeFinding(cause[0], name.rpartition(".")[0] or name, f"{name}: {cause[1]}", cause[2]))
    return shared(found)


def opened(source: Mapping[str, Tensor] | str | Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict, of a safetensors file or of a folder of such files."""
    if isinstance(source, Mapping):
        return {name: x.detach().cpu() for name, x in source.items() if isinstance(x, Tensor)}
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ParityError(f"{path} has no file of safetensors: give the folder or the file that was saved")
    return {key: file.get(key) for file in map(TensorFile, files) for key in file.keys}


def key_in(export: Mapping[str, Tensor], name: str, rename: Callable[[str], str] | None) -> str | None:
    """Return a parameter's name in an export: equal, without a prefix, or without peft's name of the adapter."""
    if rename is not None:
        return rename(name) if rename(name) in export else None
    words = name.split(".")
    # peft: q.lora_A.default.weight is saved as q.lora_A.weight.
    short = [w for w, before in zip(words, ["", *words], strict=False)
             if not (before.startswith("lora_") or before == "modules_to_save")
             or w in ("weight", "bias")]  # fmt: skip
    for wanted in dict.fromkeys((name, ".".join(short), ".".join(w for w in short if w != "modules_to_save"))):
        if wanted in export:
            return wanted
        ends = [key for key in export if wanted.endswith(f".{key}") or key.endswith(f".{wanted}")]
        if len(ends) == 1:
            return ends[0]
    return None


def values_of(name: str, local: Tensor | None, per_rank: Sequence[Mapping[str, tuple]]) -> dict[int, Tensor]:
    """Return an adapter's distinct values by the first rank with each. Sent only if ranks differ. Collective."""
    first: dict[str, int] = {}
    for rank, facts in enumerate(per_rank):
        if name in facts:
            first.setdefault(facts[name][3], rank)
    if local is not None and len(first) == 1 and all(name in facts for facts in per_rank):
        return {0: local}
    values = {}
    for rank in first.values():
        dtype, shape, *_ = per_rank[rank][name]
        values[rank] = from_rank(rank, local, shape, vars(torch)[dtype])
    return values


def is_equal(x: Tensor, wanted: Tensor) -> bool:
    """Return True if tensors are equal up to one rounding of the coarser dtype."""
    if x.shape != wanted.shape:
        return False
    eps = max(torch.finfo(each.dtype).eps for each in (x, wanted) if each.is_floating_point())
    return bool(((x.double() - wanted.double()).abs() <= eps * wanted.double().abs()).all())


def difference(
    x: Tensor, variants: Mapping[int, Tensor], cuts: Mapping[int, Box], are_parts: bool, initial: Tensor | None
) -> tuple[str, str, float] | None:
    """Return (kind, cause with remedy, factor) for a wrong exported tensor; None for a right one."""
    rank, trained = next(iter(variants.items()))
    if len(variants) > 1:
        wholes = list(joined(list(variants.values()))) if are_parts else []
        if any(is_equal(x, whole) for whole in wholes):
            return None
        alone = next((rank for rank, each in variants.items() if is_equal(x, each)), None)
        if alone is not None:
            remedy = ("join the parts of all ranks before saving" if are_parts else
                      "reduce gradients, so that ranks hold one value, or join the parts")  # fmt: skip
            return (
                "own part",
                f"the export has rank {alone}'s part alone, and ranks hold different values; {remedy}",
                1.0,
            )
        trained = next((whole for whole in wholes if whole.shape == x.shape), trained)
    if is_equal(x, trained):
        return None
    for rank, (offsets, sizes) in cuts.items():
        shard = trained[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        if shard.numel() < trained.numel() and is_equal(x, shard):
            return "own part", f"the export has rank {rank}'s part alone; save full_tensor() of each DTensor", 1.0
    if x.shape != trained.shape:
        if x.ndim == 2 and is_equal(x.T, trained):
            return "transposed", "the export has it transposed; save it as the module holds it", 1.0
        shapes = f"{tuple(x.shape)}, and {tuple(trained.shape)} was trained"
        return "wrong shape", f"the export has shape {shapes}; save the tensor of all ranks", 1.0
    if initial is not None and is_equal(x, initial):
        return "initial values", "the export has the values from before training; save after the last step", 1.0
    wanted, given = trained.double().flatten(), x.double().flatten()
    square = float(wanted @ wanted)
    factor = float(given @ wanted) / square if square else math.inf
    eps = max(torch.finfo(each.dtype).eps for each in (x, trained))
    size = max(square**0.5, 1e-300)
    if math.isfinite(factor) and float((given - factor * wanted).norm()) <= 2 * eps * max(abs(factor), 1.0) * size:
        return "scaled", f"the export is the trained value times {factor:.4g}; save it without a scale", factor
    off = float((given - wanted).norm()) / size
    return "wrong values", f"the export is off by {off:.1e} of its size; save after the last step, from this model", 1.0


def joined(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield ways to join the parts of ranks: concatenated along each dim, and stacked."""
    if len({shard.shape for shard in parts}) == 1:
        yield from (torch.cat(list(parts), dim) for dim in range(parts[0].ndim))
        yield torch.stack(list(parts))
