"""The numbers of a comparison: medians of timed steps, errors, the stage that is shown, agreement of losses."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.tools.compare.report import as_dict, sentences, times_table
from meshwright.tools.compare.result import Measurement, StageBytes
from tests.tools.compare.runs import STAGES, comparison, contender, predicted, rank, run

FAST = run((9, 9, 0.1, 0.3), (5, 4, 3, 2), [rank(0)])
LOSSES = (5.0, 4.0, 3.0, 2.0)


def test_the_first_steps_are_not_timed_and_rounds_count_together() -> None:
    row = Measurement(contender(), (FAST, run((9, 9, 0.2, 0.8), LOSSES, [rank(0, peak=3000)])))
    assert row.timed == [0.1, 0.3, 0.2, 0.8]
    assert row.seconds == pytest.approx(0.25)
    assert row.quartiles == pytest.approx((0.175, 0.425))
    assert row.phases["passes"] == pytest.approx(0.125)
    assert row.peak_bytes == 3000


def test_of_stages_the_fullest_and_the_one_that_sends_most() -> None:
    first = rank(0, 0, 100, {("pipe", "message"): (2, 60), ("data", "all_reduce"): (1, 5)})
    second = rank(1, 1, 300, {("pipe", "message"): (2, 70), ("data", "all_gather"): (1, 1), ("data", "send"): (1, 1)})
    foreseen = predicted(1.0, (100, {"pipe": 60, "data": 5}), (301, {"pipe": 71, "data": 2}))
    row = Measurement(contender("two", STAGES), (run((1, 1, 1, 1), LOSSES, [first, second]),), foreseen)
    assert row.held == {
        "weights": StageBytes(1, 300, 301),
        "gradients": StageBytes(1, 300, 301),
        "states": StageBytes(1, 600, 602),
    }
    assert row.sent == {"pipe": StageBytes(1, 70, 71), "data": StageBytes(0, 5, 5)}
    assert row.sent_in_all == StageBytes(1, 72, 73)
    assert foreseen.worst_memory == 4 * 301 + 506


def test_an_axis_that_was_foreseen_and_is_not_used_is_shown() -> None:
    row = Measurement(contender(), (FAST,), predicted(1.0, (100, {"tensor": 8})))
    assert row.sent == {"tensor": StageBytes(0, 0, 8)}
    assert Measurement(contender(), (FAST,)).sent == {}


def test_errors_and_the_fastest() -> None:
    slow = run((9, 9, 1, 1), LOSSES, [rank(0)])
    made = comparison(
        Measurement(contender("fast"), (FAST,), predicted(0.3, (1, {}))),
        Measurement(contender("slow"), (slow,), predicted(0.2, (1, {}))),
    )
    assert [row.error for row in made.measured] == [pytest.approx(0.5), pytest.approx(-0.8)]
    assert made.mean_error == pytest.approx(0.65)
    assert made.fastest.name == "fast"
    assert made.clear_fastest is made.fastest
    assert made.predicted_fastest is not None
    assert "slow was predicted to be the fastest, but it is not." in sentences(made)


def test_no_fastest_is_foreseen_where_a_prediction_is_missing() -> None:
    rows = (
        Measurement(contender("a"), (FAST,), predicted(0.3, (1, {}))),
        Measurement(contender("b"), (FAST,), unpredicted="it is server-loss"),
    )
    made = comparison(*rows)
    assert made.predicted_fastest is None
    assert "b was not predicted: it is server-loss" in sentences(made)


def test_losses_are_held_against_the_first_ones_step_by_step_in_every_round() -> None:
    near, far = (5.0, 4.0, 3.00001, 2.0), (5.0, 4.4, 3.0, 2.0)
    reference = Measurement(contender("a"), (run((1, 1, 1, 1), LOSSES, [rank(0)]),))
    other = Measurement(contender("b"), (run((1, 1, 1, 1), near, [rank(0)]),))
    made = comparison(reference, other)
    assert made.difference(other) == pytest.approx(1e-5 / 3)
    assert made.agrees(other)
    assert "All losses agree with those of a to 3.3e-06, step by step." in sentences(made)
    strays = Measurement(contender("c"), (*other.runs, run((1, 1, 1, 1), far, [rank(0)])))
    made = comparison(reference, strays)
    assert made.difference(strays) == pytest.approx(0.1)
    assert any(line.startswith("Losses of c differ from those of a by more than rounding") for line in sentences(made))


def test_one_timed_step_is_its_own_spread() -> None:
    row = Measurement(contender("a"), (run((9, 9, 0.5), (3, 2, 1), [rank(0)]),))
    assert row.quartiles == (0.5, 0.5)
    assert any(
        "takes" in line or "noise" in line for line in sentences(comparison(row, Measurement(contender("b"), row.runs)))
    )


def test_what_is_no_number_does_not_agree() -> None:
    reference = Measurement(contender("a"), (FAST,))
    lost = Measurement(contender("b"), (run((1, 1, 1, 1), (5.0, float("nan"), 3.0, 2.0), [rank(0)]),))
    assert not comparison(reference, lost).agrees(lost)


@pytest.mark.parametrize(
    "model, losses, sentence, cell",
    [
        ({"dropout": 0.1}, (6.0, 4.0, 3.0, 2.0), "Losses of b differ from those of a, as they may: model.dropout is on",
         "2.0e-01 (dropout)"),
        # Layouts that cut replicas alone share the masks, so no sentence says that losses may differ.
        ({"dropout": 0.1}, LOSSES, "All losses agree with those of a to 0.0e+00, step by step.", "0.0e+00"),
        ({"dropout": 0.1, "bits": "layout-free"}, LOSSES, "All losses are those of a to the bit", "0.0e+00"),
        ({"bits": "layout-free"}, LOSSES, "All losses are those of a to the bit, step by step", "0.0e+00"),
        ({"dropout": 0.1, "bits": "layout-free"}, (5.0, 4.0, 3.0, 2.0 + 2**-51),
         "Losses of b are not those of a, and bits=layout-free promises equal bits", "2.2e-16: NOT EQUAL"),
    ],
)  # fmt: skip
def test_losses_by_dropout_and_bits(model: dict[str, Any], losses: tuple[float, ...], sentence: str, cell: str) -> None:
    rows = [
        Measurement(contender(name, **model), (run((1, 1, 1, 1), each, [rank(0)]),))
        for name, each in (("a", LOSSES), ("b", losses))
    ]
    made = comparison(*rows)
    assert any(line.startswith(sentence) for line in sentences(made)), sentences(made)
    assert times_table(made).lines[1][-1].text == cell


def test_several_threads_are_said() -> None:
    said = sentences(comparison(Measurement(contender("wide"), (FAST,), predicted(1.0, (1, {})), threads=2)))
    assert any("wide has several threads" in line for line in said)


def timed(name: str, *seconds: float, **fields: object) -> Measurement:
    return Measurement(contender(name, **fields), (run((9, 9, *seconds), (1.0,) * (2 + len(seconds)), [rank(0)]),))


@pytest.mark.parametrize(
    "rows, clear, sentence",
    [
        ([("a", 1.0, 1.1), ("b", 2.0, 2.1)], "a", "The fastest is a; b takes 1.95 times as long."),
        (
            [("a", 1.0, 2.0, 1.5), ("b", 1.2, 2.1, 1.6)],
            None,
            "No difference above the noise between a, b: the middle halves of their steps overlap.",
        ),
        (
            [("c", 4.0, 4.0, 4.0), ("b", 1.2, 2.1, 1.6), ("a", 1.0, 2.0, 1.5)],
            None,
            "No difference above the noise between a, b: the middle halves of their steps overlap; "
            "c takes 2.67 times as long.",
        ),
        ([("a", 1.0, 1.0, 1.0), ("b", 0.9, 3.0, 3.0)], "a", "The fastest is a; b takes 3.00 times as long."),
    ],
)
def test_no_layout_is_the_fastest_inside_of_the_noise(
    rows: list[tuple[str, float]], clear: str | None, sentence: str
) -> None:
    made = comparison(*(timed(name, *seconds) for name, *seconds in rows))
    assert sentence in sentences(made)
    told = as_dict(made)
    assert told["fastest"] == clear
    assert told["within_noise"][0] == made.fastest.name
    assert times_table(made).best == (None if clear is None else [name for name, *_ in rows].index(clear))


def test_dropout_is_no_excuse_for_layout_free_bits() -> None:
    free = [timed(name, 1.0, 1.0, dropout=0.1) for name in "ab"]
    for row in free:
        bits = row.contender.config.bits.model_copy(update={"kind": "layout-free"})
        object.__setattr__(row.contender, "config", row.contender.config.model_copy(update={"bits": bits}))
    assert not comparison(*free).drops_out
    assert comparison(*(timed(name, 1.0, 1.0, dropout=0.1) for name in "ab")).drops_out
