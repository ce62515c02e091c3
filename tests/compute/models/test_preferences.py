"""The loss over pairs equals plain torch written from the paper, and every layout equals one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.config import parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.tools.verify.reference import Reference
from tests.compute.models.preferring import pairs_of, paper_loss, preferring, run
from tests.families.llama.layouts import LAYOUTS, RING, SUBGRAPH, ULYSSES
from tests.oracle.context import BLOCKS, CUT
from tests.oracle.run import check

HALF = {"micro": 2, "global": 8}


def by_the_paper(config: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The first step's loss and gradients on whole logits, by autograd."""
    model = Reference(config, torch.device("cpu")).model
    batch = pairs_of(config, 0)
    rows = model.prepared(batch)
    (h,) = model.hidden_states(rows)
    table = model.tokens.weight if config.model.tied else model.head.weight
    logits = (h @ table[: config.model.vocabulary].T).unflatten(0, (-1, 2))
    settings = config.loss
    loss = paper_loss(logits, batch["labels"], batch["reference"], settings.beta, settings.label_smoothing)
    loss.backward()
    return float(loss.detach()), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_one_device_equals_the_papers_equation(family: str, smoothing: float) -> None:
    config = preferring({}, family, loss={"label_smoothing": smoothing}, steps=1)
    loss, gradients = by_the_paper(config)
    ((losses, mine),) = run(config)
    assert losses[0] == pytest.approx(loss, rel=1e-13)
    assert mine.keys() == gradients.keys()
    for name, held in mine.items():
        (gradient,) = held.values()
        assert (gradient - gradients[name]).norm() <= 1e-12 * gradients[name].norm(), name


@cache
def one_device(family: str = "llama") -> Any:
    return run(preferring({}, family))[0]


MORE: dict[str, dict[str, Any]] = {
    "replicas": {"data": {"size": 2}},
    "zero1": {"data": {"size": 2, "sync": "zero1"}},
    "zero2": {"data": {"size": 2, "sync": "zero2"}},
    "server": {"data": {"size": 2, "sync": "server-gradient"}},
    "cut": {"tensor": CUT},
    "1f1b": {"pipeline": {"size": 2, "schedule": "1f1b"}},
    "1f1b x ring x replicas": {"pipeline": {"size": 2, "schedule": "1f1b"}, "context": RING, "data": {"size": 2}},
    "head over stages": {"pipeline": {"size": 2, "head": "spread"}},
    "head over stages x ulysses": {"pipeline": {"size": 2, "head": "spread"}, "context": ULYSSES},
    "2-D x ring": {"tensor": BLOCKS, "context": RING},
    "chunks": {"pipeline": {"size": 1, "chunks": 2}},
}
SHORT = {
    "1-D",
    "2-D",
    "ring",
    "slices",
    "cut",
    "1f1b x ring x replicas",
    "branches",
    "head over stages",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in {**LAYOUTS, **MORE}],
)
def test_layouts_equal_one_device(name: str) -> None:
    check(run(preferring({**LAYOUTS, **MORE}[name])), one_device())


def test_a_rank_without_rows_has_no_loss() -> None:
    config = preferring({"tensor": SUBGRAPH | {"common": "one"}}, "gpt2")
    check(run(config), one_device("gpt2"))


def test_accumulated_microbatches_are_one_batch() -> None:
    check(run(preferring({}, batch={"global": 8, "micro": 1})), one_device())


ADAPTER = {"rank": 4, "begin": "random"}


@cache
def with_adapters() -> Any:
    return run(preferring({}, model={"adapter": ADAPTER}))[0]


@pytest.mark.parametrize("name", ["cut", pytest.param("1f1b x ring x replicas", marks=pytest.mark.long)])
def test_adapters_learn_from_pairs(name: str) -> None:
    results = run(preferring(MORE[name], model={"adapter": ADAPTER}))
    assert all(".adapter." in weight for _, held in results for weight in held)
    check(results, with_adapters())


EXPERTS = {
    "biases": ["query-key-value"],
    "experts": {"count": 4, "per_token": 2, "balance": 0.3},
    "feed_forward": 16,
    "layers": 1,
}


def test_a_balance_of_experts_is_a_mean_over_rows() -> None:
    """The reference sums the routers' losses of both rows of a pair; half of the sum is a mean."""
    config = preferring({}, model=EXPERTS, steps=1)
    reference = Reference(config, torch.device("cpu"))
    batch = pairs_of(config, 0)
    rows = reference.model.prepared(batch)
    hidden = reference.model.embed(rows)
    *_, routers = reference.model.run_layers(hidden, rows, reference.model.chunk)
    whole = run(config)[0][0][0]
    plain, *_ = run(preferring({}, model=EXPERTS | {"experts": EXPERTS["experts"] | {"balance": 1e-30}}, steps=1))[0]
    assert whole - plain[0] == pytest.approx(float(routers.detach().mean()) / config.model.num_blocks, rel=1e-9)


@pytest.mark.parametrize("name", ["expert axis", pytest.param("ring x cut", marks=pytest.mark.long)])
def test_experts_under_layouts(name: str) -> None:
    layouts = {"expert axis": {"data": {"size": 2, "expert": 2}}, "ring x cut": {"context": RING, "tensor": CUT}}
    check(run(preferring(layouts[name], model=EXPERTS)), run(preferring({}, model=EXPERTS))[0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bits": {"kind": "layout-free", "sequence": 2}}, "bits.sequence=2 adds up losses part by part"),
        ({"layout": {"data": {"size": 2, "sync": "server-loss"}}}, "computes the loss of gathered outputs and labels"),
        ({"loss": None}, "loss=null is the loss of one text, and data.kind=preferences gives pairs of answers"),
        ({"data": {"kind": "text"}}, "loss=dpo is a loss over pairs of answers, and data.kind=text gives none"),
        (
            {"model": EXPERTS | {"experts": EXPERTS["experts"] | {"balance_over": "batch"}}},
            "model.experts.balance_over=batch counts the tokens of a batch of single texts",
        ),
        (
            {"model": {"family": "deepseek", "later_tokens": 1}},
            "model.later_tokens=1 adds losses of single tokens",
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    tree = preferring({}).model_dump(mode="json", by_alias=True)
    tree["layout"], tree["memory"] = changes.get("layout", {}), {}
    tree |= {"model": {"family": "llama"} | changes.get("model", {}), "bits": changes.get("bits", {})}
    tree |= {"data": tree["data"] | changes["data"]} if "data" in changes else {}
    tree |= {"loss": changes["loss"]} if "loss" in changes else {}
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        parse_config(tree)
