"""A separate head fills the head's bucket first, under server-loss on the server alone. All ranks must send in one
order."""

from __future__ import annotations

import pytest
import torch

from meshwright.ranks.grid import Grid
from tests.oracle.data_parallel import SYNCS, config_for
from tests.oracle.run import assembled, train
from tests.workers import run_ranks


@pytest.mark.parametrize("sync", SYNCS)
def test_untied_head_equals_serial(sync: str) -> None:
    untied = {
        "layers": 1, "hidden": 24, "heads": 3, "positions": 12, "vocabulary": 300, "vocabulary_multiple": 8,
        "dropout": 0.0, "tied": False,
    }  # fmt: skip
    changes = {"model": untied, "steps": 3, "optimizer": {"lr": 1e-2}}
    ((serial_losses, serial_gradients),) = run_ranks(train, Grid((("data", 1),)), config_for("allreduce", 1, **changes))
    results = run_ranks(train, Grid((("data", 2),)), config_for(sync, 2, **changes))
    for losses, _ in results:
        torch.testing.assert_close(losses, serial_losses, rtol=1e-10, atol=0)
    assert {"tokens.weight", "positions.weight", "norm.bias"} <= serial_gradients.keys()
    for name, held in serial_gradients.items():
        (expected,) = held.values()
        actual = assembled([gradients[name] for _, gradients in results if name in gradients], expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{name}: {error}"
