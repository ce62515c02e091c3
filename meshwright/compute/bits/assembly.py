"""Assembly of a run under `bits: layout-free`: the kit's arithmetic, attention's heads, grains and fixed point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from meshwright.compute.bits.arithmetic import ExactArithmetic, SeparateArithmetic
from meshwright.compute.bits.blocks import Blocks
from meshwright.compute.bits.dropout import BlockDropout
from meshwright.compute.bits.grains import SampleGrains
from meshwright.compute.bits.head import PartHead
from meshwright.compute.bits.heads import HeadParts
from meshwright.compute.bits.runs import RunsOfQueries
from meshwright.compute.bits.section import WHOLE_VECTORS
from meshwright.compute.models.chain import Chain, chain_of
from meshwright.compute.parameters.bucket import VECTOR
from meshwright.compute.parameters.fixed import FixedPoint, PairedFixedPoint
from meshwright.compute.parameters.role import HIDDEN_MATRIX, TABLE
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.compute.tensor.dropout import InnerDropout
from meshwright.compute.tensor.products import Products
from meshwright.compute.tensor.whole_vectors import InWholeVectors
from meshwright.config import Config
from meshwright.ranks.mesh import Mesh


def arithmetic_of(config: Config, mesh: Mesh, products: Products) -> SeparateArithmetic:
    """Return the arithmetic of this rank's kit. `products`: multiplies one run's rows by one part."""
    return ExactArithmetic(blocks_of(config, mesh), products) if config.bits.cuts else SeparateArithmetic(products)


def heads_of(config: Config, mesh: Mesh) -> HeadParts:
    """Return the attention over heads of whole sequences on this rank, for a run with cuts."""
    blocks = blocks_of(config, mesh)
    widens = config.precision.widens
    if config.bits.attention == "runs":
        return RunsOfQueries(blocks, config.bits.sequence, widens=widens)
    return HeadParts(blocks, widens=widens)


def blocks_of(config: Config, mesh: Mesh) -> Blocks:
    """Return this rank's parts and runs of each dim that the training run cuts."""
    bits, tensor = config.bits, config.layout.tensor
    axis = (tensor.inner_axis,) if tensor.inner_axis else ()
    ranks, rank = mesh.size(*axis), mesh.index(*axis)
    holders, holder = (mesh.size("context"), mesh.index("context")) if config.layout.context.size > 1 else (1, 0)
    again, outer_index = (ranks, rank) if tensor.cuts_sequences else (1, 0)
    parts, runs = bits.tensor // ranks, bits.sequence // holders
    outer_runs = runs // again
    own_hidden = bits.hidden // ranks if tensor.cuts_hidden else bits.hidden
    by_heads = config.layout.context.strategy.by_heads
    dealt = holders if by_heads else 1
    head_parts = bits.head_parts(config.model) // (ranks * dealt)
    return Blocks(
        parts=parts,
        first_part=rank * parts,
        all_parts=bits.tensor,
        runs=runs,
        first_run=holder * runs,
        outer_runs=outer_runs,
        first_outer_run=holder * runs + outer_index * outer_runs,
        head_parts=head_parts,
        first_head_part=(rank * dealt + holder % dealt) * head_parts,
        query_runs=1 if bits.attention == "heads" else bits.sequence if by_heads else runs,
        grains=tensor.rows.at_once,
        hidden=bits.hidden,
        own_hidden=own_hidden,
        first_hidden=rank * own_hidden if tensor.cuts_hidden else 0,
        exact=True,
    )


@dataclass(frozen=True)
class LayoutFree:
    """The grains and the fixed-point format of a rank."""

    portions: SampleGrains
    fixed: FixedPoint
    """The format of sums of gradients."""

    def apply(self, config: Config, mesh: Mesh, model: Chain, specs: dict[str, ShardSpec]) -> None:
        """Make the dropout masks and losses of a model bit-equal in every layout.

        Args:
            config: the run's config.
            mesh: the ranks.
            model: this rank's part of the model; changed in place.
            specs: the parameters of the whole model, by name.
        """
        if mesh.device.type != "meta" and not _vectors_are_whole(config, specs):
            # Threads split odd sizes within a vector; the elements of a split vector are rounded differently.
            torch.set_num_threads(1)
        grains = self.portions
        if isinstance(model.context.heads, HeadParts):
            model.context.attend_by(replace(model.context.heads, draw=grains.draw))
        bits, widths = config.bits, config.model.widths
        # If each part of each width has whole vectors, element-wise functions need no padding.
        whole = not bits.cuts or all(width // bits.tensor % WHOLE_VECTORS == 0 for _, width in widths)
        for module in tuple(model.modules()):
            match module:
                case InWholeVectors() if not whole:
                    module.pad()
                case PartHead():
                    module.round_by(self.fixed)
                case InnerDropout() if config.bits.cuts:
                    module.draw_by(BlockDropout(module.rate, module.inner.blocks, grains.draw))
            for name, child in module.named_children():
                if isinstance(child, nn.Dropout) and config.bits.cuts:
                    between = blocks_of(config, mesh).between
                    module.register_module(name, BlockDropout(child.p, between, grains.draw))
        model.wrap_runs(grains.remembered, partial(grains.seeded, device=mesh.device))


def layout_free(config: Config, mesh: Mesh, inside: Sequence[str]) -> LayoutFree:
    """Make a run's grains and the fixed-point format of gradients. `inside`: batch entries that branches read."""
    tensor, bits = config.layout.tensor, config.bits
    rows = tensor.rows
    grains = SampleGrains(
        bits.samples,
        config.micro,
        config.seed,
        shares=rows.parts,
        share=mesh.index(*tensor.batch_axes) if rows.parts > 1 else 0,
        at_once=rows.at_once,
        inside=inside,
    )
    # Each use of a table adds one gradient per run, and one per part if parts share heads.
    uses = config.model.table_uses * bits.sequence * bits.tensor
    make = PairedFixedPoint if config.precision.dtype == "float64" else FixedPoint
    return LayoutFree(grains, make(uses * config.batch.global_ // bits.samples, mesh.device))


def _vectors_are_whole(config: Config, specs: dict[str, ShardSpec]) -> bool:
    """Return True if products have equal bits under any number of threads.

    Measured for MKL and oneDNN with 1, 2 and 4 threads: bits are equal if rows and columns are multiples of 16. False
    with experts, which get any number of rows, and with an optimizer of whole matrices: few rows and columns make MKL
    share the sum of a square among threads.
    """
    if config.model.routing.num_experts or config.optimizer.update.matrix_step:
        return False
    if config.model.adapter is not None and config.model.adapter.dora:  # products of one row
        return False
    bits = config.bits
    tokens = bits.samples * chain_of(config).tokens_per_sample(config)
    sizes = {spec.shape[-1] for spec in specs.values() if spec.role.name == HIDDEN_MATRIX.name}
    tables = {name: spec.shape[0] for name, spec in specs.items() if spec.role.name == TABLE.name}
    heads = {rows for name, rows in tables.items() if name.startswith(("tokens.", "head."))}
    # Tables of positions and segments take part in no product.
    parts = max(bits.tensor, bits.hidden)
    return tokens % (VECTOR * bits.sequence) == 0 and all(size % (VECTOR * parts) == 0 for size in sizes | heads)
