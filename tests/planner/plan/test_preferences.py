"""The planner counts runs on pairs of answers: the head's two passes, both rows, sums over shared sequences, and the
pass under the first weights, once before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.compute.models.chain import chain_of
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner, Prediction
from tests.compute.models.preferring import preferring
from tests.families.llama.layouts import RING
from tests.oracle.context import BLOCKS, CUT
from tests.planner.plan.checked import check

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"data": {"size": 2, "sync": "zero1"}},
    "cut": {"tensor": CUT},
    "ring": {"context": RING},
    "1f1b": {"pipeline": {"size": 2, "schedule": "1f1b"}},
    "2-D": {"tensor": BLOCKS},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "ring" else pytest.mark.long) for n in LAYOUTS])
def test_bytes_are_those_of_runs(name: str) -> None:
    check([preferring({**LAYOUTS[name], "transport": "torch"})])


def test_a_sample_is_two_rows() -> None:
    pairs = preferring({})
    texts = pairs.model_copy(update={"loss": None})
    ours, plain = chain_of(pairs), chain_of(texts)
    assert ours.tokens_per_sample(pairs) == 2 * plain.tokens_per_sample(texts) == 48
    assert ours.flops_per_sample(pairs) == 2 * plain.flops_per_sample(texts)


def predicted(layout: dict[str, Any], **changes: Any) -> Prediction:
    return Planner(load_cluster("two-cores")).predict(preferring(layout, **changes))


def test_the_pass_is_the_forward_tasks_of_a_batch() -> None:
    alone = predicted({})
    forward = [span.seconds for span in alone.timeline.tasks if span.category == "forward"]
    assert len(forward) == alone.config.num_microbatches > 1
    assert alone.reference_seconds == pytest.approx(sum(forward), rel=1e-9)
    assert 0 < alone.reference_seconds < alone.seconds


def test_stages_overlap_and_replicas_share_the_pass() -> None:
    alone, stages = (predicted(each, batch={"global": 8, "micro": 1}) for each in ({}, {"pipeline": {"size": 2}}))
    replicas = predicted({"data": {"size": 2}}, batch={"global": 8, "micro": 1})
    assert stages.reference_seconds is not None
    assert alone.reference_seconds is not None
    assert replicas.reference_seconds is not None
    assert 0.5 < stages.reference_seconds / alone.reference_seconds < 1
    assert replicas.reference_seconds == pytest.approx(alone.reference_seconds / 2, rel=0.1)
