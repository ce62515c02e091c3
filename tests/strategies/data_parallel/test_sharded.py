"""Gradients and weights as slices: the sends of each microbatch, the most whole bytes at any time, and the next part's
weights, sent while a part is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshwright.compute.model import EMBEDDINGS, HEAD, rows_of, to_device
from meshwright.compute.parameters.bucket import Bucket, make_buckets
from meshwright.compute.parameters.shard import Box
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.ranks.comm import Later
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.strategies.data_parallel.gathering import GatheredSum, Gathering
from meshwright.training.rank_model import build_model
from meshwright.training.step import backward
from tests.harness import build, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.oracle.pipeline import WHOLE, V, pipelined
from tests.workers import run_ranks

MICRO = 2


def step(mesh: Mesh, sync: str, count: int = 3) -> dict[str, Any]:
    """Run a step of `count` microbatches. Return each phase's sends, and the most bytes of gradients and of weights."""
    size = mesh.size(*mesh.grid.names)
    layout = {"data": {"size": size, "sync": sync, "shard": mesh.size("data"), "bucket": 8192}}
    config = config_for(sync, size, batch={"global": count * MICRO * size, "micro": MICRO}, layout=layout)
    parts = build(config, mesh)
    strategy = parts.strategy
    most = {"gradients": 0, "values": 0}

    def look(*_: object) -> None:
        for which, before in most.items():
            now = sum(getattr(bucket, which).untyped_storage().nbytes() for bucket in strategy.buckets)
            most[which] = max(before, now)

    for parameter in parts.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for module in parts.model.modules():
        module.register_forward_hook(look)
    seen: dict[str, Any] = {
        "buckets": [bucket.gradients.numel() * 8 for bucket in strategy.buckets],
        "parts": [bucket.parts for bucket in strategy.buckets],
    }

    def record(phase: str) -> None:
        entries = {verb: (entry.calls, entry.sent_bytes) for (_, verb), entry in mesh.ledger.traffic.items()}
        seen[phase] = entries
        mesh.ledger.traffic.clear()

    mesh.ledger.traffic.clear()
    batch = rows_of(global_batch(config, 0), slice(0, config.replica_batch))
    for index in range(count):
        rows = rows_of(batch, slice(index * MICRO, (index + 1) * MICRO))
        forward_and_backward(parts, rows, {"labels": 1.0}, final=index == count - 1)
        record(f"microbatch {index}")
    strategy.finish()
    record("finish")
    seen["left"] = sum(bucket.gradients.untyped_storage().nbytes() for bucket in strategy.buckets)
    strategy.publish()
    record("publish")
    slices = sum(slot.parameter.grad.nbytes for slot in strategy.slots)
    held = dict(zip(("weight_bytes", "gradient_bytes"), strategy.most_bytes, strict=True))
    return seen | held | {"most": most, "slices": slices}


@pytest.mark.parametrize("size", [2, 3])
def test_zero2_sums_in_every_microbatch_and_holds_few_buckets(size: int) -> None:
    for seen in run_ranks(step, Grid((("data", size),)), "zero2"):
        buckets = seen["buckets"]
        assert len(buckets) > 3
        part = (size - 1) * sum(buckets) // size
        for index in range(3):
            assert seen[f"microbatch {index}"] == {"reduce_scatter": (len(buckets), part)}
        assert seen["publish"] == {"all_gather": (len(buckets), part)}
        assert seen["left"] == 0
        assert seen["slices"] == sum(buckets) // size
        assert 0 < seen["most"]["gradients"] <= seen["gradient_bytes"] - seen["slices"] < sum(buckets)


def test_shard_groups_sum_their_slices_once_a_step() -> None:
    """HSDP: 2 groups of 2 send in a microbatch and hold the same bytes as 2 ranks. Slices are summed over the groups
    once, all but the last bucket's during the last backward pass."""
    grid = Grid((("replicate", 2), ("data", 2), ("pipe", 1)))
    for sync in ("zero2", "zero3"):
        alone = run_ranks(step, Grid((("data", 2),)), sync)
        for seen in run_ranks(step, grid, sync, token_axes=("replicate", "data")):
            buckets = seen["buckets"]
            calls, under = seen["microbatch 2"].pop("all_reduce")
            assert calls == len(buckets) - 1
            assert seen["finish"] == {"all_reduce": (1, sum(buckets) // 2 - under)}  # in all 2 (r-1)/r of S/k
            kept = (
                "microbatch 0",
                "microbatch 1",
                "microbatch 2",
                "publish",
                "slices",
                "gradient_bytes",
                "weight_bytes",
            )
            assert sum(buckets) % 4 == 0
            assert {each: seen[each] for each in kept} == {each: alone[0][each] for each in kept}


@pytest.mark.parametrize("sync", ["zero2", "zero3"])
def test_a_single_microbatch_sums_each_bucket_once(sync: str) -> None:
    for seen in run_ranks(step, Grid((("data", 2),)), sync, 1):
        assert seen["microbatch 0"]["reduce_scatter"] == (len(seen["buckets"]), sum(seen["buckets"]) // 2)
        assert seen["finish"] == {}


@pytest.mark.parametrize("size", [2, 3])
def test_zero3_gathers_a_part_at_a_time_and_holds_two(size: int) -> None:
    """With two layers and a tied table, a microbatch gathers the embeddings, both layers, the head, and layer 0 again.
    The next microbatch finds layer 0."""
    for seen in run_ranks(step, Grid((("data", size),)), "zero3"):
        buckets, parts = seen["buckets"], seen["parts"]

        def part(index: int, buckets: list[int] = buckets, parts: list[tuple[int, ...]] = parts) -> list[int]:
            return [length for length, users in zip(buckets, parts, strict=True) if index in users]

        def sent(*gathered: int) -> tuple[int, int]:
            each = [length for index in gathered for length in part(index)]
            return len(each), (size - 1) * sum(each) // size

        reduced = (len(buckets), (size - 1) * sum(buckets) // size)
        assert seen["microbatch 0"] == {"reduce_scatter": reduced, "all_gather": sent(EMBEDDINGS, 0, 1, HEAD, 0)}
        for index in (1, 2):
            assert seen[f"microbatch {index}"] == {
                "reduce_scatter": reduced,
                "all_gather": sent(EMBEDDINGS, 1, HEAD, 0),
            }
        assert seen["publish"] == {}
        two = max(sum(part(EMBEDDINGS) + part(0)), sum(part(0) + part(1)), sum(part(1) + part(HEAD)))
        assert seen["weight_bytes"] == sum(buckets) // size + two
        assert 0 < seen["most"]["values"] <= two
        assert 0 < seen["most"]["gradients"] <= seen["gradient_bytes"] - seen["slices"]
        assert seen["slices"] == sum(buckets) // size


def trace_gathers(strategy: Gathering, events: list[str], look: Callable[[], None] = lambda: None) -> None:
    """Record the begin of each bucket's gather, and the end of the wait. `look`: called when a gather has begun."""
    for one in strategy.sums:

        def traced(one: GatheredSum = one, gather: Callable[[], None] = one.gather) -> None:
            gather()
            work, parts = one.arriving, one.bucket.parts
            events.append(f"gather {parts}")
            look()
            one.arriving = Later(lambda: (work.wait(), events.append(f"have {parts}"))[0])

        one.gather = traced


def trace(mesh: Mesh) -> list[str]:
    """Return the order of a step's computed parts, begun gathers and waits."""
    parts = build(config_for("zero3", mesh.size("data"), batch={"global": 4, "micro": 2}), mesh)
    strategy, events = parts.strategy, []
    trace_gathers(strategy, events)
    for name, block in parts.model.blocks.items():
        block.register_forward_hook(lambda *_, name=name: events.append(f"computed {name}"))
    batch = rows_of(global_batch(parts.config, 0), slice(0, 2))
    forward_and_backward(parts, batch, {"labels": 1.0})
    strategy.finish()
    strategy.publish()
    return events


def test_the_next_parts_weights_travel_while_a_part_is_computed() -> None:
    for events in run_ranks(trace, Grid((("data", 2),))):
        assert events.index("gather (1,)") < events.index("computed 0") < events.index("have (1,)")
        assert events.index("gather (0,)") < events.index("have (0,)") < events.index("computed 0")
        last = len(events) - 1 - events[::-1].index("gather (0,)")  # in the backward pass, during layer 1
        assert last > events.index("computed 1")
        assert "have (0,)" not in events[events.index("computed 1") : last]


def trace_of_chunks(mesh: Mesh, config: Config) -> tuple[list[str], int, int]:
    """Run a step of a stage of two chunks. Return the gathers, waits and computed parts; the most bytes of whole
    weights at a time, and the bytes of two neighbouring parts."""
    parts = build(config, mesh)
    strategy, events, most = parts.strategy, [], 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(bucket.values.untyped_storage().nbytes() for bucket in strategy.buckets))

    trace_gathers(strategy, events, look)
    for name, block in parts.model.blocks.items():
        block.register_forward_hook(lambda *_, name=name: events.append(f"computed {name}"))
    everyone = to_device(rows_of(global_batch(config, 0), slice(0, config.replica_batch)), mesh.device)
    parts.pipeline.train(parts.microbatches(everyone), {"labels": 1.0, "samples": 1.0}, lambda index, chunk: None)
    strategy.finish()
    slices = sum(slot.parameter.nbytes for slot in strategy.slots)
    return events, most, strategy.most_bytes[0] - slices


def test_stages_of_two_chunks_gather_ahead_and_hold_two_parts() -> None:
    """Six layers in a v of two stages: the first holds layers 0, 1 and 5, the second 2 to 4."""
    config = pipelined("gpt2", 2, "message-driven", WHOLE, 2, V | {"partition": (2, 2, 1, 1)})
    tree = config.model_dump(mode="json", by_alias=True)
    tree["model"]["layers"], tree["layout"]["data"]["sync"] = 6, "zero3"
    config = parse_config(tree)
    for rank, (events, most, two) in enumerate(
        run_ranks(trace_of_chunks, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    ):
        first, ahead = (0, 1) if rank % 2 == 0 else (2, 3)
        assert events.index(f"gather ({ahead},)") < events.index(f"computed {first}") < events.index(f"have ({ahead},)")
        assert 0 < most <= two


def sums_of(mesh: Mesh, config: Config) -> list[tuple[str, int]]:
    """Return the sums of a microbatch by bucket: the begin of each sum, and the wait for each sum's end."""
    parts, events = build(config, mesh), list[tuple[str, int]]()

    def noted(event: str, index: int, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: (events.append((event, index)), run())[1]

    with ExitStack() as stack:
        for index, one in enumerate(parts.strategy.sums):
            for event in ("leave", "end"):
                run = noted(event, index, getattr(one, event))
                stack.enter_context(mock.patch.object(one, event, run))
        backward(parts, global_batch(config, 0))
    return events


def test_a_sum_begins_before_the_one_before_it_is_waited_for() -> None:
    """A link always has a sum while the device adds another sum to a slice."""
    layout = {"data": {"size": 2, "sync": "zero2", "bucket": 8192}}
    config = config_for("zero2", 2, layout=layout, batch={"global": 2 * MICRO, "micro": MICRO})
    for events in run_ranks(sums_of, Grid(config.layout.axes), config):
        begun = [index for event, index in events if event == "leave"]
        assert len(begun) > 3
        for before, following in pairwise(begun):
            assert events.index(("leave", following)) < events.index(("end", before))


def first_slices(mesh: Mesh, config: Config) -> list[tuple[str, Box, Tensor]]:
    """Return this rank's slices of the initial weights. At most one bucket is whole at a time."""
    taken: list[Bucket] = []

    def one_by_one(*arguments: Any, **options: Any) -> Iterator[Bucket]:
        for bucket in make_buckets(*arguments, **options):
            whole = [other for other in taken if other.values.untyped_storage().nbytes()]
            assert not whole
            assert not any(other.gradients.untyped_storage().nbytes() for other in taken)
            taken.append(bucket)
            yield bucket

    with mock.patch("meshwright.strategies.data_parallel.assembly.make_buckets", one_by_one):
        slots = build(config, mesh).strategy.slots
    assert len(taken) > 3
    return [
        (place.name, place.box, slot.parameter.detach()[place.start : place.stop])
        for slot in slots
        for place in slot.places
    ]


@pytest.mark.parametrize("level, dtype", [("O0", "float64"), ("O2", "bf16")])
def test_zero3_draws_and_cuts_one_bucket_after_the_other(level: str, dtype: str) -> None:
    """The values equal a whole model's, to the bit, and every element is on one rank."""
    config = config_for("zero3", 2, precision={"level": level, "dtype": dtype})
    serial = build_model(config, SerialKit(alone := solo_mesh(torch.device("cpu"))), alone)
    whole = {name: parameter.detach() for name, parameter in serial.named_parameters()}
    counted = dict.fromkeys(whole, 0)
    for rank in run_ranks(first_slices, Grid((("data", 2),)), config):
        for name, box, values in rank:
            part = whole[name][box.slices]
            assert values.dtype == part.dtype
            assert torch.equal(values.view(part.shape), part), name
            counted[name] += values.numel()
    assert counted == {name: parameter.numel() for name, parameter in whole.items()}
