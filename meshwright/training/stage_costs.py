"""Costs and memory of a layout's stages, counted on the meta device or timed, for decisions of `resolve`.

| question                  | answer                                                                                 |
|---------------------------|----------------------------------------------------------------------------------------|
| work of each part         | products of a forward pass, and the work on parameters in the same unit (`shared_work`)|
| seconds of each part      | forward and backward of one microbatch on one device, with partition: measured         |
| fixed memory              | weights and gradients with padding of buckets, the optimizer's states                  |
| memory of a microbatch    | live tensors after F, and after B until W, with the configured recomputation           |
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal

import torch
from torch import nn

from meshwright.compute.model import SAMPLES, Batch, Chunk, Costs, Hidden, links
from meshwright.compute.models.adapter_section import ALL, PEFT, matches
from meshwright.compute.models.chain import Chain, chain_of, make_chain, parameters_of, split_name
from meshwright.compute.models.section import Network
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.parameters.shard import check_patterns, shard_specs, use_gradients
from meshwright.compute.tensor.linear import autocasts_of
from meshwright.compute.tensor.router import Router
from meshwright.compute.tensor.serial import SerialKit
from meshwright.compute.tensor.tesseract import TesseractKit
from meshwright.config import Config
from meshwright.config.registry import load_entry
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import PIPE
from meshwright.ranks.launch import Rank, Ranks, joined, run
from meshwright.ranks.machine import usable_cores
from meshwright.ranks.mailbox import TensorMeta
from meshwright.ranks.mesh import solo_mesh
from meshwright.ranks.planned import PlannedMesh, planned_mesh
from meshwright.strategies.memory.activations import apply_policy
from meshwright.strategies.memory.offload import state_bytes
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.strategies.pipeline.partition import fastest
from meshwright.strategies.pipeline.stage import Stage
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.training.all_stages import plan_stages
from meshwright.training.on_device import AsOnDevice, Attention
from meshwright.training.parts import Parts, build
from meshwright.training.rank_model import build_kit, build_model, empty_batch

PRODUCTS_PER_PARAMETER = {"cpu": 200, "cuda": 2000}
"""Multiplications in the time of a step's work on one parameter (gradient written, AdamW: some 40 bytes in all). By
data sheets in bf16: 1,650 on an A100, 3,500 on an H100."""

TIMED_ROUNDS = 5


def first_ranks(config: Config) -> list[PlannedMesh]:
    """Return the mesh of each stage's first rank, on the meta device. If ranks of a stage differ, the first holds the
    most."""
    grid = config.grid
    origin = grid.coordinates(0)
    ranks = [grid.rank(origin | {PIPE: stage}) for stage in range(config.layout.pipeline.size)]
    return [planned_mesh(grid, rank, config.layout.token_axes) for rank in ranks]


@dataclass
class BuiltStages:
    """Answers from each stage's first rank, built on the meta device."""

    _built: dict[Config, list[Parts]] = field(default_factory=dict)

    def _parts(self, config: Config) -> list[Parts]:
        if config not in self._built:
            self._built[config] = [build(config, mesh) for mesh in first_ranks(config)]
        return self._built[config]

    def partition(self, config: Config) -> tuple[int, ...]:
        timed = config.layout.pipeline.partition == "measured"
        costs = measured_costs(config) if timed else counted_costs(config)
        if config.layout.pipeline.head == "spread":  # all stages have equal parts of it
            costs = replace(costs, head=0.0)
        return fastest(costs, placement_of(config), rule_of(config), config.num_microbatches)

    def fixed_bytes(self, config: Config) -> Sequence[int]:
        sizes = []
        for parts in self._parts(config):
            slots = [slot.size for slot in parts.strategy.slots]
            states = state_bytes(config, slots, on_cpu=config.device == "cpu")
            sizes.append(sum(parts.strategy.most_bytes) + states)
        return sizes

    def block_bytes(self, config: Config) -> Sequence[Sequence[int]]:
        kits = [parts.kit for parts in self._parts(config)]
        return [[size_bytes(block) for block in kit.weights.blocks] for kit in kits if isinstance(kit, TesseractKit)]

    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        return microbatch_bytes(config, "cuda" if config.device == "cuda" else "cpu", "fused")


def microbatch_bytes(config: Config, device: str, attention: Attention) -> list[int]:
    """Return the most bytes that a microbatch in flight holds between two tasks, by stage, with the run's
    recomputation. Of a stage's chunks the one with most bytes counts.

    After F a microbatch holds tensors saved by autograd and by recomputed groups. After B, until W, a microbatch holds
    the products' inputs (recomputed if configured) and gradients. In the last chunk B follows F at once, so only the
    bytes after B accumulate. `device`, `attention`: as in AsOnDevice.
    """
    meshes = first_ranks(config)
    stages = plan_stages(config, meshes[0])
    known: dict[Hashable, int] = {}
    sizes = [0] * len(meshes)
    for position, chunk in enumerate(stages.chunks):
        mesh = meshes[stages.placement.stage_of[position]]
        kit = build_kit(config, mesh)
        model = build_model(config, kit, mesh, chunk)
        apply_policy(config, replace(mesh, stands_for=device), model, (chunk,))
        inner = tuple((split_name(name)[1], x.shape) for name, x in model.named_parameters())
        key = inner, chunk.last  # chunks of the same layers hold the same
        if key not in known:
            gradients = Gradients()
            use_gradients(model, gradients)
            stage = Stage(model, gradients, autocasts=autocasts_of(config, mesh))
            batch = empty_batch(config, kit, model, mesh.device)
            with AsOnDevice(device, attention):
                held_bytes(stage, 0, batch, stages.ends(position))  # first run: gathers values that later runs reuse
                after_forward, after_backward = held_bytes(stage, 1, batch, stages.ends(position))
            known[key] = after_backward if chunk.last else max(after_forward, after_backward)
        holder = stages.placement.stage_of[position]
        sizes[holder] = max(sizes[holder], known[key])
    return sizes


def held_bytes(
    stage: Stage, index: int, batch: Batch, ends: tuple[tuple[TensorMeta, ...], tuple[TensorMeta, ...]]
) -> tuple[int, int]:
    """Run F and B of a microbatch; return the microbatch's live bytes after each. `ends`: as in Stages."""
    device = next(iter(batch.values())).device
    with LiveBytes() as live:
        given, coming = (
            tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in forms) for forms in ends
        )
        # Here the gradient from the next stage is allocated during F; in a run it is not.
        waiting = sum(map(size_bytes, coming))
        stage.forward(index, given, batch, dict.fromkeys((*stage.model.labels, SAMPLES), 1.0))
        after_forward = live.live - waiting
        stage.backward(index, coming, defers=True)
        # Messages are freed after B; tensors that stay alive are W's.
        del given, coming
        return after_forward, live.live


LINEARS = "meshwright.compute.models.adapters:linears_of"
"""The entry that lists the linears next to which adapters can be."""


def check_frozen(config: Config) -> None:
    """Check `model.frozen` and `model.adapter.on` against the names of the model's parameters and linears.

    Raises:
        ConfigError: a pattern matches nothing, or no parameter is left to train.
    """
    kit = SerialKit(solo_mesh(torch.device("meta")))
    if config.model.adapter is not None:
        _check_adapter(config.model, load_entry(LINEARS)(config.model, kit))
    model = make_chain(config, kit)
    check_patterns(config.model.frozen, shard_specs(model))


def _check_adapter(model: Network, linears: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigError for a pattern of `model.adapter.on` that names none of the linears and parts."""
    known: dict[str, None] = {}
    names: list[str] = []
    for path, part_names in linears.items():
        names += (path, *(f"{path}.{name}" for name in part_names))
        known |= dict.fromkeys((*part_names, path.split(".", 2)[2]))
    for pattern in () if model.adapter is None else model.adapter.on:
        if not any(matches(each, names) for each in PEFT.get(pattern, (pattern,))):
            near = get_close_matches(pattern, [*known, *PEFT], n=4, cutoff=0.4)
            rule = "names no linear of the layers" if known else f"has no linears to name in a {model.family}"
            others = [name for name in (*known, ALL) if name not in near]
            raise ConfigError.of("model.adapter.on", pattern, rule, ", ".join((*near, *others)))


def counted_costs(config: Config) -> Costs:
    """Count the work of each part of the chain (`shared_work`)."""
    mesh = first_ranks(config)[0]
    kit = build_kit(config, mesh)
    specs = (shard_specs(build_model(config, kit, mesh, chunk)) for chunk in links(config.model.num_blocks))
    return shared_work(config, parameters_of(*specs), config.device)


def shared_work(config: Config, parameters: Costs, device: str) -> Costs:
    """Return the work of a microbatch's passes and of its share of the parameters' updates, in products of a forward
    pass."""
    products, samples = chain_of(config).products(config), config.micro
    # Divided by 3, since the unit is a product of a forward pass, and a microbatch runs three (forward and backward).
    # A step's microbatches share the work on parameters.
    weight = PRODUCTS_PER_PARAMETER["cuda" if device == "cuda" else "cpu"] / 3 / config.num_microbatches
    return Costs(
        samples * products.embedding + weight * parameters.embedding,
        tuple(
            samples * product + weight * size for product, size in zip(products.layers, parameters.layers, strict=True)
        ),
        samples * products.head + weight * parameters.head,
    )


def measured_costs(config: Config) -> Costs:
    """Time each part of the chain, in seconds, in a separate process like a rank: this process may start no threads."""
    # Inside another launcher this process already is a rank, and may have threads.
    if joined():
        begin, *layers, end = time_links(config, torch.device("cuda" if config.device == "cuda" else "cpu"))
    else:
        device: Literal["cpu", "cuda"] = "cuda" if config.device == "cuda" else "cpu"
        threads = usable_cores() if config.threads == "auto" else config.threads
        alone = Ranks((("data", 1),), device=device, threads=threads)
        ((begin, *layers, end),) = run(time_links_on, alone, config=config)
    return Costs(begin, tuple(layers), end)


def time_links_on(rank: Rank, config: Config) -> list[float]:
    return time_links(config, rank.mesh.device)


def time_links(config: Config, device: torch.device) -> list[float]:
    """Time a microbatch forward and backward, in seconds, in each whole part of the chain on one device.

    Only ratios of these times are used. Of layers with equal shapes of inputs and parameters the first is timed.
    """
    kit = SerialKit(solo_mesh(device))
    begin, layers, end = links(config.model.num_blocks)
    known: dict[tuple[torch.Size, ...], float] = {}
    seconds: list[float] = []
    hidden: Hidden = ()
    for link in (begin, *(Chunk(range(layer, layer + 1), False, False) for layer in layers.layers), end):
        model: Chain = make_chain(config, kit, link)
        for parameter in model.parameters():
            # Numbers of usual size: uninitialised memory may hold denormals, and these slow a CPU down.
            nn.init.normal_(parameter, std=0.02)
        for module in model.modules():
            if isinstance(module, Router):  # in place of counts from an earlier pass
                module.balance_by(torch.ones(module.shape.count, device=device))
        batch = empty_batch(config, kit, model, device)
        shapes = tuple(x.shape for x in (*hidden, *model.parameters()))
        if shapes not in known:
            rounds: list[float] = []
            for _ in range(TIMED_ROUNDS):
                given = tuple(x.detach().requires_grad_() for x in hidden)
                started = time.perf_counter()
                out = model(batch, dict.fromkeys((*model.labels, SAMPLES), 1.0), given)
                learned = [x for x in out if x.requires_grad]  # none of frozen embeddings
                if learned:
                    torch.autograd.backward(learned, [torch.ones_like(x) for x in learned])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # until here the GPU's work is only queued
                rounds.append(time.perf_counter() - started)
            known[shapes] = statistics.median(rounds)  # other programs can only add time, in some rounds
        seconds.append(known[shapes])
        with torch.no_grad():
            hidden = model.hidden_states(batch, hidden)
    return seconds


def free_gpu_bytes(num_gpus: int) -> int:
    """Return the least free memory of this node's first GPUs, in bytes. A separate process asks, so that CUDA contexts
    end with that process."""
    free: int = run(ask_gpus, 1, num_gpus=num_gpus)[0]
    return free


def ask_gpus(rank: Rank, num_gpus: int) -> int:
    return min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus))
