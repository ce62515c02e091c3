"""No layout waits forever for a communicator of NCCL: the calls of train, verify and compare, under NCCL's rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import Config
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.tools.verify.job import leave_layout
from meshwright.training.loop import Trainer, validate
from meshwright.training.measured_run import count_sent
from tests.harness import build, resolved
from tests.mailbox_cases import spawn_within
from tests.oracle.data_parallel import SYNCS
from tests.oracle.tensor import BLOCKS, ONE_D, SEQUENCE, config_for
from tests.rehearsal.births import births
from tests.tools.verify.cases import Drawn
from tests.workers import free_port, run_ranks

MIXED = (
    "zero1-megatron", "zero1-subgraph", "stages-megatron", "stages-subgraph", "three-kinds", "vit-2-D-and-data",
)  # fmt: skip
"""Layouts of 4 to 8 ranks with axes that other layouts show, alone and with 2-D: long."""

WHOLE = {"kind": "none"}
SUBGRAPH = {"kind": "subgraph", "size": 2}
SCHEDULES = ("gpipe", "1f1b", "axonn", "message-driven")
LOOP, V = {"chunks": 2}, {"chunks": 2, "placement": "v"}


def layouts() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, model and layout: every kit, sync and schedule, alone and with others; 2 to 8 ranks."""
    for sync in SYNCS:
        yield sync, "gpt2", {"data": {"size": 2, "sync": sync}}
    for schedule in SCHEDULES:
        yield schedule, "gpt2", {"pipeline": {"size": 3, "schedule": schedule}}
    yield "ring-of-two-stages", "gpt2", {"pipeline": {"size": 2, "schedule": "1f1b"} | LOOP}
    yield "ring-of-three-stages", "gpt2", {"pipeline": {"size": 3, "schedule": "message-driven"} | LOOP}
    yield "v-and-data", "gpt2", {"data": {"size": 2, "sync": "zero1"}, "pipeline": {"size": 2} | V}
    for kit in (ONE_D[0], SEQUENCE[1], BLOCKS[1], BLOCKS[2], SUBGRAPH, SUBGRAPH | {"common": "one"}):
        yield "-".join(map(str, kit.values())), "gpt2", {"tensor": kit}
    for kit in (ONE_D[0], BLOCKS[1], SUBGRAPH):
        yield f"zero1-{kit['kind']}", "gpt2", {"data": {"size": 2, "sync": "zero1"}, "tensor": kit}
        yield f"stages-{kit['kind']}", "gpt2", {"pipeline": {"size": 2, "schedule": "1f1b"}, "tensor": kit}
    three = {"data": {"size": 2, "sync": "ring"}, "pipeline": {"size": 2}, "tensor": ONE_D[0]}
    yield "three-kinds", "gpt2", three
    for kind in ("ulysses", "ring"):
        yield kind, "gpt2", {"context": {"size": 3 if kind == "ulysses" else 2, "kind": kind}, "data": {"size": 2}}
    yield "ring-untied", "untied", {"data": {"size": 2, "sync": "ring"}, "pipeline": {"size": 2}}
    yield "vit-2-D-and-data", "vit", {"data": {"size": 2}, "tensor": BLOCKS[1]}
    yield "t5-subgraph", "t5", {"tensor": SUBGRAPH | {"branch": "attention-core"}}


def config_of(model: str, layout: dict[str, Any]) -> Config:
    replicas = layout.get("data", {}).get("size", 1)
    config = config_for(model, WHOLE, batch={"global": 24, "micro": 12 // replicas}, steps=3)
    tree = config.model_dump(mode="json", by_alias=True) | {"layout": layout}
    stages = layout.get("pipeline", {"size": 1})
    tree["model"]["layers"] = max(2, stages["size"], 4 * ("chunks" in stages))
    return resolved(Config.model_validate(tree))


def as_train(mesh: Mesh, config: Config) -> None:
    """Call in the order of `meshwright train`: compare replicas, make a step, validate."""
    parts, samples = build(config, mesh), Drawn(config)
    assert parts.strategy.make_replicas_equal() == []
    assert parts.optimizer.make_replicas_equal() == []
    trainer = Trainer(parts, samples)
    trainer.turn(None)
    validate(parts, samples, 1)
    trainer.require_good_state()


def as_verify_and_compare(mesh: Mesh, config: Config, folder: Path) -> None:
    """Call in the order of `meshwright verify`, with a step first of all, and then as `meshwright compare` after this
    step."""
    parts, samples = build(config, mesh), Drawn(config)
    leave_layout(parts, samples, folder, 1)
    count_sent(parts, samples, config.batch.global_)


ORDERS = ("train", "verify and compare")


def in_order(order: str, mesh: Mesh, config: Config, folder: Path) -> None:
    if order == "train":
        as_train(mesh, config)
    else:
        as_verify_and_compare(mesh, config, folder)


def rehearse(mesh: Mesh, config: Config, orders: Sequence[str], folder: Path, *how: bool) -> None:
    """Run each order of calls with separate communicators."""
    with_groups, batched = how or (True, True)
    for order in orders:
        name = "" if order == orders[0] else f"{order}: "
        with births(mesh, name, with_groups=with_groups, batched=batched) as rehearsed:
            in_order(order, rehearsed, config, folder)


def run(model: str, layout: dict[str, Any], orders: Sequence[str], folder: Path, *how: bool) -> None:
    config = config_of(model, layout)
    run_ranks(
        rehearse,
        Grid(config.layout.axes),
        config,
        orders,
        folder,
        *how,
        token_axes=config.layout.token_axes,
        transport="torch",
    )


@pytest.mark.few
@pytest.mark.parametrize(
    "model, layout, order",
    [
        pytest.param(
            *case[1:], ORDERS[number % len(ORDERS)], marks=pytest.mark.long if case[0] in MIXED else (), id=case[0]
        )
        for number, case in enumerate(layouts())
    ],
)
def test_no_layout_waits_for_ever(model: str, layout: dict[str, Any], order: str, tmp_path: Path) -> None:
    run(model, layout, [order], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("model, layout", [case[1:] for case in layouts()], ids=[case[0] for case in layouts()])
def test_no_layout_waits_for_ever_in_any_order(model: str, layout: dict[str, Any], tmp_path: Path) -> None:
    run(model, layout, ORDERS, tmp_path)


def on_gpus(rank: int, port: int, tree: dict[str, Any], order: str, folder: str) -> None:
    """Run one rank of a layout over NCCL."""
    config = Config.model_validate(tree)
    torch.cuda.set_device(rank)
    size = config.layout.world_size
    environment, point = Environment(rank, size, rank, size, 0, "torchrun"), Rendezvous("127.0.0.1", port, hosted=False)
    device, axes = torch.device("cuda", rank), config.layout.token_axes
    with open_mesh(Grid(config.layout.axes), environment, "torch", device, point, axes) as mesh:
        in_order(order, mesh, config, Path(folder))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model, layout", [case[1:] for case in layouts()], ids=[case[0] for case in layouts()])
def test_no_layout_waits_for_ever_over_nccl(model: str, layout: dict[str, Any], order: str, tmp_path: Path) -> None:
    config = config_of(model, layout)
    if torch.cuda.device_count() < config.layout.world_size:
        pytest.skip(f"NCCL between {config.layout.world_size} ranks needs as many GPUs")
    tree = config.model_dump(mode="json", by_alias=True)
    arguments = (free_port(), tree, order, str(tmp_path))
    spawn_within(180, on_gpus, *arguments, processes=config.layout.world_size)


def test_a_pipeline_of_single_messages_hangs(tmp_path: Path) -> None:
    """Both ends post the receive first, in a communicator that the other end does not reach."""
    with pytest.raises(AssertionError, match=r"waits in irecv for the birth of pipe \w+:\d-\d's pair"):
        run("gpt2", {"pipeline": {"size": 2}}, ["train"], tmp_path, True, False)


def test_blocks_hang_where_a_diagonal_rank_does_not_send(tmp_path: Path) -> None:
    """A transpose is between mirrored ranks: half of a batch's group never calls the batch."""
    with pytest.raises(AssertionError, match=r"waits in batch_isend_irecv for the birth of row\+col:"):
        run("gpt2", {"data": {"size": 2}, "tensor": BLOCKS[1]}, ["train"], tmp_path, False, True)


def test_a_tied_table_hangs_where_its_sum_is_the_first_use(tmp_path: Path) -> None:
    """The last stage waits for the first in the sum of the table, before the gradient is sent. In train, the replicas
    have been compared in the same communicator before."""
    with pytest.raises(AssertionError, match=r"rank 2 waits in all_reduce for the birth of data\+ends:0-2"):
        run("gpt2", {"pipeline": {"size": 3, "schedule": "1f1b"}}, ["verify and compare"], tmp_path, False, True)
