"""Inputs in host memory: a backward pass reads the numbers of the same microbatch's forward pass, copied one group
ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.ranks.comm import Later, Work
from meshwright.strategies.memory.host_inputs import HostCopies, recomputed_from
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.strategies.memory.staging import Lane

LAYERS = 4


@dataclass
class LateLane(Lane):
    """A lane that runs a copy only at a wait for this copy or a later one, as a GPU may."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    handed_in: int = 0

    device = torch.device("cpu")

    def submit(self, copy: Callable[[], None]) -> Work:
        self.waiting.append(copy)
        self.handed_in += 1
        number = self.handed_in

        def wait() -> None:
            while self.handed_in - len(self.waiting) < number:
                self.waiting.pop(0)()

        return Later(wait)


class Layers:
    """Layers x -> sin(w x), run by the policy, and the inputs of the layers' second passes."""

    def __init__(self, lane: Lane) -> None:
        self.copies = HostCopies(lane)
        self.weights = [torch.full((), 1.0 + layer, dtype=torch.float64, requires_grad=True) for layer in range(LAYERS)]
        self.read: list[tuple[int, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.ones(3)
        for layer in range(LAYERS):
            (x, again) = recomputed_from(self.copies, self.layer, layer, (x, x.sum()), shared)
            assert again is shared, "what has no gradient is not copied"
        return x

    def layer(self, layer: int, hidden: tuple[Tensor, Tensor], shared: Tensor) -> tuple[Tensor, Tensor]:
        self.read.append((layer, hidden[0].detach().clone()))
        return torch.sin(self.weights[layer] * hidden[0]) + 0 * hidden[1], shared


def plain(x: Tensor) -> Tensor:
    for layer in range(LAYERS):
        x = torch.sin((1.0 + layer) * x)
    return x


def leaf(seed: int) -> Tensor:
    return torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("make", [LateLane, lambda: Lane(torch.device("cpu"), threaded=False)])
def test_gradients_of_passes_in_any_order(make: Callable[[], Lane], order: tuple[int, ...]) -> None:
    layers, xs, wanted = Layers(make()), [leaf(seed) for seed in range(3)], [leaf(seed) for seed in range(3)]
    ends = [layers.forward(x) for x in xs]
    for which in order:
        ends[which].sum().backward()  # type: ignore[no-untyped-call]
        plain(wanted[which]).sum().backward()  # type: ignore[no-untyped-call]
    for x, other in zip(xs, wanted, strict=True):
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-14, atol=0)


def test_copies_are_started_one_group_ahead() -> None:
    lane = LateLane()
    layers, x = Layers(lane), leaf(0)
    end = layers.forward(x)
    assert lane.handed_in == LAYERS, "each layer's inputs are copied to the host"
    assert len(lane.waiting) == 1, "the next layer waits for the copies of the layer before"
    handed: list[int] = []
    for layer, weight in enumerate(layers.weights):
        weight.register_hook(lambda _, layer=layer: handed.append(lane.handed_in - LAYERS))  # type: ignore[misc]
    end.sum().backward()  # type: ignore[no-untyped-call]
    # The last layer's inputs are still on the device. While the last layer is recomputed, the inputs of the layer
    # before are fetched.
    assert handed == [1, 2, 3, 3]


def test_without_gradients_nothing_is_copied() -> None:
    lane = LateLane()
    with torch.no_grad():
        Layers(lane).forward(leaf(0))
    assert lane.handed_in == 0


def test_an_input_leaves_when_the_next_is_handed_in() -> None:
    """On the meta device, a copy counts as device memory: the test gives host copies an eighth of the bytes."""

    class Elsewhere(HostCopies):
        def __init__(self) -> None:
            super().__init__(Lane(torch.device("cpu"), threaded=False))
            self._room = lambda x: torch.empty(x.shape, dtype=torch.int8)  # an eighth

    copies, x = Elsewhere(), torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    with LiveBytes() as live:
        for _ in range(LAYERS):
            x = recomputed_from(copies, torch.sin, x)
    assert live.live == 2 * 8000 + LAYERS * 1000, "the last input and the output are on the device"


TREE: dict[str, Any] = {
    "model": {"family": "llama", "layers": 4, "hidden": 512, "heads": 8, "positions": 256, "vocabulary": 1000},
    "data": {"sequence": 256}, "batch": {"global": 8, "micro": 2}, "precision": "bf16",
}  # fmt: skip
HIDDEN_BYTES = 2 * 256 * 512 * 2


def planned(setting: str | int, *words: str, host_link: float = 5e10, cluster: str = "dgx-h100") -> Prediction:
    found = load_cluster(cluster)
    device = found.device.model_copy(update={"host_link_bytes_per_second": host_link})
    planner = Planner(found.model_copy(update={"device": device}))
    return planner.predict(parse_config(TREE | {"memory": {"recompute": setting}}, words))


def test_a_plan_counts_the_host_memory_and_no_device_memory() -> None:
    again, moved = planned(1), planned("offload")
    # Both plans have a checkpoint's copy in host memory: the states, and the few weights without a master.
    assert 0.999 * again.fullest.host < again.fullest.states <= again.fullest.host
    assert moved.fullest.host - again.fullest.host == LAYERS * HIDDEN_BYTES
    assert moved.fullest.activations == again.fullest.activations - LAYERS * HIDDEN_BYTES
    assert f"in host memory {moved.fullest.host / 1e6:.0f} MB" in moved.fullest.text


def test_a_plan_of_stages_counts_each_microbatch_in_flight() -> None:
    words = ("layout.pipeline.size=2", "layout.pipeline.schedule=1f1b", "model.dropout=0")
    again, moved = (planned(setting, *words).memory[0] for setting in (1, "offload"))
    assert moved.host - again.host == 2 * (LAYERS // 2) * HIDDEN_BYTES


def test_a_plan_on_a_cpu_counts_the_copies_as_its_memory() -> None:
    again, moved = (planned(setting, "precision=float32", cluster="two-cores").fullest for setting in (1, "offload"))
    assert moved.host == 0
    assert moved.activations >= again.activations


def test_a_slow_link_is_waited_for() -> None:
    again, moved, slow = planned(1).seconds, planned("offload").seconds, planned("offload", host_link=1e8).seconds
    assert moved == planned("offload", host_link=1e12).seconds  # hidden
    # A copy ends a sequence of compiled kernels: one more to issue a layer and microbatch.
    assert 0 <= moved - again <= 4 * LAYERS * load_cluster("dgx-h100").device.issue_seconds
    # To the host and back, for each of four microbatches; a copy runs during one layer alone.
    copied = 4 * LAYERS * 2 * HIDDEN_BYTES / 1e8
    assert 0.5 * copied < slow - again < copied
