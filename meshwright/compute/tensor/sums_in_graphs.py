"""Rewrites of Inductor's graphs for column_sums.py: sums that an operation has made already are not made again.

| in a backward graph                          | becomes                                                         |
|----------------------------------------------|-----------------------------------------------------------------|
| norm_backward(...), then its dx + an addend  | the addend as an operand: dx is written once                    |
| the sum over rows of an operation's dx       | the sum of the operation's partial sums                         |

The second is the gradient of the bias of the linear before. A graph in another form is left as it is: the results are
equal, and a pass is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from meshwright.compute.tensor.column_sums import OPERATIONS

aten = torch.ops.aten
SAME_ROWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    torch.ops.prims.convert_element_type.default,
)
"""Operations that keep the elements of contiguous rows in order."""
ADDEND = 3
"""Index of `addend` in norm_backward's arguments."""


def sums_of(node: fx.Node) -> fx.Node | None:
    """Return the operation with the result dx that a node is, after views; None for other nodes."""
    while node.target in SAME_ROWS:
        (node, *_) = node.all_input_nodes
    if node.target is not getitem or node.args[1] != 0:
        return None
    operation = node.args[0]
    return operation if isinstance(operation, fx.Node) and operation.target in OPERATIONS else None


def depends(node: fx.Node, on: fx.Node) -> bool:
    """Return whether a node is computed from another."""
    seen, left = {node}, [node]
    while left:
        for each in left.pop().all_input_nodes:
            if each is on:
                return True
            if each not in seen:
                seen.add(each)
                left.append(each)
    return False


def addends(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, fx.Node]]:
    """Yield (sum, norm_backward, dx, addend) for each sum of an addend and a dx that nothing else reads."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        left, right = node.args[:2]
        for dx, addend in ((left, right), (right, left)):
            if not (isinstance(dx, fx.Node) and isinstance(addend, fx.Node) and dx.target is getitem):
                continue
            norm, (dx_value, addend_value) = sums_of(dx), (each.meta["val"] for each in (dx, addend))
            alone = (
                len(dx.users) == 1
                and dx_value.shape == addend_value.shape
                and dx_value.dtype == addend_value.dtype
                and not node.kwargs
            )
            if norm is None or norm.target is not OPERATIONS[0] or norm.args[ADDEND] is not None or not alone:
                continue
            if not depends(addend, norm):
                yield node, norm, dx, addend
                break


class SumsInGraphs(CustomGraphPass):
    """The rewrites, as a pass of Inductor."""

    def __call__(self, graph: fx.Graph) -> None:
        while (found := next(addends(graph), None)) is not None:  # an addend may be a sum that was replaced
            node, norm, dx, addend = found
            norm.update_arg(ADDEND, addend)
            node.replace_all_uses_with(dx)
            graph.erase_node(node)
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            rows, dims, *_ = node.args
            operation = sums_of(rows)
            if operation is None or list(dims) != [0] or rows.meta["val"].dim() != 2:
                continue
            made = operation.meta["val"]
            if made[-1].shape[1] != rows.meta["val"].shape[1] or made[-1].dtype != node.meta["val"].dtype:
                continue
            with graph.inserting_after(operation):
                partial = graph.call_function(getitem, (operation, len(made) - 1))
            partial.meta["val"] = made[-1]
            with graph.inserting_before(node):
                total = graph.call_function(aten.sum.dim_IntList, (partial, [0]))
            total.meta.update(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)
        stable_topological_sort(graph)
        graph.lint()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


REWRITES = SumsInGraphs()
"""The rewrites. One object, since layers share a graph if their compilers are equal."""
