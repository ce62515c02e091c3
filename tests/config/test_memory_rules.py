"""The rules of a run with an offloaded optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import parse_run
from meshwright.ranks.errors import ConfigError

O2 = {"level": "O2", "dtype": "bf16"}


def mistakes(offload: dict[str, Any], **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run({"memory": {"offload": offload}} | changes)
    return [str(problem) for problem in caught.value.problems]


def test_masters_are_what_is_offloaded() -> None:
    (told,) = mistakes({"to": "host"})
    assert told == (
        "memory.offload.to=host takes float32 masters off the device, and precision.level=O0 has none; "
        "valid: none, or precision.level=O2 with dtype bf16 or fp16"
    )


@pytest.mark.parametrize("bucket, valid", [(100, "128, 1M"), (1000, "896, 1024, 1M")])
def test_halves_of_whole_vectors(bucket: int, valid: str) -> None:
    (told,) = mistakes({"to": "host", "bucket": bucket}, precision=O2)
    assert told == f"memory.offload.bucket={bucket} is not a multiple of 128; valid: {valid}"


def test_the_bucket_of_the_layout_has_no_effect() -> None:
    (told,) = mistakes({"to": "host"}, precision=O2, layout={"data": {"bucket": 4096}})
    assert told.startswith("layout.data.bucket=4096 has no effect with memory.offload.to=host")


def test_what_works() -> None:
    parse_run({"memory": {"offload": {"to": "host", "bucket": "1M"}}, "precision": O2})
    parse_run({"layout": {"data": {"bucket": 4096}}})
