"""Layers compute equal numbers with and without graphs: every family, every cut, deferred gradients, recomputation.

Graphs are traced and differentiated here as for Inductor, and run by torch's own kernels (`aot_eager`); one test lets
Inductor make the graphs.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa

from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.shard import ShardedModule
from meshwright.compute.tensor import graphs
from meshwright.compute.tensor.compiler import start_compiler, vectors_found
from meshwright.compute.tensor.compiling import outside_of_graphs
from meshwright.compute.tensor.experts import Experts
from meshwright.compute.tensor.fp8 import narrow
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.config.section import with_field
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.training.decisions import resolve_process
from meshwright.training.step import train_step
from tests.compute.tensor.in_graphs import (
    LAYOUTS,
    MEGATRON,
    OLD,
    ONE,
    WARNINGS,
    equals,
    losses,
    needs_inductor,
    run,
    some,
    with_blocks,
)
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.pipeline import LOOP, WHOLE, pipelined
from tests.oracle.pipeline import serial as serial_in_microbatches
from tests.oracle.run import assembled, check, train
from tests.oracle.run import train_step as train_step_of
from tests.oracle.tensor import MODELS, config_for, serial
from tests.rehearsal.fake_cuda import compiler
from tests.workers import run_ranks

pytestmark = WARNINGS

HALVES = {"level": "O2", "dtype": "bf16"}


@pytest.mark.parametrize("model", some(MODELS, ("llama", "deepseek")))
def test_every_family_is_one_device_without_graphs(model: str) -> None:
    """The layouts below compare gpt2."""
    config = with_blocks(config_for(model, WHOLE, steps=3))
    made, breaks = equals(config, serial(model))
    assert made
    # Whole layers if nothing is outside.
    assert bool(breaks) == bool(list(outside_of_graphs(config))), breaks


NAMED = {
    "gpt2-mini": {}, "llama-mini": {}, "mixtral-mini": {}, "deepseek-mini": {}, "qwen3-next-mini": {}, "bert-tiny": {},
    "phi-3-mini-4k": {}, "transformer-tiny": {},
    "vit-tiny": {"kind": "images", "source": "digits"}, "resnext-tiny": {"kind": "images", "source": "digits"},
}  # fmt: skip
"""Data of a shipped model of each family."""


@pytest.mark.parametrize("model", NAMED)
def test_modules_outside_of_graphs_are_named(model: str) -> None:
    """The run's first lines name experts and group norms, and no module of a family without these."""
    data = NAMED[model] or {"tokenizer": "bytes"}
    config = parse_config({"model": model, "data": data, "batch": {"global": 4}, "compile": "blocks"})
    chain = make_chain(config, SerialKit(solo_mesh(torch.device("meta"))))
    modules = [module for block in chain.blocks.values() for module in block.modules()]
    left = [module for module in modules if isinstance(module, ShardedModule | Experts) and not module.in_graphs]
    assert bool(left) == bool(list(outside_of_graphs(config))), left


@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", some(LAYOUTS, ("zero3", "megatron", "tesseract", "ring")))
def test_every_way_to_cut_is_one_device_without_graphs(layout: str, model: str) -> None:
    config = with_blocks(config_for(model, WHOLE, steps=3, batch={"global": 24, "micro": 6}), **LAYOUTS[layout])
    made, breaks = equals(config, serial(model))
    assert made
    assert bool(breaks) == bool(list(outside_of_graphs(config))), breaks


@pytest.mark.parametrize(
    "experts",
    [
        {"data": {"size": 2, "expert": 2}},
        pytest.param({"data": {"size": 2, "expert": 2, "exchange": "messages"}}, marks=pytest.mark.long),
    ],
)
def test_experts_of_other_ranks(experts: dict[str, Any]) -> None:
    equals(with_blocks(config_for("experts", WHOLE, steps=3), **experts), serial("experts"))


@pytest.mark.parametrize(
    "schedule, placed, tensor",
    [
        pytest.param("gpipe", {}, WHOLE, marks=pytest.mark.long),
        pytest.param("1f1b", {}, WHOLE, marks=pytest.mark.long),
        pytest.param("message-driven", {}, WHOLE, marks=pytest.mark.long),
        ("message-driven", LOOP, WHOLE),  # which defers weight gradients
        ("1f1b", LOOP, MEGATRON),
    ],
)
def test_stages_with_several_microbatches_in_flight(
    schedule: str, placed: dict[str, Any], tensor: dict[str, Any]
) -> None:
    config = with_blocks(pipelined("gpt2", 2, schedule, tensor, placed=placed))
    made, _ = equals(config, serial_in_microbatches("gpt2"))
    assert made


@pytest.mark.parametrize(
    "recompute",
    ["selective", "offload", *(pytest.param(each, marks=pytest.mark.long) for each in ("auto", {"every": 1}))],
)
def test_recomputed_layers(recompute: Any) -> None:
    made, _ = equals(with_blocks(config_for("gpt2", WHOLE, steps=3, memory={"recompute": recompute})), serial("gpt2"))
    assert made


@needs_inductor
def test_inductor_makes_one_graph_of_all_layers() -> None:
    config = with_blocks(config_for("gpt2", WHOLE, steps=2, batch={"global": 24, "micro": 6}))
    made, breaks = equals(config, serial("gpt2"), "inductor")
    # One of the layers: a CPU's loss of all classes is one softmax, and no island.
    assert (made, breaks) == (1, Counter())


def from_disk(mesh: Mesh, config: Config, folder: Path) -> tuple[Any, dict[str, int]]:
    """Return the result of the oracle's `train`, and the counts of torch's cache of graphs in a folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    result = train(mesh, config)
    return result, {what: counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("bypass", "miss", "hit")}


@needs_inductor
def test_graphs_are_read_from_disk(tmp_path: Path) -> None:
    """Another process traces the graphs again, and neither differentiates nor lowers any graph. Layers with other
    frozen weights are other graphs, though the forward passes are equal."""
    config = with_blocks(config_for("gpt2", WHOLE, steps=2, batch={"global": 24, "micro": 6}))
    frozen = with_field(config, "model.frozen", ("blocks.*.attention.*",))
    ((one, made), (again, read), (part, other)) = (
        run_ranks(from_disk, ONE, each, tmp_path, forked=True)[0] for each in (config, config, frozen)
    )
    assert (made["bypass"], made["hit"]) == (0, 0)
    assert read == {"bypass": 0, "miss": 0, "hit": 1}
    assert other["bypass"] == 0 < other["miss"]
    check([one], serial("gpt2"))
    check([again], serial("gpt2"))
    ((plain, _, _),) = run(with_field(frozen, "compile", "none"))
    torch.testing.assert_close(part[0], plain[0], rtol=1e-12, atol=0)
    assert part[0] != one[0]


def on_vectors(mesh: Mesh, config: Config, folder: Path, capability: str) -> tuple[Any, dict[str, int]]:
    os.environ["ATEN_CPU_CAPABILITY"] = capability
    return from_disk(mesh, config, folder)


@needs_inductor
@pytest.mark.long
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="one vector length here")
def test_a_folder_of_graphs_serves_two_vector_lengths(tmp_path: Path) -> None:
    """Loops of the other length would leave elements unset, or write after the end of a tensor."""
    config = with_blocks(config_for("gpt2", WHOLE, steps=2, batch={"global": 24, "micro": 6}))
    lengths = ("avx512", "avx2", "avx512")
    found = [run_ranks(on_vectors, ONE, config, tmp_path, each, forked=True)[0] for each in lengths]
    assert [counts["hit"] for _, counts in found] == [0, 0, 1]
    check([one for one, _ in found], serial("gpt2"))


def vectors(mesh: Mesh, config: Config, ours: bool) -> list[tuple[str, str]]:
    """Return the vector instructions that Inductor finds on this CPU, by itself or by the search at the start of
    runs."""
    if ours:
        start_compiler("cpu")
        found = vectors_found().result()
    else:
        found = cpu_vec_isa.valid_vec_isa_list()
    return [(str(isa), isa.build_arch_flags()) for isa in found]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler here, which Inductor needs on a CPU")
def test_vector_instructions_are_those_that_the_compiler_finds_by_itself() -> None:
    config = config_for("gpt2", WHOLE)
    ((own,), (ours,)) = (run_ranks(vectors, ONE, config, each, forked=True) for each in (False, True))
    assert ours == own != []


IN_FP8: dict[str, dict[str, Any]] = {
    "serial": {},
    **{layout: LAYOUTS[layout] for layout in ("zero3", "megatron", "sequence-parallel", "tesseract", "ring")},
    "stages": {"pipeline": {"size": 2, "schedule": "1f1b"}},
    "deferred": {"pipeline": {"size": 2, "schedule": "message-driven"} | LOOP},
    "stages and megatron": {"pipeline": {"size": 2, "schedule": "1f1b"}, "tensor": MEGATRON},
}


def in_fp8(model: str, compiles: str, axes: dict[str, Any], recompute: Any = "none") -> Config:
    """Return a run in float64 with linears in FP8, which no run file allows: nothing else is rounded."""
    small = config_for(model, WHOLE, steps=3, batch={"global": 24, "micro": 6}, memory={"recompute": recompute})
    tree = small.model_dump(mode="json", by_alias=True) | {"compile": compiles}
    tree["model"] |= {"layers": 4, "hidden": 96} | ({"feed_forward": 96} if model == "llama" else {})
    for axis, settings in axes.items():
        tree["layout"][axis] |= settings
    config = parse_config(tree)
    narrowed: Config = with_field(config, "precision.products", "fp8")
    return narrowed


def equals_in_fp8(model: str, axes: dict[str, Any], recompute: Any = "none") -> int:
    """Compare with the same ranks without graphs, since scales are of each rank's operands; return the number of
    graphs."""
    plain, graph = (run(in_fp8(model, compiles, axes, recompute)) for compiles in ("none", "blocks"))
    losses, pieces = zip(*(result for result, _, _ in plain), strict=True)
    whole: dict[str, Any] = {}
    for name in {name for held in pieces for name in held}:
        parts = [held[name] for held in pieces if name in held]
        ends = [[o + n for o, n in zip(at, x.shape, strict=True)] for part in parts for at, x in part.items()]
        shape = torch.Size(map(max, zip(*ends, strict=True)))
        whole[name] = {(0,) * len(shape): assembled(parts, shape)}
    check([result for result, _, _ in graph], (losses[0], whole))
    return graph[-1][1]


@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", some(IN_FP8, ("megatron", "deferred")))
def test_linears_in_fp8_are_those_without_graphs(layout: str, model: str) -> None:
    assert equals_in_fp8(model, IN_FP8[layout])


@pytest.mark.parametrize("recompute", ["selective", pytest.param({"every": 1}, marks=pytest.mark.long)])
def test_layers_in_fp8_that_are_recomputed(recompute: Any) -> None:
    assert equals_in_fp8("llama", {}, recompute)


def test_fp8_has_two_kinds_of_layers() -> None:
    """The first and the last layer are one graph, and all between are another: both in one process, and no breaks."""
    config = in_fp8("gpt2", "blocks", {})
    ((_, stored, _),) = run(with_field(config, "precision.products", "stored"))
    ((_, narrowed, breaks),) = run(config)
    assert (narrowed - stored, breaks) == (1, Counter())


@pytest.mark.parametrize("precision", [{"level": "O1", "dtype": "bf16"}, {"level": "O2", "dtype": "bf16"}])
def test_halves_round_no_worse(precision: dict[str, str]) -> None:
    exact = losses()
    plain, graph = (losses(precision=precision, compile=each) for each in ("none", "blocks"))
    assert plain != graph, "nothing was compiled"
    torch.testing.assert_close(graph, exact, rtol=2e-3, atol=0)
    torch.testing.assert_close(graph, plain, rtol=2e-3, atol=0)


def steps_as_on_a_gpu(mesh: Mesh, config: Config) -> tuple[list[float], Counter[str]]:
    """Return the losses of layers that multiply by torch's `_scaled_mm`, which a CPU has as well, and the breaks of
    graphs."""
    graphs.BACKEND = "aot_eager"
    parts = build(config, mesh)
    narrow(parts.model.blocks, config.model.num_blocks, "cuda")
    return [train_step(parts, BATCHES["gpt2"](config, step), step).loss for step in range(3)], counters["graph_break"]


WIDE_ENOUGH = {"layers": 4, "hidden": 96}


@pytest.mark.skipif(OLD, reason="torch 2.11's _scaled_mm has no scales by row on CPUs")
def test_products_of_a_gpu_in_fp8_are_in_graphs() -> None:
    plain, graph = (
        run_ranks(steps_as_on_a_gpu, ONE, bf16_of(compiles, "stored"), forked=True)[0]
        for compiles in ("none", "blocks")
    )
    assert graph[1] == Counter()
    assert graph[0][0] == plain[0][0], "the first step's forward pass, whose numbers are the same in halves"
    torch.testing.assert_close(graph[0], plain[0], rtol=2e-3, atol=0)
    assert plain[0] != losses(WIDE_ENOUGH, precision=HALVES | {"products": "stored"})


def bf16_of(compiles: str, products: str) -> Config:
    tree = config_for("gpt2", WHOLE, compile=compiles).model_dump(mode="json", by_alias=True)
    return parse_config(tree | {"model": tree["model"] | WIDE_ENOUGH, "precision": HALVES | {"products": products}})


def gradients(mesh: Mesh, config: Config, backend: str) -> Tensor:
    """Return all gradients of the first step as one vector, in the order of names."""
    graphs.BACKEND = backend
    held = train_step_of(build(config, mesh), 0)[1]
    return torch.cat([part.flatten().double() for name in sorted(held) for part in held[name].values()])


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler here, which Inductor needs on a CPU")
def test_fused_casts_to_fp8_round_no_worse() -> None:
    """Inductor casts numbers that are not rounded to halves before: some fall on the other side of a half of e4m3."""
    exact_run = with_field(bf16_of("none", "stored"), "precision", config_for("gpt2", WHOLE).precision)
    exact, plain, graph = (
        run_ranks(gradients, ONE, config, "inductor", forked=True)[0]
        for config in (exact_run, bf16_of("none", "fp8"), bf16_of("blocks", "fp8"))
    )
    errors = [
        float((own - other).norm() / exact.norm()) for own, other in ((plain, exact), (graph, exact), (graph, plain))
    ]
    assert errors[1] <= 1.1 * errors[0], errors
    assert 0 < errors[2] <= 0.8 * errors[0], errors


def test_masks_of_dropout_are_those_without_graphs() -> None:
    plain, graph = (losses({"dropout": 0.2}, compile=each) for each in ("none", "blocks"))
    torch.testing.assert_close(graph, plain, rtol=1e-12, atol=0)
    assert plain != losses()


@pytest.mark.few(2)
@pytest.mark.parametrize("patterns", [["blocks.0.*"], ["*.weight"], ["*.bias"], ["blocks.*.attention.*"]])
def test_frozen_weights(patterns: list[str]) -> None:
    plain, graph = (losses({"frozen": patterns}, compile=each) for each in ("none", "blocks"))
    torch.testing.assert_close(graph, plain, rtol=1e-12, atol=0)


def test_single_operations_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"memory\.recompute=ops keeps single operations, and compile=blocks"):
        with_blocks(config_for("gpt2", WHOLE, memory={"recompute": "ops"}))


def test_islands_of_a_cpu_hide_single_operations() -> None:
    config = config_for("gpt2", WHOLE, memory={"recompute": "ops"}, compile="islands")
    with pytest.raises(ConfigError, match=r"compile=islands compiles operations on CPUs that memory\.recompute=ops"):
        resolve_process(config, Machine(cores=8, memory=2**36))


GPU = Machine(cores=8, memory=2**36, gpus=1)


@pytest.mark.parametrize(
    "changes, taken", [({}, "blocks"), ({"memory": {"recompute": "ops"}}, "islands"), ({"bits": "layout-free"}, "none")]
)
def test_auto_on_a_gpu(changes: dict[str, Any], taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.decisions.find_spec", lambda name: object())
    config = config_for("gpt2", WHOLE, precision={"level": "O0", "dtype": "float32"}, **changes)
    tree = config.model_dump(mode="json", by_alias=True) | {"device": "auto"}
    if taken == "none":
        tree["device"] = "cpu"
    assert resolve_process(parse_config(tree), GPU).config.compile == taken


def test_the_first_lines_name_modules_that_are_not_compiled() -> None:
    config = with_blocks(config_for("experts", MEGATRON), context={"size": 2, "kind": "ring"})
    (note,) = (
        each for each in resolve_process(config, Machine(cores=8, memory=2**36)).notes if each.startswith("compile")
    )
    assert note.endswith("layers that layout.tensor.kind=megatron cuts and attention over 2 ranks and experts")
