"""Drawn layouts of every axis end with the bits of one device: a covering set, and 500 with --long."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.__main__ import COVERING_BITS
from tests.fuzz.bits import AXES, config_of, differing, numbered

COVERING = [json.loads(line) for line in COVERING_BITS.read_text().splitlines()]


@pytest.mark.parametrize("case", COVERING, ids=lambda case: case["run"])
def test_a_covering_set_of_layouts_ends_with_the_bits_of_one_device(case) -> None:
    kind = case["run"], case["precision"]
    assert differing(kind, config_of(kind, case["words"])) == []


@pytest.mark.long
@pytest.mark.parametrize("number", range(500))
def test_500_drawn_layouts_of_all_axes_end_with_the_bits_of_one_device(number: int) -> None:
    kind, config = numbered(number)
    assert differing(kind, config, **({"transport": "torch"} if number % 10 == 9 else {})) == []


def test_the_covering_set_has_every_value_of_every_axis() -> None:
    found = {word for case in COVERING for word in case["words"]}
    assert {word for values in AXES.values() for value in values for word in value} <= found
