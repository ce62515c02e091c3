"""A prediction, composed of links recorded one by one, equals the counts of planning the run whole."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.software import OWN_SOFTWARE, with_imbalance
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import PIPE, Grid
from tests.harness import counted_step
from tests.planner.plan.clusters import CLUSTER, DEVICE

MODEL = {
    "base": "gpt2-small",
    "layers": 5,
    "hidden": 32,
    "heads": 4,
    "positions": 16,
    "vocabulary": 512,
    "dropout": 0.0,
}
MESSAGE_DRIVEN = {"size": 2}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {}, "none", "zero1"),
    ({"kind": "megatron", "size": 2}, MESSAGE_DRIVEN, "none", "allreduce"),
    ({"kind": "megatron", "size": 4, "sequence_parallel": True}, {"size": 3, "schedule": "1f1b"}, "auto", "ring"),
    ({"kind": "tesseract", "q": 2, "d": 1}, {"size": 2, "schedule": "gpipe"}, "selective", "rooted"),
    ({"kind": "tesseract", "q": 2, "d": 2}, {}, "none", "zero1"),
    ({"kind": "subgraph", "size": 2, "branch": "block"}, MESSAGE_DRIVEN, "auto", "allreduce"),
    ({"kind": "subgraph", "size": 4, "common": "one"}, {"size": 2, "schedule": "axonn"}, "none", "zero1"),
]


def config_for(tensor: dict[str, Any], pipeline: dict[str, Any], recompute: Any, **more: Any) -> Config:
    layout = {"data": {"size": 2, "sync": more.pop("sync", "allreduce")}, "pipeline": pipeline}
    tree = {
        "model": MODEL,
        "data": {"sequence": 16},
        "batch": {"global": 32, "micro": 4},
        "layout": layout | ({"tensor": tensor} if tensor else {}),
        "memory": {"recompute": recompute},
    }
    return parse_config(tree | more)


def predicted(config: Config) -> Prediction:
    return Planner(CLUSTER).predict(config)


def sent(traffic: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes."""
    return {key: (entry.calls, entry.sent_bytes) for key, entry in traffic.items() if entry.calls}


@pytest.mark.few(4)
@pytest.mark.parametrize("tensor, pipeline, recompute, sync", LAYOUTS)
def test_traffic_and_weights_are_those_of_the_whole_run(
    tensor: dict[str, Any], pipeline: dict[str, Any], recompute: str, sync: str
) -> None:
    check_whole_run(config_for(tensor, pipeline, recompute, sync=sync))


def test_experts_have_equal_shares() -> None:
    """A recorded router has no values: each rank sends every other rank the rows of an even router."""
    model = {
        "family": "llama", "layers": 3, "hidden": 32, "heads": 4, "feed_forward": 16, "positions": 16,
        "vocabulary": 512, "experts": {"count": 4, "per_token": 2, "balance": 0.1},
    }  # fmt: skip
    data = {"size": 4, "expert": 2, "sync": "zero1"}
    config = config_for({}, {}, "none", model=model, layout={"data": data, "pipeline": {"size": 2}})
    check_whole_run(config)
    counts = 4 * 8 // 2  # bytes of the counts that say how many rows follow
    elsewhere = 32 // 4 * 16 * 2 // 2  # rows of two experts a token; half of the experts are on this rank
    traffic = predicted(config).traffic
    sent_bytes = sum(part["expert", "all_to_all"].sent_bytes for part in traffic)
    rows_bytes = 4 * elsewhere * 32 * 4  # all-to-alls, rows, hidden width, bytes
    assert sent_bytes == 3 * (rows_bytes + counts * config.num_microbatches)  # layers


def test_an_imbalance_makes_the_busiest_rank_the_slowest() -> None:
    """The busiest rank's rows take memory and time only if ranks hold different experts; a capacity has no
    imbalance."""
    model = {
        "family": "llama", "layers": 2, "hidden": 32, "heads": 4, "feed_forward": 64, "positions": 16,
        "vocabulary": 512, "experts": {"count": 4, "per_token": 2},
    }  # fmt: skip

    def made(expert: int, imbalance: float) -> Prediction:
        config = config_for({}, {}, "none", model=model, layout={"data": {"size": 4, "expert": expert}})
        return Planner(CLUSTER, with_imbalance(OWN_SOFTWARE, config, imbalance)).predict(config)

    even, busy = made(2, 1.0), made(2, 1.5)
    assert busy.seconds > even.seconds
    assert even.fullest.activations < busy.fullest.activations < 1.5 * even.fullest.activations
    assert made(1, 1.5).seconds == made(1, 1.0).seconds
    bounded = config_for({}, {}, "none", model=model | {"experts": model["experts"] | {"capacity": 1.0}})
    for config, message in [
        (bounded, "--imbalance=1.5 has no effect with model.experts.capacity"),
        (config_for({}, {}, "none"), "--imbalance=1.5 has no effect on a model without experts"),
    ]:
        with pytest.raises(ConfigError, match=message):
            with_imbalance(OWN_SOFTWARE, config, 1.5)


def check_whole_run(config: Config) -> None:
    made = predicted(config)
    grid = Grid(config.layout.axes)
    for stage in range(config.layout.pipeline.size):
        parts = counted_step(config, grid.rank(dict.fromkeys(grid.names, 0) | {PIPE: stage}))
        traffic = parts.mesh.ledger.traffic
        assert sent(made.traffic[stage]) == sent(traffic)
        assert made.traffic[stage].keys() >= traffic.keys()
        for key, entry in traffic.items():
            peers = {peer: part.sent_bytes for peer, part in entry.by_peer.items()}
            assert {peer: part.sent_bytes for peer, part in made.traffic[stage][key].by_peer.items()} == peers
        buckets = parts.strategy.buckets  # type: ignore[attr-defined]
        assert made.memory[stage].weights == sum(bucket.values.nbytes for bucket in buckets)
        assert made.memory[stage].gradients == sum(bucket.gradients.nbytes for bucket in buckets)


def test_groups_of_recomputed_layers_follow_from_small_ones() -> None:
    """The costs of recomputing five layers at once follow from one and two."""
    config = config_for({"kind": "megatron", "size": 2}, {}, 5)
    made, parts = predicted(config), counted_step(config)
    assert sent(made.traffic[0]) == sent(parts.mesh.ledger.traffic)
    assert made.flops == pytest.approx(predicted(config_for({"kind": "megatron", "size": 2}, {}, 1)).flops)


def test_recomputation_trades_memory_for_products() -> None:
    plain, again = (predicted(config_for({}, {}, recompute)) for recompute in ("none", "auto"))
    assert again.memory[0].activations < plain.memory[0].activations / 2
    assert 1.2 * plain.flops < again.flops < 4 / 3 * plain.flops


def test_half_the_ranks_do_twice_the_work() -> None:
    """The layers' products are shared out evenly by every kit."""
    whole = predicted(config_for({}, {}, "none"))
    for tensor, parts in (({"kind": "megatron", "size": 2}, 2), ({"kind": "tesseract", "q": 2, "d": 1}, 4)):
        made = predicted(config_for(tensor, {}, "none"))
        assert made.flops == pytest.approx(whole.flops / parts, rel=0.02)


def test_each_pass_through_a_part_takes_the_host_its_time() -> None:
    """Embeddings, five layers and the head, forward and backward, for each of eight microbatches."""
    host = CLUSTER.model_copy(
        update={"device": DEVICE.model_copy(update={"python_seconds_per_part": 0.25}), "cores": 1, "turns": None}
    )
    config = config_for({}, {}, "none", layout={})
    longer = Planner(host).predict(config).seconds - Planner(CLUSTER).predict(config).seconds
    assert longer == pytest.approx(0.25 * 2 * 7 * 8)


def test_a_cpu_takes_the_norm_of_a_wide_copy() -> None:
    planner, config = Planner(CLUSTER), config_for({}, {}, "none", layout={})
    for bucket in TimedRun(planner.site, planner.buckets, config, planner.stages(config)).buckets[0]:
        copied = bucket.touched_bytes(config, "cpu") - bucket.touched_bytes(config, "cuda")
        assert copied == 2 * 8 * bucket.stepped_elements > 0


def test_rounding_to_the_nearest_takes_no_noise() -> None:
    """A fused AdamW in bf16 reads a gradient twice (norm, step), and reads and writes weight and moments in bf16."""
    half = {"precision": {"level": "O2", "dtype": "bf16", "accumulate": "stored"}}
    config = config_for({}, {}, "none", layout={}, **half)
    settings = config.optimizer.model_copy(update={"name": "adamw", "masters": "bf16", "states": "bf16"})
    config = config.model_copy(update={"optimizer": settings})
    touched, memory = {}, {}
    for rounding in ("random", "nearest"):
        planner = Planner(CLUSTER, OWN_SOFTWARE.model_copy(update={"rounding": rounding}))
        run = TimedRun(planner.site, planner.buckets, config, planner.stages(config))
        buckets = [bucket for bucket in run.buckets[0] if bucket.kind.dtype.itemsize == 2]
        touched[rounding] = sum(bucket.touched_bytes(config, "cuda") for bucket in buckets)
        memory[rounding] = planner.predict(config).memory[0]
    elements = sum(bucket.stepped_elements for bucket in buckets)
    assert touched["nearest"] == (2 * 2 + 2 * 2 + 2 * 2 * 2) * elements < touched["random"]
    assert memory["nearest"].states == memory["random"].states
    assert memory["nearest"].temporaries <= memory["random"].temporaries


def test_offload_leaves_the_staging_on_the_device() -> None:
    half = {"precision": {"level": "O2", "dtype": "bf16"}}
    here = predicted(config_for({}, {}, "none", **half)).memory[0]
    config = config_for({}, {}, "none", **half)
    offload = config.memory.offload.model_copy(update={"to": "host", "bucket": 1024})
    config = config.model_copy(update={"memory": config.memory.model_copy(update={"offload": offload})})
    there = predicted(config).memory[0]
    assert there.states == 16 * 1024
    assert here.states == pytest.approx(6 * here.weights, rel=0.05)  # 12 bytes to the 2 of a half


@pytest.mark.parametrize(
    "more, field",
    [
        ({"sync": "server-loss"}, "layout.data.sync"),
        ({"precision": {"level": "O0", "dtype": "float64"}}, "precision.dtype"),
    ],
)
def test_what_cannot_be_planned_is_refused(more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        predicted(config_for({}, {}, "none", **more))


def test_a_server_is_slower_than_a_ring() -> None:
    """A server sends the model to all ranks, receives all gradients, and steps alone."""
    server, ring = (predicted(config_for({}, {}, "none", sync=sync)) for sync in ("server-gradient", "ring"))
    assert server.seconds > ring.seconds
    assert server.traffic[0]["data", "broadcast"].sent_bytes == server.memory[0].weights


def test_a_partition_measured_at_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="measured"):
        predicted(config_for({}, {"size": 2, "partition": "measured"}, "none"))


def test_what_was_recorded_serves_other_layouts() -> None:
    planner = Planner(CLUSTER)
    first = planner.predict(config_for({"kind": "megatron", "size": 2}, {}, "none"))
    known = len(planner.recordings.recorded)
    second = planner.predict(config_for({"kind": "megatron", "size": 2}, {"size": 2, "schedule": "1f1b"}, "none"))
    assert len(planner.recordings.recorded) == known
    assert second.seconds < first.seconds
