"""Layers as graphs (`compile: blocks`): torch.compile takes each layer of a model whole, forward and backward.

| pass     | in the graph                             | one operation that the compiler does not look into            |
|----------|------------------------------------------|---------------------------------------------------------------|
| forward  | y = x W + b                              | -                                                             |
| backward | dx = dy Wᵀ, db = the sum of dy over rows | meshwright::add_gradients adds xᵀ dy and db to the gradients  |
|          |                                          | in the buckets (gradients.py), at once or as deferred work    |

The compiler fuses norms, residual sums, GELU and the sums of biases. Buckets, deferred gradients and hooks are the same
as in a run without graphs. The operation finds the layer by an index. The index is a tensor on the host and an input
of the graph, so that equal layers share one graph. The operation returns the gradient of a tensor without elements, the
anchor of the layer, so that a compiler does not drop the operation.

A graph ends before a module with `in_graphs` False: a layer that sends activations to other ranks, experts. The next
graph begins after the module. compiling.py lists the reasons that attention is not in graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import ShardedModule
from meshwright.compute.tensor.compiler import start_compiler
from meshwright.compute.tensor.experts import Experts
from meshwright.compute.tensor.fused import UsesFused
from meshwright.compute.tensor.linear import cast
from meshwright.compute.tensor.norms import Norm
from meshwright.compute.tensor.products import Products, add_gradients, write_part
from meshwright.compute.tensor.serial import SerialLinear
from meshwright.ranks import collectives

if TYPE_CHECKING:
    from meshwright.config import Config


BACKEND = "inductor"
"""The compiler of graphs."""
SHAPES = 64
"""The most graphs of a function (for different shapes and kinds of layers); torch runs further ones uncompiled."""

_layers: WeakValueDictionary[int, SerialLinear] = WeakValueDictionary()
"""The layers of this process by index, of all ranks that are threads."""
_numbers = count()
_hidden: set[type[nn.Module]] = set()
"""Classes with a `forward` that is outside of graphs."""


@torch.library.custom_op("meshwright::add_gradients", mutates_args=())
def _add_gradients(x: Tensor | None, dy: Tensor, dbias: Tensor | None, layer_index: Tensor) -> Tensor:
    """Add to the gradients of a layer's weight and bias. Returns the gradient [0] of the layer's anchor.

    Args:
        x: [n, I]; None if the weight is frozen.
        dy: [n, N].
        dbias: [N], at least float32; None if the bias is frozen, or there is none.
        layer_index: index of the layer in the process.
    """
    layer = _layers[int(layer_index)]
    left: list[Tensor | None] = []
    if x is not None:
        if layer.gradients.defers:  # the compiled graph reuses the memory of both after the graph's end
            x, dy = x.clone(), dy.clone()
        read = layer.products.read(dy)
        addends = layer.products.weight_gradients(lambda: x, read)
        left.append(add_gradients(layer, "weight", layer.weight.detach().flatten(1), addends))
    if dbias is not None:
        total = dbias.clone() if layer.gradients.defers else dbias
        bias = layer.get_parameter("bias").detach().flatten()
        left.append(layer.add_gradient("bias", bias, lambda out, beta: write_part(total, out, beta)))
    assert not any(each is not None for each in left), "a layer in a graph whose gradients have no bucket"
    return dy.new_empty(0, dtype=torch.float32)


@_add_gradients.register_fake
def _(x: Tensor | None, dy: Tensor, dbias: Tensor | None, layer_index: Tensor) -> Tensor:
    return dy.new_empty(0, dtype=torch.float32)


class _Linear(torch.autograd.Function):
    """x W + b of x [n, I], W [I, N] and b [N]. `trained`: whether W and b are."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, layer_index: Tensor,
        products: Products, trained: tuple[bool, bool],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if trained[0] else None, weight, layer_index)
        ctx.products, ctx.trained, ctx.form = products, trained, (x.shape, x.dtype)
        y = products.forward(x, weight, bias)
        # torch 2.11 hands zeros to `backward` if a graph's function returns a `to` that changes nothing.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, layer_index = ctx.saved_tensors
        wide = torch.promote_types(dy.dtype, torch.float32)
        dbias = dy.sum(0, dtype=wide) if ctx.trained[1] else None
        danchor = torch.ops.meshwright.add_gradients(x, dy, dbias, layer_index) if any(ctx.trained) else None
        shape, dtype = ctx.form
        dx = ctx.products.input_gradient(ctx.products.read(dy), weight).view(shape).to(dtype)
        return dx, None, None, danchor, None, None, None


def linear_in_graph(
    x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, layer_index: Tensor, products: Products
) -> Tensor:
    """Compute x W + b in a graph; [B, ..., I] x [I, N] + [N] -> [B, ..., N]. `anchor`, `layer_index`: the layer's."""
    trained = weight.requires_grad, bias is not None and bias.requires_grad
    x, weight, bias = cast(x, weight, bias)
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias, anchor, layer_index, products, trained)
    return y.view(*x.shape[:-1], weight.shape[1])


@cache
def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that graphs end in front of. The same one each time, as graphs are made for a function."""
    hidden: Callable[..., Any] = torch.compiler.disable(function)
    return hidden


def compile_block(config: Config, block: nn.Module) -> None:
    """Let a layer of a model run as a graph."""
    torch._dynamo.config.recompile_limit = SHAPES
    collectives.hide_from_compilers(outside)
    for module in block.modules():
        module_type = type(module)
        if isinstance(module, SerialLinear):
            layer_index = next(_numbers)
            _layers[layer_index] = module
            module.join_graph(layer_index, linear_in_graph)
        elif isinstance(module, ShardedModule | Experts) and not module.in_graphs and module_type not in _hidden:
            # On the class: a graph belongs to a function, so a function per layer would be a graph per layer.
            module_type.forward = outside(module_type.forward)
            _hidden.add(module_type)
    options: dict[str, Any] = {"fallback_random": True}
    if config.bits.layout_free:
        options["cpp.threads"] = 1  # several threads would each sum some of the rows
    if config.compile == "kernels":
        from meshwright.compute.tensor.column_sums import FUSED, WIDEST
        from meshwright.compute.tensor.sums_in_graphs import REWRITES

        options["post_grad_custom_post_pass"] = REWRITES
        for module in block.modules():
            # Norms over a head's width are left to Inductor, which fuses the rotation of heads with them.
            left = isinstance(module, Norm) and not config.model.hidden <= module.weight.numel() <= WIDEST
            if isinstance(module, UsesFused) and not left:
                module.use_fused(FUSED)
    if BACKEND != "inductor":
        block.compile(backend=BACKEND, dynamic=False)
    else:
        block.compile(backend=start_compiler(config.device), dynamic=False, options=options)
