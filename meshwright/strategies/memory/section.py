"""Facts on activation policies, for the config and the planner. No torch.

| recompute | inputs of layers are kept         | other activations are kept                  | computed again |
|-----------|-----------------------------------|---------------------------------------------|----------------|
| none      | on the device                     | on the device                               | -              |
| selective | on the device                     | all but attention weights and dropout masks | attention      |
| auto      | of a group's first, on the device | of the group that is in its backward pass   | each layer     |
| every: n  | of each n-th, on the device       | of the group that is in its backward pass   | each layer     |
| ops       | on the device                     | attention's results, every second product   | all else       |
| offload   | in host memory                    | of the layer that is in its backward pass   | each layer     |

A policy is added by an `ActivationPolicy` and a line in the registry (docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.config.registry import OURS, entries
from meshwright.config.section import Rule, at_most, rule, with_field
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config

FIELD = "memory.recompute"

KEEPS_ALL = next(iter(OURS["activations"]))
"""The policy that saves nothing: the registry's first."""

NEAR_THE_ROOT = 0
"""A group size: the divisor of a stage's layers nearest to the square root of the network's layers."""


@dataclass(frozen=True)
class Group:
    """Layers that run together. wrapped: True if the policy runs the group, False if the group runs unchanged."""

    layers: Sequence[int]
    wrapped: bool = True


def every_group(index: int) -> bool:
    """Wrap each group of a chunk."""
    return True


@dataclass(frozen=True)
class ActivationPolicy:
    """Activations that a forward pass keeps for the backward pass, computes again, or moves.

    `make` names the behaviour: `module:attribute` of a function make(mesh), which returns run(function, *arguments).
    """

    make: str = ""
    """Makes the function that runs groups of layers, or attention. Empty: all activations are kept."""
    attention: bool = False
    """True: attention is run by the policy; False: groups of layers are."""
    group: int = 1
    """Layers in a group, or NEAR_THE_ROOT."""
    wraps: Callable[[int], bool] = every_group
    """wraps(index): whether the policy runs a chunk's group of this index; the other groups run unchanged."""
    keeps_inputs: bool = True
    """Whether the inputs of groups stay on the device."""
    recorded: bool = False
    """Whether kept bytes and added seconds are known only by recording, because single operations are chosen."""
    candidate: bool = False
    """Whether a planner tries the policy. The other policies are planned if a run or a program asks for one."""
    rules: tuple[Rule, ...] = ()
    """Rules on combinations that are refused; checked if the policy is chosen."""

    @property
    def recomputes(self) -> bool:
        """Whether a backward pass computes something again."""
        return bool(self.make)

    @property
    def by_groups(self) -> bool:
        """Whether the policy runs groups of layers."""
        return bool(self.make) and not self.attention

    def group_size(self, config: Config, chunk_layers: int) -> int:
        """Number of layers in a group of a chunk of `chunk_layers`."""
        assert self.by_groups, "a policy without groups of layers"
        if config.layout.data.in_pieces:  # rows of other ranks are kept inside of each layer
            return 1
        return best_group(chunk_layers, config.model.num_blocks) if self.group == NEAR_THE_ROOT else self.group

    def groups(self, config: Config, layers: Sequence[int]) -> tuple[Group, ...]:
        """Return a chunk's layers in groups, as a run computes them."""
        if not self.by_groups:
            return (Group(layers, wrapped=False),)
        parts = groups_of(layers, self.group_size(config, len(layers)))
        return tuple(Group(group_layers, self.wraps(index)) for index, group_layers in enumerate(parts))

    def wrapped_layers(self, config: Config, chunk_layers: int) -> int:
        """Number of layers of a chunk that the policy runs."""
        return sum(len(group.layers) for group in self.groups(config, range(chunk_layers)) if group.wrapped)


def groups_of(layers: Sequence[int], every: int) -> tuple[Sequence[int], ...]:
    """Return the layers in groups of `every`; the last group may be shorter."""
    return tuple(layers[start : start + every] for start in range(0, len(layers), every))


def best_group(stage_layers: int, network_layers: int) -> int:
    """Return the divisor of a stage's layers nearest to √(the network's layers); of two equally near, the smaller."""
    # Divisors only: the paper's formula assumes groups of equal length.
    factors = [size for size in range(1, stage_layers + 1) if stage_layers % size == 0]
    return min(factors, key=lambda size: abs(size - math.sqrt(network_layers)), default=1)


def policy_of(setting: str | int) -> ActivationPolicy:
    """Return the policy that a value of memory.recompute names: an entry, or groups of a number of layers."""
    if isinstance(setting, int):
        return replace(EVERY, group=setting)
    policy: ActivationPolicy = entries("activations")[setting]
    return policy


def keeping_all(config: Config) -> Config:
    """Return the config with the policy that saves nothing."""
    policy_config: Config = with_field(config, FIELD, KEEPS_ALL)
    return policy_config


@rule(FIELD, "model.layers", "model.stage_blocks")
def groups_fit(config: Config) -> Iterator[Problem]:
    size, layers = config.memory.policy.group, config.model.num_blocks
    if size > layers:
        rule_text = f"is more than the model's {layers} layers"
        yield Problem(_named(config), size, rule_text, at_most(layers), mend=({FIELD: str(layers)},))


@rule("layout.data.exchange", "layout.data.expert", FIELD)
def messages_are_kept(config: Config) -> Iterator[Problem]:
    size = config.memory.policy.group
    if config.layout.data.in_pieces and size > 1:
        rule_text = "is of whole layers, and layout.data.exchange=messages keeps the rows that come inside of each"
        mend = ({FIELD: "1"}, {"layout.data.exchange": "blocking"})
        yield Problem(_named(config), size, rule_text, "1, or layout.data.exchange=blocking", mend=mend)


GROUPING = (groups_fit, messages_are_kept)
"""Rules of every policy."""


def _named(config: Config) -> str:
    """Return the field that says how many layers a group has."""
    return f"{FIELD}.every" if isinstance(config.memory.recompute, int) else FIELD


@rule(FIELD, "model.family")
def attention_is_found(config: Config) -> Iterator[Problem]:
    if not config.model.has_attention:
        rule_text = f"recomputes attention, and a {config.model.family} has none"
        yield Problem(FIELD, config.memory.recompute, rule_text, "none, auto, {every: n}")


@rule(FIELD, "layout.tensor")
def kept_operations_are_whole(config: Config) -> Iterator[Problem]:
    tensor = config.layout.tensor
    if tensor.by_size:
        rule_text = f"keeps products, and layout.tensor.kind={tensor.kind} adds its up in place, panel by panel"
        yield Problem(FIELD, config.memory.recompute, rule_text, "none, auto, selective, {every: n}")


@rule(FIELD, "compile")
def kept_operations_are_seen(config: Config) -> Iterator[Problem]:
    if config.in_graphs:
        rule_text = f"keeps single operations, and compile={config.compile} leaves none to see"
        yield Problem(FIELD, config.memory.recompute, rule_text, "none, auto, selective, offload, {every: n}")


RECOMPUTING = "meshwright.strategies.memory.recompute:recomputing"

NONE = ActivationPolicy(candidate=True)
"""All activations are kept."""
SELECTIVE = ActivationPolicy(RECOMPUTING, attention=True, candidate=True, rules=(attention_is_found,))
"""Attention is computed again."""
AUTO = ActivationPolicy(RECOMPUTING, group=NEAR_THE_ROOT, candidate=True)
"""Groups of layers are computed again, of a size near the square root of the network's layers."""
EVERY = ActivationPolicy(RECOMPUTING)
"""Groups of n layers are computed again; a run names the number (`{every: n}`), and no entry of the registry."""
OPS = ActivationPolicy(
    "meshwright.strategies.memory.recompute:keeping_operations",
    recorded=True,
    rules=(kept_operations_are_whole, kept_operations_are_seen),
)
"""Each layer is computed again, except attention and every second product."""
OFFLOAD = ActivationPolicy("meshwright.strategies.memory.host_inputs:in_host_memory", keeps_inputs=False)
"""Each layer is computed again from an input that is kept in host memory."""
