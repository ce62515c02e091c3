"""Branches of a network, assigned to the sub-grids of an axis: D&SP for any modules (SUPER, IPDPS 2021, section IV).

g: ranks of the axis; B: rows of a replica's microbatch; b: those of them that a rank holds outside of branches, nearly
evenly on the first m ranks. Rank c runs the branches of sub-grid c, and nobody else has their parameters.

| `enter` | a branch gets                | `leave`  | outside there is again                            |
|---------|------------------------------|----------|---------------------------------------------------|
| split   | x of all rows: [B, ..., N]   | sum      | the sum of the branches' outputs: [b, ..., N]     |
| slice   | its part of `dim`, all rows  | concat   | the outputs side by side along `dim`: [b, ..., N] |

| `common` | m | sends                                                                                       |
|----------|---|---------------------------------------------------------------------------------------------|
| all      | g | all-gather (split), reduce-scatter (sum), all-to-all (slice, concat)       (D&SP)           |
| one      | 1 | broadcast, reduce, scatter, gather                                         (D&SP-cSub)      |
| a number | m | messages (translation.py); so do slice and concat where sub-grids have parts of unlike widths |

Who runs which branch: branches of given costs assigned to sub-grids (SUPER, IPDPS 2021: D&SP).

Greedy: the most expensive branch first, to whom has the least to do (Graham, 1969: at most 4/3 of the best time).
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

    `costs`: of the branches, in any unit. Branches of the same cost lie side by side: equal ones are assigned in runs,
    0 1 | 2 3. Raises ConfigError for fewer branches than sub-grids, and for costs that are no numbers from 0 up.
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
        left = iter(alike)  # dealt in runs: equal branches lie side by side, and their slices need no reordering
        for subgrid, share in enumerate(shares):
            hands[subgrid] += islice(left, share)
            loads[subgrid] += share * cost
    return tuple(tuple(sorted(hand)) for hand in hands)


Enter = Literal["split", "slice"]
Leave = Literal["sum", "concat"]
Common = Literal["all", "one"] | int


class Branches(ShardedModule):
    """x [b, ...] -> [b, ...]. On an axis of one rank: the modules one after another, the serial form."""

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
        """`modules`: the branches, made alike on every rank; `num_rows`: B.

        `costs`: what they are assigned by; None: all the same. `widths`: of the parts of `dim` that branches get of a
        slice, `out_widths` those that they make for a concat; None: all the same. Every output depends on its input
        differentiably, else a rank would be missing in the backward pass.

        Raises ConfigError for branches, rows, widths or a number of common ranks that the axis cannot have, and for
        widths of a dim that is not cut.
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
        self.order = tuple(chain(*self.assignment))  # the branches in the order in which their parts lie on the axis
        self._in_order = list(self.order) == sorted(self.order)
        holders = range(_num_holders(common, size))
        self.held = nearly_even(num_rows, holders, size)[mesh.index(axis)]
        self.slices, self.concats = enter == "slice", leave == "concat"
        self.entrance = self._crossing(holders, (widths or [1] * count) if self.slices else None)
        self.exit = self._crossing(holders, (out_widths or [1] * count) if self.concats else None)
        owners = {branch: subgrid for subgrid, hand in enumerate(self.assignment) for branch in hand}
        for branch, module in enumerate(modules):
            # Every rank declares every branch, its own with rows and the others' without: names and buckets are then
            # the same everywhere.
            self.add_owned(str(branch), module, (axis, owners[branch]))

    def _crossing(self, holders: range, shares: Sequence[int] | None) -> Segment | Translated:
        """The segmented collectives where ranks' parts are equal. `shares`: by branch, its part of a dim."""
        size = self.mesh.size(self.axis)
        by_rank = [1] * size if shares is None else [sum(shares[branch] for branch in hand) for hand in self.assignment]
        if len(holders) not in (1, size) or len(set(by_rank)) > 1:
            # Collectives of torch and MPI need equal parts; uneven ones go by messages.
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
        """The rows that this rank holds outside of branches: [B, ...] -> [b, ...]."""
        return x[self.held.start : self.held.stop]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != len(self.held):
            rule = f"rows are not the {len(self.held)} that rank {self.mesh.rank} holds of num_rows={self.num_rows}"
            raise ConfigError.of("x", len(x), rule, str(len(self.held)))
        # The input of the first layer needs no gradient, but the ranks' steps back must be the same.
        x = _reached(x)
        parts = self._sliced(x) if self.slices else [self.entrance.enter(x)] * len(self.mine)
        results = [self.get_submodule(str(branch))(part) for branch, part in zip(self.mine, parts, strict=True)]
        if self.concats:
            return self._joined(results)
        total = results[0]
        for result in results[1:]:
            total = total + result
        return self.exit.leave(_reached(total))

    def _sliced(self, x: Tensor) -> Sequence[Tensor]:
        """The parts of x, of all rows, that this rank's branches get."""
        total, count = x.shape[self.dim], len(self.order)
        widths = [total // count] * count if self.widths is None else list(self.widths)
        if sum(widths) != total:
            rule = f"is not the width {total} of dim {self.dim}, which falls to {count} branches"
            raise ConfigError.of("widths", sum(widths), rule, f"{count} widths, together {total}")
        if not self._in_order:
            parts = x.split(widths, self.dim)
            # Ranks get contiguous slices, so the parts are laid in the order in which ranks hold their branches.
            x = torch.cat([parts[branch] for branch in self.order], self.dim)
        return self.entrance.slice(x, self.dim).split([widths[branch] for branch in self.mine], self.dim)

    def _joined(self, results: Sequence[Tensor]) -> Tensor:
        """All branches' results side by side in their order, of the rows that this rank holds."""
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
    """x as something that the backward pass comes to, on every rank: each takes its part in the steps back.

    Else a rank without rows, or with branches that learn nothing, would leave the others waiting.
    """
    if x.requires_grad or not torch.is_grad_enabled() or not x.is_floating_point():
        return x
    return x.detach().requires_grad_()


def _num_holders(common: Common, size: int) -> int:
    """The ranks of an axis that hold rows outside of branches."""
    if common == "all":
        return size
    if common == "one":
        return 1
    if isinstance(common, int) and 1 <= common <= size:
        return common
    raise ConfigError.of("common", common, f"is no number of ranks of an axis of {size}", f"all, one, or 1 to {size}")


def _check_step(field: str, word: str, words: tuple[str, str], widths_field: str, widths: Sequence[int] | None) -> None:
    """`words`: what the step may be; by the second, a dim is cut."""
    if word not in words:
        raise ConfigError.of(field, word, "is no step between common layers and branches", " or ".join(words))
    if widths is not None and word != words[1]:
        raise ConfigError.of(widths_field, list(widths), f"have no effect with {field}={word}", f"{field}={words[1]}")
