"""The layout section of sub-graphs (D&SP): fields, rules and facts for the config and the planner. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from meshwright.compute.tensor.section import Cut, Rows, TensorSection, Whole
from meshwright.config.section import Positive, Rule, divisors, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


@rule("layout.tensor", "model")
def branches_share_nothing(config: Config) -> Iterator[Problem]:
    """Refuse parameters shared by branches if one rank computes the common layers.

    Ranks would have different buckets, reduce the shared parameter between different exchanges, and hang.
    """
    tensor, shared = config.layout.tensor, config.model.branches.shared
    if isinstance(tensor, Subgraph) and tensor.common == "one" and tensor.size > 1 and shared:
        rule_text = f"gives the first rank all that branches share, and {shared} is shared inside of them"
        yield Problem("layout.tensor.common", "one", rule_text, "all")


class Subgraph(TensorSection):
    """D&SP: the branches of each block (heads, paths) assigned to sub-grids, the layers between data-parallel."""

    kind: Literal["subgraph"]
    size: Positive
    """Number of sub-grids; branches are distributed over these."""
    common: Literal["all", "one"] = "all"
    """Sub-grids that compute the layers between branches; all: each a share of the batch; one (D&SP-cSub): first."""
    branch: Literal["attention-core", "attention", "block"] = "attention"
    """The part of a block that is cut along heads; attention: projections too; block: the feed-forward too."""

    axis_fields: ClassVar[tuple[tuple[str, str], ...]] = (("branch", "size"),)
    kit_class: ClassVar[str] = "meshwright.compute.subgraph.kit:SubgraphKit"
    by_parts: ClassVar[str] = kit_class
    inner_axis: ClassVar[str] = "branch"
    batch_axes: ClassVar[tuple[str, ...]] = ("branch",)
    rules: ClassVar[tuple[Rule, ...]] = (branches_share_nothing,)
    idle_alone: ClassVar[tuple[str, ...]] = ("common", "branch")

    @property
    def rows(self) -> Rows:
        """Rows are split over ranks outside of branches, gathered inside; with common=one, the first has all rows."""
        if self.common == "one":
            return Rows(leads=self.size)
        return Rows(self.size, at_once=self.size, by="layout.tensor.size=")

    @property
    def replica_of_ends(self) -> tuple[TensorSection, int]:
        if self.common == "all":
            return Whole(), self.size
        return self.model_copy(update={"branch": "attention"}), 1  # the other ranks wait for the first

    @property
    def words(self) -> str:
        common = "all ranks" if self.common == "all" else "the first sub-grid"
        return f"{self.kind} ({self.branch} in branches, other layers on {common})"

    def cuts(self, config: Config) -> Iterator[Cut]:
        """Yield the cuts of branches. Hidden widths and tables are outside of branches, and are not cut."""
        branches, (_, *inner) = config.model.branches[:2], config.model.widths
        for field, size in (branches, *(inner if self.branch == "block" else ())):
            # Branches are not split: one rank computes a whole head or path.
            yield Cut(field, size, "layout.tensor.size", self.size)

    @classmethod
    def candidates(cls, devices: int) -> Iterator[Self]:
        for size in divisors(devices)[1:]:
            for common, branch in product(("all", "one"), ("attention-core", "attention", "block")):
                yield cls.model_validate({"kind": "subgraph", "size": size, "common": common, "branch": branch})

    def kit_settings(self, config: Config) -> Mapping[str, Any]:
        samples = config.bits.samples if config.bits.layout_free else config.micro
        return {"settings": self, "num_rows": samples * config.data.rows}
