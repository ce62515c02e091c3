"""ViT against transformers' ViT with equal random weights, in float64; padding, count, dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.models.chain import chain_of
from meshwright.compute.parameters.shard import num_parameters, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.families.vision.vit import ViT, patch_rows
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_model
from tests.compute.models.harness import random_model, train_both
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
B, CLASSES, STEPS = 5, 7, 20
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
BLOCK = {
    "layernorm_before": "attention_norm",
    "attention.o_proj": "attention.output",
    "layernorm_after": "feed_forward_norm",
    "mlp.fc1": "feed_forward.expand",
    "mlp.fc2": "feed_forward.contract",
}


def config_of(**model: Any) -> Config:
    shape = {
        "family": "vit", "layers": 2, "hidden": 24, "heads": 3, "image": 12, "patch": 4, "channels": 3,
        "classes": CLASSES, "vocabulary_multiple": 4, "dropout": 0.0,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": shape | model, "data": {"source": "digits"}, "precision": precision})


def batch(step: int = 0, channels: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(256, (B, channels, 12, 12), generator=generator, dtype=torch.uint8)
    return {"images": images, "labels": torch.randint(CLASSES, (B, 1), generator=generator)}


def loss_of(model: ViT, rows: dict[str, Tensor]) -> Tensor:
    """Return the mean over all images."""
    return model(rows, {"labels": 1 / B})[0]


def hugging_face(model: ViT, config: Config) -> nn.Module:
    """Return transformers' model with our weights."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = config.model
    theirs = ViTForImageClassification(
        ViTConfig(
            hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            intermediate_size=shape.inner, image_size=shape.image, patch_size=shape.patch,
            num_channels=shape.channels, num_labels=shape.classes, layer_norm_eps=shape.norm_epsilon,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
        )
    ).double()  # fmt: skip
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, value in as_theirs({name: value.detach() for name, value in model.named_parameters()}).items():
            parameters.pop(name).copy_(value.reshape(theirs.get_parameter(name).shape))
        parameters.pop("vit.embeddings.cls_token").zero_()  # row 0 of our positions has the class token
    assert parameters == {}, f"without a counterpart: {list(parameters)}"
    return theirs


def as_theirs(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename our weights or gradients, and order the dims, as transformers'; shapes may still differ."""
    made = {}
    patches = ours.pop("patches.weight")
    made["vit.embeddings.patch_embeddings.projection.weight"] = patches[:-1].t()
    made["vit.embeddings.patch_embeddings.projection.bias"] = patches[-1]
    made["vit.embeddings.position_embeddings"] = ours.pop("positions.weight")[:10]
    made["classifier.weight"] = ours.pop("head.weight")[:CLASSES]
    made["classifier.bias"] = ours.pop("head.bias")[:CLASSES]
    for kind in ("weight", "bias"):
        made[f"vit.layernorm.{kind}"] = ours.pop(f"norm.{kind}")
        for layer in (0, 1):
            groups = ours.pop(f"blocks.{layer}.attention.query_key_value.{kind}")
            for index, projection in enumerate(PROJECTIONS):
                made[f"vit.layers.{layer}.attention.{projection}.{kind}"] = groups[..., index, :].t()
            for theirs, name in BLOCK.items():
                made[f"vit.layers.{layer}.{theirs}.{kind}"] = ours.pop(f"blocks.{layer}.{name}.{kind}").t()
    assert ours == {}, f"not compared: {list(ours)}"
    return made


def their_loss(theirs: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    logits = theirs(pixel_values=rows["images"].double() / 127.5 - 1).logits
    return F.cross_entropy(logits, rows["labels"][:, 0])


def compare_gradients(mesh: Mesh) -> tuple[float, dict[str, float], float]:
    """Return the relative distances of the logits and of each gradient, and the losses' distance."""
    config = config_of()
    model = random_model(ViT, mesh, config)
    theirs = hugging_face(model, config)
    rows = batch()
    wanted = theirs(pixel_values=rows["images"].double() / 127.5 - 1).logits.detach()
    logits = model.head.logits(model.hidden_states(rows)[0][:, 0]).detach()
    loss, other = loss_of(model, rows), their_loss(theirs, rows)
    loss.backward()
    other.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    distances = {}
    for name, gradient in as_theirs(gradients).items():
        reference = theirs.get_parameter(name).grad
        assert reference is not None
        # A key's bias moves no attention: the gradient is rounding alone, and has no scale.
        scale = reference.norm() if "k_proj.bias" not in name else torch.ones(())
        distances[name] = float((gradient.reshape(reference.shape) - reference).norm() / scale)
    return float((logits - wanted).norm() / wanted.norm()), distances, abs(float(loss.detach() - other.detach()))


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    return pytest.importorskip("transformers.models.vit.modeling_vit", reason="pip install transformers")


def test_logits_and_gradients_equal_hugging_faces() -> None:
    ((logits, gradients, loss),) = run_ranks(compare_gradients, ONE)
    assert logits < 1e-9
    assert loss < 1e-12
    assert len(gradients) == 3 + 2 * 16 + 2 + 2
    assert max(gradients.values()) < 1e-9, gradients


def compare_training(mesh: Mesh) -> tuple[list[float], list[float]]:
    """Return losses under AdamW. transformers sums two rows for our class token's; one of the two rows is fixed."""
    config = config_of()
    model = random_model(ViT, mesh, config)
    theirs = hugging_face(model, config)
    theirs.get_parameter("vit.embeddings.cls_token").requires_grad_(False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.0) for each in (model, theirs)]

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        rows = batch(step)
        return loss_of(model, rows), their_loss(theirs, rows)

    return train_both(optimizers, STEPS, losses_at)


def test_twenty_steps_equal_hugging_faces() -> None:
    ((ours, theirs),) = run_ranks(compare_training, ONE)
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def test_a_row_is_a_patch_and_a_one() -> None:
    pixels = torch.arange(2 * 3 * 4 * 4, dtype=torch.float64).view(2, 3, 4, 4)
    rows = patch_rows(pixels, 2)
    assert rows.shape == (2, 5, 13)
    assert rows[:, 0].count_nonzero() == 0
    assert (rows[:, 1:, -1] == 1).all()
    torch.testing.assert_close(rows[1, 2, :-1], pixels[1, :, 0:2, 2:4].flatten())  # right of the first patch
    torch.testing.assert_close(rows[1, 3, :-1], pixels[1, :, 2:4, 0:2].flatten())  # below the first patch


def padded_loss(mesh: Mesh, multiple: int) -> tuple[list[tuple[int, ...]], float, Tensor]:
    """Compute the loss with large padding rows, so that a use of the padding changes the loss."""
    model = build_model(config_of(hidden=32, heads=4, vocabulary_multiple=multiple), SerialKit(mesh), mesh)
    assert isinstance(model, ViT)
    with torch.no_grad():
        model.get_parameter("head.weight")[CLASSES:] = 5.0
        model.get_parameter("positions.weight")[10:] = 5.0
    loss = loss_of(model, batch())
    loss.backward()
    gradient = model.get_parameter("head.weight").grad
    assert gradient is not None
    shapes = [tuple(model.get_parameter(name).shape) for name in ("head.weight", "head.bias", "positions.weight")]
    return shapes, float(loss.detach()), gradient


def test_padding_rows_change_nothing() -> None:
    ((shapes, loss, gradient),) = run_ranks(padded_loss, ONE, 1)
    ((padded_shapes, padded, padded_gradient),) = run_ranks(padded_loss, ONE, 16)
    assert shapes == [(7, 32), (7,), (10, 32)]
    assert padded_shapes == [(16, 32), (16,), (16, 32)]
    assert padded == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(padded_gradient[:CLASSES], gradient, rtol=1e-11, atol=1e-14)
    assert padded_gradient[CLASSES:].count_nonzero() == 0


def count(mesh: Mesh, name: str) -> tuple[int, int]:
    """Return the number of a shipped model's parameters without the padding, and the hidden size."""
    shape = parse_config({"model": name, "data": {"source": "digits"}}).model
    with torch.device("meta"):
        model = ViT(shape, SerialKit(Mesh(mesh.grid, 0, torch.device("meta"), mesh.transport)))
    classes, positions = (shape.padded(rows) - rows for rows in (shape.classes, shape.positions))
    padding = classes * (shape.hidden + 1) + positions * shape.hidden
    return num_parameters(list(shard_specs(model).values())) - padding, shape.hidden


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("vit-tiny", 5_717_416),
        ("vit-small", 22_050_664),
        ("vit-base", 86_567_656),
        ("vit-large", 304_326_632),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, wanted: int) -> None:
    ((counted, hidden),) = run_ranks(count, ONE, name)
    assert counted + hidden == wanted, "ours has the class token in its position's row"


def dropout_facts(mesh: Mesh) -> tuple[bool, bool]:
    """Return whether two passes differ, in training and in evaluation."""
    model = random_model(ViT, mesh, config_of(dropout=0.5))
    with torch.no_grad():
        training = [float(loss_of(model, batch())) for _ in range(2)]
        model.eval()
        evaluating = [float(loss_of(model, batch())) for _ in range(2)]
    return training[0] != training[1], evaluating[0] != evaluating[1]


def test_dropout_acts_in_training_alone() -> None:
    assert run_ranks(dropout_facts, ONE) == [(True, False)]


def first_facts(mesh: Mesh) -> tuple[float, int, int]:
    """Return the untrained loss, and the right answers of the likeliest classes, without and with an ignored label."""
    model = build_model(config_of(channels=1), SerialKit(mesh), mesh)
    assert isinstance(model, ViT)
    rows = batch(channels=1)
    with torch.no_grad():
        loss = float(loss_of(model, rows))
        h = model.hidden_states(rows)[0]
        rows["labels"] = model.head.logits(h[:, :1]).argmax(-1)
        all_right = model.num_correct(h, rows)
        rows["labels"][0] = -100
        return loss, all_right[0], model.num_correct(h, rows)[0]


def test_an_untrained_model_knows_nothing_and_right_answers_are_counted() -> None:
    ((loss, right, one_ignored),) = run_ranks(first_facts, ONE)
    assert loss == pytest.approx(math.log(CLASSES), abs=0.1)
    assert (right, one_ignored) == (B, B - 1)


def counted_flops(mesh: Mesh) -> int:
    """Return torch's flops of products, forward and backward, without attention's, which torch's kernel hides."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(config_of(vocabulary_multiple=1), SerialKit(mesh), mesh)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch()).backward()  # type: ignore[arg-type]
    counts = {str(name).split(".")[-1]: number for name, number in counter.get_flop_counts()["Global"].items()}
    return sum(number for name, number in counts.items() if "attention" not in name)


def test_flops_are_those_of_the_products() -> None:
    config = config_of(vocabulary_multiple=1)
    model = config.model
    attention = 6 * model.layers * 2 * 10**2 * model.hidden
    images_need_no_gradient = 2 * 10 * 49 * model.hidden
    wanted = chain_of(config).flops_per_sample(config) - attention - images_need_no_gradient
    assert run_ranks(counted_flops, ONE) == [B * wanted]
