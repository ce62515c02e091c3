"""Assembles a rank's data-parallel strategy: parameters in buckets, and the sums of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn

from meshwright.compute.model import Chunk, RunsParts
from meshwright.compute.parameters.bucket import PartsUsing, make_buckets
from meshwright.compute.parameters.initial import draw_values
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.compute.precision import DTYPES
from meshwright.config.registry import load_entry
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.strategy import Synchroniser

if TYPE_CHECKING:
    from meshwright.compute.parameters.fixed import FixedPoint
    from meshwright.config import Config

LEAST_BYTES, PIECE_BYTES = 2**24, 2**20
"""The least bytes of a bucket under `auto`, and of the piece that each rank sends."""


class Bucketed(RunsParts, Protocol):
    """A chain of blocks with parameters held in buckets."""

    blocks: nn.ModuleDict

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def get_submodule(self, target: str) -> nn.Module: ...


def build_strategy(
    config: Config, mesh: Mesh, model: Bucketed, specs: dict[str, ShardSpec], chunks: Sequence[Chunk],
    using: Callable[[], PartsUsing], fixed: FixedPoint | None = None, *, drawn: bool = True,
) -> Synchroniser:  # fmt: skip
    """Build a rank's strategy. Buckets allocate memory for meta parameters and draw initial values.

    Args:
        specs: of the whole model's parameters.
        chunks: of the chain, on this rank.
        using: returns the parts of the chain that use each parameter.
        fixed: the format in which gradients are added; None: the dtype of gradients.
        drawn: whether initial values are drawn; otherwise parameters are zeros.
    """
    sync = config.layout.data.strategy
    policy = load_entry(sync.policy)()
    users = {} if policy.owners == "all" else using()
    parts = users if sync.gathers else None
    chunks_of = {
        name: tuple(index for index, chunk in enumerate(chunks) if not set(those).isdisjoint(chunk.parts))
        for name, those in users.items()
    }
    # A sliced bucket is summed when its chunk is done; a bucket of two chunks would wait for the later chunk.
    by_chunk = chunks_of if sync.slices and len(chunks) > 1 else None

    def fill(name: str, out: Tensor) -> nn.Parameter:
        if drawn:
            draw_values(out, name, specs[name], mesh, config.seed)
        parameter = nn.Parameter(out.new_empty(0), requires_grad=specs[name].role.rule.trained)
        parameter.data = out
        owner, _, attribute = name.rpartition(".")
        # Registered anew: a meta tensor cannot get memory in place (swap_tensors fails under FakeTensorMode).
        model.get_submodule(owner).register_parameter(attribute, parameter)
        return parameter

    buckets = make_buckets(
        model.named_parameters(), specs, mesh, bucket_bytes(config), parts, by_chunk,
        rule_of=config.optimizer.update.rule_of, dealt_over=policy.dealt_over(mesh), widens=config.widens_gradients,
        exact=fixed is not None, shares=sync.over_mpi, fill=None if mesh.device.type == "meta" else fill,
    )  # fmt: skip
    strategy = load_entry(sync.synchroniser)(buckets, mesh, policy, fixed)
    if policy.owners != "all":
        strategy.follow(model, users, chunks)
    return cast(Synchroniser, strategy)


def bucket_bytes(config: Config) -> int:
    """Return the bytes of a bucket. Under offload a bucket is the optimizer's chunk: one is stepped while the next is
    summed."""
    offload, bucket = config.memory.offload, config.layout.data.bucket
    if offload.to == "none":
        if bucket != "auto":
            return bucket
        # A ring sends pieces of bucket / ranks bytes, and a link is slow with small ones.
        sizes = dict(config.layout.axes)
        return max(LEAST_BYTES, PIECE_BYTES * math.prod(sizes[axis] for axis in config.layout.batch_axes))
    return offload.chunk * offload.bucket * DTYPES[config.precision.dtype].itemsize
