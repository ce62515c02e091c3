"""ResNeXt against torch's grouped convolutions and norms, in float64; and every layout against one device."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.models.chain import chain_of
from meshwright.compute.parameters.shard import num_parameters, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.families.vision.resnext import BlockShape, ResNeXtModel, block_shapes
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import CutForms, TensorMeta
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.training.all_stages import plan_stages
from meshwright.training.rank_model import build_model
from meshwright.training.stage_costs import counted_costs, time_links
from tests.compute.models.harness import random_model
from tests.oracle.run import check, run
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
B, CLASSES = 5, 7
WHOLE = {"kind": "none"}


def config_of(**model: Any) -> Config:
    shape = {
        "family": "resnext", "hidden": 8, "stage_blocks": [2, 1], "paths": 4, "path_width": 2, "image": 12,
        "channels": 3, "classes": CLASSES, "vocabulary_multiple": 4, "stem": "small",
    }  # fmt: skip
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": shape | model, "data": {"source": "digits"}, "precision": precision})


def batch(config: Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (B, config.model.channels, config.model.image, config.model.image)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return {"images": images, "labels": torch.randint(CLASSES, (B, 1), generator=generator)}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class PlainBlock(nn.Module):
    """Figure 3 (c) of the paper, with group norm."""

    def __init__(self, shape: BlockShape, paths: int) -> None:
        super().__init__()
        self.expand = convolution(shape.inputs, shape.inner, 1)
        self.expand_norm = nn.GroupNorm(paths, shape.inner)
        self.kernels = convolution(shape.inner, shape.inner, 3, shape.stride, paths)
        self.kernels_norm = nn.GroupNorm(paths, shape.inner)
        self.contract = convolution(shape.inner, shape.outputs, 1)
        self.contract_norm = nn.GroupNorm(paths, shape.outputs)
        self.shortcut = nn.Sequential()
        if shape.inputs != shape.outputs or shape.stride > 1:
            self.shortcut.add_module("transform", convolution(shape.inputs, shape.outputs, 1, shape.stride))
            self.shortcut.add_module("norm", nn.GroupNorm(paths, shape.outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.expand_norm(self.expand(x)))
        y = F.relu(self.kernels_norm(self.kernels(y)))
        return F.relu(self.contract_norm(self.contract(y)) + self.shortcut(x))


class Plain(nn.Module):
    """The same model on [B, C, S, S]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        imagenet = model.stem == "imagenet"
        self.patches = convolution(model.channels, model.hidden, 7 if imagenet else 3, 2 if imagenet else 1)
        self.norm = nn.GroupNorm(model.paths, model.hidden)
        self.pool = nn.MaxPool2d(3, 2, 1) if imagenet else nn.Identity()
        self.blocks = nn.Sequential(*(PlainBlock(shape, model.paths) for shape in block_shapes(model)))
        self.head = nn.Linear(block_shapes(model)[-1].outputs, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.patches(images.double() / 127.5 - 1))))
        return self.head(self.blocks(x).mean((2, 3)))


def as_plain(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename our weights, or gradients, as the plain model's; a 1 x 1 convolution's lack the last dims."""
    return {
        name.removeprefix("stem."): value[:CLASSES] if name.startswith("head")
        else value if name.endswith("kernels.weight") or value.dim() == 1
        else value.t()
        for name, value in ours.items()
    }  # fmt: skip


def compare(mesh: Mesh, stem: str) -> tuple[float, dict[str, float]]:
    """Return the losses' distance, and the relative distance of each gradient."""
    config = config_of(stem=stem, image=24 if stem == "imagenet" else 12)
    model, plain = random_model(ResNeXtModel, mesh, config), Plain(config).double()
    with torch.no_grad():
        weights = as_plain(dict(model.named_parameters()))
        assert weights.keys() == dict(plain.named_parameters()).keys()
        for name, value in weights.items():
            plain.get_parameter(name).copy_(value.reshape(plain.get_parameter(name).shape))
    rows = batch(config)
    (loss,) = model(rows, {"labels": 1 / B})
    other = F.cross_entropy(plain(rows["images"]), rows["labels"][:, 0])
    loss.backward()
    other.backward()
    gradients = as_plain({name: parameter.grad for name, parameter in model.named_parameters()})
    distances = {}
    for name, gradient in gradients.items():
        wanted = plain.get_parameter(name).grad
        assert wanted is not None
        distances[name] = float((gradient.reshape(wanted.shape) - wanted).norm() / wanted.norm())
    return abs(float((loss - other).detach())), distances


@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_values_and_gradients_equal_plain_torchs(stem: str) -> None:
    ((loss, gradients),) = run_ranks(compare, ONE, stem)
    assert loss < 1e-12
    assert len(gradients) == 3 + 3 * 9 + 2 * 3 + 2
    assert max(gradients.values()) < 1e-11, gradients


def explicit_paths(mesh: Mesh) -> float:
    """Return a block's distance from the sum of its paths, each computed separately (figure 3 (a) of the paper)."""
    config = config_of()
    model, paths = random_model(ResNeXtModel, mesh, config), config.model.paths
    block: Any = model.blocks["2"]
    h = torch.randn(B, 144, 32, dtype=torch.float64)
    x = h.transpose(1, 2).unflatten(2, (12, 12))

    def norm(y: Tensor, layer: Any, mine: slice) -> Tensor:
        return F.relu(F.group_norm(y, 1, layer.weight[mine], layer.bias[mine]))

    def path(mine: slice) -> Tensor:
        y = norm(F.conv2d(x, block.expand.weight[:, mine].t()[..., None, None]), block.expand_norm, mine)
        y = norm(F.conv2d(y, block.kernels.weight[mine], stride=2, padding=1), block.kernels_norm, mine)
        return F.conv2d(y, block.contract.weight[mine].t()[..., None, None])

    width = block.expand.weight.shape[1] // paths
    summed = sum((path(slice(width * index, width * (index + 1))) for index in range(paths)), torch.zeros(()))
    with torch.no_grad():
        wanted = F.relu(block.contract_norm(summed.flatten(2).transpose(1, 2)) + block.shortcut(h))
        return float((block(h) - wanted).norm() / wanted.norm())


def test_a_block_is_the_sum_of_its_paths() -> None:
    assert run_ranks(explicit_paths, ONE)[0] < 1e-13


def test_the_published_size_and_cost() -> None:
    """25.0 million parameters and 4.2 billion multiplications (table 1); torchvision counts 25 028 904 parameters."""
    config = parse_config({"model": "resnext-50", "data": {"source": "digits"}})
    model = ResNeXtModel(config.model, SerialKit(solo_mesh(torch.device("meta"))))
    padding = config.model.padded(1000) - 1000
    assert num_parameters(list(shard_specs(model).values())) - padding * 2049 == 25_028_904
    costs = chain_of(config).products(config)
    assert costs.total == pytest.approx(4.2e9, rel=0.01)
    assert len(set(costs.layers)) == 3  # the first block, the first block of another stage, all others


def first_facts(mesh: Mesh) -> tuple[float, int, int, int]:
    """Return the untrained loss, the right answers of the likeliest classes, also with one ignored, and the flops."""
    from torch.utils.flop_counter import FlopCounterMode

    config = config_of(channels=1, vocabulary_multiple=1)
    model = build_model(config, SerialKit(mesh), mesh)
    assert isinstance(model, ResNeXtModel)
    rows = batch(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = float(model(rows, {"labels": 1 / B})[0])
    with torch.no_grad():
        h = model.hidden_states(rows)[0]
        rows["labels"] = model.head.logits(h).argmax(-1)  # type: ignore[operator, union-attr]
        (all_right,) = model.num_correct(h, rows)
        rows["labels"][0] = -100
        return loss, all_right, model.num_correct(h, rows)[0], counter.get_total_flops()


def test_an_untrained_model_and_what_it_computes() -> None:
    ((loss, right, one_ignored, flops),) = run_ranks(first_facts, ONE)
    assert loss == pytest.approx(math.log(CLASSES), abs=0.1)
    assert (right, one_ignored) == (B, B - 1)
    config = config_of(channels=1, vocabulary_multiple=1)
    assert flops == 2 * B * chain_of(config).products(config).total


def laid_out(tensor: dict[str, Any], data: int = 1, stages: int = 1, **pipeline: Any) -> Config:
    """Return a config with four microbatches of random images, over replicas."""
    config = config_of(channels=1, image=6, stage_blocks=[1, 2])
    tree = config.model_dump(mode="json", by_alias=True) | {
        "batch": {"global": 16, "micro": 4},
        "layout": {
            "data": {"size": data, "bucket": 8192},
            "pipeline": {"size": stages} | pipeline,
            "tensor": tensor,
        },
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 1}},
        "steps": 3,
    }
    return parse_config(tree)


@cache
def serial() -> Any:
    return run(laid_out(WHOLE))[0]


def subgraph(size: int, common: str, branch: str) -> dict[str, Any]:
    return {"kind": "subgraph", "size": size, "common": common, "branch": branch}


SUBGRAPHS = [
    *[subgraph(2, common, branch) for common in ("all", "one") for branch in ("attention-core", "attention")],
    subgraph(2, "one", "block"),  # a block has no feed-forward, so `block` equals `attention`
    *[subgraph(4, common, branch) for common, branch in (("all", "attention"), ("one", "attention-core"))],
]
ONE_D = {"kind": "megatron", "size": 2}
BLOCKS = [{"kind": "tesseract", "q": 2, "d": d} for d in (1, 2)]


ONLY_LONG = [
    BLOCKS[1],
    *[subgraph(4, common, branch) for common, branch in (("all", "attention-core"), ("one", "attention"))],
    subgraph(2, "all", "block"),
]


def label(tensor: dict[str, Any]) -> str:
    return "-".join(map(str, tensor.values()))


@pytest.mark.parametrize(
    "tensor",
    [*SUBGRAPHS, ONE_D, BLOCKS[0], *(pytest.param(tensor, marks=pytest.mark.long) for tensor in ONLY_LONG)],
    ids=label,
)
def test_kits_equal_serial(tensor: dict[str, Any]) -> None:
    check(run(laid_out(tensor)), serial())


def test_data_parallelism_equals_serial() -> None:
    check(run(laid_out(WHOLE, 2)), serial())
    check(run(laid_out(SUBGRAPHS[1], 2)), serial())


@pytest.mark.parametrize("stages, schedule", [(2, "1f1b"), (3, "message-driven")])
def test_stages_equal_serial(stages: int, schedule: str) -> None:
    check(run(laid_out(WHOLE, 1, stages, schedule=schedule)), serial())


@pytest.mark.parametrize("tensor", [SUBGRAPHS[1], SUBGRAPHS[3]], ids=label)
def test_stages_with_subgraphs_equal_serial(tensor: dict[str, Any]) -> None:
    check(run(laid_out(tensor, 1, 2)), serial())


@pytest.mark.parametrize("precision", [{"level": "O1", "dtype": "bf16"}, {"level": "O2", "dtype": "bf16"}], ids=str)
def test_half_precision_on_stages(precision: dict[str, str]) -> None:
    """Activations are of the planned dtype, and losses are near float64's."""
    config = laid_out(WHOLE, 1, 2)
    tree = config.model_dump(mode="json", by_alias=True) | {"precision": precision}
    for losses, _ in run(parse_config(tree)):
        assert losses == pytest.approx(serial()[0], rel=0.02)


def test_recomputed_blocks_equal_serial() -> None:
    tree = laid_out(SUBGRAPHS[3]).model_dump(mode="json", by_alias=True)
    check(run(parse_config(tree | {"memory": {"recompute": {"every": 2}}})), serial())


def test_each_cut_has_its_own_messages_and_each_block_its_own_cost() -> None:
    config = laid_out(WHOLE, 1, 3, partition=(1, 1, 1))
    mesh = planned_mesh(Grid(config.layout.axes), 0, config.layout.token_axes)
    first, second = (TensorMeta(shape, torch.float64) for shape in ((4, 36, 32), (4, 9, 64)))
    stages = plan_stages(config, mesh)
    assert [stages.message(stage) for stage in range(3)] == [
        {"before": {}, "after": {0: CutForms((first,), False)}},
        {"before": {0: CutForms((first,), True)}, "after": {1: CutForms((second,), False)}},
        {"before": {1: CutForms((second,), True)}, "after": {}},
    ]
    costs, products = counted_costs(config), chain_of(config).products(config)
    weights = [
        cost - config.micro * product
        for cost, product in zip(
            (costs.embedding, *costs.layers, costs.head),
            (products.embedding, *products.layers, products.head),
            strict=True,
        )
    ]
    held = [
        num_parameters([spec for name, spec in stages.specs.items() if name.startswith(link)])
        for link in ("stem.", "blocks.0.", "blocks.1.", "blocks.2.", "head.")
    ]
    assert weights == pytest.approx([weights[0] / held[0] * number for number in held])
    assert len(set(held)) == 5


def measured_costs(mesh: Mesh) -> tuple[float, ...]:
    return tuple(time_links(config_of(stage_blocks=[3, 1]), mesh.device))


def test_layers_that_are_alike_are_measured_once() -> None:
    begin, first, second, third, other, end = run_ranks(measured_costs, ONE)[0]
    assert min(begin, first, second, other, end) > 0
    assert second == third
    assert len({first, second, other}) == 3


def test_what_does_not_fit() -> None:
    """Every mistake is refused, and the message has the valid values."""
    base: dict[str, Any] = {"data": {"source": "digits"}, "batch": {"global": 12}}
    told = []
    for model, more in (
        ({"paths": 3}, {"layout": {"tensor": ONE_D}}),
        ({}, {"layout": {"tensor": ONE_D | {"sequence_parallel": True}}}),
        ({}, {"memory": {"recompute": "selective"}}),
        ({}, {"layout": {"tensor": {"kind": "subgraph", "size": 3}}}),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(base | {"model": {"base": "resnext-tiny"} | model} | more)
        told += [str(problem) for problem in caught.value.problems]
    assert told == [
        "model.paths=3 does not divide model.hidden=16: norms have a group for each path; valid: 1, 2, 4, 8, 16",
        "layout.tensor.size=2 does not divide model.paths=3; valid: 1, 3",
        "layout.tensor.sequence_parallel=True cuts the positions of an image, over which the norms of a resnext are "
        "taken; valid: false",
        "memory.recompute=selective recomputes attention, and a resnext has none; valid: none, auto, {every: n}",
        "layout.tensor.size=3 does not divide model.paths=4; valid: 1, 2, 4",
    ]
