"""Host memory of a plan: offloaded states, and copies of a GPU's checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.memory import Memory, verdict
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.report import why
from meshwright.planner.plan.search import RunnerUp, search
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.planned import planned_mesh
from meshwright.training.checkpoint import pieces_of
from tests.harness import build
from tests.planner.plan.counted import CPU, HALVES, MEGATRON, synced

CLUSTER = load_cluster("dgx-h100")
OFFLOADED = {"memory": {"offload": {"to": "host"}}}
BF16_STATES = {"optimizer": {"states": "bf16", "masters": "bf16", "lr": 1e-2, "clip": 0.5}}


def copied(config: Config) -> int:
    """Return the bytes of the pieces that rank 0 of a run gives to a checkpoint."""
    parts = build(config, planned_mesh(Grid(config.layout.axes), 0, config.layout.token_axes))
    parts.optimizer.prepare_states(1)
    return sum(size_bytes(piece.tensor) for piece in pieces_of(parts))


CASES: dict[str, Config] = {
    "replicas": synced("allreduce", 2, **HALVES),
    "slices": synced("zero1", 2, **HALVES),
    "slices of weights": synced("zero3", 2, **HALVES),
    "1-D cut": synced("zero2", 2, MEGATRON, **HALVES),
    "float32": synced("zero1", 2, precision={"level": "O0", "dtype": "float32"}),
    "states and masters in bf16": synced("zero1", 2, **HALVES, **BF16_STATES),
    "Muon": synced("zero1", 2, **HALVES, optimizer={"name": "muon", "lr": 1e-2}),
    "frozen": with_field(synced("zero1", 2, **HALVES), "model.frozen", ("blocks.0.*",)),
    "offloaded": synced("zero1", 2, **HALVES, **OFFLOADED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_needs_as_much_host_memory_as_its_pieces(name: str) -> None:
    (memory,) = Planner(CLUSTER).predict(CASES[name]).memory
    real = copied(CASES[name])
    if name == "offloaded":  # 12 bytes a weight in the store, 12 in the copy; of float32 weights 8 and 12
        assert 1.99 * real <= memory.host <= 2 * real
    else:
        assert memory.host == real


@pytest.mark.parametrize("sync, copying", [("allreduce", 1), ("zero1", 4)])
def test_of_ranks_with_equal_slots_one_copies(sync: str, copying: int) -> None:
    """A node of replicas holds a checkpoint's copy once, as slices or whole."""
    (memory,) = Planner(CLUSTER).predict(synced(sync, 4, **HALVES)).memory
    assert memory.host_of_node == copying * memory.host


def test_a_cpus_memory_is_the_hosts_already() -> None:
    (memory,) = Planner(CPU).predict(CASES["offloaded"]).memory
    assert (memory.host, memory.host_of_node) == (0, 0)


def most_of(found: Prediction) -> int:
    """Return the bytes of a node with ranks of the stage that needs most."""
    return max(memory.host_of_node for memory in found.memory)


def with_host(size: int) -> Cluster:
    return CLUSTER.model_copy(update={"host_memory_bytes": size})


def test_what_a_node_has_no_room_for_is_refused_by_name() -> None:
    config, fixed = CASES["offloaded"], ["layout", "memory", "batch"]
    fitting = search(config, CLUSTER, 2, fixed=fixed).predictions[0]
    assert fitting.fits
    needed = fitting.fullest.host_of_node
    assert search(config, with_host(needed), 2, fixed=fixed).predictions[0].fits
    with pytest.raises(
        ConfigError,
        match=r"in host memory 0\.263 MB; 1e-06 MB of the 0\.527 MB of a node's host.*offload\.to=none or disk",
    ):
        search(config, with_host(needed - 1), 2, fixed=fixed)
    assert not Planner(with_host(needed - 1)).predict(config).fits


def test_a_search_leaves_out_only_layouts_that_need_more() -> None:
    """States on the host need twice the memory of states on the device."""
    config = CASES["slices"]
    needs = [most_of(one) for one in search(config, CLUSTER, 2, top=20).predictions]
    found = search(config, with_host(min(needs)), 2, top=20).predictions
    assert max(needs) > min(needs)
    assert all(most_of(one) <= min(needs) for one in found)


def test_a_runner_up_says_which_memory_it_lacks() -> None:
    best = Planner(CLUSTER).predict(CASES["slices"])
    memory = Memory(10, 0, 0, 0, 0, 0, host=6 * 10**9, host_of_node=48 * 10**9)
    best = replace(best, cluster=with_host(40 * 10**9))
    assert verdict(memory, best.cluster) == "does not fit"
    told = why(RunnerUp("zero1", best.config, memory, whole=True), best)
    assert told == "does not fit: 8.00 GB of the 40.00 GB of a node's host memory are missing"
