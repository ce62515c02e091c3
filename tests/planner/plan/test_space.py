"""The space is the legal set: of all expressible layouts exactly the layouts that the config's rules accept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import pytest

from meshwright.compute.tensor.section import Megatron
from meshwright.config import Config, parse_config
from meshwright.config.layout import ContextParallel, DataParallel, Layout, PipelineSection
from meshwright.config.rules import broken_rules
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.software import load_program
from meshwright.planner.plan.space import (
    FEW,
    SearchJob,
    as_messages,
    fixed_fields,
    legal_layouts,
    orders_of,
    ranks_per_node,
    savings,
)
from meshwright.ranks.grid import Grid

LEVELS = [{"joins": 2, "latency": 1e-6, "bandwidth": 1e10}, {"latency": 1e-5, "bandwidth": 1e9}]
TREE: dict[str, Any] = {
    "model": {"layers": 3, "hidden": 12, "heads": 6, "positions": 24, "vocabulary": 300, "vocabulary_multiple": 4},
    "data": {"sequence": 12},
    "batch": {"global": 12},
}
HALF = {"precision": {"level": "O2", "dtype": "bf16"}}


def cluster_of(devices_per_node: int = 2) -> Cluster:
    device = {"kind": "cuda", "memory": "1G", "peak": {"float32": 1e12}, "efficiency": [(1, 0.5)],
              "bandwidth": [(1, 1e11)], "host_link": 1e10}  # fmt: skip
    links = {"torch": {"levels": LEVELS}}
    return Cluster.model_validate(
        {"name": "small", "device": device, "devices_per_node": devices_per_node, "links": links}
    )


def job_of(devices: int, tree: dict[str, Any] = TREE, fixed: tuple[str, ...] = ()) -> SearchJob:
    return SearchJob(parse_config(tree), cluster_of(), devices, fixed)


def facts(config: Config) -> tuple[Any, ...]:
    layout, memory = config.layout, config.memory
    names = tuple(name for name, size in layout.axes if size > 1)
    return (
        layout.data.size, layout.data.sync, layout.pipeline.size, layout.pipeline.schedule, layout.pipeline.limit,
        layout.pipeline.chunks, layout.pipeline.placement,
        layout.tensor, names, layout.ranks_per_node, config.batch.micro, memory.recompute, memory.offload.to,
        layout.data.shard,
    )  # fmt: skip


def everything(run: Config, devices: int) -> Iterator[Config]:
    """Yield all expressible layouts, legal or not, on `devices` ranks, in every order of the three groups of axes."""
    sizes = range(1, devices + 1)
    tensors: list[dict[str, Any]] = [{"kind": "none"}]
    tensors += [{"kind": "megatron", "size": n, "sequence_parallel": cut} for n in sizes[1:] for cut in (False, True)]
    tensors += [{"kind": "tesseract", "q": q, "d": d} for q in sizes[1:] for d in sizes]
    tensors += [
        {"kind": "subgraph", "size": n, "common": common, "branch": branch}
        for n in sizes[1:] for common in ("all", "one") for branch in ("attention-core", "attention", "block")
    ]  # fmt: skip
    for tensor, pipe, data in product(tensors, sizes, sizes):
        tree = run.model_dump(mode="json", by_alias=True)
        tree["layout"] |= {"data": {"size": data}, "pipeline": {"size": pipe}, "tensor": tensor, "ranks_per_node": 2}
        made = Config.model_validate(tree)
        if made.layout.world_size != devices:
            continue
        syncs = ("allreduce", "zero1", "zero2", "zero3")
        here = pipe == 1 and data > 2 and not made.layout.tensor.axes  # slices that two ranks of a node share
        shared = [(sync, 2) for sync in syncs[2:] if here]
        for (sync, shard), micro, recompute, to in product(
            [*((sync, None) for sync in syncs), *shared],
            range(1, run.batch.global_ + 1), ("none", "selective", "auto"), ("none", "host"),
        ):  # fmt: skip
            cut = {"size": data, "sync": sync, "shard": shard}
            tree["layout"] |= {"data": cut, "order": "auto"}
            blocks = _blocks(Config.model_validate(tree).layout)
            orders = {
                tuple(name for block in some for name, size in block if size > 1) for some in permutations(blocks)
            }
            for order, (schedule, limit, *chunked) in product(orders, _schedules(pipe)):
                placed = {"chunks": 2, "placement": chunked[0]} if chunked else {}
                told = {"data": cut, "order": order,
                        "pipeline": {"size": pipe, "schedule": schedule, "limit": limit} | placed}  # fmt: skip
                tree["layout"] |= told
                tree["batch"]["micro"] = micro
                tree["memory"] |= {"recompute": recompute, "offload": {"to": to}}
                yield Config.model_validate(tree)


def _blocks(layout: Layout) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return axes that stay together, with sizes."""
    return layout.data.axes, (("pipe", layout.pipeline.size),), layout.tensor.axes


def _schedules(pipe: int) -> list[tuple[Any, ...]]:
    """Return schedules with limits, and the shape of two chunks a stage."""
    if pipe == 1:
        return [("message-driven", "auto")]
    limits: list[tuple[Any, ...]] = [("message-driven", limit) for limit in range(1, 2 * pipe + 1)]
    limits += [("message-driven", limit, "v") for limit in range(2, 4 * pipe + 1)]
    return [*limits, ("1f1b", "auto"), ("1f1b", "auto", "loop"), ("gpipe", "auto"), ("axonn", "auto")]


def has_an_effect(config: Config) -> bool:
    """Return whether limit and sync have an effect: microbatches fill the rounds through the stages, and ranks sum the
    shards."""
    sizes = dict(config.layout.axes)
    summed = any(sizes[axis] > 1 for axis in config.layout.token_axes)
    pipeline = config.layout.pipeline
    limit, stages, count = (
        pipeline.limit, pipeline.size * pipeline.chunks, config.num_microbatches * pipeline.chunks
    )  # fmt: skip
    if pipeline.chunks > 1 and config.num_microbatches > FEW * pipeline.size:
        return False
    fewest = min(stages, count) if pipeline.chunks == 1 else 0
    rounds = limit == "auto" or limit in (fewest, min(2 * stages, count))
    return rounds and (summed or config.layout.data.sync == "allreduce")


def together(config: Config) -> set[frozenset[tuple[tuple[str, int], ...]]]:
    """Return the sets of coordinates that share a node."""
    grid = Grid(tuple(axis for axis in config.layout.axes if axis[1] > 1))
    places = [tuple(sorted(grid.coordinates(rank).items())) for rank in range(grid.world_size)]
    return {frozenset(places[rank : rank + 2]) for rank in range(0, grid.world_size, 2)}


def test_experts_are_held_by_ranks_of_a_node_or_by_as_many_as_can() -> None:
    model = {
        "family": "llama", "layers": 1, "hidden": 32, "heads": 4, "feed_forward": 32, "positions": 32,
        "vocabulary": 300, "experts": {"count": 4},
    }  # fmt: skip
    fixed = ("memory.recompute", "memory.offload.to", "batch.micro", "layout.pipeline.size", "layout.order")
    tree = TREE | {"batch": {"global": 8, "micro": 1}, "layout": {"data": {"size": 4}}}
    found = list(legal_layouts(job_of(4, tree | {"model": model}, fixed)))
    assert all(not broken_rules(config) for config in found)
    sizes = {(config.layout.data.size, config.layout.data.expert) for config in found}
    assert sizes == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
    assert {config.layout.data.expert for config in legal_layouts(job_of(4, tree, fixed))} == {1}


@pytest.mark.parametrize(
    "devices, tree",
    [
        pytest.param(4, TREE | {"batch": {"global": 4}}, marks=pytest.mark.long),
        (2, TREE | HALF),
        *(pytest.param(devices, TREE, marks=pytest.mark.long) for devices in (4, 6)),
    ],
)
def test_the_space_is_the_legal_set(devices: int, tree: dict[str, Any]) -> None:
    run = parse_config(tree)
    fixed = ("memory.recompute", "memory.offload.to") if devices > 2 else ()
    found = list(legal_layouts(job_of(devices, tree, fixed)))
    assert all(not broken_rules(config) for config in found[:: max(1, len(found) // 50)])
    assert len({facts(config) for config in found}) == len(found), "a layout twice"

    def but_order(config: Config) -> tuple[Any, ...]:
        told = facts(config)
        return *told[:6], *told[7:]

    unique: dict[tuple[Any, ...], list[Config]] = {}
    for config in found:
        unique.setdefault(but_order(config), []).append(config)
    expected: dict[tuple[Any, ...], list[Any]] = {}
    for config in everything(run, devices):
        if fixed and (config.memory.recompute, config.memory.offload.to) != ("none", "none"):
            continue
        key = but_order(config)
        nodes = together(config)
        if nodes in expected.get(key, []) or not has_an_effect(config):
            continue
        if not broken_rules(config):
            expected.setdefault(key, []).append(nodes)
    assert unique.keys() == expected.keys()
    for key, configs in unique.items():
        mine = [together(config) for config in configs]
        assert len(mine) == len(expected[key])
        assert all(nodes in expected[key] for nodes in mine), "another order of the axes"


def test_what_is_fixed_stays() -> None:
    words = ["layout.tensor={kind: megatron, size: 2}", "layout.data.sync=ring", "memory.recompute={every: 2}",
             "layout.pipeline.limit=3", "layout.pipeline.schedule=axonn", "batch.micro=auto"]  # fmt: skip
    run = parse_config(TREE, words)
    job = SearchJob(run, cluster_of(), 4, fixed_fields(words))
    found = list(legal_layouts(job))
    assert found
    for config in found:
        assert (config.layout.tensor.kind, dict(config.layout.axes)["tensor"]) == ("megatron", 2)
        assert config.layout.data.sync == "ring"
        assert (config.memory.recompute, config.layout.pipeline.limit) == (2, 3)
        assert config.batch.micro == "auto"
    cut = {config.layout.tensor.sequence_parallel for config in found if config.layout.tensor.kind == "megatron"}
    assert cut == {False, True}, "what is not fixed is free"
    assert {config.layout.pipeline.size for config in found} == {1, 2}


def test_sizes_that_are_fixed_must_fit() -> None:
    words = ["layout.data.size=3"]
    job = SearchJob(parse_config(TREE, words), cluster_of(), 4, fixed_fields(words))
    assert not list(legal_layouts(job))


def test_fields_of_words() -> None:
    words = ["layout.tensor={kind: megatron, size: 2}", "batch.micro=4", "memory={offload: {to: host}}"]
    assert fixed_fields(words) == {"layout.tensor.kind", "layout.tensor.size", "batch.micro", "memory.offload.to"}
    words = ["layout.tensor=megatron", "layout.data=4", "layout={pipeline: 2}", "layout=auto", "memory.offload=host"]
    assert fixed_fields(words) == {
        *("layout.tensor.kind", "layout.data.size", "layout.pipeline.size", "memory.offload.to"),
    }


@pytest.mark.parametrize("devices, here", [(1, 1), (6, 6), (48, 6), (1024, 4), (7, 1)])
def test_nodes_are_full(devices: int, here: int) -> None:
    assert ranks_per_node(cluster_of(6), devices) == here


def test_an_order_is_there_for_what_it_puts_together() -> None:
    """On nodes of 2, two replicas of two stages: neighbours are either the stages or the replicas."""
    tree = TREE | {"layout": {"pipeline": {"size": 2}}}
    found = legal_layouts(job_of(4, tree, ("layout.tensor", "layout.pipeline.size")))
    assert {config.layout.order for config in found} == {"auto", ("pipe", "data")}


@pytest.mark.parametrize("sizes", [(2, 4, 1, 2), (4, 2, 8, 1), (3, 2, 4, 2), (6, 3, 1, 2), (2, 2, 3, 3)])
def test_each_order_puts_other_ranks_on_a_node(sizes: tuple[int, ...]) -> None:
    """Of all orders of the axes, exactly one is tried for each grouping of a run's ranks by node."""
    data, pipe, context, tensor = sizes
    layout = Layout(
        data=DataParallel(size=data), pipeline=PipelineSection(size=pipe), context=ContextParallel(size=context),
        tensor=Megatron(kind="megatron", size=tensor),
    )  # fmt: skip
    for on_a_node in (2, 3, 4, 6, 8):
        job = SearchJob(parse_config(TREE), cluster_of(on_a_node), layout.world_size)
        unit = ranks_per_node(job.cluster, job.devices)
        config = job.run.model_copy(update={"layout": layout.model_copy(update={"ranks_per_node": unit})})

        def nodes(names: Sequence[str], unit: int = unit) -> frozenset[frozenset[tuple[int, ...]]]:
            axes, usual = dict(layout.axes), [name for name, _ in layout.axes]
            ranks = list(product(*(range(axes[name]) for name in names)))
            coordinates = [tuple(dict(zip(names, rank, strict=True))[name] for name in usual) for rank in ranks]
            return frozenset(frozenset(coordinates[at : at + unit]) for at in range(0, len(ranks), unit))

        usual = tuple(name for name, size in layout.axes if size > 1)
        fixed = tuple(name for name, size in layout.axes if size == 1)
        tried = [nodes((*fixed, *(usual if order == "auto" else order))) for order in orders_of(config, job)]
        assert len(set(tried)) == len(tried)
        assert set(tried) == {nodes((*fixed, *order)) for order in permutations(usual)}


def test_why_a_kind_is_not_there() -> None:
    refused: dict[str, Any] = {}
    tree = TREE | {"model": TREE["model"] | {"heads": 3, "hidden": 12}}
    kinds = {config.layout.tensor.kind for config in legal_layouts(job_of(2, tree), refused)}
    assert kinds == {"none"}
    assert str(refused["megatron"]) == "layout.tensor.size=2 does not divide model.heads=3; valid: 1, 3"


def contexts_in(tree: dict[str, Any], *fixed: str) -> set[tuple[int, str]]:
    kept = ("layout.tensor", "layout.pipeline.size", "memory.recompute", "memory.offload.to", "layout.data.sync")
    contexts = (config.layout.context for config in legal_layouts(job_of(4, tree, (*kept, *fixed))))
    return {(context.size, context.kind) for context in contexts}


def test_contexts_are_tried_where_sequences_are_long() -> None:
    model = TREE["model"] | {"positions": 8192, "dropout": 0.0}
    long = TREE | {"model": model, "data": {"sequence": 8192}}
    own = {"layout": {"context": {"size": 2, "kind": "ring"}}}
    assert contexts_in(TREE) == {(1, "ulysses")}
    assert contexts_in(long) == {(1, "ulysses"), (2, "ulysses"), (2, "ring"), (4, "ring")}  # 4 do not divide 6 heads
    assert contexts_in(long | {"model": model | {"dropout": 0.1}}) == {(1, "ulysses"), (2, "ulysses")}
    assert contexts_in(long | own, "layout.context.size", "layout.context.kind") == {(2, "ring")}
    assert contexts_in(long | own, "layout.context.size") == {(2, "ulysses"), (2, "ring")}


@pytest.mark.parametrize("devices", [3, 6, 12])
def test_positions_are_padded_for_ranks_that_do_not_divide_them(devices: int) -> None:
    model = TREE["model"] | {"hidden": 24, "heads": 12, "positions": 1024, "vocabulary_multiple": 12}
    job = job_of(devices, TREE | {"model": model})
    assert devices in {
        layout.layout.tensor.size for layout in legal_layouts(job) if layout.layout.tensor.kind == "megatron"
    }


def test_a_program_that_knows_one_kind_of_context_also_has_whole_sequences() -> None:
    """torchtitan cuts sequences over a ring alone; whole sequences are of no kind."""
    run = parse_config({"model": "gpt2-small", "data": {"sequence": 512}, "batch": {"global": 8}})
    job = SearchJob(run, load_cluster("dgx-h100"), 8, known=load_program("torchtitan").layouts)
    assert job.is_known("layout.context", ContextParallel())
    assert job.is_known("layout.context", ContextParallel(kind="ring", size=2))
    assert not job.is_known("layout.context", ContextParallel(kind="ulysses", size=2))


def test_savings_of_a_layout_are_legal_and_one_each() -> None:
    run = parse_config({"model": "gpt2-small", "data": {"sequence": 512}, "batch": {"global": 8}, "precision": "bf16"})
    job = SearchJob(run, load_cluster("dgx-h100"), 1)
    found = {(one.memory.offload.to, one.memory.recompute) for one in savings(run, job)}
    assert found == {("host", "none"), ("none", "selective"), ("none", "auto")}
    fixed = SearchJob(run, load_cluster("dgx-h100"), 1, fixed=("memory.offload",))
    assert {one.memory.offload.to for one in savings(run, fixed)} == {"none"}


def test_rows_to_experts_travel_as_messages_under_a_schedule_that_knows_pieces() -> None:
    tree = {"model": "mixtral-mini", "data": {"sequence": 64}, "batch": {"global": 16, "micro": 1}}
    data = {"size": 4, "expert": 4, "sync": "zero2"}
    run = parse_config(tree | {"layout": {"data": data, "pipeline": {"size": 2, "schedule": "1f1b"}}})
    tried = [one.layout for one in as_messages(run, SearchJob(run, load_cluster("dgx-h100"), 8))]
    assert {(one.data.exchange, one.data.sync, one.pipeline.schedule) for one in tried} == {
        ("messages", "zero1", "message-driven")
    }
    assert [one.pipeline.limit for one in tried] == [4, 2]
    for kept in ("layout.data.exchange", "layout.data.sync", "layout.pipeline.schedule"):
        assert not list(as_messages(run, SearchJob(run, load_cluster("dgx-h100"), 8, fixed={kept})))
    assert not list(as_messages(parse_config(tree), SearchJob(run, load_cluster("dgx-h100"), 8)))
