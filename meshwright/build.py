"""From a config to the parts of a run: the only place where a strategy's name is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.batch import Batch
from meshwright.bucket import assign_rooms, make_buckets
from meshwright.config import Config
from meshwright.data.dataset import TEXT, Dataset
from meshwright.data.images import IMAGES
from meshwright.data.masked import MASKED_TEXT
from meshwright.data_parallel.allreduce import AllReduce
from meshwright.data_parallel.fsdp import FullySharded
from meshwright.data_parallel.parameter_server import Rooted, Server, ServerGradient, ServerLoss
from meshwright.data_parallel.ring import Ring
from meshwright.data_parallel.sharded import Zero1
from meshwright.data_parallel.strategy import Policy, Strategy, Synchroniser
from meshwright.launch.mpiexec import find_mpiexec
from meshwright.memory.offload import on_disk, on_host
from meshwright.mesh import Mesh
from meshwright.model import Model
from meshwright.models import bert, gpt, vit
from meshwright.models.bert import BERT
from meshwright.models.gpt import GPT
from meshwright.models.vit import ViT
from meshwright.optim.autocast import Autocast
from meshwright.optim.in_place import InPlace
from meshwright.optim.optimizer import Optimizer
from meshwright.optim.states import StatesFactory
from meshwright.shard import ShardSpec, initialise, shard_specs
from meshwright.tensor.kit import Kit
from meshwright.tensor.megatron import MegatronKit
from meshwright.tensor.serial import SerialKit
from meshwright.tensor.tesseract import TesseractKit

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Family:
    """A family of models: how one is made of a config and a kit, and what feeds it."""

    model: Callable[[Any, Kit], nn.Module]
    dataset: Dataset
    flops_per_sample: Callable[[Config], int]
    tokens_per_sample: Callable[[Config], int]
    shapes: Callable[[Config], dict[str, tuple[int, ...]]]
    """Of one sample, by its entries' names."""


FAMILIES: dict[str, Family] = {
    "gpt2": Family(GPT, TEXT, gpt.flops_per_sample, lambda c: c.data.sequence, gpt.sample_shapes),
    "bert": Family(BERT, MASKED_TEXT, bert.flops_per_sample, lambda c: c.data.sequence, bert.sample_shapes),
    "vit": Family(ViT, IMAGES, vit.flops_per_sample, lambda c: c.model.positions, vit.sample_shapes),
}

KITS: dict[str, Callable[[Any, Mesh], Kit]] = {
    "none": lambda config, mesh: SerialKit(mesh),
    "megatron": lambda config, mesh: MegatronKit(mesh, sequence_parallel=config.layout.tensor.sequence_parallel),
    "tesseract": lambda config, mesh: TesseractKit(mesh, config.memory.summa),
}

SYNCHRONISERS: dict[str, tuple[type[Synchroniser], Callable[[], Policy]]] = {
    "server-loss": (ServerLoss, Server),
    "server-gradient": (ServerGradient, Server),
    "rooted": (Synchroniser, Rooted),
    "allreduce": (Synchroniser, AllReduce),
    "ring": (Synchroniser, Ring),
    "zero1": (Synchroniser, Zero1),
}

STATES: dict[str, Callable[[Mesh, Path], StatesFactory]] = {
    "none": lambda mesh, folder: InPlace,
    "host": lambda mesh, folder: partial(on_host, device=mesh.device),
    "disk": lambda mesh, folder: partial(on_disk, device=mesh.device, path=folder / f"offload-{mesh.rank}.bin"),
}


@dataclass(frozen=True)
class Parts:
    """What the train loop turns: built for one rank."""

    config: Config
    mesh: Mesh
    kit: Kit
    module: nn.Module
    model: Model
    """The module as it is called: under autocast with O1."""
    specs: dict[str, ShardSpec]
    strategy: Strategy
    optimizer: Optimizer

    def local(self, batch: Batch) -> Batch:
        """This rank's rows of a replica's microbatch."""
        return {name: self.kit.slice_batch(x) for name, x in batch.items()}

    @property
    def flops_per_sample(self) -> int:
        """Floating-point operations of a sample's forward and backward pass."""
        return family_of(self.config).flops_per_sample(self.config)

    @property
    def tokens_per_sample(self) -> int:
        """Positions of a sample that the model computes."""
        return family_of(self.config).tokens_per_sample(self.config)


def family_of(config: Config) -> Family:
    """The family of a run's model."""
    return FAMILIES[config.model.family]


def build_kit(config: Config, mesh: Mesh) -> Kit:
    """The words that the model is written in, for this rank."""
    return KITS[config.layout.tensor.kind](config, mesh)


def resolve_transport(config: Config, device: str) -> str:
    """`auto`: MPI on CPUs where it is installed and can carry the strategy, torch.distributed elsewhere."""
    if config.layout.transport != "auto":
        return config.layout.transport
    can = device == "cpu" and config.layout.data.sync != "fsdp" and config.layout.world_size > 1
    return "mpi" if can and find_spec("mpi4py") is not None and find_mpiexec() is not None else "torch"


def build_model(config: Config, kit: Kit, mesh: Mesh) -> nn.Module:
    """The model with this rank's part of its initial weights, in the precision that its level stores."""
    model = family_of(config).model(config.model, kit)
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


def build(config: Config, mesh: Mesh, folder: Path = Path()) -> Parts:
    """Everything a rank needs to train. `folder`: the run's, where an optimizer that lives on disk has its file."""
    kit = build_kit(config, mesh)
    module: Any = build_model(config, kit, mesh)
    specs = shard_specs(module)
    strategy = _build_strategy(config, mesh, module, specs)
    to = config.memory.offload.to if mesh.device.type != "meta" else "none"  # a plan has nothing to keep
    optimizer = Optimizer(config, strategy.slots, mesh, STATES[to](mesh, folder))
    autocasts = config.precision.level == "O1"
    model: Model = Autocast(module, mesh.device, DTYPES[config.precision.dtype]) if autocasts else module
    return Parts(config, mesh, kit, module, model, specs, strategy, optimizer)


def _bucket_bytes(config: Config) -> int:
    """What one collective sums: with an offloaded optimizer a chunk, so that it steps one while the next is summed."""
    offload = config.memory.offload
    if offload.to == "none":
        return config.layout.data.bucket
    return offload.chunk * offload.bucket * DTYPES[config.precision.dtype].itemsize


def _build_strategy(config: Config, mesh: Mesh, model: nn.Module, specs: dict[str, ShardSpec]) -> Strategy:
    sync = config.layout.data.sync
    if sync == "fsdp":
        half = DTYPES[config.precision.dtype] if config.precision.level == "O2" else None
        blocks = model.get_submodule("blocks")
        return FullySharded(model, list(blocks.children()), specs, mesh, half)
    kind, policy = SYNCHRONISERS[sync]
    buckets = make_buckets(model.named_parameters(), specs, mesh, _bucket_bytes(config))
    assign_rooms(model, buckets)
    return kind(buckets, mesh, policy())
