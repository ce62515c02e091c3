"""Memory of a process beyond tensors: the allocator's segments, the context, the communicators' buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.process import DIRECT_CHANNEL, GROUP_CHANNEL, NET_POOL, PAIR_CHANNEL, group_bytes
from tests.oracle.pipeline import pipelined
from tests.oracle.tensor import config_for
from tests.planner.plan.clusters import FLAT, INNER, OUTER, cluster
from tests.planner.plan.counted import MEGATRON, WHOLE, synced

PEAK = FLAT.device.peak_flops_per_second | {"float64": 1e13}
GPU = FLAT.model_copy(update={"device": FLAT.device.model_copy(update={"peak_flops_per_second": PEAK})})


def with_channels(channels: int, on: Cluster = GPU) -> Cluster:
    links = on.links["torch"].model_copy(update={"channels": channels})
    return on.model_copy(update={"links": {"torch": links}})


@pytest.mark.parametrize(
    "config, channel_bytes",
    [
        (synced("allreduce", 1), 0),
        (synced("allreduce", 2), 2 * PAIR_CHANNEL),  # data, and the world with another comm
        (synced("allreduce", 2, MEGATRON), 2 * PAIR_CHANNEL + GROUP_CHANNEL),  # data, tensor, the world
        (pipelined("gpt2", 2, "1f1b", WHOLE), 4 * PAIR_CHANNEL + 2 * DIRECT_CHANNEL),
    ],
)  # fmt: skip
def test_communicators(config: Config, channel_bytes: int) -> None:
    """A pipeline has communicators of the world, two with a neighbour, and one of a tied table's two ends."""
    assert {memory.communicators for memory in Planner(with_channels(3)).predict(config).memory} == {3 * channel_bytes}
    assert {memory.communicators for memory in Planner(GPU).predict(config).memory} == {0}


def test_connections_to_other_nodes_share_buffers() -> None:
    """Two channels a peer if the channels have room for so many messages, else one; inside of a node all channels."""

    def connections(ranks: int, neighbours: int, channels: int) -> int:
        with_messages, without = (group_bytes(ranks, neighbours, channels, direct=each) for each in (True, False))
        return with_messages - without

    assert connections(8, 7, 32) == 7 * 32 * DIRECT_CHANNEL
    assert connections(64, 7, 32) == 2 * 7 * DIRECT_CHANNEL + 32 * NET_POOL
    assert connections(65, 7, 32) == connections(2048, 7, 32) == 7 * DIRECT_CHANNEL + 32 * NET_POOL
    assert connections(4, 0, 2) == 2 * NET_POOL


def test_experts_over_nodes_hold_few_buffers() -> None:
    """Of four ranks with experts, each has connections with buffers to all others on one switch; on nodes of two to
    one."""
    few, pairs = {"global": 16, "micro": 2}, cluster({**INNER, "joins": 2}, OUTER)
    config = config_for("experts", WHOLE, 4, batch=few, layout={"data": {"size": 4, "expert": 4}})
    on_a_switch, on_nodes = (
        Planner(with_channels(32, each)).predict(config).fullest.communicators
        for each in (GPU, pairs.model_copy(update={"device": GPU.device}))
    )
    assert on_a_switch - on_nodes == group_bytes(4, 3, 32, direct=True) - group_bytes(4, 1, 32, direct=True) > 0


def test_allocator_holds_more_than_tensors() -> None:
    memory = Planner(GPU).predict(synced("allreduce", 1)).fullest
    assert memory.cached > 0
    assert memory.reserved == memory.allocated + memory.cached
    assert memory.total == memory.reserved + memory.context + memory.communicators


def test_verdicts() -> None:
    """Memory is tight if the spare memory is within the unpredicted share."""
    memory = Planner(GPU).predict(synced("allreduce", 1)).fullest
    for spare, expected in ((1.2, "fits"), (1.05, "tight"), (0.99, "does not fit")):
        device = GPU.device.model_copy(update={"memory_bytes": int(memory.total * spare)})
        assert verdict(memory, GPU.model_copy(update={"device": device})) == expected


def test_at_the_limit_cached_memory_is_given_back() -> None:
    """If a device has memory for the tensors and none for the cache, the allocator frees the cache, and the layout is
    tight."""
    config = with_field(synced("allreduce", 1), "model.hidden", 768)
    free = Planner(GPU).predict(config).fullest
    device = GPU.device.model_copy(update={"memory_bytes": free.total - 4 * 2**20})
    prediction = Planner(GPU.model_copy(update={"device": device})).predict(config)
    assert replace(prediction.fullest, cached=0) == replace(free, cached=0)
    assert prediction.fullest.total <= free.total
    assert verdict(prediction.fullest, prediction.cluster) != "fits"


def test_a_process_holds_what_its_transport_loads() -> None:
    """`links.T.reserved` overrides the device's, and changes the verdict as any byte does."""
    config = synced("allreduce", 2)
    loaded = GPU.links["torch"].model_copy(update={"reserved_bytes": GPU.device.reserved_bytes + 10**8})
    plain, more = (
        Planner(cluster).predict(config).fullest
        for cluster in (GPU, GPU.model_copy(update={"links": {"torch": loaded}}))
    )
    assert more == replace(plain, context=plain.context + 10**8)


@pytest.mark.parametrize("sync, of_gradients", [("allreduce", 2), ("zero1", 1), ("ring", 0), ("zero2", 0)])
def test_gradients_that_ranks_share_are_resident_in_each(sync: str, of_gradients: int) -> None:
    """CPU ranks of a machine share these gradients, which exist once and are in no total."""
    host = GPU.device.model_copy(update={"kind": "cpu"})
    machine = GPU.model_copy(update={"device": host, "cores": 4})
    predicted = Planner(machine).predict(synced(sync, 2))
    assert predicted.fullest.read == of_gradients * predicted.fullest.gradients // 2
    assert predicted.measured_memory == predicted.worst_memory + predicted.fullest.read
    assert Planner(GPU).predict(synced(sync, 2)).fullest.read == 0
