"""A start on a fake GPU: the host holds no part of a model longer than the part's copy takes."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.compute.parameters.initial import BLOCK_ELEMENTS
from meshwright.config import parse_config
from tests.rehearsal.layouts import HALF, runs_of
from tests.rehearsal.step import FakeGpu

BOTH = {"states": "bf16", "masters": "bf16"}
HOST = {"offload": {"to": "host"}}


PARAMETERS = 1_235_814_400
"""The parameters of llama-3.2-1b."""


@pytest.mark.parametrize(
    "base, optimizer, memory, stored",
    [
        pytest.param("llama-3.1-8b", BOTH, {}, 0, marks=pytest.mark.long),
        ("llama-3.2-1b", BOTH, {}, 0),
        ("llama-3.2-1b", {}, HOST, 12 * PARAMETERS),
    ],
    ids=["8 B", "1 B", "1 B, states on the host"],
)
def test_the_host_holds_blocks_of_one_parameter(
    base: str, optimizer: dict[str, Any], memory: dict[str, Any], stored: int, fake_gpu: FakeGpu
) -> None:
    """The host holds a block in float32 and two rounded copies, and the offloaded states once."""
    tree = {
        "model": {"base": base}, "data": {"sequence": 64, "tokenizer": "bytes"}, "batch": {"global": 1, "micro": 1},
        "precision": HALF, "optimizer": optimizer, "memory": memory, "compile": "none", "steps": 1,
    }  # fmt: skip
    (report,) = fake_gpu.rehearse(runs_of({base: parse_config(tree)}, steps=0))
    assert not report.error, report.error
    block = 4 * BLOCK_ELEMENTS
    assert block < report.host_bytes <= stored + 2 * block
