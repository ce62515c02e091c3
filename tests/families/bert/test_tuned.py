"""BERT's fine-tunings under layouts: float64 gradients to 1e-12 relative, losses to 1e-10; against plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.compute.models.chain import make_chain
from meshwright.config import Config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify.reference import Reference
from meshwright.tools.verify.reference_kit import ReferenceKit
from meshwright.training.step import train_step
from tests.families.bert.tuned import config_for
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.context import BLOCKS, CUT, ONE_D
from tests.oracle.run import check, run
from tests.workers import run_ranks

FAMILIES = ("bert-pairs", "bert-spans", "bert-choice")


@cache
def serial(family: str) -> Any:
    return run(config_for(family, {}))[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D": {"tensor": ONE_D},
    "1-D, cut": {"tensor": CUT},
    "2-D": {"tensor": BLOCKS},
    "2.5-D": {"tensor": BLOCKS | {"d": 2}},
    "stages x replicas": {"pipeline": {"size": 2}, "data": {"size": 2, "sync": "zero1", "bucket": 8192}},
    "cut x stages": {"tensor": CUT, "pipeline": {"size": 2, "schedule": "message-driven"}},
    "zero3": {"data": {"size": 2, "sync": "zero3"}},
    "branches": {"tensor": {"kind": "subgraph", "size": 2}},
    "branches, one": {"tensor": {"kind": "subgraph", "size": 2, "common": "one"}},
    "ulysses": {"context": {"size": 2}},
    "ring": {"context": {"size": 2, "kind": "ring"}},
}
OTHERS = {("bert-choice", "branches"), ("bert-choice", "branches, one")}
OTHERS |= {(family, kind) for family in FAMILIES[1:] for kind in ("ulysses", "ring")}
"""Layouts that a family refuses."""
ONLY_LONG = {(family, name) for family in FAMILIES for name in ("2.5-D", "zero3", "branches", "ring")}
ONLY_LONG |= {(family, name) for family in FAMILIES[1:] for name in ("1-D", "cut x stages", "branches, one")}


@pytest.mark.few
@pytest.mark.parametrize(
    "family, layout",
    [
        pytest.param(family, layout, marks=pytest.mark.long) if (family, layout) in ONLY_LONG else (family, layout)
        for family in FAMILIES
        for layout in LAYOUTS
        if (family, layout) not in OTHERS
    ],
)
def test_equals_serial(family: str, layout: str) -> None:
    losses, gradients = serial(family)
    assert all(next(iter(parts.values())).norm() > 1e-15 for parts in gradients.values()), "none is rounding alone"
    check(run(config_for(family, LAYOUTS[layout])), (losses, gradients))


@pytest.mark.parametrize("family, layout", sorted(OTHERS))
def test_what_does_not_go_is_refused(family: str, layout: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_for(family, LAYOUTS[layout])
    wanted = "deals out rows" if "branches" in layout else f"a {family} looks at whole ones elsewhere"
    assert wanted in str(refusal.value)


def losses(mesh: Mesh, config: Config) -> tuple[float, float]:
    """Return the loss of a batch on one device, and the reference's loss."""
    batch = BATCHES[config.model.family](config, 0)
    return train_step(build(config, mesh), batch, 0).loss, Reference(config, torch.device("cpu")).backward(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_is_plain_torchs(family: str) -> None:
    [(ours, theirs)] = run_ranks(losses, Grid((("data", 1),)), config_for(family, {}))
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_heads_are_small() -> None:
    names = {
        family: set(dict(make_chain(config_for(family, {}), ReferenceKit()).named_parameters())) for family in FAMILIES
    }
    trunk = set.intersection(*names.values()) | {"blocks.1.feed_forward_norm.bias"}
    assert trunk - names["bert-spans"] == trunk - names["bert-pairs"] | {"blocks.1.feed_forward_norm.bias"}
    assert names["bert-spans"] - trunk == {"spans.weight"}
    assert {name.split(".")[0] for name in names["bert-pairs"] - trunk} == {"pooler", "head"}
    assert {name.split(".")[0] for name in names["bert-choice"] - trunk} == {"pooler", "score"}
