"""The growth of a figure: the slope's fit and words, and each question at small sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import growth, growth_peers
from benchmarks.contender import Place
from benchmarks.growth import QUESTIONS, Question
from benchmarks.ours import train
from benchmarks.reference import global_batch
from benchmarks.slope import fit, word_of

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    "power, word",
    [(-1, "falls"), (0, "flat"), (0.5, "below linear"), (1, "linear"), (1.5, "above linear"), (2, "quadratic"),
     (3, "above quadratic")],
)  # fmt: skip
def test_a_planted_power_has_its_word(power: float, word: str) -> None:
    slope = fit(SIZES, [3 * size**power for size in SIZES])
    assert slope.power == pytest.approx(power, abs=1e-12)
    assert slope.last == pytest.approx(power, abs=1e-12)
    assert slope.bend is None
    assert slope.words.startswith(f"{word}, x {2**power:.2f} a doubling")
    assert word_of(power) == word


def test_a_planted_bend_is_found() -> None:
    """The planted figure is flat until 4, then quadratic."""
    slope = fit(SIZES, [5.0, 5.0, 5.0, 20.0, 80.0])
    assert slope.bend == 4
    assert (slope.before, slope.after) == (pytest.approx(0, abs=1e-12), pytest.approx(2))
    assert slope.words.endswith("x 4.00 the last; bends at 4: x 1.00 a doubling before, x 4.00 after")


def test_sizes_need_not_double() -> None:
    slope = fit([10, 70, 100], [2.0, 14.0, 20.0])
    assert slope.words == "linear, x 2.00 a doubling (1.00 of linear), x 2.00 the last"


def test_noise_is_no_bend() -> None:
    assert fit(SIZES, [10.0, 20.6, 39.0, 81.0, 158.0]).bend is None


def test_one_point_has_no_slope() -> None:
    with pytest.raises(ValueError, match="1 points have no slope"):
        fit([4], [1.0])


SMALL = {"ranks": (1, 2), "sequence": (64, 128), "vocabulary": (128, 256), "experts": (2, 4), "microbatches": (1, 2),
         "layers": (1, 2)}  # fmt: skip


def test_every_question_has_small_sizes() -> None:
    assert SMALL.keys() == QUESTIONS.keys()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SMALL)
def test_a_question_measures_and_says_its_slopes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    question = replace(QUESTIONS[name], sizes=SMALL[name])
    points = growth.measure(question, rounds=2)
    peer = points[-1].label
    assert [point.size for point in points if point.label == peer] == list(SMALL[name])
    assert all(min(point.ms.median, point.processor_ms.median, point.held_bytes) > 0 for point in points)
    assert all(point.work.median == 1 for point in points if point.label == peer)
    growth.show(question, points, 1.0)
    said = capsys.readouterr().out
    for label in {point.label for point in points}:
        assert f"{label}: processor time a rank: " in said


def first_loss(question: Question, label: str, size: int) -> float:
    one = question.contenders(size)[label]
    factory = {"ours": train, "growth_peers": None}.get(one.factory.partition(":")[0].rpartition(".")[2])
    if factory is None:
        factory = vars(growth_peers)[one.factory.partition(":")[2]]
    with factory(Place(0, 1), **one.options) as step:
        return step()


@pytest.mark.parametrize("name", ["vocabulary", "experts", "microbatches", "layers"])
def test_ours_and_the_peer_begin_near_an_even_guess(name: str) -> None:
    """Both models have one size, with equal numbers of classes, and small first weights."""
    question, size = QUESTIONS[name], SMALL[name][-1]
    classes = size if name == "vocabulary" else growth.SMALL.vocabulary
    for label in question.contenders(size):
        assert first_loss(question, label, size) == pytest.approx(math.log(classes), rel=0.05)


def test_microbatches_add_up_to_the_batch() -> None:
    """The plain loop's loss and gradients are equal by microbatch and at once."""
    sizes = replace(growth.SMALL, vocabulary=64, hidden=16, layers=1)
    found = []
    for microbatches in (1, 4):
        model = growth_peers.plain_model(sizes).double()
        step = growth_peers.loop(model, model, Place(0, 1), sizes, microbatches)
        found.append((step(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (whole, gradients), (parts, others) = found
    assert parts == pytest.approx(whole, rel=1e-12)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)
    assert global_batch(0, sizes)[0].shape == (4, 128)
