"""Compilation of a model's layers (`compile: blocks`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.compute.tensor import islands
from meshwright.compute.tensor.compiling import attention_outside
from meshwright.compute.tensor.graphs import compile_block, outside

if TYPE_CHECKING:
    from meshwright.compute.models.chain import Chain
    from meshwright.config import Config


def apply(config: Config, model: Chain) -> None:
    """Run the model's layers as compiled graphs, and the head's element-wise passes as islands (tensor/islands.py).

    Islands are compiled anew for other numbers of rows, and the first number depends on the layout: `bits: layout-free`
    has none.
    """
    if not config.bits.layout_free:
        islands.apply(config, model)
    for core in model.attention_cores():
        if attention_outside(config) is not None:
            core.run_by(outside(core.run))
    for block in model.blocks.values():
        compile_block(config, block)
