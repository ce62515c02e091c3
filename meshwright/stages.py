"""What each stage of a pipeline holds of a model, and what passes between stages, found out without numbers.

All stages are built on the meta device, so that every rank knows the whole model's parameters, and which of them two
stages hold: tied embeddings, on the first and the last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.batch import Batch
from meshwright.config import Config
from meshwright.families import family_of
from meshwright.free_memory import free_memory_bytes
from meshwright.grid import PIPE
from meshwright.mailbox import Form
from meshwright.memory.activations import kept_bytes
from meshwright.mesh import Mesh, planned_mesh, solo_mesh
from meshwright.model import Costs, Hidden, Stretch
from meshwright.models.chain import Chain
from meshwright.pipeline.partition import balanced, ranges_of
from meshwright.shard import ShardedModule, ShardSpec, num_parameters, shard_specs
from meshwright.tensor.kit import Kit, rows_of_rank
from meshwright.tensor.serial import SerialKit

PRODUCTS_PER_PARAMETER = 200
"""Multiplications in the time of a step's work on a parameter: its gradient written, AdamW, some 40 bytes in all. For a
CPU core; of a GPU it is ten times as many."""

TIMED_ROUNDS = 5

MakeModel = Callable[[Mesh, Stretch], tuple[Chain, Kit]]


@dataclass(frozen=True)
class Stages:
    """`specs`: of all parameters of the whole model. `forms`: of what passes between stages."""

    stretches: tuple[Stretch, ...]
    specs: dict[str, ShardSpec]
    forms: tuple[Form, ...]

    def mark_tied(self, model: nn.Module) -> None:
        """Tell the layers which of their parameters another stage holds too."""
        for path, module in model.named_modules():
            if isinstance(module, ShardedModule):
                for name, spec in module.specs.items():
                    module.specs[name] = replace(spec, tied=self.specs[f"{path}.{name}"].tied)


def plan_stages(config: Config, mesh: Mesh, make: MakeModel) -> Stages:
    """Cut the model into the layout's stages. `make`: builds a stretch for the rank of a mesh."""
    num_stages = config.layout.pipeline.size
    layers = ranges_of(_partition(config, mesh, make))
    stretches = tuple(Stretch(run, stage == 0, stage == num_stages - 1) for stage, run in enumerate(layers))
    specs: dict[str, ShardSpec] = {}
    forms: tuple[Form, ...] = ()
    for stage, stretch in enumerate(stretches):
        model, kit = make(_planned(mesh, stage), stretch)
        specs |= {name: replace(spec, tied=name in specs) for name, spec in shard_specs(model).items()}
        if stretch.first:
            hidden = model.begin(empty_batch(config, kit, model.inside, torch.device("meta")))
            forms = tuple(Form(tuple(x.shape), x.dtype) for x in hidden)
    return Stages(stretches, specs, forms)


def affordable_microbatches(config: Config, mesh: Mesh, make: MakeModel, stages: Stages) -> int:
    """How many microbatches this stage can hold, at most all, in half of the free memory.

    Each with the activations of its forward pass, and as much again for what its weight gradients wait with.
    """
    stage = mesh.index(PIPE)
    stretch = stages.stretches[stage]
    model, kit = make(_planned(mesh, stage), stretch)
    batch, scales = empty_batch(config, kit, model.inside, torch.device("meta")), dict.fromkeys(model.labels, 1.0)
    given = tuple(torch.empty(form.shape, dtype=form.dtype, device="meta") for form in stages.forms)

    def forward() -> None:
        hidden = model.begin(batch) if stretch.first else tuple(x.requires_grad_() for x in given)
        hidden = model.run_layers(hidden, batch)
        if stretch.last:
            model.loss(model.end(hidden), batch, scales)

    axes = [name for name, _ in config.layout.tensor.axes]
    held = 2 * kept_bytes(forward, model.parameters())
    return max(1, min(config.num_microbatches, free_memory_bytes(mesh, *axes) // 2 // max(1, held)))


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
    """A microbatch forward and backward and its share of the work on parameters, in products of a forward pass."""
    products, samples = family_of(config).products(config), config.micro
    nothing = range(0)
    links = (Stretch(nothing, True, False), Stretch(range(1), False, False), Stretch(nothing, False, True))
    begin, layer, end = (
        PRODUCTS_PER_PARAMETER / 3 / config.num_microbatches * num_parameters(list(shard_specs(model).values()))
        for model, _ in (make(_planned(mesh, 0), stretch) for stretch in links)
    )
    layers = tuple(samples * product + layer for product in products.layers)
    return Costs(samples * products.begin + begin, layers, samples * products.end + end)


def _measured(config: Config, mesh: Mesh) -> Costs:
    """A microbatch forward and backward in seconds, on rank 0 alone; every rank is told. A plan measures on the CPU."""
    seconds = torch.zeros(3, dtype=torch.float64)
    if mesh.rank == 0 or mesh.device.type == "meta":
        device = torch.device("cpu") if mesh.device.type == "meta" else mesh.device
        seconds = torch.tensor(_link_seconds(config, device), dtype=torch.float64)
    if mesh.device.type != "meta":
        seconds = seconds.to(mesh.device)
        mesh.world.broadcast(seconds, 0)
    begin, layer, end = seconds.tolist()
    return Costs(begin, (layer,) * config.model.num_blocks, end)


def _link_seconds(config: Config, device: torch.device) -> list[float]:
    """Of the beginning, a layer and the end of the chain, on whole layers: their ratios are what counts."""
    kit = SerialKit(solo_mesh(device))
    model: Chain = family_of(config).model(config.model.model_copy(update={"layers": 1}), kit, None)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    batch, scales = empty_batch(config, kit, model.inside, device), dict.fromkeys(model.labels, 1.0)
    given = tuple(x.detach().requires_grad_() for x in model.begin(batch))
    links: list[Callable[[], Hidden]] = [
        lambda: model.begin(batch),
        lambda: model.run_layers(given, batch),
        lambda: (model.loss(model.end(given), batch, scales),),
    ]
    return [statistics.median(_seconds(link, device) for _ in range(TIMED_ROUNDS)) for link in links]


def _seconds(link: Callable[[], Hidden], device: torch.device) -> float:
    started = time.perf_counter()
    out: list[Tensor] = list(link())
    torch.autograd.backward(out, [torch.ones_like(x) for x in out])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
