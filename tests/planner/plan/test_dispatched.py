"""Other programs' dispatch of rows to experts: ranks, rows and bytes by hand."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.expert_ranks import Choice, units_of
from meshwright.planner.plan.network import DISPATCHERS, ClusterNetwork, Rows
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import Kernel, Program, Start
from meshwright.planner.plan.software import load_program
from meshwright.planner.plan.space import SearchJob, legal_layouts
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.strategies.pipeline.task import TaskKind

MICRO, TOKENS, HIDDEN, CHOSEN = 2, 64, 128, 2


def config_of(layout: dict[str, Any], hidden: int = HIDDEN, tokens: int = TOKENS) -> Config:
    sizes = {"layers": 2, "hidden": hidden, "heads": 4, "feed_forward": 256, "vocabulary": 512, "positions": tokens}
    experts = {"count": 8, "per_token": CHOSEN, "width": hidden // 2}
    ranks = math.prod(
        section["size"] for name, section in layout.items() if isinstance(section, dict) and name != "tensor"
    )
    return parse_config({
        "model": {"family": "llama", "experts": experts, **sizes},
        "data": {"sequence": tokens},
        "batch": {"global": 4 * MICRO * ranks, "micro": MICRO},
        "layout": layout,
        "precision": {"level": "O2", "dtype": "bf16"},
    })  # fmt: skip


def planner(*facts: str) -> Planner:
    program = load_program("megatron-core", facts)
    return Planner(program.on(load_cluster("dgx-h100")), program.software)


def layer_programs(plan: Planner, config: Config, kind: TaskKind) -> list[Program]:
    """Return a middle microbatch's programs of the first stage's units."""
    (chunk,) = plan.run(config).stages[0].chunks
    return [program for unit in chunk.units for program, _ in unit.passes(kind, 1)]


def messages(plan: Planner, config: Config, kind: TaskKind) -> list[tuple[str, str, int]]:
    """Return (axes, verb, payload) of all layers, of one microbatch."""
    starts = [event for program in layer_programs(plan, config, kind) for event in program.events]
    return [(each.axes, each.verb, each.payload_bytes) for each in starts if isinstance(each, Start)]


def rows_sent(dispatch: str, config: Config, kind: TaskKind) -> list[tuple[str, int]]:
    """Return (verb, payload) of messages over the expert axis."""
    found = messages(planner(f"dispatch={dispatch}"), config, kind)
    return [(verb, payload) for axes, verb, payload in found if axes == "expert"]


@pytest.mark.parametrize("choice", [Choice(8, 2), Choice(8, 3, 4, 2), Choice(12, 3, 3, 2), Choice(16, 2, 4, 1)])
@pytest.mark.parametrize("units", [2, 4])
def test_the_units_of_a_token_are_counted(choice: Choice, units: int) -> None:
    """The counted units are the mean over every choice of groups, and of experts in these groups."""
    size, each = choice.experts // choice.groups, choice.experts // units
    counts = [
        len({expert // each for expert in chosen})
        for groups in combinations(range(choice.groups), choice.groups_chosen)
        for chosen in combinations([group * size + place for group in groups for place in range(size)], choice.chosen)
    ]
    assert units_of(choice, units) == pytest.approx(sum(counts) / len(counts))


def test_deepep_sends_a_token_once_to_each_node() -> None:
    """Two nodes of eight, one expert a rank, two of 16 experts a token, 1,000 tokens of 1,024 bytes.

    A token has 16 x (1 - C(15,2)/C(16,2)) = 2 ranks and 2 x (1 - C(8,2)/C(16,2)) = 1.5333 nodes. Of 2,048,000 bytes
    7/8 leave a rank inside of the node; of 1,000 x 1.5333 x 1,024 bytes a half leaves the node.
    """
    cluster, choice = load_cluster("dgx-h100"), Choice(16, 2)
    assert units_of(choice, 16) == pytest.approx(2)
    assert units_of(choice, 2) == pytest.approx(2 * (1 - 28 / 120))
    network = ClusterNetwork(cluster, "torch", Grid((("data", 1), ("expert", 16))), Rows("deepep", choice, 1, 20))
    payload = 1000 * 2 * 1024
    inner, outer = cluster.links["torch"].levels
    inside = payload * 7 / 8 / min(inner.bandwidth_bytes_per_second, 20 * 1.67e10)
    assert outer.device_bandwidth_bytes_per_second is not None
    between = 1000 * 1.5333333 * 1024 / 2 / (0.47 * outer.device_bandwidth_bytes_per_second)
    latencies = inner.latency_seconds + outer.latency_seconds
    assert between > inside
    assert network.collective("expert", "all_to_all", payload) == pytest.approx(between + latencies)
    # An all-to-all sends each row separately, one after the other.
    plain = ClusterNetwork(cluster, "torch", Grid((("data", 1), ("expert", 16))))
    assert plain.collective("expert", "all_to_all", payload) > network.collective("expert", "all_to_all", payload)
    # Sequences are exchanged over the context axis, and sums are no rows.
    grid = Grid((("data", 1), ("expert", 2), ("context", 8)))
    with_rows = ClusterNetwork(cluster, "torch", grid, Rows("deepep", choice, 1, 20))
    without = ClusterNetwork(cluster, "torch", grid)
    assert with_rows.collective("context", "all_to_all", 4096) == without.collective("context", "all_to_all", 4096)
    assert with_rows.collective("expert", "all_reduce", 4096) == without.collective("expert", "all_reduce", 4096)


@pytest.mark.parametrize(
    "ranks, published", [(8, (764.03 + 737.13) / 2), (16, (706.95 + 666.26) / 2), (32, (642.23 + 605.15) / 2)]
)
def test_hybridep_is_as_fast_as_its_own_table(ranks: int, published: float) -> None:
    """GB200, kernels alone, bf16, 32 multiprocessors, there and back (docs/README_Hybrid-EP.md of DeepEP): 4,096
    tokens of 7,168, eight of 8 experts a rank; bytes that arrive over seconds."""
    choice = Choice(8 * ranks, 8)
    received = 4096 * units_of(choice, ranks) * 7168 * 2
    network = ClusterNetwork(
        load_cluster("gb200-nvl72"), "torch", Grid((("expert", ranks),)), Rows("hybridep", choice, 1, 32)
    )
    seconds = network.collective("expert", "all_to_all", round(received))
    assert received / seconds / 1e9 == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(
    "dispatch, verbs, rows",
    [
        # Each token's rows: k = 2.
        ("alltoall", ["all_to_all"] * 2, [2 * MICRO * TOKENS] * 2),
        # 4 ranks of 2 experts: 4 (1 - C(6,2)/C(8,2)) = 13/7 ranks a token, rounded up to rows.
        ("deepep", ["all_to_all"] * 2, [math.ceil(MICRO * TOKENS * 13 / 7)] * 2),
        ("hybridep", ["all_to_all"] * 2, [math.ceil(MICRO * TOKENS * 13 / 7)] * 2),
        ("allgather", ["all_gather", "reduce_scatter"], [4 * MICRO * TOKENS] * 2),
    ],
)
def test_messages_are_the_dispatchers(dispatch: str, verbs: list[str], rows: list[int]) -> None:
    config = config_of({"data": {"size": 4, "expert": 4}})
    found = rows_sent(dispatch, config, TaskKind.FORWARD)
    layers = config.model.num_blocks
    assert [verb for verb, _ in found] == verbs * layers
    assert [payload for _, payload in found] == [each * HIDDEN * 2 for each in rows] * layers
    assert sorted(rows_sent(dispatch, config, TaskKind.BACKWARD)) == sorted(found)


@pytest.mark.parametrize(
    "dispatch, copies",
    [
        ("alltoall", [(128, 256), (256, 256), (256, 256), (256, 128)]),
        # 128 tokens x 13/7 ranks of a token.
        ("deepep", [(238, 256), (256, 238)]),
        ("hybridep", [(238, 256), (256, 238)]),
        ("allgather", [(512, 256), (256, 512)]),
    ],
)
def test_copies_of_rows_are_one_kernel_each(dispatch: str, copies: list[tuple[int, int]]) -> None:
    """A layer copies rows to rows, to experts and back, in equal numbers forward and backward; 128 tokens, two experts
    a token."""
    config = config_of({"data": {"size": 4, "expert": 4}})
    plan = planner(f"dispatch={dispatch}", "fuses_elements=false")
    for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
        events = [event for program in layer_programs(plan, config, kind) for event in program.events]
        kernels = [event for event in events if isinstance(event, Kernel) and event.operation == "constant_pad_nd"]
        found = [each.touched_bytes for each in kernels if each.elements >= 128 * HIDDEN]  # others copy weights
        wanted = [(one + other) * HIDDEN * 2 for one, other in copies] * config.model.num_blocks
        assert sorted(found) == sorted(wanted)


def parameters_of(facts: tuple[str, ...], layout: dict[str, Any]) -> dict[str, int]:
    """Return the elements of a rank's experts of the first layer, by name."""
    (chunk,) = planner(*facts).run(config_of(layout)).stages[0].chunks
    own = [parameter for unit in chunk.units for parameter in unit.parameters]
    experts = ("blocks.0.feed_forward.expand.weight", "blocks.0.feed_forward.contract.weight")
    return {each.name: each.num_elements for each in own if each.name in experts}


TENSOR = {"kind": "megatron", "size": 4, "sequence_parallel": True}


@pytest.mark.parametrize(
    "facts, layout, ranks, axes",
    [
        # Replicas alone; a layer's four tensor ranks cut each expert.
        ((), {"data": {"size": 2, "expert": 2}, "tensor": TENSOR}, 8, "expert+tensor"),
        # Each expert is whole on a rank: 2 x 4 ranks of experts.
        (("expert_tensor=1",), {"data": {"size": 2, "expert": 2}, "tensor": TENSOR}, 8, "expert+tensor"),
        # Two ranks cut an expert: 2 x 4 / 2 = 4 ranks of experts.
        (("expert_tensor=2",), {"data": {"size": 2, "expert": 2}, "tensor": TENSOR}, 8, "expert+tensor"),
        # More ranks of experts than replicas.
        (("expert_tensor=1",), {"data": {"size": 1}, "tensor": TENSOR}, 4, "tensor"),
        (
            ("expert_tensor=1", "expert_context=true"),
            {"data": {"size": 1}, "context": {"size": 2, "kind": "ring"}, "tensor": TENSOR | {"size": 2}}, 4,
            "context+tensor",
        ),
    ],
)  # fmt: skip
def test_experts_are_dealt_over_the_ranks_of_a_stage(
    facts: tuple[str, ...], layout: dict[str, Any], ranks: int, axes: str
) -> None:
    expand, contract = parameters_of(facts, layout).values()
    assert (expand, contract) == (8 * HIDDEN * 2 * 64 // ranks, 8 * HIDDEN * 64 // ranks)
    found = messages(planner(*facts, "dispatch=deepep"), config_of(layout), TaskKind.FORWARD)
    assert axes in {group for group, verb, _ in found if verb == "all_to_all"}


def test_ranks_that_share_an_expert_all_get_its_rows() -> None:
    """Each of four tensor ranks has 32 tokens of two experts and sends 64 rows; if two ranks share each expert, 128
    rows."""
    layout = {"data": {"size": 1}, "tensor": TENSOR}
    (whole, halves) = (
        max(payload for _, verb, payload in messages(planner(fact), config_of(layout), TaskKind.FORWARD)
            if verb == "all_to_all")
        for fact in ("expert_tensor=1", "expert_tensor=2")
    )  # fmt: skip
    assert (whole, halves) == (64 * HIDDEN * 2, 128 * HIDDEN * 2)


@pytest.mark.parametrize(
    "facts, layout, words",
    [
        (
            ("expert_tensor=3",),
            {"data": {"size": 1}, "tensor": TENSOR},
            "8 experts of 3 parts over 4 ranks",
        ),
        (
            ("expert_tensor=1",),
            {"data": {"size": 1}, "tensor": TENSOR | {"sequence_parallel": False}},
            "needs tensor ranks with different tokens",
        ),
    ],
)
def test_ranks_without_experts_of_their_own_are_refused(
    facts: tuple[str, ...], layout: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planner(*facts).predict(config_of(layout))


@pytest.mark.parametrize("fact", ["dispatch=deepep", "expert_tensor=1", "expert_context=true", "dispatch_sms=20"])
def test_our_own_runs_refuse_layouts_of_other_programs(fact: str) -> None:
    with pytest.raises(ConfigError, match="our own runs deal experts over"):
        load_program("meshwright", [fact])


@pytest.mark.parametrize(
    "program, facts, words",
    [
        (
            "megatron-core",
            ("dispatch_sms=20",),
            "has no effect with dispatch=alltoall; valid: dispatch=deepep, hybridep",
        ),
        ("megatron-core", ("dispatch=allgather", "dispatch_sms=20"), "has no effect with dispatch=allgather"),
        ("deepspeed", ("expert_tensor=1",), "has no effect with dispatch=None"),
        ("fsdp", ("expert_context=true",), "has no effect with dispatch=None"),
    ],
)
def test_facts_without_an_effect_are_refused(program: str, facts: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_program(program, facts)


@pytest.mark.parametrize("sms", [132, 133, 500])
def test_a_dispatcher_leaves_multiprocessors_to_products(sms: int) -> None:
    config = config_of({"data": {"size": 4, "expert": 4}})
    beside = ("dispatch=deepep", "overlapped=experts", f"dispatch_sms={sms}")
    with pytest.raises(ConfigError, match=r"leaves none of the 132 multiprocessors .* valid: 1 to 131"):
        planner(*beside).predict(config)
    assert planner("dispatch=deepep", "overlapped=experts", "dispatch_sms=131").predict(config).seconds > 0


def test_hidden_rows_cost_the_multiprocessors_of_their_kernels() -> None:
    """A part that computes for c seconds and sends for m < c takes c + m x 20 / (132 - 20) seconds under another
    microbatch. The part takes c + m seconds in the step's first forward pass and last backward pass."""
    config = config_of({"data": {"size": 4, "expert": 4}}, hidden=2048, tokens=4096)
    plan, blocking = planner("dispatch=deepep", "overlapped=sums,gathers,layers,experts"), planner("dispatch=deepep")
    site, run = plan.site, plan.run(config)
    program = max(
        layer_programs(plan, config, TaskKind.FORWARD),
        key=lambda each: sum(isinstance(event, Start) for event in each.events),
    )
    computed = run.timer.seconds(program, lambda *_: 0.0, 1.0)
    whole = blocking.site.program_seconds(program, run.timer, run.network, "torch", config)
    sent = whole - computed
    assert 0 < sent < computed
    beside = site.program_seconds(program, run.timer, run.network, "torch", config)
    assert beside == pytest.approx(computed + sent * 20 / (132 - 20))
    assert site.program_seconds(program, run.timer, run.network, "torch", config, alone=True) == whole
    assert plan.seconds(config) < blocking.seconds(config)


def test_a_dispatchers_multiprocessors_are_a_fact() -> None:
    config = config_of({"data": {"size": 4, "expert": 4}})
    assert [planner(*facts).site.rows(config) for facts in ((), ("dispatch=allgather",))] == [None, None]
    own, told = (planner("dispatch=hybridep", *facts).site.rows(config) for facts in ((), ("dispatch_sms=32",)))
    assert own is not None
    assert told is not None
    assert (own.sms, told.sms) == (DISPATCHERS["hybridep"].sms, 32)


def test_a_search_deals_experts_over_the_ranks_of_a_layer_first() -> None:
    """Eight experts on four tensor ranks leave two to replicas; on ranks that cut each expert, all eight."""
    run = config_of({"data": {"size": 8}})
    cluster = load_cluster("dgx-h100")
    for facts, most in ((("expert_tensor=1",), {1: 8, 2: 4, 4: 2, 8: 1}), ((), {1: 8, 2: 4, 4: 2, 8: 1})):
        program = load_program("megatron-core", facts)
        job = SearchJob(run, cluster, 8, known=program.layouts, experts=program.software.expert_ranks)
        found: dict[int, int] = {}
        for config in legal_layouts(job):
            tensor = dict(config.layout.axes).get("tensor", 1)
            found[tensor] = max(found.get(tensor, 0), config.layout.data.expert)
            assert tensor == 1 or config.layout.tensor.cuts_sequences or not facts
            assert 8 % (config.layout.data.expert * (tensor if facts else 1)) == 0
        assert found == {tensor: experts for tensor, experts in most.items() if tensor in found}
        assert len(found) > 2
