"""What each stage of a pipeline holds of a model, and what passes between stages, found out without numbers.

All stages are built on the meta device, so that every rank knows the whole model's parameters, and which of them two
stages hold: tied embeddings, on the first and the last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from meshwright.config import Config
from meshwright.families import family_of
from meshwright.memory.recompute import kept_bytes
from meshwright.model import Batch, Costs, Hidden, Stretch
from meshwright.models.chain import Chain
from meshwright.parameters.shard import ShardSpec, num_parameters, shard_specs
from meshwright.pipeline.partition import balanced, ranges_of
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import MessageMeta, TensorMeta
from meshwright.ranks.mesh import Mesh, planned_mesh, solo_mesh
from meshwright.tensor.kit import Kit, rows_of_rank
from meshwright.tensor.serial import SerialKit

PRODUCTS_PER_PARAMETER = 200
"""Multiplications in the time of a step's work on a parameter: its gradient written, AdamW, some 40 bytes in all. For a
CPU core; of a GPU it is ten times as many."""

TIMED_ROUNDS = 5

MakeModel = Callable[[Mesh, Stretch], tuple[Chain, Kit]]


@dataclass(frozen=True)
class Stages:
    """`specs`: of all parameters of the whole model. `passing`: forms of what stage i gives to stage i + 1."""

    stretches: tuple[Stretch, ...]
    specs: dict[str, ShardSpec]
    passing: tuple[tuple[TensorMeta, ...], ...]

    def forms(self, stage: int) -> MessageMeta:
        """Of what a stage gets from those beside it, and sends them."""
        ends = ((), *self.passing, ())
        return {"before": ends[stage], "after": ends[stage + 1]}


def plan_stages(config: Config, mesh: Mesh, make: MakeModel) -> Stages:
    """Cut the model into the layout's stages. `make`: builds a stretch for the rank of a mesh."""
    num_stages = config.layout.pipeline.size
    layers = ranges_of(_partition(config, mesh, make))
    stretches = tuple(Stretch(run, stage == 0, stage == num_stages - 1) for stage, run in enumerate(layers))
    specs: dict[str, ShardSpec] = {}
    passing: list[tuple[TensorMeta, ...]] = []
    hidden: Hidden = ()
    for stage, stretch in enumerate(stretches):
        model, kit = make(_planned(mesh, stage), stretch)
        specs |= {name: replace(spec, tied=name in specs) for name, spec in shard_specs(model).items()}
        if not stretch.last:
            with torch.no_grad():
                hidden = model.hidden_states(empty_batch(config, kit, model.inside, torch.device("meta")), hidden)
            passing.append(tuple(TensorMeta(tuple(x.shape), x.dtype) for x in hidden))
    return Stages(stretches, specs, tuple(passing))


def microbatch_bytes(config: Config, mesh: Mesh, make: MakeModel, stages: Stages) -> int:
    """What this stage holds of a microbatch in flight.

    That is the activations of its forward pass, and as much again for what its weight gradients wait with.
    """
    stage = mesh.index(PIPE)
    model, kit = make(_planned(mesh, stage), stages.stretches[stage])
    batch = empty_batch(config, kit, model.inside, torch.device("meta"))
    forms = stages.forms(stage)["before"]
    given = tuple(torch.empty(form.shape, dtype=form.dtype, device="meta").requires_grad_() for form in forms)
    return 2 * kept_bytes(partial(model, batch, dict.fromkeys(model.labels, 1.0), given), model.parameters())


def empty_batch(config: Config, kit: Kit, inside: Sequence[str], device: torch.device) -> Batch:
    """This rank's rows of a microbatch of zeros."""
    shapes = family_of(config).shapes(config)
    zeros = {name: torch.zeros(config.micro, *shape, dtype=torch.long, device=device) for name, shape in shapes.items()}
    return rows_of_rank(zeros, kit, inside)


def _planned(mesh: Mesh, stage: int) -> Mesh:
    """The mesh of this rank's fellow on a stage, without numbers."""
    rank = mesh.grid.rank(mesh.grid.coordinates(mesh.rank) | {PIPE: stage})
    return planned_mesh(mesh.grid, rank, mesh.token_axes)


def _partition(config: Config, mesh: Mesh, make: MakeModel) -> tuple[int, ...]:
    pipeline = config.layout.pipeline
    if pipeline.size == 1:
        return (config.model.num_blocks,)
    match pipeline.partition:
        case "auto":
            return balanced(counted(config, mesh, make), pipeline.size)
        case "measured":
            return balanced(_measured(config, mesh), pipeline.size)
    return pipeline.partition


def counted(config: Config, mesh: Mesh, make: MakeModel) -> Costs:
    """What each link of the chain costs: `shared_work` of its parameters."""
    specs = (shard_specs(make(_planned(mesh, 0), stretch)[0]) for stretch in links(config.model.num_blocks))
    return shared_work(config, parameters_of(*specs))


def parameters_of(begin: dict[str, ShardSpec], layers: dict[str, ShardSpec], end: dict[str, ShardSpec]) -> Costs:
    """How many parameters each link of the chain has."""
    blocks: dict[int, list[ShardSpec]] = {}
    for name, spec in layers.items():
        blocks.setdefault(int(name.split(".")[1]), []).append(spec)
    own = tuple(num_parameters(blocks[layer]) for layer in sorted(blocks))
    return Costs(num_parameters(list(begin.values())), own, num_parameters(list(end.values())))


def shared_work(config: Config, parameters: Costs) -> Costs:
    """A microbatch forward and backward and its share of the work on parameters, in products of a forward pass."""
    products, samples = family_of(config).products(config), config.micro
    weight = PRODUCTS_PER_PARAMETER / 3 / config.num_microbatches
    return Costs(
        samples * products.begin + weight * parameters.begin,
        tuple(
            samples * product + weight * own for product, own in zip(products.layers, parameters.layers, strict=True)
        ),
        samples * products.end + weight * parameters.end,
    )


def links(num_layers: int) -> tuple[Stretch, Stretch, Stretch]:
    """The beginning, all layers and the end of the chain, each by itself."""
    nothing = range(0)
    return Stretch(nothing, True, False), Stretch(range(num_layers), False, False), Stretch(nothing, False, True)


def _measured(config: Config, mesh: Mesh) -> Costs:
    """A microbatch forward and backward in seconds, on rank 0 alone; every rank is told. A plan measures on the CPU."""
    seconds = torch.zeros(config.model.num_blocks + 2, dtype=torch.float64)
    if mesh.rank == 0 or mesh.device.type == "meta":
        device = torch.device("cpu") if mesh.device.type == "meta" else mesh.device
        seconds = torch.tensor(_link_seconds(config, device), dtype=torch.float64)
    if mesh.device.type != "meta":
        seconds = seconds.to(mesh.device)
        mesh.world.broadcast(seconds, 0)
    begin, *layers, end = seconds.tolist()
    return Costs(begin, tuple(layers), end)


def _link_seconds(config: Config, device: torch.device) -> list[float]:
    """Of the beginning, each layer and the end of the chain, whole, one at a time: their ratios are what counts.

    Of layers that are alike, in what they read and in their parameters, the first is measured.
    """
    kit = SerialKit(solo_mesh(device))
    begin, layers, end = links(config.model.num_blocks)
    known: dict[tuple[torch.Size, ...], float] = {}
    seconds: list[float] = []
    hidden: Hidden = ()
    for link in (begin, *(Stretch(range(layer, layer + 1), False, False) for layer in layers.layers), end):
        model: Chain = family_of(config).model(config.model, kit, link)
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


def _seconds(model: Chain, hidden: Hidden, batch: Batch, device: torch.device) -> float:
    """Of a stretch forward and backward."""
    given = tuple(x.detach().requires_grad_() for x in hidden)
    started = time.perf_counter()
    out = model(batch, dict.fromkeys(model.labels, 1.0), given)
    torch.autograd.backward(out, [torch.ones_like(x) for x in out])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
