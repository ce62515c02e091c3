"""One rank's model: the kit, the chunk with this rank's part of the weights, and this rank's part of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.compute import precision
from meshwright.compute.context.open import open_context
from meshwright.compute.model import EMBEDDINGS, HEAD, Batch, Chunk
from meshwright.compute.models.chain import Chain, chain_of, make_chain
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.tensor.cross_entropy import ScoresClasses
from meshwright.compute.tensor.kit import Kit
from meshwright.compute.tensor.products import PLAIN
from meshwright.config.registry import load_entry
from meshwright.config.schema import PRODUCTS
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh

if TYPE_CHECKING:
    from meshwright.config import Config

ARITHMETIC = "meshwright.compute.tensor.arithmetic:Arithmetic"
EXACT_ARITHMETIC = "meshwright.compute.bits.assembly:arithmetic_of"
"""Entries that make a kit's arithmetic. The second is of the room of equal bits, which other runs do not import."""
NARROW = "meshwright.compute.tensor.fp8:narrow"
"""The entry that lets the linears of layers multiply in FP8."""


def build_kit(config: Config, mesh: Mesh) -> Kit:
    """Return this rank's kit, which models use to build layers."""
    # A CPU casts to FP8, and multiplies all else as float32: few CPUs have fast products of halves.
    widens = config.precision.in_fp8 and mesh.device_type == "cpu"
    products = load_entry(PRODUCTS["float32" if widens else config.precision.products])
    if config.bits.layout_free:
        arithmetic = load_entry(EXACT_ARITHMETIC)(config, mesh, products)
    else:
        # Kits of other packages may take no arithmetic, and need none for the usual products.
        arithmetic = None if products is PLAIN else load_entry(ARITHMETIC)(products)
    return config.layout.tensor.kit(config, mesh, arithmetic)


def build_model(config: Config, kit: Kit, mesh: Mesh, chunk: Chunk | None = None) -> Chain:
    """Build the model or a chunk, with this rank's part of the initial weights in the stored precision."""
    model = make_chain(config, kit, chunk)
    if (chunk_bytes := config.memory.logits) != "auto":
        for head in (module for module in model.modules() if isinstance(module, ScoresClasses)):
            head.use_chunks(chunk_bytes)
    model.attend_in(open_context(config, mesh))
    initialise(model, mesh, config.seed)
    precision.store(config, model)
    if config.precision.in_fp8:
        load_entry(NARROW)(model.blocks, config.model.num_blocks, mesh.device_type)
    return model


def rank_part(batch: Batch, kit: Kit, model: Chain) -> Batch:
    """Slice a replica's batch for this rank: each entry's rows (inside or outside of branches), then this rank's tokens
    of each row."""
    entries, inside = model.prepared(batch).items(), model.inside
    rows = {name: kit.slice(x, "inside" if name in inside else "batch") for name, x in entries}
    return model.context.cut(rows, inside)


def empty_batch(config: Config, kit: Kit, model: Chain, device: torch.device, rows: int | None = None) -> Batch:
    """Return this rank's part of a batch of zeros. `rows`: of the replica's batch; None: a microbatch's."""
    shapes, count = chain_of(config).sample_shapes(config), rows or config.micro
    zeros = {name: torch.zeros(count, *shape, dtype=torch.long, device=device) for name, shape in shapes.items()}
    return rank_part(zeros, kit, model)


def parts_using(config: Config, mesh: Mesh, chunk: Chunk) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the chunk's parts that use each parameter."""
    there = planned_mesh(mesh.grid, mesh.rank, mesh.token_axes)
    kit = build_kit(config, there)
    runs = [(EMBEDDINGS, Chunk(range(0), True, False))] if chunk.first else []
    runs += [(layer, Chunk(range(layer, layer + 1), False, False)) for layer in chunk.layers]
    runs += [(HEAD, Chunk(range(0), False, chunk.last, chunk.head_over))] if chunk.has_head else []
    using: dict[str, tuple[int, ...]] = {}
    for position, alone in runs:
        for name, _ in make_chain(config, kit, alone).named_parameters():
            using[name] = (*using.get(name, ()), position)
    return using


def tables_of_both_ends(config: Config, mesh: Mesh, model: Chain) -> list[nn.Parameter]:
    """Return the trained tied tables that a rank with both ends of the chain looks up and scores."""
    if not (model.chunk.first and model.chunk.last):
        return []
    ends = Chunk((), first=True, last=True)
    using = parts_using(config, mesh, ends)
    return [
        parameter
        for name, parameter in model.named_parameters()
        if using.get(name) == (EMBEDDINGS, HEAD) and parameter.requires_grad
    ]
