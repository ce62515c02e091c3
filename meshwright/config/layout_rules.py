"""What the order of a layout's axes, and their nodes, must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from meshwright.config.messages import nearest
from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.section import divisors, listed, rule

SIZES = ("layout.data.size", "layout.pipeline.size", "layout.tensor")


@rule("layout.order", *SIZES)
def order_names_every_axis_once(config: Config) -> Iterator[Problem]:
    order, sizes = config.layout.order, dict(config.layout.axes)
    if order == "auto":
        return
    known = config.layout.model_copy(update={"order": "auto"}).axes
    wrong = [f"names {name}, no axis of this layout{nearest(name, list(sizes))}" for name in order if name not in sizes]
    wrong += [f"names {name} {count} times" for name, count in Counter(order).items() if count > 1]
    wrong += [f"leaves {name} out" for name, size in known if size > 1 and name not in order]
    if wrong:
        alone = ", ".join(name for name, size in known if size == 1)
        note = f" (of one rank, may be left out: {alone})" if alone else ""
        valid = f"auto, {_shown(name for name, _ in known)} in any order{note}"
        yield Problem("layout.order", _shown(order), " and ".join(wrong), valid)


@rule("layout.ranks_per_node", *SIZES)
def nodes_are_full(config: Config) -> Iterator[Problem]:
    here, ranks = config.layout.ranks_per_node, config.layout.world_size
    if here != "auto" and ranks % here:
        rule_text = f"does not divide the {ranks} ranks of the layout"
        yield Problem("layout.ranks_per_node", here, rule_text, f"auto, {listed(divisors(ranks))}")


def _shown(names: Iterable[str]) -> str:
    return f"[{', '.join(names)}]"


LAYOUT_RULES = (order_names_every_axis_once, nodes_are_full)
