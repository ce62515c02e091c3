"""Every sync computes as one device does: float64 gradients to 1e-12 relative, 20 steps' losses to 1e-10."""

from __future__ import annotations

import pytest
import torch

from meshwright.config import Config
from meshwright.ranks.grid import Grid
from tests.oracle.data_parallel import SYNCS, config_for
from tests.oracle.run import assembled, train
from tests.workers import run_ranks


@pytest.fixture(scope="module")
def serial() -> tuple[list[float], dict[str, dict[tuple[int, ...], torch.Tensor]]]:
    return run_ranks(train, Grid((("data", 1),)), config_for("allreduce", 1))[0]


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sync", SYNCS)
def test_equals_serial(sync: str, size: int, serial: tuple) -> None:
    check(config_for(sync, size), serial)


@pytest.mark.few(3)
@pytest.mark.parametrize("sync, shard", [("zero1", 2), ("zero1", 1), ("zero2", 2), ("zero3", 2), ("zero3", 1)])
def test_equals_serial_in_shard_groups(sync: str, shard: int, serial: tuple) -> None:
    layout = {"data": {"size": 4, "sync": sync, "bucket": 8192, "shard": shard}}
    check(config_for(sync, 4, layout=layout, batch={"global": 12, "micro": 3 // shard}), serial)  # of 1 or 3 samples


@pytest.mark.parametrize("sync", ["zero3", "server-gradient"])
def test_equals_serial_with_inputs_in_host_memory(sync: str, serial: tuple) -> None:
    check(config_for(sync, 2, memory={"recompute": "offload"}), serial)


def check(config: Config, serial: tuple) -> None:
    """Compare the config's run with one device's."""
    results = run_ranks(train, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    serial_losses, serial_gradients = serial
    for losses, _ in results:
        torch.testing.assert_close(losses, serial_losses, rtol=1e-10, atol=0)
    assert {"tokens.weight", "positions.weight", "norm.bias"} <= serial_gradients.keys()
    for name, held in serial_gradients.items():
        (expected,) = held.values()
        parts = [gradients[name] for _, gradients in results if name in gradients]
        actual = assembled(parts, expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{name}: {error}"
