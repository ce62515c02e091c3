"""A step's batch in a sentence: replicas, microbatches, and gradient accumulation under this name."""

from __future__ import annotations

import pytest

from meshwright.config import parse_config


@pytest.mark.parametrize(
    "size, micro, said",
    [
        (2, 4, "2 replicas x 8 microbatches of 4 (gradient accumulation over 8)"),
        (1, "auto", "1 replica x 1 microbatch of 64 (no gradient accumulation)"),
        (4, 16, "4 replicas x 1 microbatch of 16 (no gradient accumulation)"),
    ],
)
def test_accumulation_is_named(size: int, micro: int | str, said: str) -> None:
    config = parse_config({"batch": {"global": 64, "micro": micro}, "layout": {"data": {"size": size}}})
    assert config.batch_summary == f"batch.global=64: {said}"
