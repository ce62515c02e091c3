"""Branches of a network, assigned to the sub-grids of an axis: D&SP for any modules (SUPER, IPDPS 2021, section IV).

g: ranks of the axis; B: rows of a replica's microbatch; b: a rank's rows outside of branches, cut nearly evenly over
the first m ranks. Rank c alone has the parameters of sub-grid c, and runs the branches of sub-grid c.

| `enter` | input of a branch            | `leave`  | result outside of branches                        |
|---------|------------------------------|----------|---------------------------------------------------|
| split   | x of all rows: [B, ..., N]   | sum      | the sum of the branches' outputs: [b, ..., N]     |
| slice   | a part of `dim`, all rows    | concat   | the outputs concatenated along `dim`: [b, ..., N] |

| `common` | m | sends                                                                                       |
|----------|---|---------------------------------------------------------------------------------------------|
| all      | g | all-gather (split), reduce-scatter (sum), all-to-all (slice, concat)       (D&SP)           |
| one      | 1 | broadcast, reduce, scatter, gather                                         (D&SP-cSub)      |
| a number | m | messages (translation.py); also slice and concat of parts of different widths                 |

Assignment of branches to sub-grids is greedy: the most expensive branch first, to the sub-grid with the least load
(Graham, 1969: at most 4/3 of the best time).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Literal

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import ShardedModule
from meshwright.compute.subgraph.segment import Segment
from meshwright.compute.subgraph.translation import Translated, nearly_even
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh

Assignment = tuple[tuple[int, ...], ...]
"""The numbers of each sub-grid's branches, in order."""


def assign(costs: Sequence[float], num_subgrids: int) -> Assignment:
    """Assign every branch to one sub-grid, and at least one branch to each sub-grid.

    Branches of equal cost are assigned in runs, 0 1 | 2 3.

    Args:
        costs: The branches' costs, in any unit.
        num_subgrids: Number of sub-grids.

    Raises:
        ConfigError: Branches are fewer than sub-grids, or a cost is not a number >= 0.
    """
    if len(costs) < num_subgrids:
        rule = f"branches are fewer than the {num_subgrids} sub-grids they are assigned to"
        raise ConfigError.of("branches", len(costs), rule, f"{num_subgrids} or more")
    for cost in costs:
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError.of("costs", cost, "is not the cost of a branch", "numbers from 0 up")
    hands: list[list[int]] = [[] for _ in range(num_subgrids)]
    loads = [0.0] * num_subgrids
    for cost in sorted(set(costs), reverse=True):
        alike = [branch for branch, its_cost in enumerate(costs) if its_cost == cost]
        shares = [0] * num_subgrids
        for _ in alike:
            # Least loaded first; of equal loads who has fewest branches, since branches may cost nothing at all and
            # each sub-grid must get one.
            *_, least = min(
                (load + share * cost, len(hand) + share, subgrid)
                for subgrid, (load, hand, share) in enumerate(zip(loads, hands, shares, strict=True))
            )
            shares[least] += 1
        left = iter(alike)  # equal branches of a sub-grid are neighbours, so slices need no reordering
        for subgrid, share in enumerate(shares):
            hands[subgrid] += islice(left, share)
            loads[subgrid] += share * cost
    return tuple(tuple(sorted(hand)) for hand in hands)


Enter = Literal["split", "slice"]
Leave = Literal["sum", "concat"]
Common = Literal["all", "one"] | int


class Branches(ShardedModule):
    """Branches on sub-grids: x [b, ...] -> [b, ...]. With one rank the modules run one after another."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        enter: Enter,
        leave: Leave,
        mesh: Mesh,
        num_rows: int,
        axis: str = "branch",
        common: Common = "all",
        costs: Sequence[float] | None = None,
        widths: Sequence[int] | None = None,
        out_widths: Sequence[int] | None = None,
        dim: int = -1,
    ) -> None:
        """Assign branches to sub-grids. Each output must depend on the input differentiably: all ranks take part in the
        backward pass.

        Args:
            modules: All branches, equal on every rank.
            enter, leave: The steps before and after the branches, as in the table.
            mesh: The rank's mesh.
            num_rows: B.
            axis: The axis of sub-grids.
            costs: Costs for the assignment; None: equal.
            widths: Widths of the branches' parts of `dim` in a slice; None: equal.
            out_widths: Widths of the branches' outputs in a concat; None: equal.

        Raises:
            ConfigError: The axis cannot have these branches, rows, widths or common ranks; or widths are given for a
                dim that is not cut.
        """
        super().__init__(mesh)
        _check_step("enter", enter, ("split", "slice"), "widths", widths)
        _check_step("leave", leave, ("sum", "concat"), "out_widths", out_widths)
        if dim == 0:
            raise ConfigError.of("dim", dim, "is the dim of the rows", "any other")
        self.axis, self.num_rows, self.dim = axis, num_rows, dim
        self.widths, self.out_widths = widths, out_widths
        size, count = mesh.size(axis), len(modules)
        for field, values in (("costs", costs), ("widths", widths), ("out_widths", out_widths)):
            if values is not None and len(values) != count:
                rule = f"are {len(values)} values for {count} branches"
                raise ConfigError.of(field, list(values), rule, f"{count} values")
            if values is not None and field != "costs" and min(values) < 1:
                raise ConfigError.of(field, list(values), "has a part without a width", "whole numbers from 1 up")
        self.assignment = assign([1.0] * count if costs is None else costs, size)
        self.mine = self.assignment[mesh.index(axis)]
        self.order = tuple(chain(*self.assignment))  # the branches in the order of the ranks on the axis
        self._in_order = list(self.order) == sorted(self.order)
        holders = range(_num_holders(common, size))
        self.held = nearly_even(num_rows, holders, size)[mesh.index(axis)]
        self.slices, self.concats = enter == "slice", leave == "concat"
        self.entrance = self._crossing(holders, (widths or [1] * count) if self.slices else None)
        self.exit = self._crossing(holders, (out_widths or [1] * count) if self.concats else None)
        owners = {branch: subgrid for subgrid, hand in enumerate(self.assignment) for branch in hand}
        for branch, module in enumerate(modules):
            # Every rank declares every branch (branches of other ranks without rows), so that all ranks have equal
            # names and buckets.
            self.add_owned(str(branch), module, (axis, owners[branch]))

    def _crossing(self, holders: range, shares: Sequence[int] | None) -> Segment | Translated:
        """Choose segmented collectives, or messages if ranks' parts differ; `shares`: each branch's part of a dim."""
        size = self.mesh.size(self.axis)
        by_rank = [1] * size if shares is None else [sum(shares[branch] for branch in hand) for hand in self.assignment]
        if len(holders) not in (1, size) or len(set(by_rank)) > 1:
            # Collectives of torch and MPI need equal parts.
            return Translated(self.mesh, self.axis, self.num_rows, holders, by_rank)
        if len(holders) < size:
            return Segment(self.mesh, self.axis, num_rows=self.num_rows)
        if self.num_rows % size:
            least = self.num_rows // size * size
            near = ", ".join(str(rows) for rows in (least, least + size, least + 2 * size) if rows)
            rule = f"rows do not fall into equal parts for the {size} ranks of axis {self.axis}"
            raise ConfigError.of("num_rows", self.num_rows, rule, f"multiples of {size}: {near}, ...")
        return Segment(self.mesh, self.axis)

    def rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows outside of branches: [B, ...] -> [b, ...]."""
        return x[self.held.start : self.held.stop]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != len(self.held):
            rule = f"rows are not the {len(self.held)} that rank {self.mesh.rank} holds of num_rows={self.num_rows}"
            raise ConfigError.of("x", len(x), rule, str(len(self.held)))
        # The first layer's input needs no gradient, but all ranks have to make the same backward steps.
        x = _reached(x)
        parts = self._sliced(x) if self.slices else [self.entrance.enter(x)] * len(self.mine)
        results = [self.get_submodule(str(branch))(inputs) for branch, inputs in zip(self.mine, parts, strict=True)]
        if self.concats:
            return self._joined(results)
        total = results[0]
        for result in results[1:]:
            total = total + result
        return self.exit.leave(_reached(total))

    def _sliced(self, x: Tensor) -> Sequence[Tensor]:
        """Return the parts of x, of all rows, for this rank's branches."""
        total, count = x.shape[self.dim], len(self.order)
        widths = [total // count] * count if self.widths is None else list(self.widths)
        if sum(widths) != total:
            rule = f"is not the width {total} of dim {self.dim}, which falls to {count} branches"
            raise ConfigError.of("widths", sum(widths), rule, f"{count} widths, together {total}")
        if not self._in_order:
            parts = x.split(widths, self.dim)
            # Ranks get contiguous slices, so parts are ordered by rank.
            x = torch.cat([parts[branch] for branch in self.order], self.dim)
        return self.entrance.slice(x, self.dim).split([widths[branch] for branch in self.mine], self.dim)

    def _joined(self, results: Sequence[Tensor]) -> Tensor:
        """Concatenate all branches' results in the branches' order, of this rank's rows."""
        made = [result.shape[self.dim] for result in results]
        widths = made[:1] * len(self.order) if self.out_widths is None else self.out_widths
        if made != [widths[branch] for branch in self.mine]:
            rule = f"are not the widths of the outputs of branches {list(self.mine)}: {made}"
            raise ConfigError.of("out_widths", self.out_widths, rule, "one width for each branch, as it makes it")
        whole = self.exit.concat(_reached(torch.cat(list(results), self.dim)), self.dim)
        if self._in_order:
            return whole
        parts = dict(zip(self.order, whole.split([widths[branch] for branch in self.order], self.dim), strict=True))
        return torch.cat([parts[branch] for branch in sorted(self.order)], self.dim)


def _reached(x: Tensor) -> Tensor:
    """Make x part of the graph, so that this rank takes part in the backward steps.

    A rank without rows, or without trained branches, would otherwise leave other ranks waiting.
    """
    if x.requires_grad or not torch.is_grad_enabled() or not x.is_floating_point():
        return x
    return x.detach().requires_grad_()


def _num_holders(common: Common, size: int) -> int:
    """Count the ranks of an axis with rows outside of branches."""
    if common == "all":
        return size
    if common == "one":
        return 1
    if isinstance(common, int) and 1 <= common <= size:
        return common
    raise ConfigError.of("common", common, f"is no number of ranks of an axis of {size}", f"all, one, or 1 to {size}")


def _check_step(field: str, word: str, words: tuple[str, str], widths_field: str, widths: Sequence[int] | None) -> None:
    """Check a step. `words`: valid words; the second cuts a dim."""
    if word not in words:
        raise ConfigError.of(field, word, "is no step between common layers and branches", " or ".join(words))
    if widths is not None and word != words[1]:
        raise ConfigError.of(widths_field, list(widths), f"have no effect with {field}={word}", f"{field}={words[1]}")
