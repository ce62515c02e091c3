"""An offloaded optimizer under sub-graphs changes no bit, also of a rank that holds no common parameter."""

from __future__ import annotations

import pytest

from meshwright.config import Config
from tests.oracle.run import run
from tests.oracle.tensor import config_for


def half_precision(tensor: dict[str, object], sync: str, to: str) -> Config:
    """Return a run of bf16 on four ranks. The sizes of sums do not depend on the optimizer's place."""
    tree = config_for("gpt2", tensor, 2, steps=3).model_dump(mode="json", by_alias=True)
    tree["layout"]["data"] = {"size": 2, "sync": sync}
    tree["precision"] = {"level": "O2", "dtype": "bf16"}
    tree["memory"]["offload"] = {"to": to, "bucket": 1024, "chunk": 2}
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    "common, branch, sync",
    [
        ("one", "attention", "zero1"),
        pytest.param("one", "attention-core", "allreduce", marks=pytest.mark.long),  # a rank without any parameter
        pytest.param("one", "block", "server-gradient", marks=pytest.mark.long),
        pytest.param("all", "block", "zero1", marks=pytest.mark.long),
    ],
)
def test_no_bit_changes(common: str, branch: str, sync: str) -> None:
    tensor = {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
    in_place, on_host = ([losses for losses, _ in run(half_precision(tensor, sync, to))] for to in ("none", "host"))
    assert on_host == in_place
    assert in_place[0][-1] != in_place[0][0]
