"""Llama under every axis equals one device: float64 gradients to 1e-12 relative, losses to 1e-10.

The model has all that a layout could mistake: grouped queries, norms of heads, biases everywhere and YaRN's positions.
A norm of heads is one weight for all heads, so ranks with different heads each have a part of the norm's gradient.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.config import Config, parse_config
from meshwright.config.section import with_field
from meshwright.families.llama.model import LlamaModel
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from tests.families.llama.layouts import LAYOUTS, RING, SUBGRAPH, ULYSSES, ZERO1, llama
from tests.families.llama.models import ONE, as_theirs, hugging_face
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.context import BLOCKS, CUT, ONE_D, serial
from tests.oracle.run import assembled, check, run
from tests.oracle.tensor import LONG, MODELS
from tests.workers import run_ranks


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
@pytest.mark.parametrize("name", ["1-D", "2-D", "branches", "slices", "ring x cut x stages x replicas"])
def test_feed_forwards_of_two_plain_linears_equal_serial(name: str, activation: str) -> None:
    alone, cut = (run(with_field(llama(layout), "model.activation", activation)) for layout in ({}, LAYOUTS[name]))
    check(cut, alone[0])
    assert alone[0][0] != serial("llama")[0]


ONLY_LONG = {"1-D of 4, cut", "2.5-D", "branches", "ring of 4 x replicas", "stages x 2-D", "ulysses x 1-D", "1-D"}
"""Layouts that other layouts cover in parts."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ONLY_LONG else name for name in LAYOUTS]
)
def test_equals_serial(name: str) -> None:
    check(run(llama(LAYOUTS[name])), serial("llama"))


SHARED = {
    "1-D": (2, {"tensor": ONE_D | {"size": 4}}),
    "cut, zero1": (1, {"tensor": CUT, "data": ZERO1}),
    "zero3": (1, {"tensor": ONE_D, "data": {"size": 2, "sync": "zero3"}}),
    "2-D": (1, {"tensor": BLOCKS}),
    "2.5-D": (1, {"tensor": BLOCKS | {"d": 2}}),
    "2-D x stages": (1, {"tensor": BLOCKS, "pipeline": {"size": 2}}),
    "stages, weights later": (1, {"tensor": ONE_D, "pipeline": {"size": 2, "schedule": "message-driven"}}),
    "ulysses": (2, {"context": ULYSSES | {"size": 4}}),
    "ulysses x 1-D": (2, {"context": ULYSSES, "tensor": ONE_D}),
    "1-D x ulysses x zero2": (1, {"tensor": CUT, "context": ULYSSES, "data": {"size": 2, "sync": "zero2"}}),
    "ring": (1, {"tensor": ONE_D, "context": RING}),
}
"""Key-value heads, fewer than the ranks that share the heads, and layouts."""
SHARED_ONLY_LONG = {"zero3", "2.5-D", "2-D x stages", "ulysses x 1-D"}


@cache
def serial_of_few(heads: int) -> Any:
    return run(few(heads, {}))[0]


def few(heads: int, layout: dict[str, Any], **changes: Any) -> Config:
    return llama(layout, model=MODELS["llama"] | {"layers": 2, "hidden": 24, "vocabulary_multiple": 12,
                 "positions": 48, "key_value_heads": heads}, **changes)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SHARED_ONLY_LONG else name for name in SHARED]
)
def test_key_value_heads_that_ranks_share(name: str) -> None:
    """Losses depend on the clipped norm: a parameter is counted once, though several ranks have the parameter."""
    heads, layout = SHARED[name]
    check(run(few(heads, layout)), serial_of_few(heads))


def hugging_faces(mesh: Mesh, config: Config) -> tuple[float, dict[str, Tensor], dict[str, torch.Size]]:
    """Return loss and gradients of transformers' Qwen3 for a step's batch and the run's first weights; our shapes."""
    model = build(config, mesh).model
    assert isinstance(model, LlamaModel)
    theirs, batch = hugging_face("qwen3", model, config), global_batch(config, 0)
    loss = F.cross_entropy(theirs(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, {name: p.shape for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name != "1-D" else name for name in SHARED]
)
def test_shared_key_value_heads_equal_hugging_faces(name: str) -> None:
    """The layouts' gradients, put together, equal the gradients of a model without our kits and our serial run."""
    pytest.importorskip("transformers.models.qwen3.modeling_qwen3", reason="pip install transformers")
    heads, layout = SHARED[name]
    model = MODELS["llama"] | {
        "layers": 2, "hidden": 24, "vocabulary_multiple": 12, "positions": 48, "biases": [], "key_value_heads": heads,
    }  # fmt: skip
    config = llama(layout, model=model)
    ((loss, theirs, shapes),) = run_ranks(hugging_faces, ONE, llama({}, model=model))
    results = run(config)
    held = {name: [gradients[name] for _, gradients in results if name in gradients] for name in shapes}
    ours = as_theirs({name: assembled(parts, shapes[name]) for name, parts in held.items()}, config)
    assert ours.keys() == theirs.keys()
    for (mine, *_), _ in results:
        assert mine == pytest.approx(loss, rel=1e-10)
    for parameter, wanted in theirs.items():
        error = float((ours[parameter] - wanted).norm() / wanted.norm())
        assert error < 1e-9, f"{parameter}: {error}"


@pytest.mark.parametrize("recompute", ["selective", 1])
def test_equals_serial_with_recomputation(recompute: str | int) -> None:
    check(run(llama(LAYOUTS["ulysses x 1-D"], memory={"recompute": recompute})), serial("llama"))


def test_equals_serial_with_the_common_layers_on_one_rank() -> None:
    model = MODELS["llama"] | {
        "layers": 1,
        "hidden": 24,
        "head_norms": False,
        "vocabulary_multiple": 12,
        "positions": 48,
    }
    layout = {"tensor": SUBGRAPH | {"branch": "attention-core", "common": "one"}}
    check(run(llama(layout, model=model)), run(llama({}, model=model))[0])


def test_twenty_steps_of_a_mixture() -> None:
    layout = {"context": RING, "tensor": ONE_D, "data": ZERO1}
    check(run(llama(layout, steps=LONG)), run(llama({}, steps=LONG))[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_trains_as_on_one_device(level: str) -> None:
    precision = {"level": level, "dtype": "bf16"}
    expected, _ = run(llama({}, precision=precision))[0]
    for losses, _ in run(llama(LAYOUTS["ulysses x 1-D"], precision=precision)):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


REAL = [(49152, {"tensor": ONE_D}), (128256, {"context": RING}), (151936, {"tensor": BLOCKS})]


@pytest.mark.few(2)
@pytest.mark.parametrize("vocabulary, layout", REAL, ids=[str(vocabulary) for vocabulary, _ in REAL])
def test_equals_serial_with_a_real_vocabulary(vocabulary: int, layout: dict[str, Any]) -> None:
    model = {
        "family": "llama", "layers": 1, "hidden": 8, "heads": 4, "key_value_heads": 2, "feed_forward": 12,
        "positions": 16, "vocabulary": vocabulary, "tied": vocabulary == 49152,
    }  # fmt: skip
    changes = {"model": model, "data": {"sequence": 16}}
    check(run(llama(layout, **changes)), run(llama({}, **changes))[0])


@pytest.mark.parametrize(
    "model, layout, message",
    [
        (
            {"heads": 6, "key_value_heads": 2},
            {"tensor": {"kind": "megatron", "size": 4}},
            "layout.tensor.size=4 does not divide model.key_value_heads=2; valid: 1, 2",
        ),
        (
            {"heads": 6, "key_value_heads": 3},
            {"context": {"size": 2, "kind": "ulysses"}},
            "layout.context.size=2 does not divide model.key_value_heads=3, which kind=ulysses deals out inside of "
            "attention; valid: 1, 3",
        ),
        ({"heads": 6, "key_value_heads": 4}, {}, "model.key_value_heads=4 does not divide model.heads=6; valid: 1, 2"),
        ({"heads": 8, "head_width": 3}, {}, "model.head_width=3 is odd, and rotary positions turn pairs"),
        ({"heads": 5}, {}, "model.heads=5 does not divide model.hidden=24, and no model.head_width is given; valid: 1"),
        (
            {"head_norms": True},
            {"tensor": SUBGRAPH | {"common": "one"}},
            "layout.tensor.common=one gives the first rank all that branches share, and model.head_norms is shared "
            "inside of them; valid: all",
        ),
        ({"rope": {"kind": "longrope"}}, {}, "model.rope.kind=longrope"),
        ({"rope": {"kind": "linear"}}, {}, "model.rope.factor"),
        (
            {"rope": {"kind": "llama3", "factor": 8, "original": 64, "low_frequency": 4, "high_frequency": 1}},
            {},
            "model.rope.low_frequency=4.0 is not below model.rope.high_frequency=1.0",
        ),
    ],
)
def test_what_does_not_go_is_refused(model: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    shape = {"family": "llama", "layers": 1, "hidden": 24, "heads": 4, "feed_forward": 24, "vocabulary": 300}
    with pytest.raises(ConfigError) as refusal:
        parse_config({"model": shape | model, "data": {"sequence": 16}, "layout": layout})
    assert message in str(refusal.value)
