"""A sum by terms, and a probe that restores all state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parity.batches import ReferenceRecipe
from meshwright.parity.gradients import near
from meshwright.parity.reference import gradient_alone, gradients_by_use, unmoved
from meshwright.parity.terms import lost_words, rounded_sum, weights_of

TERMS = [torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
NAMES = ["the first", "the second", "the third"]


@pytest.mark.parametrize(
    "weights, kind, words",
    [
        ((1, 0, 1), "incomplete sum", "the sum without the second"),
        ((0, 0, 1), "incomplete sum", "the sum without the first and the second"),
        ((1, 1, 2), "scaled", "the sum with the third 2 times"),
    ],
)
def test_terms_that_are_lost_or_repeated_are_named(weights: tuple[int, ...], kind: str, words: str) -> None:
    rest = torch.ones(6, 5, dtype=torch.float64)
    whole = torch.stack(TERMS).sum(0) + rest
    ours = sum((w * x for w, x in zip(weights, TERMS, strict=True)), rest)
    found = weights_of(ours, whole, TERMS, 1e-12)
    assert found is not None
    assert found == pytest.approx(weights, abs=1e-9)
    assert lost_words(found, NAMES) == (kind, words)


@pytest.mark.parametrize("shape", [(50257, 64), (7,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_sums_of_terms_have_their_weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    """Tables of a real vocabulary and tiny biases; terms of sizes up to a factor of 1,000, each in the terms' dtype."""
    generator = torch.Generator().manual_seed(seed)
    count = 3 if len(shape) == 1 else 8
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    sizes = 10 ** (torch.rand(count, generator=generator, dtype=torch.float64) * (3 if dtype == torch.float64 else 0))
    terms = [size * draw() for size in sizes]
    weights = torch.randint(0, 3, (count,), generator=generator).tolist()
    weights[0] = 1 if weights[1] != 1 else 0
    whole, ours = (sum((w * x for w, x in zip(each, terms, strict=True)), torch.zeros(shape)) for each in
                   ([1] * count, weights))  # fmt: skip
    found = weights_of(ours.to(dtype).double(), whole, terms, near(8 * torch.finfo(dtype).eps))
    assert found is not None
    assert [round(w) for w in found] == weights


def test_what_no_terms_explain_has_no_weights() -> None:
    whole = torch.stack(TERMS).sum(0)
    assert weights_of(whole + TERMS[0].flip(0), whole, TERMS, 1e-12) is None, "no sum of these terms"
    assert weights_of(2 * whole, whole, [TERMS[0], TERMS[0]], 1e-12) is None, "equal terms have no weights"
    assert weights_of(whole * 2, whole, list(whole.flatten()[:20].diag()), 1e-12) is None, "too many terms"
    assert lost_words([0.5, 1.0], NAMES[:2]) is None
    assert lost_words([0.0, 0.0], NAMES[:2]) is None, "nothing is left: no gradient"


def test_terms_that_were_rounded_before_the_sum_are_known() -> None:
    rest = torch.zeros(6, 5, dtype=torch.float64)
    rounded = torch.stack([x.bfloat16().double() for x in TERMS]).sum(0)
    assert rounded_sum(rounded, TERMS, rest, "float64", 1e-12) == "bfloat16"
    whole = torch.stack(TERMS).sum(0)
    assert rounded_sum(whole * (1 + 2**-9), TERMS, rest, "float64", 1e-12) == "", "a factor of the size of rounding"
    assert rounded_sum(whole, TERMS, rest, "float64", 1e-12) == ""


class Moving(nn.Module):
    """A buffer written in place, a replaced buffer, a tensor in an attribute; a random number a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.extra = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        self.mean = self.mean + 2
        self.extra += torch.rand(4)
        return F.linear(x, weight=self.weight) @ self.weight.T + x * self.weight[0]


def test_a_probe_puts_back_all_that_moves() -> None:
    model, x = Moving(), torch.ones(2, 4, dtype=torch.float64)
    state = torch.random.get_rng_state()
    with unmoved(model):
        model(x)
        assert float(model.counts[0]) == 1
    assert not any(bool(y.any()) for y in (model.counts, model.mean, model.extra))
    assert dict(model.named_buffers())["mean"] is model.mean
    assert torch.equal(torch.random.get_rng_state(), state)


def test_gradients_of_uses_add_up_to_the_gradient() -> None:
    model = Moving()
    recipe = ReferenceRecipe(
        lambda model, batch: model(batch["x"]).square().sum(),
        lambda generator: {"x": torch.randn(2, 4, generator=generator, dtype=torch.float64)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), None, None, torch.float64,
    )  # fmt: skip
    uses = gradients_by_use(model, recipe)["weight"]
    assert len(uses) == 3
    whole = gradient_alone(model, recipe, [recipe.global_batch(1)])["weight"]
    torch.testing.assert_close(torch.stack(uses).sum(0), whole, rtol=1e-13, atol=1e-13)
