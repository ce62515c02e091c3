"""Meshwright's layouts as a user's program: parity gets plain torch's model, and the model that `build` made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.compute.model import Batch, counts_of, scales_of
from meshwright.config import Config, parse_config
from meshwright.parity.check import ParityCheck, ParityResult, judged
from meshwright.parity.job import ParityJob
from meshwright.parity.worker import call_check
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify.reference import Reference
from meshwright.training.step import train_step
from tests.families.llama.experts import BOUNDED, BOUNDED_LAYOUTS, experts
from tests.families.llama.experts import LAYOUTS as EXPERTS
from tests.families.llama.layouts import LAYOUTS as LLAMAS
from tests.families.llama.layouts import llama
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.context import KINDS
from tests.oracle.context import config_for as in_context
from tests.oracle.data_parallel import SYNCS
from tests.oracle.pipeline import CHUNKED, SCHEDULES, WHOLE, pipelined
from tests.oracle.subgraph import CASES as SUBGRAPHS
from tests.oracle.subgraph import subgraph as branches
from tests.oracle.tensor import CASES, MODELS
from tests.oracle.tensor import config_for as tensor_config
from tests.workers import run_ranks

IN_SLOTS = ("zero1", "zero2", "zero3", "server-loss", "server-gradient")
"""Syncs that step slices of flat memory, all of it, or none on a rank. For these syncs, slots are compared, and outputs
and losses show the computing weights; for all other syncs, parameters and gradients are compared."""


def config_for(model: str, layout: dict[str, Any], layers: int = 2, micro: int = 12) -> Config:
    shape = {"layers": layers, "hidden": 24, "heads": 12, "vocabulary_multiple": 12, "dropout": 0.0}
    tree = {
        "model": shape | MODELS[model],
        "data": {"source": "digits"} if model == "vit" else {"sequence": 12},
        "batch": {"global": 24, "micro": micro},
        "layout": layout,
        "precision": {"level": "O0", "dtype": "float64"},
        "steps": 8,
    }
    return parse_config(tree)


def compared(config: Config) -> Config:
    """Return the run with Adam without decay: torch's Adam then takes the same step from the parameters alone."""
    tree = config.model_dump(mode="json", by_alias=True)
    return parse_config(tree | {"optimizer": {"lr": 1e-2, "clip": None, "weight_decay": 0.0}})


def layout_name(config: Config) -> str:
    """Return the fields that the layout of a run sets, in words."""
    words = [config.model.family]
    for section, tree in config.layout.model_dump(mode="json", exclude_defaults=True).items():
        fields = tree.items() if isinstance(tree, dict) else [("", tree)]
        words += [section, *(f"{key}={value}" for key, value in fields if key != "bucket")]
    return " ".join(words)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the sum of the labels' mean losses, and the experts' balance over all samples."""
    samples = len(next(iter(batch.values())))
    (loss,) = model(batch, scales_of(model.labels, counts_of(batch, model.labels), 1.0, samples))
    return loss


def check_layout(job: ParityJob, mesh: Mesh, config: Config) -> None:
    """Check a layout like a user of Meshwright."""

    def batch_of(generator: torch.Generator) -> Batch:
        return BATCHES[config.model.family](config, generator.initial_seed())

    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        settings = config.optimizer
        return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=0, **settings.update.arguments(settings))

    serial = Reference(config, torch.device("cpu")).model
    job.reference(serial, loss=loss_of, batch=batch_of, optimizer=adam)
    parts = build(config, mesh)

    sliced = config.layout.data.sync in IN_SLOTS

    def slot_places(gradients: bool = False) -> dict[str, torch.Tensor]:
        kept = {}
        for slot in parts.strategy.slots:
            flat = slot.parameter.grad if gradients else slot.parameter.detach()
            for place in slot.places:
                offsets = ".".join(map(str, place.box.offsets))
                kept[f"{place.name}@{offsets}" if sliced else place.name] = flat[place.start : place.stop].view(
                    place.box.lengths
                )
        return kept

    def box(name: str) -> tuple[str, tuple[slice, ...]]:
        name, _, offsets = name.partition("@")
        own = parts.specs[name].box(mesh.grid, mesh.rank)
        starts, sizes = own.offsets, own.lengths
        if offsets:
            starts = tuple(map(int, offsets.split(".")))
            sizes = slot_places()[f"{name}@{offsets}"].shape
        return name, tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))

    def step(model: nn.Module, batch: Batch) -> float:
        parts.strategy.publish()  # parity has written the reference's norms and biases to the slots
        return train_step(parts, batch, observe=lambda: job.keep_gradients(slot_places(gradients=True))).loss

    weights = slot_places if sliced else None
    job.parallel(parts.model, step=step, part=box, gradients=False, weights=weights)


def layout_rank(mesh: Mesh, config: Config, folder: Path) -> None:
    call_check(lambda job: check_layout(job, mesh, config), mesh, "float64", folder)


def result_of(config: Config, folder: Path) -> ParityResult:
    layout = config.layout
    run_ranks(layout_rank, Grid(layout.axes), config, folder, token_axes=layout.token_axes, transport="torch")
    check = ParityCheck("layout", Path(__file__), layout.axes, "float64")
    return judged(check, "float64", folder, time.monotonic())


MEGATRON: dict[str, Any] = {"kind": "megatron", "size": 2}
SEQUENCE = MEGATRON | {"sequence_parallel": True}
BLOCKS = {"kind": "tesseract", "q": 2}
FEW = {
    "bert-sequence": config_for("bert", {"tensor": SEQUENCE}),
    "gpt2-blocks-x2": config_for("gpt2", {"tensor": BLOCKS, "data": {"size": 2, "bucket": 8192}}),
    "t5-chunks": config_for("t5", {"pipeline": {"size": 2, "schedule": "1f1b"}}),
    "llama-ring": config_for("llama", {"context": {"size": 2, "kind": "ring"}}),
    "gpt2-zero3": config_for("gpt2", {"data": {"size": 2, "sync": "zero3", "bucket": 8192}}, micro=3),
}
PIPELINES = [
    *[pipelined("gpt2", stages, schedule, WHOLE) for stages in (2, 3, 4) for schedule in SCHEDULES],
    *[pipelined("gpt2", 2, schedule, WHOLE, 2) for schedule in SCHEDULES],
    *[pipelined(model, 2, "message-driven", WHOLE) for model in ("untied", "bert", "megatron-bert", "vit")],
    *[pipelined("gpt2", 2, schedule, tensor) for schedule in SCHEDULES for tensor in (MEGATRON, SEQUENCE, BLOCKS)],
    *[pipelined("gpt2", stages, schedule, WHOLE, placed=placed) for stages, schedule, placed in CHUNKED],
    pipelined("gpt2", 2, "message-driven", branches(2, "all", "block"), 2, batch={"global": 24, "micro": 6}),
]
CONTEXTS = [
    in_context(model, {"size": size, "kind": kind}, layout={"tensor": tensor})
    for kind in KINDS
    for model, size, tensor in [
        *[("gpt2", size, WHOLE) for size in (2, 3, 4)],
        *[(model, 3, WHOLE) for model in ("untied", "bert", "megatron-bert")],
        *[(model, 2, tensor) for model in ("gpt2", "bert") for tensor in (MEGATRON, SEQUENCE, BLOCKS)],
    ]
]
SLICED = [
    *[config_for("gpt2", {"data": {"size": size, "sync": sync, "bucket": 8192}}, micro=6 // size)
      for sync in SYNCS for size in (2, 3)],
    *[config_for("gpt2", {"data": {"size": 4, "sync": sync, "shard": shard}}, micro=3)
      for sync, shard in (("zero2", 2), ("zero3", 2), ("zero3", 1))],
]  # fmt: skip
ROOMS = {
    "tensor": [tensor_config(model, tensor, data) for model, tensor, data, _ in CASES],
    "subgraph": [
        *[tensor_config(model, branches(*tensor), data) for model, *tensor, data in SUBGRAPHS],
        *[config_for(model, {"tensor": branches(2, "all")}) for model in ("transformer", "t5")],
    ],
    "data": SLICED,
    "pipeline": PIPELINES,
    "context": CONTEXTS,
    "llama": [llama(layout) for layout in LLAMAS.values()],
    "experts": [experts(layout) for layout in EXPERTS.values()],
    "capacity": [experts(layout, model=BOUNDED) for layout in BOUNDED_LAYOUTS.values()],
}
"""The layouts of the equality tests of each strategy."""

MANY = {f"{room}-{index} {layout_name(config)}": config
        for room, configs in ROOMS.items() for index, config in enumerate(configs)}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.long) for name in MANY)])
def test_a_layout_is_equal_to_plain_torch(name: str, tmp_path: Path) -> None:
    config = compared((FEW | MANY)[name])
    result = result_of(config, tmp_path)
    assert result.holds, result.verdict
    unexplained = [(line.name, kind) for line in result.modules for kind in ("output", "gradient")
                   if (e := vars(line)[kind]) is not None and not e.explained]  # fmt: skip
    assert unexplained == []
    kinds = {row.kind for row in result.rows}
    assert kinds >= {"loss", "gradient", "weight"}
