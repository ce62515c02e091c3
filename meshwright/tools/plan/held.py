"""The activations that an estimate's layout holds: those of microbatches on their way back, and of recomputed layers
whose weight gradients wait (estimate.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from meshwright.config import Config
from meshwright.parts import placement_of, recomputed_group, rule_of
from meshwright.pipeline.partition import ranges_of
from meshwright.pipeline.placement import ChunkPlacement
from meshwright.ranks.mailbox import AHEAD
from meshwright.tools.plan.recordings import splits
from meshwright.tools.plan.timed_parts import EstimatedPart, TimedParts

MIN_DEFERRED_SHARE = 0.5
"""The share of what deferred weight gradients may hold that the search takes for certain: which stage defers how many
is a guess."""

StageShape = tuple[tuple[int, int], ...]
"""A stage: each of its parts by position (`TimedParts.distinct`), and how many it has of it."""


class HeldBytes:
    """Bytes of activations; what layouts share is remembered."""

    def __init__(self, parts: TimedParts) -> None:
        self.parts = parts
        self._deferrals: dict[Hashable, dict[int, float]] = {}

    def of(self, config: Config, partition: tuple[int, ...], shapes: Sequence[StageShape]) -> tuple[float, float]:
        """The activations that the fullest stage keeps, and all that it holds of microbatches at most."""
        parts, placement = self.parts.untimed(config), placement_of(config)
        kept, total, deferring = 0.0, 0.0, self._deferring(config, partition, placement)
        # Candidates for the fullest: the first holds most microbatches, the longest most layers, a deferring one most
        # W.
        for stage in {0, placement.stage_of(partition.index(max(partition))), *deferring}:
            own = placement.positions(stage)
            works = [[(parts[place], times) for place, times in shapes[position]] for position in own]
            in_flight = _in_flight(config, stage, placement)
            keeps = in_flight * sum(self._kept_bytes(config, work) for work in works) / placement.num_chunks
            if stage in deferring:
                whole = sum(times * part.kept_bytes for work in works for part, times in work if part.is_layer)
                limit = rule_of(config).limit_at(stage, placement, config.num_microbatches)
                most = min(limit, config.num_microbatches * placement.num_chunks)
                deferred = max(0, most - in_flight) * deferring[stage] * whole / placement.num_chunks
                keeps += MIN_DEFERRED_SHARE * deferred
            # Messages of both sides have memory before they come (mailbox.py).
            ahead = min(AHEAD[self.parts.planner.cluster.device.kind], config.num_microbatches)
            beside = max(
                ahead
                * (
                    (parts[shapes[at - 1][-1][0]].outgoing_bytes if at else 0)
                    + (parts[shapes[at][-1][0]].outgoing_bytes if at < len(shapes) - 1 else 0)
                )
                for at in own
            )
            # A recomputed group of layers holds all of its activations again when its backward pass begins.
            recomputed = 0.0
            for work in works if in_groups(config) else ():
                layers = [(part.kept_bytes, times) for part, times in work if part.is_layer]
                if layers:
                    group = recomputed_group(config, sum(times for _, times in layers))
                    recomputed = max(recomputed, group * min(size for size, _ in layers))
            kept = max(kept, keeps)
            total = max(total, keeps + beside + recomputed)
        return kept, total

    def _deferring(self, config: Config, partition: tuple[int, ...], placement: ChunkPlacement) -> dict[int, float]:
        """Stages that put off W of recomputed layers until their limit makes room for it, and of how many of their
        microbatches. Each takes in as many as the slowest stage does without W; the time that is left to it is not
        enough for all of its W. Of stages that hold as much the last, which has fewest on their way back to it."""
        free = not (rule_of(config).fixed or config.layout.pipeline.limit_by_memory)
        if not (free and splits(config) and in_groups(config)):
            return {}
        key = partition, placement, config.micro, config.num_microbatches
        if key not in self._deferrals:
            costs = self.parts.planner.work(config)
            layers = [sum(costs.layers[layer] for layer in layers) for layers in ranges_of(partition)]
            ends = [0.0] * len(layers)
            ends[0] += costs.embedding
            ends[-1] += costs.head
            own = [placement.positions(stage) for stage in range(placement.num_stages)]
            # A layer's F, its F once more, and B are a third of its work each, W is another; ends do F once.
            weights = [sum(layers[at] + ends[at] for at in positions) / 3 for positions in own]
            passes = [sum(layers[at] + ends[at] * 2 / 3 for at in positions) for positions in own]
            alike = {tuple(partition[at] for at in positions): stage for stage, positions in enumerate(own)}
            self._deferrals[key] = {
                stage: max(0.0, 1 - (max(passes) - passes[stage]) / weights[stage])
                for stage in alike.values()
                if weights[stage]
            }
        return self._deferrals[key]

    def _kept_bytes(self, config: Config, stage: Sequence[tuple[EstimatedPart, int]]) -> float:
        """Bytes that a forward pass keeps on a stage of so many of each part; a recomputed group keeps one input."""
        setting = config.memory.recompute
        if setting == "none":
            return sum(times * part.kept_bytes for part, times in stage)
        layers = [(part, times) for part, times in stage if part.is_layer]
        if setting == "selective":
            return self.parts.kept_share(config) * sum(times * part.kept_bytes for part, times in layers)
        num_layers = sum(times for _, times in layers)
        return sum(times * part.outgoing_bytes for part, times in layers) / max(1, recomputed_group(config, num_layers))


def in_groups(config: Config) -> bool:
    """Whether groups of layers are recomputed."""
    return config.memory.recompute not in ("none", "selective")


def _in_flight(config: Config, stage: int, placement: ChunkPlacement) -> int:
    """Microbatches that a stage holds when it goes backward for the first time, counted once for each chunk; of a
    message-driven one most likely."""
    if config.layout.pipeline.limit_by_memory:
        return 1  # what memory allows
    count, rule = config.num_microbatches, rule_of(config)
    limit = min(rule.limit_at(stage, placement, count), count * placement.num_chunks)
    return limit if rule.fixed else rule.held(stage, placement.num_stages, limit)
