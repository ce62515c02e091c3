"""The section of the layout. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from meshwright.compute.tensor.section import Cut, Rows, TensorSection, whole_layers
from meshwright.config.section import Positive, Rule, divisors, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


@rule("layout.tensor", "model.family")
def the_model_has_towers(config: Config) -> Iterator[Problem]:
    if config.layout.tensor.kind == "towers" and config.model.family != "towers":
        rule_text = f"places towers on sub-grids, and a {config.model.family} has none"
        yield Problem("layout.tensor.kind", "towers", rule_text, "none, megatron, subgraph")


class Towers(TensorSection):
    """Each tower on a sub-grid of ranks (SUPER, IPDPS 2021): inside, rows shared and layers cut."""

    kind: Literal["towers"]
    size: Literal[1, 2] = 2
    """Sub-grids; 2: one for each tower, 1: both towers on the same ranks."""
    replicas: Positive = 1
    """Ranks of a sub-grid that share the rows of a batch. All rows are contrasted, as on one rank."""
    cut: Positive = 1
    """Ranks of a sub-grid that cut each layer, as Megatron-LM does."""

    axis_fields: ClassVar[tuple[tuple[str, str], ...]] = (("tower", "size"), ("rows", "replicas"), ("tensor", "cut"))
    kit_class: ClassVar[str] = "towers.kit:TowersKit"
    rules: ClassVar[tuple[Rule, ...]] = (the_model_has_towers,)
    batch_axes: ClassVar[tuple[str, ...]] = ("rows",)
    inner_axis: ClassVar[str] = "tensor"
    inner_field: ClassVar[str] = "layout.tensor.cut"

    @property
    def rows(self) -> Rows:
        return Rows(self.replicas, by="layout.tensor.replicas=")

    @property
    def words(self) -> str:
        return f"{self.kind} ({'a sub-grid each' if self.size == 2 else 'both on every rank'})"

    def cuts(self, config: Config) -> Iterator[Cut]:
        yield from whole_layers(config, "layout.tensor.cut", self.cut)

    @classmethod
    def candidates(cls, devices: int) -> Iterator[Self]:
        for size, replicas, cut in product((1, 2), divisors(devices), divisors(devices)):
            if 1 < size * replicas * cut <= devices and devices % (size * replicas * cut) == 0:
                yield cls.model_validate({"kind": "towers", "size": size, "replicas": replicas, "cut": cut})

    def kit_settings(self, config: Config) -> Mapping[str, Any]:
        return {}
