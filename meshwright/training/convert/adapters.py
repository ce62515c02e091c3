"""peft's folders in and out: adapter_config.json and adapter_model.safetensors, and adapters added to the weights.

r: the rank. A factor of peft is an nn.Linear's weight, [out, in]; ours are [in, out].

| peft                                        | shape    | ours, of the linear or part LAYER | shape            |
|---------------------------------------------|----------|-----------------------------------|------------------|
| base_model.model.MODULE.lora_A.weight       | [r, I]   | LAYER.a.weight                    | [I, r]           |
| base_model.model.MODULE.lora_B.weight       | [N, r]   | LAYER.b.weight                    | [r, N], [r, G, N/G] |
| base_model.model.MODULE.lora_magnitude_vector | [N]    | ‖W‖ + LAYER.d.weight              | [N]              |
| base_model.model.EXPERTS.lora_A.weight      | [n r, I] | LAYER.a.weight of n experts       | [n, I, r]        |
| base_model.model.EXPERTS.lora_B.weight      | [N, r n] | LAYER.b.weight of n experts       | [n, r, ..., N]   |

transformers has one parameter of all experts, `gate_up_proj` or `down_proj` of a module, which peft adapts by
`target_parameters`. If a module has adapters of both, gate_up_proj's are inside: EXPERTS.base_layer.lora_A.

Values are written as the checkpoint has them, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.compute.models.adapter_section import ALL, INSIDE, PEFT, Adapter
from meshwright.compute.models.adapters import LowRank, Parts, adapted_chain, magnitude_scales
from meshwright.compute.parameters.initial import first_values
from meshwright.compute.parameters.shard import Box, ShardSpec, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config.registry import load_entry
from meshwright.config.section import shown
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.foreign import read_json
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.convert.family import Family, as_text
from meshwright.training.convert.folder import Source

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = {"a": "lora_A.weight", "b": "lora_B.weight", "d": "lora_magnitude_vector"}
_USUAL: dict[str, Any] = {
    "bias": "none",
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules")),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "trainable_token_indices", "layer_replication", "use_qalora")),
    **dict.fromkeys(("lora_bias", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config")),
}
"""Keys of adapter_config.json that change the mathematics, with the value that our adapters have; an empty value or
false is the same as null."""
_EXPERTS = {"expand": "gate_up_proj", "contract": "down_proj"}
"""transformers' parameter of all experts, by the last name of our layer."""


@dataclass(frozen=True)
class Factor:
    """One of our parameters of an adapter, and peft's tensor with the same numbers."""

    name: str
    spec: ShardSpec
    theirs: str
    parameter: str = ""
    """transformers' parameter of all experts; empty: a linear."""
    alternates: bool = False
    """Whether gates and ups alternate in the parameter's columns."""

    @property
    def changes_magnitudes(self) -> bool:
        """Whether the parameter has changes of magnitudes, and peft's tensor the magnitudes."""
        return self.theirs.endswith(_FACTORS["d"])

    def to_theirs(self, ours: Tensor) -> Tensor:
        """Transpose our factor to peft's shape."""
        if self.changes_magnitudes:
            return ours.flatten()
        if not self.parameter:
            return ours.flatten(1).t().contiguous()
        if self.theirs.endswith(_FACTORS["a"]):
            return ours.transpose(1, 2).flatten(0, 1).contiguous()
        columns = ours.transpose(-1, -2) if self.alternates and ours.dim() > 3 else ours
        return columns.flatten(2).permute(2, 1, 0).flatten(1).contiguous()

    def to_ours(self, theirs: Tensor) -> Tensor:
        """Transpose peft's factor to our shape; magnitudes without the base's."""
        shape = self.spec.shape
        if not self.parameter:
            return theirs.t().reshape(shape).contiguous()
        if self.theirs.endswith(_FACTORS["a"]):
            return theirs.unflatten(0, (shape[0], shape[2])).transpose(1, 2).contiguous()
        columns = theirs.unflatten(1, (shape[1], shape[0])).permute(2, 1, 0)
        if self.alternates and len(shape) > 3:
            return columns.unflatten(2, (shape[3], shape[2])).transpose(-1, -2).contiguous()
        return columns.reshape(shape).contiguous()


def chain_with_adapters(model: Any) -> nn.Module:
    """Build the chain of a model's section on the meta device."""
    return adapted_chain(load_entry(model.chain), model, SerialKit(solo_mesh(torch.device("meta"))))


def specs_of(model: Any) -> dict[str, ShardSpec]:
    """Return the spec of each parameter of the adapters, by name; none without adapters."""
    if model.adapter is None:
        return {}
    return {name: spec for name, spec in shard_specs(chain_with_adapters(model)).items() if INSIDE in name}


def factors_of(family: Family, model: Any) -> list[Factor]:
    """Return the parameters of a model's adapters with peft's names.

    Raises CheckpointError if peft has no such adapter.
    """
    names, specs = family.names(model), specs_of(model)
    factors = []
    for name, spec in specs.items():
        layer, _, inner = name.partition(INSIDE)
        *prefix, factor, _ = inner.split(".")
        module, (block, linear) = names[layer], layer.rpartition(".")[::2]
        if family.expert_module and layer.startswith("blocks.") and inner in ("a.weight", "b.weight"):
            of_all = len(specs[f"{layer}{INSIDE}a.weight"].shape) > 2
            if of_all:
                experts = f"model.layers.{layer.split('.')[1]}.{family.expert_module}"
                both = linear == "expand" and f"{block}.contract{INSIDE}a.weight" in specs
                there = f"{_PREFIX}{experts}{'.base_layer' if both else ''}.{_FACTORS[factor]}"
                factors.append(Factor(name, spec, there, f"{experts}.{_EXPERTS[linear]}", family.alternates))
                continue
        if not isinstance(module, str):
            parts = model.adapter_parts.get(layer.rpartition(".")[2], ())
            if not prefix or len(parts) != len(module):
                there = f"{len(module)} linears" if len(module) > 1 else "one parameter of all experts"
                what = f"{layer} is one adapter here, and {there} of transformers"
                raise CheckpointError(f"{what}: peft has no form of it; export the merged weights (--merged)")
            module = module[parts.index(prefix[0])]
        factors.append(Factor(name, spec, f"{_PREFIX}{module}.{_FACTORS[factor]}"))
    return factors


def first_adapters(family: Family, model: Any, seed: int, base: Source) -> Iterator[tuple[str, Tensor]]:
    """Yield the first values of adapters: of the folder `model.adapter.from`, or drawn.

    Args:
        family: The form of the model.
        model: The model's section.
        seed: Of drawn values.
        base: The tensors of the model without adapters.

    Raises:
        CheckpointError: The folder has other adapters than the model.
    """
    if model.adapter is None or model.adapter.from_ is None:
        for name, spec in specs_of(model).items():
            yield name, first_values(name, spec, seed)
        return
    folder = Path(model.adapter.from_)
    stored, factors = Source.of_safetensors(folder, str, WEIGHTS), factors_of(family, model)
    wanted = {factor.theirs for factor in factors}
    for what, more in (
        ("lacks", wanted - stored.names),
        ("has, in addition to model.adapter.on,", stored.names - wanted),
    ):
        if more:
            raise CheckpointError(f"{folder} {what} {min(more)} (and {len(more) - 1} more)")
    shapes = {
        theirs: shape
        for pair in (family.pairs(model) if model.adapter.dora else ())
        for theirs, shape in pair.theirs.items()
    }
    for factor in factors:
        shape = tuple(factor.to_theirs(torch.empty(factor.spec.shape, device="meta")).shape)
        theirs = stored.weight(factor.theirs, shape)
        if factor.changes_magnitudes:
            linear = f"{factor.theirs.removeprefix(_PREFIX).rpartition('.')[0]}.weight"
            magnitudes = magnitudes_of(family, base.weight(linear, shapes[linear]))
            theirs = (theirs.double() - magnitudes).to(theirs.dtype)
        yield factor.name, factor.to_ours(theirs)


def magnitudes_of(family: Family, weight: Tensor) -> Tensor:
    """Return the norms [N] of the columns of a linear in a family's form, in float64."""
    return weight.double().norm(dim=1 if family.stores_out_in else 0)


def read_adapter(folder: str) -> dict[str, Any]:
    """Read the fields of `model.adapter` from a folder of peft. Raises CheckpointError for other adapters than ours."""
    path = Path(folder) / CONFIG
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        told = values.get("peft_type") if isinstance(values, dict) else values
        raise CheckpointError(f"{path}: peft_type={shown(told)} is not supported; valid: LORA")
    for key, usual in _USUAL.items():
        if (value := values.get(key) or None) not in (None, usual):
            raise CheckpointError(f"{path}: {key}={shown(value)} is not supported; valid: {shown(usual)}")
    targets = values.get("target_modules")
    known = targets if isinstance(targets, list) else [targets]
    last = [name.rpartition(".")[2] if isinstance(name, str) else "" for name in known]
    if known != [ALL] and not set(last) <= PEFT.keys():
        rule = f"target_modules={shown(targets)} is not supported"
        raise CheckpointError(f"{path}: {rule}; valid: {ALL}, or a list of {', '.join(PEFT)}")
    parameters = values.get("target_parameters") or []
    experts = {theirs: f"feed_forward.{ours}" for ours, theirs in _EXPERTS.items()}
    each = [str(name).rpartition(".")[2] for name in parameters] if isinstance(parameters, list) else [""]
    if not set(each) <= experts.keys():
        rule = f"target_parameters={shown(parameters)} is not supported"
        raise CheckpointError(f"{path}: {rule}; valid: null, or a list of {', '.join(experts)} of experts")
    return {
        "rank": values.get("r", 8),
        "alpha": values.get("lora_alpha", 8),
        "on": sorted({*last, *(experts[name] for name in each)}),
        "rslora": bool(values.get("use_rslora")),
        "dora": bool(values.get("use_dora")),
    }


def write_adapter(
    folder: Path, checkpoint: Checkpoint, family: Family, model: Any, base: str | None, dtype: torch.dtype | None
) -> None:
    """Write peft's two files.

    Args:
        folder: the new folder.
        checkpoint: has the adapters.
        family: the form of the model.
        model: the model's section.
        base: the folder or name of the model without adapters.
        dtype: of the tensors; None: as stored.
    """
    factors = factors_of(family, model)
    tensors = {}
    for factor in factors:
        ours = checkpoint.read(factor.name, "weight", Box((0,) * len(factor.spec.shape), factor.spec.shape))
        theirs = factor.to_theirs(ours)
        if factor.changes_magnitudes:
            theirs = (theirs.double() + base_magnitudes(checkpoint, family, model, factor)).to(theirs.dtype)
        tensors[factor.theirs] = theirs if dtype is None else theirs.to(dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    text = as_text(_settings(family, model, factors, base))
    (folder / CONFIG).write_text(text, encoding="utf-8")


def base_magnitudes(checkpoint: Checkpoint, family: Family, model: Any, factor: Factor) -> Tensor:
    """Return the norms of the columns of the frozen linear of an adapter, in float64."""
    layer = factor.name.partition(INSIDE)[0]
    pair = next(pair for pair in family.pairs(model) if pair.name == f"{layer}.weight")
    whole = checkpoint.read(pair.name, "weight", Box((0,) * len(pair.shape), pair.shape)).double()
    module = factor.theirs.removeprefix(_PREFIX).rpartition(".")[0]
    named = zip(pair.theirs.items(), pair.to_theirs(whole), strict=True)
    return magnitudes_of(family, {name: tensor.reshape(shape) for (name, shape), tensor in named}[f"{module}.weight"])


def _settings(family: Family, model: Any, factors: list[Factor], base: str | None) -> dict[str, Any]:
    """Return the keys of adapter_config.json."""
    adapter: Adapter = model.adapter
    parameters = sorted({factor.parameter for factor in factors if factor.parameter})
    alpha = 2.0 * adapter.rank if adapter.alpha is None else adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.reads == "tokens" else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": target_modules(family, model, [each.theirs for each in factors if not each.parameter]),
        "target_parameters": parameters or None,
        "fan_in_fan_out": not family.stores_out_in,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "bias": "none",
    }


def target_modules(family: Family, model: Any, tensors: list[str]) -> list[str]:
    """Return the last names of the adapted modules, or the full names if another module has such a last name."""
    adapted = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}
    every = {
        name for theirs in family.names(model).values() for name in ([theirs] if isinstance(theirs, str) else theirs)
    }
    if family.expert_module:  # whose experts are one parameter in memory
        every = {name for name in every if ".experts." not in name}
    last = {name.rpartition(".")[2] for name in adapted}
    return sorted(last if {name for name in every if name.rpartition(".")[2] in last} == adapted else adapted)


class Merge:
    """Adds adapters to weights: W + scale · A B in float64, rounded once."""

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        self.checkpoint, self.specs = checkpoint, dict[str, ShardSpec]()
        self.dora = model.adapter is not None and model.adapter.dora
        if model.adapter is not None:
            self.chain = chain_with_adapters(model)
            self.specs = {name: spec for name, spec in shard_specs(self.chain).items() if INSIDE in name}
        self.layers = {name.partition(INSIDE)[0] for name in self.specs}

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight [I, ..., N] or [n, I, ..., N], by our name, with the adapter if there is one."""
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer not in self.layers:
            return weight
        adapter = self.chain.get_submodule(f"{layer}{INSIDE}"[:-1]).to_empty(device="cpu").double().eval()
        with torch.no_grad():
            for inner, parameter in adapter.named_parameters():
                spec = self.specs[f"{layer}{INSIDE}{inner}"]
                box = Box((0,) * len(spec.shape), spec.shape)
                parameter.copy_(self.checkpoint.read(f"{layer}{INSIDE}{inner}", "weight", box))
            adapter.requires_grad_(False)
            stacked = next(adapter.parameters()).dim() > 2  # each expert's A
            whole = weight.double() + self._product(adapter, weight, stacked=stacked)
            if self.dora:
                whole *= magnitude_scales(cast(LowRank | Parts, adapter), weight.double())[0]
            return whole.to(weight.dtype)

    def _product(self, adapter: nn.Module, weight: Tensor, *, stacked: bool) -> Tensor:
        """Return scale · A B: the adapter's output for each unit vector."""
        if not stacked:
            product: Tensor = adapter(torch.eye(weight.shape[0], dtype=torch.float64))
            return product.reshape(weight.shape)
        count, inputs = weight.shape[:2]
        rows = torch.eye(inputs, dtype=torch.float64).repeat(count, 1)
        of_rows: Tensor = adapter(rows, [[inputs] * count])
        return of_rows.reshape(weight.shape)
