"""The reference is plain torch, by its imports and autograd graph.

Layouts of every family, level and optimizer equal the reference.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compute.model import SAMPLES
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import ShardedModule
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config
from meshwright.config.schema import ScheduleSection
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.optimizer import learning_rate
from meshwright.tools.verify import reference, reference_kit
from meshwright.tools.verify.outcome import reference_run
from meshwright.tools.verify.reference import Reference, rate_share
from tests.sources import imported_names, tree_of
from tests.tools.verify.cases import MODELS, Drawn, batches, config_for, run_reference, verdict_of
from tests.workers import run_ranks

ALLOWED = {
    "meshwright.compute.model.Batch",
    "meshwright.compute.model.IGNORED",
    "meshwright.compute.model.SAMPLES",
    "meshwright.config.Config",
    "meshwright.config.schema.ScheduleSection",
    "meshwright.compute.models.chain.make_chain",
    "meshwright.compute.context.context.Context",
    "meshwright.compute.context.spec.AttentionSpec",
    "meshwright.compute.parameters.role.Role",
    "meshwright.compute.parameters.shard.Initial",
    "meshwright.compute.parameters.shard.ONES",
    "meshwright.compute.parameters.shard.ZEROS",
    "meshwright.config.registry.load_entry",
    "meshwright.compute.tensor.copies.HeadGroups",
    "meshwright.compute.tensor.head.HeadShape",
    "meshwright.compute.tensor.router.ExpertsShape",
}
"""Facts, and the model files."""

SOLO = Grid((("data", 1),))


def test_it_imports_facts_and_the_models_alone() -> None:
    paths = [Path(module.__file__) for module in (reference, reference_kit)]
    names = {
        name for path in paths for name in imported_names(ast.walk(tree_of(path))) if name.startswith("meshwright")
    }
    own = f"{reference_kit.__name__}."
    assert {name for name in names if not name.startswith(own)} == ALLOWED
    assert sum(len(path.read_text().splitlines()) for path in paths) <= 383


def functions_of(mesh: Mesh, config: Config) -> tuple[set[str], list[str]]:
    """Return our autograd functions in the graph of a loss, and the model's layers of other kits."""
    run = Reference(config, torch.device("cpu"))
    batch = next(batches(config))
    (loss,) = run.model(run.model.prepared(batch), dict.fromkeys((*run.model.labels, SAMPLES), 1.0))
    found, waiting, seen = set[str](), [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # a function written in Python
            found.add(type(node).__name__)
    assert len(seen) > 50, "the graph was walked"
    return found, [type(layer).__name__ for layer in run.model.modules() if isinstance(layer, ShardedModule)]


@pytest.mark.parametrize("model", MODELS)
def test_its_graph_is_torchs(model: str) -> None:
    """The model files have autograd functions: GPT-2's GELU, Llama's rotation and SwiGLU, and a stage's kept inputs."""
    ours, layers = run_ranks(functions_of, SOLO, config_for(model))[0]
    family = "experts" if model == "experts" else config_for(model).model.family
    own = {
        "experts": {"_RotateBackward"},
        "deepseek": {"_RotateBackward", "_SwigluBackward", "_LoadsBackward"},  # the reference counts loads too
        "gpt2": {"_GeluBackward"}, "llama": {"_RotateBackward", "_SwigluBackward"},
        "qwen3-next": {"_RotateBackward", "_SwigluBackward"},
        "transformer": {"_TogetherBackward"}, "t5": {"_TogetherBackward"},
    }  # fmt: skip
    assert ours == own.get(family, set())
    assert layers == []


TENSORS = {
    "gpt2": {"kind": "megatron", "size": 2},
    "untied": {"kind": "tesseract", "q": 2},
    "llama": {"kind": "megatron", "size": 2},
    "experts": {"kind": "megatron", "size": 2, "sequence_parallel": True},
    "deepseek": {"kind": "megatron", "size": 2, "sequence_parallel": True},
    "qwen3-next": {"kind": "megatron", "size": 2, "sequence_parallel": True},
    "bert": {"kind": "megatron", "size": 2, "sequence_parallel": True},
    "vit": {"kind": "subgraph", "size": 2},
    "t5": {"kind": "megatron", "size": 2},
    "resnext": {"kind": "subgraph", "size": 2},
}


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_equals_it(model: str, tmp_path: Path) -> None:
    verdict = verdict_of(config_for(model), tmp_path, 4)
    verdict.check()
    names = {row.name for row in verdict.rows if row.kind == "weight"}
    stepped = [name for name in names if not name.endswith("router.bias")]  # router biases step by signs
    assert len(verdict.rows) == 3 * len(names) + 2 * 4 + 2 * len(stepped)  # Adam has two moments


@pytest.mark.parametrize("model", [model for model in MODELS if model in TENSORS])
def test_layouts_equal_it(model: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "layout": {"data": {"size": 1}, "tensor": TENSORS[model]},
        "batch": {"global": 12, "micro": 4},
    }
    verdict_of(config_for(model, **changes), tmp_path, 3).check()


def test_experts_dealt_out_equal_it(tmp_path: Path) -> None:
    layout = {"data": {"size": 2, "expert": 2, "sync": "zero1"}}
    verdict_of(config_for("experts", layout=layout), tmp_path, 3).check()


@pytest.mark.parametrize("name", ["sgd", "momentum"])
@pytest.mark.parametrize("decay", ["constant", "linear"])
def test_every_optimizer_and_schedule(name: str, decay: str, tmp_path: Path) -> None:
    settings = {"name": name, "lr": 0.1, "clip": None, "schedule": {"decay": decay, "floor": 0.2}}
    if decay == "constant":
        settings["schedule"] = {}
    layout = {"data": {"size": 2, "sync": "zero1"}}
    verdict_of(config_for(optimizer=settings, layout=layout), tmp_path, 4).check()


PRECISIONS = [("O0", "float32"), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")]


@pytest.mark.diagonal
@pytest.mark.parametrize("level,dtype", PRECISIONS)
@pytest.mark.parametrize("model", ["gpt2", "t5", "resnext"])
def test_every_precision(model: str, level: str, dtype: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "precision": {"level": level, "dtype": dtype},
        "layout": {"data": {"size": 2}},
    }
    verdict_of(config_for(model, **changes), tmp_path, 3).check()


def drawn(mesh: Mesh, config: Config) -> dict[str, torch.Tensor]:
    model = make_chain(config, SerialKit(mesh))
    initialise(model, mesh, config.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_initial_values_of_more_than_one_block() -> None:
    """A table of 2^20 elements and more is drawn in blocks, with equal bits on both sides."""
    config = config_for()
    config = config.model_copy(update={"model": config.model.model_copy(update={"hidden": 64, "vocabulary": 20000})})
    (ours,) = run_ranks(drawn, SOLO, config)
    assert ours["tokens.weight"].numel() > 2**20
    for name, values in ours.items():
        initial = reference.initial_values(f"{config.seed}/{name}", tuple(values.shape), _initial_of(config, name))
        assert torch.equal(initial, values), name


def _initial_of(config: Config, name: str) -> Any:
    model = make_chain(config, reference_kit.ReferenceKit())
    path, own = name.rsplit(".", 1)
    return model.get_submodule(path).initial if own == "weight" else reference.Initial(0.0)


@pytest.mark.parametrize("stable", [0.0, 0.5])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "sqrt", "inverse-sqrt"])
def test_learning_rates_are_those_of_the_run(decay: Any, stable: float) -> None:
    schedule = ScheduleSection(warmup=3, stable=stable, decay=decay, floor=0.2)
    rates = [rate_share(schedule, step, 10) for step in range(12)]
    assert rates == pytest.approx([learning_rate(1.0, schedule, step, 10) for step in range(12)], rel=1e-15)
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])


def interface(mesh: Mesh, config: Config) -> Any:
    return reference_run(config, batches(config), 2)


def test_the_callable(tmp_path: Path) -> None:
    """The callable reads whole global batches, and returns numbers by step and whole tensors by name."""
    (outcome,) = run_ranks(interface, SOLO, config_for())
    assert len(outcome.losses) == len(outcome.norms) == 2
    assert outcome.initial.keys() == outcome.gradients.keys() == outcome.weights.keys()
    assert outcome.norms[0] == pytest.approx(
        float(torch.stack([gradient.norm() for gradient in outcome.gradients.values()]).norm())
    )
    assert run_reference(Drawn(config_for()), tmp_path / "left", 1).joinpath("reference.json").exists()
