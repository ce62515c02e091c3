"""Costs and memory of a layout's stages, counted on the meta device or timed; `resolve` decides by them.

| question                  | answer                                                                                 |
|---------------------------|----------------------------------------------------------------------------------------|
| work of each link         | products of a forward pass, and the work on parameters in the same unit (`shared_work`)|
| seconds of each link      | forward and backward of one microbatch on one device, with partition: measured         |
| memory that is taken      | weights and gradients with their buckets' padding, the optimizer's states              |
| memory of a microbatch    | what autograd keeps of its forward pass, twice: weight gradients wait with as much     |
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from meshwright.config import Config
from meshwright.data_parallel.strategy import Strategy
from meshwright.launch import Rank, Ranks, joined, run
from meshwright.machine import usable_cores
from meshwright.memory.offload import host_store_bytes, state_bytes
from meshwright.memory.recompute import kept_bytes
from meshwright.model import Chunk, Costs, Hidden
from meshwright.models.chain import Chain, chain_of, make_chain, split_name
from meshwright.parameters.bucket import gradient_dtype
from meshwright.parameters.shard import ShardSpec, num_parameters, shard_specs
from meshwright.parts import Parts, build, build_kit, build_model, empty_batch, plan_stages
from meshwright.pipeline.partition import balanced
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.tensor.serial import SerialKit
from meshwright.tensor.tesseract import TesseractKit

PRODUCTS_PER_PARAMETER = 200
"""Multiplications in the time of a step's work on a parameter: its gradient written, AdamW, some 40 bytes in all. For a
CPU core; of a GPU it is ten times as many."""

TIMED_ROUNDS = 5


def first_ranks(config: Config) -> list[Mesh]:
    """The mesh of each stage's first rank, on the meta device. Where ranks of a stage differ, it holds the most."""
    grid = Grid(config.layout.axes)
    origin = grid.coordinates(0)
    ranks = [grid.rank(origin | {PIPE: stage}) for stage in range(config.layout.pipeline.size)]
    return [planned_mesh(grid, rank, config.layout.token_axes) for rank in ranks]


class BuiltStages:
    """Answers by building each stage's first rank on the meta device."""

    def __init__(self) -> None:
        self._built: dict[Config, list[Parts]] = {}

    def _parts(self, config: Config) -> list[Parts]:
        if config not in self._built:
            self._built[config] = [build(config, mesh) for mesh in first_ranks(config)]
        return self._built[config]

    def partition(self, config: Config) -> tuple[int, ...]:
        pipeline = config.layout.pipeline
        costs = measured_costs(config) if pipeline.partition == "measured" else counted_costs(config)
        return balanced(costs, pipeline.size)

    def fixed_bytes(self, config: Config) -> Sequence[int]:
        return [_fixed_bytes(config, parts.strategy) for parts in self._parts(config)]

    def block_bytes(self, config: Config) -> Sequence[Sequence[int]]:
        kits = [parts.kit for parts in self._parts(config)]
        return [[size_bytes(block) for block in kit.weights.blocks] for kit in kits if isinstance(kit, TesseractKit)]

    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        stages = plan_stages(config, first_ranks(config)[0])
        sizes = []
        for stage, mesh in enumerate(first_ranks(config)):
            kit = build_kit(config, mesh)
            model = build_model(config, kit, mesh, stages.chunks[stage])
            batch = empty_batch(config, kit, model.inside, mesh.device)
            forms = stages.message(stage)["before"]
            given = tuple(torch.empty(form.shape, dtype=form.dtype, device="meta").requires_grad_() for form in forms)
            sizes.append(
                2 * kept_bytes(partial(model, batch, dict.fromkeys(model.labels, 1.0), given), model.parameters())
            )
        return sizes


def _fixed_bytes(config: Config, strategy: Strategy) -> int:
    weights = [flat.values for flat in strategy.weights]
    gradients = sum(x.numel() * gradient_dtype(x.dtype, config.widens_gradients).itemsize for x in weights)
    slots = [(slot.parameter.numel(), slot.parameter.dtype) for slot in strategy.slots]
    return sum(map(size_bytes, weights)) + gradients + all_state_bytes(config, slots, config.device)


def all_state_bytes(config: Config, slots: Sequence[tuple[int, torch.dtype]], device: str) -> int:
    """The optimizer's states in the device's memory: on a CPU an offloaded optimizer's store lies there as well."""
    return state_bytes(config, slots) + (host_store_bytes(config, slots) if device == "cpu" else 0)


def counted_costs(config: Config) -> Costs:
    """The work of each link of the chain, `shared_work` of its parameters."""
    mesh = first_ranks(config)[0]
    kit = build_kit(config, mesh)
    specs = (shard_specs(build_model(config, kit, mesh, chunk)) for chunk in links(config.model.num_blocks))
    return shared_work(config, parameters_of(*specs))


def parameters_of(embedding: dict[str, ShardSpec], layers: dict[str, ShardSpec], head: dict[str, ShardSpec]) -> Costs:
    """How many parameters the embeddings, each layer and the head have."""
    blocks: dict[int, list[ShardSpec]] = {}
    for name, spec in layers.items():
        layer, _ = split_name(name)
        assert layer is not None, f"{name} is no layer's"
        blocks.setdefault(layer, []).append(spec)
    own = tuple(num_parameters(blocks[layer]) for layer in sorted(blocks))
    return Costs(num_parameters(list(embedding.values())), own, num_parameters(list(head.values())))


def shared_work(config: Config, parameters: Costs) -> Costs:
    """A microbatch forward and backward and its share of the work on parameters, in products of a forward pass."""
    products, samples = chain_of(config).products(config), config.micro
    weight = PRODUCTS_PER_PARAMETER / 3 / config.num_microbatches
    return Costs(
        samples * products.embedding + weight * parameters.embedding,
        tuple(
            samples * product + weight * own for product, own in zip(products.layers, parameters.layers, strict=True)
        ),
        samples * products.head + weight * parameters.head,
    )


def links(num_layers: int) -> tuple[Chunk, Chunk, Chunk]:
    """The beginning, all layers and the end of the chain, each by itself."""
    nothing = range(0)
    return Chunk(nothing, True, False), Chunk(range(num_layers), False, False), Chunk(nothing, False, True)


def measured_costs(config: Config) -> Costs:
    """Seconds of each link of the chain, timed in a process of its own, as ranks run: this one may start no threads."""
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
    """Seconds of a microbatch forward and backward in each link of the chain, whole, on one device.

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
            nn.init.normal_(parameter, std=0.02)
        batch = empty_batch(config, kit, model.inside, device)
        shapes = tuple(x.shape for x in (*hidden, *model.parameters()))
        if shapes not in known:
            known[shapes] = statistics.median(_seconds(model, hidden, batch, device) for _ in range(TIMED_ROUNDS))
        seconds.append(known[shapes])
        with torch.no_grad():
            hidden = model.hidden_states(batch, hidden)
    return seconds


def _seconds(model: Chain, hidden: Hidden, batch: dict[str, torch.Tensor], device: torch.device) -> float:
    """A chunk forward and backward."""
    given = tuple(x.detach().requires_grad_() for x in hidden)
    started = time.perf_counter()
    out = model(batch, dict.fromkeys(model.labels, 1.0), given)
    torch.autograd.backward(out, [torch.ones_like(x) for x in out])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def free_gpu_bytes(num_gpus: int) -> int:
    """Free memory of the fullest of this node's first GPUs; asked in a process whose contexts on them go with it."""
    free: int = run(ask_gpus, 1, num_gpus=num_gpus)[0]
    return free


def ask_gpus(rank: Rank, num_gpus: int) -> int:
    return min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus))
