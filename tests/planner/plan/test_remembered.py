"""Remembered results are right for every run that asks: a key without a field that is read is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.config.section import with_field
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recordings import Recordings
from meshwright.planner.plan.remembered import UnnamedField, remembered, replaced, viewer
from meshwright.planner.plan.timed_parts import HeldActivations, TimedParts

MODEL = {"family": "gpt2", "layers": 4, "hidden": 128, "heads": 4, "vocabulary": 512, "dropout": 0.0}


def config(*words: str, **sections: Any) -> Config:
    tree = {
        "model": MODEL,
        "data": {"sequence": 64},
        "batch": {"global": 16, "micro": 2},
        "precision": {"level": "O2", "dtype": "bf16"},
    }
    return parse_config(tree | sections, words)


RUN = config()


def view(*fields: str, of: Config = RUN) -> Config:
    return viewer(fields, "a test")(of)


def test_a_view_has_the_named_fields_and_what_follows_from_them() -> None:
    run = config("layout.tensor={kind: megatron, size: 2}", "layout.data.size=2", "layout.data.sync=zero2")
    seen = view("layout.tensor", "layout.data.sync", "layout.data.expert", "micro", of=run)
    assert seen.layout.tensor == run.layout.tensor
    assert seen.layout.data.strategy is run.layout.data.strategy  # a property that reads the named field
    assert seen.micro == 2
    for read, missing in (
        (lambda: seen.layout.data.size, "layout.data.size"),
        (lambda: seen.layout.data.axes, "layout.data.shard"),  # a property that reads this field
        (lambda: seen.layout.context.axes, "layout.context.size"),
        (lambda: seen.num_microbatches, "batch.global_"),
        (lambda: seen.model, "model"),
    ):
        with pytest.raises(UnnamedField) as error:
            read()
        assert str(error.value) == (
            f"a test reads {missing}, but is remembered by layout.tensor, layout.data.sync, layout.data.expert, micro "
            "alone: name it, or replace it"
        )
    with pytest.raises(AttributeError, match="Layout has no axis"):
        seen.layout.axis  # type: ignore[attr-defined]  # noqa: B018


def test_a_replaced_field_can_be_read_and_properties_follow_it() -> None:
    seen = view("micro", "batch", "layout.data.size")
    assert with_field(seen, "layout.pipeline.size", 3).layout.pipeline.size == 3
    larger = with_field(seen, "batch.micro", 8)
    assert (seen.micro, larger.micro, larger.num_microbatches) == (2, 8, 2)
    assert seen.batch.micro == 2  # the view itself is unchanged
    # A named property may depend on any field. The property is evaluated anew, unless `replaced` names the property as
    # unaffected.
    changed = with_field(view("micro"), "seed", 7)
    with pytest.raises(UnnamedField, match=r"batch\.micro"):
        changed.micro  # noqa: B018
    assert replaced(view("micro"), "seed", 7, "micro").micro == 2


def test_a_section_of_a_view_is_no_key() -> None:
    part = view("layout.data.size").layout.data
    for whole in (lambda: part == RUN.layout.data, lambda: hash(part)):
        with pytest.raises(UnnamedField, match=r"reads layout\.data as a whole, but is"):
            whole()
    with pytest.raises(UnnamedField, match="reads the config as a whole"):
        hash(view("micro"))


@pytest.mark.parametrize(
    "name, rule",
    [
        ("layout.tensor.size", "no section of one class: name it whole"),
        ("model.layers", "no section of one class: name it whole"),
        ("layout.steps", "Layout has no steps"),
        ("model_copy", "Config has no model_copy"),
        ("layout.data.model_dump", "DataParallel has no model_dump"),
    ],
)
def test_names_are_fields(name: str, rule: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=rule):
        remembered(name)(lambda self, config: 0)


@dataclass
class Counting:
    """Counts the calls that are not remembered."""

    asked: list[str] = field(default_factory=list)

    @remembered("precision", "layout.data.size", "micro")
    def named(self, config: Config, word: str) -> str:
        self.asked.append(word)
        return f"{word} {config.layout.data.size} {config.micro} {config.precision.dtype}"

    @remembered("precision", "layout.data.size", last=True)
    def latest(self, config: Config) -> int:
        self.asked.append("latest")
        return config.layout.data.size

    @remembered()
    def of(self, number: int) -> int:
        self.asked.append(str(number))
        return -number


def test_results_are_found_by_named_fields_and_arguments() -> None:
    counting, other = Counting(), Counting()
    two, single = with_field(RUN, "layout.data.size", 2), config(precision={"dtype": "float32"})
    for _ in range(2):
        assert counting.named(RUN, "a") == counting.named(with_field(RUN, "seed", 9), "a") == "a 1 2 bf16"
        assert counting.named(RUN, "b") == "b 1 2 bf16"
        assert counting.named(two, "a") == "a 2 2 bf16"
        assert counting.named(single, "a") == "a 1 2 float32"
        assert counting.named(config(), "a") == "a 1 2 bf16"  # equal sections, other objects
        assert [counting.of(3), counting.of(4)] == [-3, -4]
    assert counting.asked == ["a", "b", "a", "a", "3", "4"]
    assert other.named(RUN, "a") == "a 1 2 bf16"
    assert other.asked == ["a"]
    for each in (RUN, RUN, two, RUN):
        assert other.latest(each) == each.layout.data.size
    assert other.asked == ["a", "latest", "latest", "latest"]


def fields_of(function: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = vars(function)["fields"]
    return fields


@cache
def recorded() -> Recordings:
    return Planner(load_cluster("dgx-a100")).recordings


def asked(owner: Any, cluster: Cluster) -> Any:
    """Ask an instance with a planted method the questions of a search and a prediction."""
    planner = Planner(cluster) if not issubclass(owner, Planner) else owner(cluster)
    # Recordings take most of the time: all cases share recordings, unless a method of `Recordings` is planted.
    planner.recordings = owner(cluster.device.kind, planner.software) if issubclass(owner, Recordings) else recorded()
    models = owner(planner) if issubclass(owner, Estimates) else Estimates(planner)
    if issubclass(owner, TimedParts):
        models.parts = models._held.parts = owner(planner)
    if issubclass(owner, HeldActivations):
        models._held = owner(models.parts)
    run = config(
        "layout.pipeline.size=2", "layout.data.size=2", "layout.data.sync=zero2", "memory.offload.to=host",
        "memory.recompute=auto",
    )  # fmt: skip
    attention = config("memory.recompute=selective")
    return [
        [models.estimated_memory(each), models.least_seconds(each), models.estimated_seconds(each),
         models.recomputes_for_nothing(each), planner.predict(each).seconds]
        for each in (run, attention)
    ]  # fmt: skip


NEEDED = [
    (Estimates, "_alone_memory", ("layout.pipeline.size", "layout.pipeline.chunks", "layout.data", "memory.offload",
                                  "accumulates", "optimizer", "layout.pipeline.partition")),
    (Estimates, "_passes", ("micro", "num_microbatches", "memory.recompute", "layout.pipeline", "precision")),
    (Estimates, "_ending", ("layout.order", "optimizer", "layout.transport", "batch.global_", "bits")),
    (Estimates, "_partition", ("model", "data", "replica_batch", "layout.pipeline.chunks")),
    (TimedParts, "of", ("micro", "widens_gradients", "precision", "layout.context", "memory.summa")),
    (TimedParts, "kept_share", ("precision", "layout.tensor")),
    (HeldActivations, "of", ("layout.pipeline", "num_microbatches", "memory.recompute")),
    (Recordings, "_record", ("bits", "precision", "batch", "memory.recompute", "layout.order", "layout.data")),
    (Planner, "stages", ("layout.pipeline", "memory.recompute", "micro")),
    (Planner, "passes", ("layout.order", "layout.transport", "layout.data", "bits")),
]  # fmt: skip


@pytest.mark.parametrize(
    "owner, name, missing",
    [
        pytest.param(owner, name, each, id=f"{owner.__name__}.{name}, {each}")
        for owner, name, fields in NEEDED
        for each in fields
    ],
)
def test_a_real_key_without_a_field_raises(owner: type, name: str, missing: str) -> None:
    function: Any = vars(owner)[name]
    # No part of the missing field may be named separately.
    others = [each for each in fields_of(function) if each != missing and not each.startswith(f"{missing}.")]
    planted = type(owner.__name__, (owner,), {name: remembered(*others)(function.__wrapped__)})
    with pytest.raises(UnnamedField, match=rf"{owner.__name__}\.{name} reads .*, but is remembered by "):
        asked(planted, load_cluster("dgx-a100"))


def answers(models: Estimates, run: Config) -> dict[str, Any]:
    made = models.planner.predict(run)
    return {
        "weights": models.weights_memory(run),
        "memory": models.estimated_memory(run),
        "least": models.least_seconds(run),
        "seconds": models.estimated_seconds(run),
        "predicted": made.seconds,
        "held": made.memory,
    }


RUNS: dict[str, Callable[[], Config]] = {
    # The weights of 2 x 2 stages were a quarter of the layers; a half is right.
    "4 stages": lambda: config("layout.pipeline={size: 4, schedule: 1f1b}", "layout.data.size=2"),
    "2 x 2 stages": lambda: config("layout.pipeline={size: 2, chunks: 2, schedule: 1f1b}", "layout.data.size=2"),
    # Recorded programs differ, and the second run had the first's: predictions, too, were wrong.
    "halves as stored": lambda: config("precision.products=stored"),
    "halves in float32": lambda: config("precision.products=float32"),
    "usual bits": lambda: config(precision={"dtype": "float32"}),
    "layout-free bits": lambda: config(precision={"dtype": "float32"}, bits="layout-free"),
    # Estimates of one run had the other's moments.
    "without moments": lambda: config("optimizer.name=sgd"),
    # Ranks share the machine's cores.
    "2 replicas": lambda: config("layout.data.size=2"),
    "4 replicas": lambda: config("layout.data.size=4"),
    "another model": lambda: config(model=MODEL | {"heads": 2}),
    "longer sequences": lambda: config(data={"sequence": 128}),
    "gradients as stored": lambda: config("precision.accumulate=stored"),
    "another carrier": lambda: config("layout.data.size=2", "layout.transport=torch"),
    "another limit": lambda: config("layout.pipeline={size: 2, limit: 3}", "layout.data.size=2"),
    "parts of 1 and 3 layers": lambda: config("layout.pipeline={size: 2, partition: [1, 3]}", "layout.data.size=2"),
    "slices": lambda: config("layout.data={size: 4, sync: zero3, shard: 2}"),
    "cut layers": lambda: config("layout.tensor={kind: megatron, size: 2}", "layout.data.size=2"),
    "cut layers, replicas inside": lambda: config(
        "layout.tensor={kind: megatron, size: 2}", "layout.data.size=2", "layout.order=[tensor, data]"
    ),
    "small buckets": lambda: config("layout.data={size: 2, bucket: 100000}"),
    # Matrices are dealt out to the ranks, so the number of ranks arranges buckets.
    "matrices of 2 owners": lambda: config("optimizer.name=muon", "layout.data={size: 2, sync: zero1}"),
    "matrices of 4 owners": lambda: config("optimizer.name=muon", "layout.data={size: 4, sync: zero1}"),
    "frozen embeddings": lambda: config(model=MODEL | {"frozen": ["tokens.*", "positions.*"]}),
    "each layer again": lambda: config("memory.recompute={every: 1}"),
    "inputs in host memory": lambda: config("memory.recompute=offload"),
}


@cache
def alone(name: str) -> dict[str, Any]:
    """Return the answers of a planner that has no other run."""
    return answers(Estimates(Planner(load_cluster("two-cores"))), RUNS[name]())


ONCE_WRONG = [*RUNS][: [*RUNS].index("another model")]
"""Runs that got other runs' answers before keys were views."""


@pytest.mark.parametrize("turn", [1, -1], ids=["in this order", "in the other order"])
@pytest.mark.parametrize("runs", [ONCE_WRONG, pytest.param([*RUNS], marks=pytest.mark.long)], ids=["once wrong", "all"])
def test_shared_answers_are_those_of_a_planner_for_each_run(runs: Sequence[str], turn: int) -> None:
    shared = Estimates(Planner(load_cluster("two-cores")))
    for name in runs[::turn]:
        assert answers(shared, RUNS[name]()) == alone(name), name


def test_estimates_shared_by_numbers_of_devices_have_each_ones_stages() -> None:
    """4 stages of a chunk on 8 devices, then 2 stages of 2 chunks on 4, have the same layers a position of the chain. A
    key without the number of stages gave 1,434,509,312 bytes for both."""
    shared, sizes = Estimates(Planner(load_cluster("dgx-a100"))), []
    for stages, chunks in ((4, 1), (2, 2)):
        pipeline = {"size": stages, "chunks": chunks, "schedule": "1f1b"}
        layout = {"data": {"size": 2}, "pipeline": pipeline}
        tree = {"model": "gpt2-small", "data": {"sequence": 64}, "batch": {"global": 16, "micro": 1}, "layout": layout}
        memory = shared.weights_memory(parse_config(tree))
        sizes.append(memory.total - memory.communicators)
    assert sizes == [1_434_509_312, 2_001_539_072]
