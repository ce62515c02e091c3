"""A module's forward pass as a graph of operators. torch.export traces through custom autograd functions.

No values are computed: parameters and inputs may be on the meta device. Costs of the forward pass alone:

| operator                          | flops                                                            |
|-----------------------------------|------------------------------------------------------------------|
| linears, convolutions, attention  | torch.utils.flop_counter's: 2 for a multiplication with addition |
| views, copies, look-ups           | 0                                                                |
| all others                        | 1 for each element of the largest tensor that is read or written |

Causal attention counts as full attention, as a kernel with a mask computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from meshwright.tools.branches.graph import BATCH, Operator, OperatorGraph, OperatorKind

COPIES = frozenset(
    {"embedding", "cat", "stack", "constant_pad_nd", "pad", "clone", "contiguous", "im2col", "repeat", "dropout"}
    | {"getitem", "index", "index_select", "_assert_tensor_metadata", "arange", "zeros", "ones", "full", "new_zeros"}
)
"""Operators besides views that compute nothing. Dropout is among them: the module is traced in evaluation mode."""

MIXING_COPIES = frozenset({"embedding", "cat", "stack", "im2col", "repeat", "index", "index_select"})
"""Copies that rearrange channels."""

WEIGHT_AT = {"mm": 1, "matmul": 1, "linear": 1, "addmm": 2}
"""By product of an activation and a weight: the index of the weight among the arguments."""

_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})


def trace(module: nn.Module, *inputs: Any) -> OperatorGraph:
    """Return the graph of module(*inputs). The inputs are the batch: tensors, in lists and dicts, and plain numbers.

    The first operators on activations read a floating-point input, or combine a weight with ids or integer images.
    """
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, strict=False)
        return _Builder(program).build()


class _Builder:
    """Builder of an exported program's graph: finds the nodes that are activations, and the kind of each."""

    def __init__(self, program: ExportedProgram) -> None:
        signature = program.graph_signature
        self.nodes = [node for node in program.graph.nodes if node.op in ("placeholder", "call_function")]
        given = set(signature.user_inputs)
        weights = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
        self.of_batch = {node for node in self.nodes if node.op == "placeholder" and node.name in given}
        self.of_weights = {node for node in self.nodes if node.op == "placeholder" and node.name in weights}
        self.numbers = {node: BATCH for node in self.of_batch if any(x.is_floating_point() for x in _tensors(node))}
        self.products: dict[str, int] = {}
        """Flops by operator and arguments: layers repeat."""

    def build(self) -> OperatorGraph:
        operators = [Operator("batch", "", (), 0, OperatorKind.OTHER)]
        beside = 0
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            for derived in (self.of_batch, self.of_weights):
                if not derived.isdisjoint(node.all_input_nodes):
                    derived.add(node)
            # A node on activations reads one, or is the first: it combines ids or pixels of the batch with a weight.
            reads = node.all_input_nodes
            inputs = tuple(dict.fromkeys(self.numbers[read] for read in reads if read in self.numbers))
            meets = any(read in self.of_batch for read in reads) and any(read in self.of_weights for read in reads)
            if not inputs and meets and (operator_name(node) == "embedding" or self._product_flops(node) > 0):
                inputs = (BATCH,)
            if inputs and any(x.is_floating_point() for x in _tensors(node)):
                self.numbers[node] = len(operators)
                operator_kind, width = self._kind(node)
                stack = list(node.meta["nn_module_stack"].values())
                path = stack[-1][0] if stack else ""  # the innermost module that the node is part of
                operators.append(Operator(operator_name(node), path, inputs, self._flops(node), operator_kind, width))
            else:
                # Masks and functions of weights alone: no branch computes these.
                beside += self._flops(node)
        return OperatorGraph(tuple(operators), beside)

    def _kind(self, node: fx.Node) -> tuple[OperatorKind, int]:
        """Return a node's OperatorKind and width."""
        name, arguments = operator_name(node), node.args
        if name == "scaled_dot_product_attention":
            return OperatorKind.HEADS, _shape(arguments[0])[-3]
        if name in _CONVOLUTIONS:
            groups = _argument(node, "groups")
            # In a convolution of one group every output depends on all inputs, as in a linear.
            return (OperatorKind.GROUPS, groups) if groups > 1 else (OperatorKind.LINEAR, _shape(arguments[1])[1])
        # A product of two activations is no linear: neither factor is a weight.
        if name in WEIGHT_AT and arguments[WEIGHT_AT[name]] not in self.numbers:
            return OperatorKind.LINEAR, _shape(arguments[WEIGHT_AT[name] - 1])[-1]
        if name == "group_norm":
            return OperatorKind.LOCAL, _argument(node, "num_groups")
        return (OperatorKind.LOCAL if _is_local(node) else OperatorKind.OTHER), 0

    def _flops(self, node: fx.Node) -> int:
        if operator_name(node) in COPIES or _is_view(node):
            return 0
        tensors = [*_tensors(node), *(x for read in node.all_input_nodes for x in _tensors(read))]
        return self._product_flops(node) or max((x.numel() for x in tensors), default=0)

    def _product_flops(self, node: fx.Node) -> int:
        """Return the flops that torch counts on meta tensors; 0 for a node that is no product."""
        if not isinstance(node.target, torch._ops.OpOverload) or _is_local(node):
            return 0

        def on_meta(read: fx.Node) -> Any:
            value = read.meta["val"]
            return torch.empty_like(value, device="meta") if torch.is_tensor(value) else value

        # The operator runs on meta tensors under torch's own counter, so the formulas are not repeated here.
        arguments = fx.node.map_arg((node.args, node.kwargs), on_meta)
        key = repr((node.target, arguments))
        if key not in self.products:
            args, kwargs = arguments
            with FlopCounterMode(display=False) as counter:
                node.target(*args, **kwargs)
            self.products[key] = counter.get_total_flops()
        return self.products[key]


def operator_name(node: fx.Node) -> str:
    """Return the name without namespace and overload: `add` for aten.add.Tensor."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.overloadpacket.__name__
    assert node.target is operator.getitem, f"{node}: {node.target} is none of torch's operators"
    return "getitem"


def _argument(node: fx.Node, name: str) -> int:
    """Return an operator's argument of that name, or the argument's default."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    schema = node.target._schema.arguments
    position = next(position for position, argument in enumerate(schema) if argument.name == name)
    value = node.args[position] if position < len(node.args) else node.kwargs.get(name, schema[position].default_value)
    assert isinstance(value, int), (node, name, value)
    return value


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(result.alias_info for result in target._schema.returns)


def _is_local(node: fx.Node) -> bool:
    name = operator_name(node)
    if name in COPIES | {"batch_norm"} or _is_view(node):
        return name not in MIXING_COPIES
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for x in value if isinstance(value, list | tuple) else (value,):
        if torch.is_tensor(x):
            yield x


def _shape(node: Any) -> tuple[int, ...]:
    assert isinstance(node, fx.Node), node
    (x,) = _tensors(node)
    return tuple(x.shape)
