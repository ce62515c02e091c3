"""The loss scale: halved on an overflow, doubled after enough good steps in a row."""

from __future__ import annotations

from meshwright.strategies.optim.optimizer import LossScaler


def test_halves_on_overflow_and_starts_counting_again() -> None:
    scaler = LossScaler(1024.0, interval=3, dynamic=True)
    scaler.update(overflow=False)
    scaler.update(overflow=False)
    scaler.update(overflow=True)
    assert (scaler.scale, scaler.good_steps) == (512.0, 0)
    scaler.update(overflow=True)
    assert scaler.scale == 256.0


def test_doubles_after_the_interval() -> None:
    scaler = LossScaler(8.0, interval=3, dynamic=True)
    scales = []
    for _ in range(7):
        scaler.update(overflow=False)
        scales.append(scaler.scale)
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]


def test_static_never_moves() -> None:
    scaler = LossScaler(1.0, interval=1, dynamic=False)
    scaler.update(overflow=True)
    scaler.update(overflow=False)
    assert scaler.scale == 1.0


def test_what_no_smaller_scale_can_mend_may_not_be_skipped() -> None:
    assert LossScaler(1024.0, interval=1, dynamic=True, max_skips=3).may_skip
    assert not LossScaler(2.0**-24, interval=1, dynamic=True, max_skips=3).may_skip
    assert not LossScaler(1.0, interval=1, dynamic=False).may_skip


def test_two_skips_may_precede_the_third_in_a_row_which_ends_the_run() -> None:
    scaler = LossScaler(1024.0, interval=9, dynamic=True, max_skips=3)
    allowed = []
    for overflow in (True, True, False, True, True, True):
        allowed.append(scaler.may_skip)
        scaler.update(overflow=overflow)
    assert allowed == [True, True, False, True, True, False]
