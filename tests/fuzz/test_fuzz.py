"""Runs over all axes equal one device: every value, every kind of tensor layout with each model, sync and schedule.

Runs that failed before are included. With --long, every legal pair of values runs, and two thousand runs drawn at
random (an hour or two on 2 cores).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from random import Random
from typing import Any

import pytest

from meshwright.compute.tensor import graphs
from meshwright.config import Config, load_config
from meshwright.config.load import parse_run
from meshwright.ranks.errors import ConfigError
from meshwright.training.fp8_note import fp8_note
from tests.fuzz.__main__ import FOUND
from tests.fuzz.axes import AXES, Case, chat_tokenizer, tree_of
from tests.fuzz.check import mistakes
from tests.fuzz.draw import Drawing, pairs_of
from tests.fuzz.fixed import FIXED, MORE, few, numbered

FEW = few()

RANDOM_RUNS, A_TEST = 2000, 20


@numbered(FIXED, FEW)
def test_equals_one_device(case: Case) -> None:
    assert mistakes(parse_run(tree_of(case))) == []


@numbered(MORE, ())
def test_more_equal_one_device(case: Case) -> None:
    assert mistakes(parse_run(tree_of(case))) == []


def drawn(random: Random, changed: Callable[[Case], dict[str, Any] | None]) -> tuple[Case, Config]:
    """Return the first drawn run that the config allows, with a change.

    `changed(case)` gives the tree of a changed run, or None for the next case.
    """
    for case, _ in Drawing(random).cases():
        if (tree := changed(case)) is None:
            continue
        try:
            return case, parse_run(tree)
        except ConfigError:
            continue
    raise AssertionError("draws do not end")


def with_experts(random: Random) -> tuple[Case, Config]:
    """Return a drawn run of Llama or DeepSeek with experts.

    In float64 alone, a router chooses and a capacity drops: in other precisions a choice jumps by rounding (check.py).
    """

    def changed(case: Case) -> dict[str, Any] | None:
        if case["data"] == 1:
            return None
        tree = tree_of(case | {"model": random.choice(("llama", "deepseek"))})
        exact = case["precision"] == "float64"
        chosen = {"per_token": 2, "capacity": random.choice((None, 0.75))} if exact else {"per_token": 6}
        if exact and random.random() < 0.5:
            chosen |= {"groups": 3, "groups_per_token": 2, "bias_rate": 0.05}
        over, scores = random.choice(("sequence", "microbatch", "batch")), random.choice(("softmax", "sigmoid"))
        beside = {"shared": random.choice((0, 24)), "router_z": random.choice((0.0, 0.01)), "balance_over": over}
        tree["model"] |= {
            "experts": {"count": 6, "balance": 0.3, "scores": scores, **beside, **chosen}, "feed_forward": 12,
            **({"biases": []} if tree["model"]["family"] == "llama" else {}),
        }  # fmt: skip
        tree["layout"]["data"]["expert"] = random.choice((1, 2, 2, 3))
        if tree["layout"]["data"]["expert"] > 1:
            tree["layout"]["data"]["exchange"] = random.choice(("blocking", "messages"))
        return tree

    return drawn(random, changed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 60))])
def test_drawn_experts_equal_one_device(seed: int) -> None:
    case, config = with_experts(Random(f"experts/{seed}"))
    assert mistakes(config) == [], (case, config.model.experts, config.layout.data)


RELATIVES = (
    {"window": 3}, {"window": 5, "window_layers": [False, True]}, {"rotary_layers": [True, False]},
    {"norms": "behind", "head_norms": False, "whole_norms": True}, {"norms": "both"},
    {"window": 4, "window_layers": [True, False], "window_rope": {"theta": 50.0}},
    {"family": "gemma", "query_scalar": 7, "score_cap": 2.0, "logit_cap": 3.0},
    {"family": "gemma", "window": 4, "window_layers": [True, False], "score_cap": 1.0}, {"family": "phi", "window": 2},
)  # fmt: skip
"""Fields of Llama's relatives; patterns need two layers."""


def with_gpt_oss(random: Random) -> tuple[Case, Config]:
    """Return a drawn run of gpt-oss: windows, sinks, biases of all linears, and clamps that act."""

    def changed(case: Case) -> dict[str, Any]:
        tree = tree_of(case | {"model": "llama"})
        exact = case["precision"] == "float64"
        chosen = {"per_token": 2, "capacity": random.choice((None, 0.75))} if exact else {"per_token": 6}
        tree["model"] |= {
            "family": "gpt-oss", "head_norms": False, "biases": ["query-key-value", "output", "feed-forward"],
            "feed_forward": 12, "gate_limit": random.choice((0.05, 7.0)), "window": random.choice((3, 5)),
            "experts": {"count": 6, "balance": random.choice((0.0, 0.3)), **chosen},
        } | ({"window_layers": [True, False]} if case["layers"] > 1 else {})  # fmt: skip
        if case["data"] > 1:
            tree["layout"]["data"]["expert"] = random.choice((1, 2, 2, 3))
        return tree

    return drawn(random, changed)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))])
def test_drawn_gpt_oss_equals_one_device(seed: int) -> None:
    case, config = with_gpt_oss(Random(f"gpt-oss/{seed}"))
    assert mistakes(config) == [], (case, config.model, config.layout.data)


def relative(random: Random) -> tuple[Case, Config]:
    """Return a drawn run of Llama with the fields of one or two relatives."""

    def changed(case: Case) -> dict[str, Any]:
        tree = tree_of(case | {"model": "llama"})
        for fields in random.sample(RELATIVES, random.choice((1, 1, 2))):
            tree["model"] |= fields
        return tree

    return drawn(random, changed)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 80))])
def test_drawn_relatives_equal_one_device(seed: int) -> None:
    case, config = relative(Random(f"relatives/{seed}"))
    assert mistakes(config) == [], (case, config.model)


def with_states(random: Random) -> tuple[Case, Config]:
    """Return a drawn run of a model with gated delta nets, with or without experts."""

    def changed(case: Case) -> dict[str, Any] | None:
        if case["frozen"] == "biases":  # the model has no biases
            return None
        heads = int(case["heads"] or 0)
        delta = {
            "family": random.choice(("qwen3-next", "qwen3.5")), "key_value_heads": heads // 2, "head_width": 4,
            "rotary_width": random.choice((2, 4)), "attention_layers": random.choice(([False, True], [True, False])),
            "linear_key_heads": heads // 2, "linear_value_heads": heads // 2 * random.choice((1, 2)),
            "linear_key_width": 4, "linear_value_width": random.choice((3, 4)), "convolution": random.choice((2, 4)),
        }  # fmt: skip
        tree = tree_of(case | {"model": "llama"})
        tree["model"] = {key: value for key, value in tree["model"].items() if key not in ("head_norms", "biases")}
        tree["model"] |= delta
        if case["precision"] == "float64" and random.random() < 0.4:  # elsewhere a router's choice jumps by rounding
            tree["model"]["experts"] = {"count": 4, "per_token": 2, "width": 12, "shared": 12, "shared_gate": True}
        return tree

    return drawn(random, changed)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 80))])
def test_drawn_delta_nets_equal_one_device(seed: int) -> None:
    case, config = with_states(Random(f"states/{seed}"))
    assert mistakes(config) == [], (case, config.model)


def trace_alone() -> None:
    """Compile layers as graphs with torch's kernels, as tests/compute/tensor/test_graphs.py does."""
    graphs.BACKEND = "aot_eager"


def with_graphs(random: Random, compiles: str) -> tuple[Case, Config]:
    """Return a drawn run with layers as graphs: `blocks`, or `kernels` with their references; the head is no graph."""
    return drawn(random, lambda case: None if case["vocabulary"] == "real" else tree_of(case) | {"compile": compiles})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns in any use; so the next line
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(60) if seed not in (0, 3))]
)
def test_drawn_layers_as_graphs_equal_one_device(seed: int) -> None:
    case, config = with_graphs(Random(f"graphs/{seed}"), ("blocks", "kernels")[seed % 2])
    assert mistakes(config, trace_alone) == [], case


def in_fp8(random: Random, **settings: str) -> tuple[Case, Config]:
    """Return a drawn run with linears in FP8, and with other settings."""
    for case, _ in Drawing(random).cases():
        if settings and case["vocabulary"] == "real":
            continue
        tree = tree_of(case | {"precision": "O2-fp8", "layers": 3}) | settings
        tree["model"]["hidden"] = 96
        try:
            config = parse_run(tree)
            fp8_note(config)  # refuses a run without linears in FP8
            return case, config
        except ConfigError:
            continue
    raise AssertionError("draws do not end")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 60))])
def test_drawn_runs_in_fp8_are_within_the_bound_of_one_device(seed: int) -> None:
    case, config = in_fp8(Random(f"fp8/{seed}"))
    assert mistakes(config) == [], case


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns in any use; so the next line
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.long  # tests/compute/tensor/test_graphs.py has fixed runs
@pytest.mark.parametrize("seed", range(40))
def test_drawn_layers_as_graphs_in_fp8_are_within_the_bound(seed: int) -> None:
    case, config = in_fp8(Random(f"graphs in fp8/{seed}"), compile="blocks")
    assert mistakes(config, trace_alone) == [], case


def rounded_at_random(random: Random) -> tuple[Case, Config]:
    """Return a drawn run with moments, masters or both stored in bf16."""

    def changed(case: Case) -> dict[str, Any]:
        formats = random.choice(({"states": "bf16"}, {"masters": "bf16"}, {"states": "bf16", "masters": "bf16"}))
        precision = random.choice(("O2-bf16", case["precision"]))
        tree = tree_of(case | {"precision": precision})
        tree["optimizer"] |= formats
        return tree

    return drawn(random, changed)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 60))])
def test_drawn_runs_that_round_at_random_equal_one_device(seed: int) -> None:
    case, config = rounded_at_random(Random(f"rounded/{seed}"))
    assert mistakes(config) == [], case


def test_the_fixed_set_has_the_pairs_of_all_others() -> None:
    covered = set().union(*map(pairs_of, FIXED))
    assert set().union(*map(pairs_of, MORE)) <= covered


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_was_found_stays_mended(path) -> None:
    chat_tokenizer()  # named by runs on pairs
    assert mistakes(load_config(path)) == []


@pytest.mark.parametrize("seed, runs", [(5, 25), pytest.param(6, 300, marks=pytest.mark.long)])
def test_a_drawn_run_holds_no_new_pair(seed: int, runs: int) -> None:
    """The fixed set covers all pairs that the config's rules allow. After a change: `python -m tests.fuzz --cover`."""
    covered = set().union(*map(pairs_of, FIXED))
    for case, _ in islice(Drawing(Random(seed)).cases(), runs):
        assert pairs_of(case) <= covered, f"`python -m tests.fuzz --cover`: nothing has {pairs_of(case) - covered}"


def test_every_value_is_in_the_fixed_set() -> None:
    for axis, values in AXES.items():
        assert {case[axis] for case in FIXED} == set(values), axis


@pytest.mark.long
@pytest.mark.timeout(A_TEST * 100)
@pytest.mark.parametrize("seed", range(RANDOM_RUNS // A_TEST))
def test_drawn_runs_equal_one_device(seed: int) -> None:
    for case, config in islice(Drawing(Random(f"long/{seed}")).cases(), A_TEST):
        assert mistakes(config) == [], case
