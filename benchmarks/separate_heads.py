"""A decoder with every attention head a separate module, run one after another, as branches of a sub-graph.

Each head has a query, key and value, a core and rows of the output: split ... sum. SUPER's baseline ran heads in this
way, and was bound by kernel launches. The rest of the model is GPT-2's, in the sub-graph kit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contender import Contender, Option, Place, Step
from benchmarks.ours import open_layout, reference_config, steps_of
from meshwright.compute.parameters.bucket import make_buckets
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial, shard_specs, use_gradients
from meshwright.compute.subgraph.branches import Branches
from meshwright.compute.subgraph.section import Subgraph
from meshwright.compute.tensor.kit import Kit
from meshwright.compute.tensor.serial import SerialLinear
from meshwright.config import Config
from meshwright.families.gpt.model import GPT
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.assembly import bucket_bytes
from meshwright.strategies.data_parallel.policies import AllReduce
from meshwright.strategies.data_parallel.strategy import Synchroniser
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.strategies.optim.states import InPlace
from meshwright.strategies.pipeline.assembly import build_pipeline
from meshwright.strategies.pipeline.stages import Stages, placement_of
from meshwright.training.parts import Parts
from meshwright.training.rank_model import build_kit


class Head(nn.Module):
    """One head: h [B, T, H] -> a term of the attention's output [B, T, H]."""

    def __init__(self, mesh: Mesh, hidden: int, width: int) -> None:
        super().__init__()
        self.query_key_value = SerialLinear(mesh, hidden, (3, width), Initial(0.02))
        self.output = SerialLinear(mesh, width, (hidden,), Initial(0.02), bias=False)

    def forward(self, h: Tensor) -> Tensor:
        query, key, value = self.query_key_value(h).unbind(-2)  # [B, T, E] each
        return self.output(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class SeparateHeads(nn.Module):
    """An attention of separate heads, in place of a GPT-2 block's attention."""

    def __init__(self, mesh: Mesh, hidden: int, heads: int, width: int, settings: Subgraph, num_rows: int) -> None:
        super().__init__()
        modules = [Head(mesh, hidden, width) for _ in range(heads)]
        self.heads = Branches(modules, enter="split", leave="sum", mesh=mesh, common=settings.common, num_rows=num_rows)

    def forward(self, h: Tensor, seen: object, documents: object, cache: None) -> Tensor:
        return self.heads(h)


def contender(name: str, transport: str, ranks: int, *, common: str, batch: int, heads: int, width: int) -> Contender:
    """Return a contender. `common`: all, one; none: data parallelism, with every rank a sub-grid."""
    branches = 1 if common == "none" else ranks
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    options: dict[str, Option] = {
        "layout.transport": transport,
        "layout.data.size": ranks // branches,
        "layout.tensor.kind": "subgraph",
        "layout.tensor.size": branches,
        "layout.tensor.common": "all" if common == "none" else common,
        "batch.global": batch,
        "separate_heads": heads,
        "head_width": width,
    }
    return Contender(name, "benchmarks.separate_heads:train", options, ranks, launcher)


@contextmanager
def train(place: Place, *, separate_heads: int, head_width: int, **options: Option) -> Iterator[Step]:
    """Yield steps of the reference model with separate heads."""
    config = reference_config(options)
    settings = config.layout.tensor
    assert isinstance(settings, Subgraph), settings
    with open_layout(config) as mesh:
        kit = build_kit(config, mesh)
        model = GPT(config.model, kit)
        for block in model.blocks.values():
            block.attention = SeparateHeads(
                mesh, config.model.hidden, separate_heads, head_width, settings, config.micro
            )
        with steps_of(_parts(config, mesh, kit, model)) as step:
            yield step


def _parts(config: Config, mesh: Mesh, kit: Kit, model: GPT) -> Parts:
    """Return the rank's strategy and parts, as `meshwright.training.parts` does for a known model."""
    initialise(model, mesh, config.seed)
    specs = shard_specs(model)
    buckets = make_buckets(model.named_parameters(), specs, mesh, bucket_bytes(config))
    strategy = Synchroniser(buckets, mesh, AllReduce())
    use_gradients(model, strategy.gradients)
    stages = Stages((model.chunk,), specs, (), placement_of(config))
    pipeline = build_pipeline(config, mesh, [model], stages, strategy)
    optimizer = Optimizer(config, strategy.slots, mesh, InPlace)
    return Parts(config, mesh, kit, model, stages, strategy, pipeline, optimizer)
