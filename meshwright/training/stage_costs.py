"""Costs and memory of a layout's stages, counted on the meta device or timed; `resolve` decides by them.

| question                  | answer                                                                                 |
|---------------------------|----------------------------------------------------------------------------------------|
| work of each part         | products of a forward pass, and the work on parameters in the same unit (`shared_work`)|
| seconds of each part      | forward and backward of one microbatch on one device, with partition: measured         |
| memory that is taken      | weights and gradients with their buckets' padding, the optimizer's states              |
| memory of a microbatch    | what is alive of it after F, and after B until W, under the recomputation that is set  |
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from meshwright.compute.model import SAMPLES, Batch, Chunk, Costs, Hidden, links
from meshwright.compute.models.chain import Chain, chain_of, make_chain, parameters_of, split_name
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.parameters.shard import check_patterns, shard_specs, use_gradients
from meshwright.compute.tensor.linear import autocasts_of
from meshwright.compute.tensor.router import Router
from meshwright.compute.tensor.serial import SerialKit
from meshwright.compute.tensor.tesseract import TesseractKit
from meshwright.config import Config
from meshwright.ranks.comm import size_bytes
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
"""Multiplications in the time of a step's work on a parameter: its gradient written, AdamW, some 40 bytes in all. Of a
GPU by data sheets: 1,650 of an A100's in bf16, 3,500 of an H100's."""

TIMED_ROUNDS = 5


def first_ranks(config: Config) -> list[PlannedMesh]:
    """The mesh of each stage's first rank, on the meta device. Where ranks of a stage differ, it holds the most."""
    grid = config.grid
    origin = grid.coordinates(0)
    ranks = [grid.rank(origin | {PIPE: stage}) for stage in range(config.layout.pipeline.size)]
    return [planned_mesh(grid, rank, config.layout.token_axes) for rank in ranks]


@dataclass
class BuiltStages:
    """Answers by building each stage's first rank on the meta device."""

    _built: dict[Config, list[Parts]] = field(default_factory=dict)

    def _parts(self, config: Config) -> list[Parts]:
        if config not in self._built:
            self._built[config] = [build(config, mesh) for mesh in first_ranks(config)]
        return self._built[config]

    def partition(self, config: Config) -> tuple[int, ...]:
        timed = config.layout.pipeline.partition == "measured"
        costs = measured_costs(config) if timed else counted_costs(config)
        if config.layout.pipeline.head == "spread":  # equal parts of it make no stage longer than another
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
    """The most bytes that a microbatch in flight holds between two tasks, by stage, as the run recomputes; in the chunk
    that holds most.

    After F it holds what autograd and recomputed groups keep; after B, while W waits, the inputs and the gradients of
    products, which recomputation has computed again. The last chunk goes backward as soon as it has gone forward, so
    only the latter adds up there. `device`, `attention`: as AsOnDevice has them.
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
                held_bytes(stage, 0, batch, stages.ends(position))  # which gathers what the later ones find
                after_forward, after_backward = held_bytes(stage, 1, batch, stages.ends(position))
            known[key] = after_backward if chunk.last else max(after_forward, after_backward)
        holder = stages.placement.stage_of[position]
        sizes[holder] = max(sizes[holder], known[key])
    return sizes


def held_bytes(
    stage: Stage, index: int, batch: Batch, ends: tuple[tuple[TensorMeta, ...], tuple[TensorMeta, ...]]
) -> tuple[int, int]:
    """Run F and B of a microbatch; the bytes that are alive because of it after each. `ends`: as Stages has them."""
    device = next(iter(batch.values())).device
    with LiveBytes() as live:
        given, coming = (
            tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in forms) for forms in ends
        )
        # The gradient from after has its memory while F runs here, and not in a run.
        waiting = sum(map(size_bytes, coming))
        stage.forward(index, given, batch, dict.fromkeys((*stage.model.labels, SAMPLES), 1.0))
        after_forward = live.live - waiting
        stage.backward(index, coming, defers=True)
        # Messages go when B is done: what stays alive is W's.
        del given, coming
        return after_forward, live.live


def check_frozen(config: Config) -> None:
    """Check `model.frozen` against the names of the model's parameters.

    Raises:
        ConfigError: a pattern matches no parameter, or no parameter is left to train.
    """
    model = make_chain(config, SerialKit(solo_mesh(torch.device("meta"))))
    check_patterns(config.model.frozen, shard_specs(model))


def counted_costs(config: Config) -> Costs:
    """The work of each part of the chain, `shared_work` of its parameters."""
    mesh = first_ranks(config)[0]
    kit = build_kit(config, mesh)
    specs = (shard_specs(build_model(config, kit, mesh, chunk)) for chunk in links(config.model.num_blocks))
    return shared_work(config, parameters_of(*specs), config.device)


def shared_work(config: Config, parameters: Costs, device: str) -> Costs:
    """A microbatch forward and backward and its share of the work on parameters, in products of a forward pass."""
    products, samples = chain_of(config).products(config), config.micro
    # By 3, since the unit is a product of a forward pass and the others go forward and back; a step's work on
    # parameters is shared by its microbatches.
    weight = PRODUCTS_PER_PARAMETER["cuda" if device == "cuda" else "cpu"] / 3 / config.num_microbatches
    return Costs(
        samples * products.embedding + weight * parameters.embedding,
        tuple(
            samples * product + weight * own for product, own in zip(products.layers, parameters.layers, strict=True)
        ),
        samples * products.head + weight * parameters.head,
    )


def measured_costs(config: Config) -> Costs:
    """Seconds of each part of the chain, timed in a process of its own, as ranks run: this one may start no threads."""
    # Inside another launcher this process is a rank already, with threads of its own.
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
    """Seconds of a microbatch forward and backward in each part of the chain, whole, on one device.

    Only their ratios count. Of layers that are alike, in what they read and in their parameters, the first is timed.
    """
    kit = SerialKit(solo_mesh(device))
    begin, layers, end = links(config.model.num_blocks)
    known: dict[tuple[torch.Size, ...], float] = {}
    seconds: list[float] = []
    hidden: Hidden = ()
    for link in (begin, *(Chunk(range(layer, layer + 1), False, False) for layer in layers.layers), end):
        model: Chain = make_chain(config, kit, link)
        for parameter in model.parameters():
            # Numbers of usual size: what the memory held may be denormals, with which a CPU is slow.
            nn.init.normal_(parameter, std=0.02)
        for module in model.modules():
            if isinstance(module, Router):  # what a pass before has counted of the batch
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
                    torch.cuda.synchronize(device)  # a GPU has only been given the work until here
                rounds.append(time.perf_counter() - started)
            known[shapes] = statistics.median(rounds)  # other programs only ever add, now and then
        seconds.append(known[shapes])
        with torch.no_grad():
            hidden = model.hidden_states(batch, hidden)
    return seconds


def free_gpu_bytes(num_gpus: int) -> int:
    """Free memory of the fullest of this node's first GPUs; asked in a process whose contexts on them go with it."""
    free: int = run(ask_gpus, 1, num_gpus=num_gpus)[0]
    return free


def ask_gpus(rank: Rank, num_gpus: int) -> int:
    return min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus))
