"""Questions for the planner, and spaces of layouts with made-up predictions."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.config import Config, parse_config
from meshwright.config.section import Section, with_field
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.memory import HeldStage, Memory
from meshwright.planner.plan.predict import Prediction
from meshwright.strategies.pipeline.span import Timeline
from tests.planner.plan.clusters import with_room

RUN = parse_config(
    {"model": {"layers": 2, "hidden": 32, "heads": 4, "dropout": 0.0}, "data": {"sequence": 16}, "batch": {"global": 8}}
)

TREE: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "positions": 32, "vocabulary": 300, "vocabulary_multiple": 4,
              "dropout": 0.0},
    "data": {"sequence": 16},
    "batch": {"global": 8},
}  # fmt: skip


def memory_of(total: int, activations: int = 0) -> Memory:
    return Memory(total - activations, 0, 0, activations, 0, 0)


@dataclass
class MadeUp:
    """Seconds and memory drawn at random, with valid bounds. Recomputation takes longer and spares activations."""

    cluster: Cluster
    seed: int
    room: int
    predicted: list[Config] = field(default_factory=list)

    @property
    def planner(self) -> MadeUp:
        """Return this object, which predicts as well."""
        return self

    def keep(self) -> None:
        """Record nothing."""

    def drawn(self, config: Config, what: str) -> float:
        """Draw a number that is equal for layouts with different recomputation or slices. Draws of memory are equal for
        different orders as well."""
        layout, data = config.layout, config.layout.data
        whole = layout.order if layout.order == "auto" else tuple(name for name in layout.order if name != "replicate")
        plain = data.model_copy(update={"sync": "zero1", "shard": None})
        layout = layout.model_copy(update={"data": plain, "order": "auto" if what == "memory" else whole})
        return random.Random(f"{self.seed} {what} {said(layout)} {said(config.batch)}").random()

    def seconds(self, config: Config, cutoff: float = math.inf) -> float:
        again = {"none": 1.0, "selective": 1.1, "auto": 1.3}[str(config.memory.recompute)]
        sent = {"allreduce": 1.0, "zero1": 1.01, "zero2": 1.1, "zero3": 1.2}[config.layout.data.sync]
        return (1 + self.drawn(config, "seconds")) * again * sent

    def bytes(self, config: Config) -> int:
        return self.weights_memory(config).total + self.activations(config)

    def activations(self, config: Config) -> int:
        share = {"none": 1.0, "selective": 0.8, "auto": 0.3}[str(config.memory.recompute)]
        return int(0.7 * self.room * share * self.drawn(config, "memory"))

    def weights_memory(self, config: Config) -> Memory:
        """Return the memory of weights, equal for a whole family."""
        layout = config.layout
        parts = said(layout.tensor), layout.pipeline.size, said(layout.data), config.memory.offload.to
        family = " ".join(map(str, (self.seed, *parts)))
        return memory_of(int(self.room * (0.2 + random.Random(family).random())))

    def alone_memory(self, config: Config) -> tuple[Memory, int]:
        return self.weights_memory(config), 0

    def held_activations(self, config: Config) -> tuple[HeldStage, ...]:
        peak_bytes = (0.9 + 0.1 * self.drawn(config, "memory")) * self.activations(config)
        return (HeldStage(0.0, peak_bytes, 1.0),)

    def least_alone(self, config: Config) -> float:
        return 0.9 * self.weights_memory(config).total

    def recorded_parts(self, config: Config) -> Collection[int]:
        return (0,) if config.batch.micro != 1 else ()

    def least_activations(self, config: Config) -> tuple[HeldStage, ...]:
        return tuple(HeldStage(0.0, 0.8 * peak_bytes, 1.0) for _, peak_bytes, _ in self.held_activations(config))

    def with_activations(self, alone: Memory, passing: int, stages: Sequence[HeldStage]) -> Memory:
        return memory_of(alone.total + int(stages[0].peak_bytes))

    def estimated_memory(self, config: Config) -> Memory:
        return self.with_activations(*self.alone_memory(config), self.held_activations(config))

    def estimated_seconds(self, config: Config, cutoff: float = math.inf) -> float:
        return self.seconds(config) * (0.7 + 0.25 * self.drawn(config, "estimate"))

    def least_seconds(self, config: Config, every: tuple[Hashable, ...] = (), *, layers: bool = False) -> float:
        return 0.7

    def least_of_cuts(self, config: Config, every: tuple[Hashable, ...]) -> float:
        return 0.7

    def least_of_whole(self, config: Config, every: tuple[Hashable, ...]) -> float:
        return 0.5

    def least_with_sums(self, config: Config, every: tuple[Hashable, ...], cutoff: float) -> float:
        return 0.95 * self.estimated_seconds(config)

    def phase_seconds(self, config: Config, every: tuple[Hashable, ...] = ()) -> float:
        """Return seconds that are equal for all syncs, offloads and carriers of messages."""
        config = with_field(config, "layout.transport", "auto")
        orders = [with_field(config, "layout.order", order) for order in every] or [config]
        return 0.7 * (1 + min(self.drawn(each, "seconds") for each in orders))

    def links_of_layer(self, config: Config) -> Any:
        return config.layout.order

    def recomputes_for_nothing(self, config: Config) -> bool:
        return False

    def least_memory(self, config: Config) -> Memory:
        return memory_of(int((0.95 + 0.05 * self.drawn(config, "memory")) * self.bytes(config)))

    def predict(self, config: Config) -> Prediction:
        self.predicted.append(config)
        memory = memory_of(self.bytes(config), self.bytes(config) // 2)
        phases = {"passes": self.seconds(config), "data_parallel": 0.0, "optimizer": 0.0}
        return Prediction(
            config, self.cluster, self.seconds(config), phases, (memory,), ({},), Timeline(1, ()), 0.0, 1.0
        )


def said(section: Section) -> str:
    """Return a section's values other than defaults, as JSON: a field added later changes no draw."""
    return section.model_dump_json(exclude_defaults=True)


def made_up(seed: int, room: int = 1_000_000) -> tuple[Cluster, MadeUp]:
    cluster = with_room(room)
    return cluster, MadeUp(cluster, seed, room)
