"""Windows in a plan: products of the keys inside of windows, one recording for each kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compute.context.context import Context
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import Chunk
from meshwright.config import Config, parse_config
from meshwright.families.llama.model import LlamaModel
from meshwright.planner.plan.recorder import Kernel, Recorder
from meshwright.planner.plan.recordings import Forms, Recordings
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import TensorMeta
from meshwright.strategies.pipeline.task import TaskKind
from meshwright.training.on_device import AsOnDevice

T, W, A, K, E = 2048, 256, 8, 2, 64


def config_of(**model: Any) -> Config:
    shape = {
        "family": "llama", "layers": 6, "hidden": A * E, "heads": A, "key_value_heads": K, "feed_forward": 1024,
        "positions": T, "vocabulary": 512,
    }  # fmt: skip
    return parse_config({"model": shape | model, "data": {"sequence": T}, "batch": {"global": 1}})


def attended(window: int | None) -> list[Kernel]:
    """Return the attention kernels of two sequences on a planned GPU, forward and backward."""
    q, k, v = (torch.empty(2, n, T, E, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (A, K, K))
    recorder = Recorder()
    with AsOnDevice("cuda", "fused", keys_grouped=True), recorder.program(Ledger()) as recorded:
        out = Context().attend(q, k, v, AttentionSpec(True, window))
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return [event for event in recorded().events if isinstance(event, Kernel) and event.kind == "attention"]


def test_a_gpus_kernel_multiplies_the_keys_of_a_window() -> None:
    forward, backward = attended(W)
    keys = sum(min(W, token + 1) for token in range(T))
    assert forward.flops == pytest.approx(4.0 * 2 * A * E * keys, rel=1e-12)
    assert backward.flops == pytest.approx(2.5 * forward.flops, rel=1e-12)
    whole, _ = attended(None)
    assert forward.flops < whole.flops / 3
    assert forward.touched_bytes == pytest.approx(whole.touched_bytes, rel=0.01)


def test_layers_of_two_kinds_are_recorded_twice() -> None:
    config = config_of(window=W, window_layers=[True, True, False])
    recordings = Recordings()
    assert recordings.outline(config).alike == (0, 0, 2, 0, 0, 2)
    seconds = [
        recordings.of(config, Chunk(range(layer, layer + 1), False, False), forms_of(config)) for layer in range(6)
    ]
    flops = [one.programs[TaskKind.FORWARD][0].flops for one in seconds]
    assert len(set(flops)) == 2
    assert flops[0] == flops[1] == flops[3] < flops[2] == flops[5]
    assert len(recordings.recorded) == 2
    assert [one.parameters[0].name.split(".")[1] for one in seconds] == list("012345")


def forms_of(config: Config) -> Forms:
    return (TensorMeta((1, T, config.model.hidden), torch.float32),)


def test_products_are_those_of_the_window() -> None:
    near, far = (LlamaModel.products(config_of(window=window)).layers for window in (W, None))
    width = 2 * T * A * E
    assert [b - a for a, b in zip(near, far, strict=True)] == [width * (T - W)] * 6
