"""Bytes are counted without sending; for 1-D the bytes are known in closed form."""

from __future__ import annotations

from benchmarks.tensor_scaling import BATCH, LAYOUTS, sent_bytes
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

SEQUENCE = 64


def bytes_of_a_layer(_mesh: Mesh, layout: str) -> int:
    one, two = (sum(sent_bytes(LAYOUTS[layout], layers, SEQUENCE).values()) for layers in (1, 2))
    return two - one


def test_a_layer_of_megatron_sends_four_all_reduces() -> None:
    (counted,) = run_ranks(bytes_of_a_layer, Grid((("data", 1),)), "[64]")
    activations = 4 * BATCH * SEQUENCE * 3072
    assert counted == 4 * (2 * 63 * activations // 64)
