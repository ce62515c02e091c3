"""A region of branches: where a model's graph splits, what runs side by side, and how it joins again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["split/join", "heads", "groups", "columns"]
"""split/join: operators side by side. heads, groups, columns: parts of operators, of attention, of a grouped
convolution, of the width between two linears."""


@dataclass(frozen=True)
class Region:
    """`enter`: split (every branch reads all) or slice (each its part); `leave`: sum, concat, or the operator's name.

    `flops`: of each branch; `names`: what each is, in a split/join; else of one, since all are alike. `linears`: the
    paths of the pair round it, if there is one; `cuts_linears`: they belong to the branches.
    """

    form: Form
    where: str
    enter: str
    leave: str
    flops: tuple[float, ...]
    names: tuple[str, ...]
    linears: tuple[str, ...] = ()
    cuts_linears: bool = False

    @property
    def total_flops(self) -> float:
        return sum(self.flops)
