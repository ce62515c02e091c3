"""A run that a context cannot cut is refused before the start, with the values that would work."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.ranks.errors import ConfigError

MODEL = {"layers": 1, "hidden": 48, "heads": 6, "positions": 64, "vocabulary": 300, "dropout": 0.0}


def mistakes(context: dict[str, Any], tensor: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    layout = {"context": context, "tensor": tensor or {"kind": "none"}}
    tree = {"model": MODEL, "batch": {"global": 16}, "data": {"sequence": 60}, "layout": layout}
    with pytest.raises(ConfigError) as caught:
        parse_config(tree | changes)
    return [str(problem) for problem in caught.value.problems]


def test_sequences_that_do_not_divide() -> None:
    (told,) = mistakes({"size": 2}, data={"sequence": 63})
    assert told == (
        "layout.context.size=2 does not cut data.sequence=63 into 2 equal parts; "
        "valid: 1, 3, 7, 9, 21, 63; or a multiple of 2 tokens"
    )


def test_sequences_that_tensor_ranks_cut_again() -> None:
    tensor = {"kind": "megatron", "size": 2, "sequence_parallel": True}
    (told,) = mistakes({"size": 3}, tensor, data={"sequence": 64}, model=MODEL | {"heads": 6})
    assert told == (
        "layout.context.size=3 does not cut data.sequence=64 into 3 equal parts, and a rank's into 2 for "
        "layout.tensor; valid: 1, 2, 4, 8, 16, 32; or a multiple of 6 tokens"
    )


def test_heads_that_do_not_divide() -> None:
    assert mistakes({"size": 4}) == [
        "layout.context.size=4 does not divide model.heads=6, which kind=ulysses deals out inside of attention; "
        "valid: 1, 2, 3, 6"
    ]
    (told,) = mistakes({"size": 2}, {"kind": "megatron", "size": 2})
    assert told == (
        "layout.context.size=2 does not divide model.heads=6 / 2 of a tensor rank, which kind=ulysses deals out inside "
        "of attention; valid: 1, 3"
    )


def test_rings_need_two_chunks_a_rank_and_no_dropout() -> None:
    assert mistakes({"size": 4, "kind": "ring"}) == [
        "layout.context.size=4 does not cut data.sequence=60 into 8 equal parts; "
        "valid: 1, 2, 3, 5, 6, 10, 15, 30; or a multiple of 8 tokens"
    ]
    assert mistakes({"size": 2, "kind": "ring"}, model=MODEL | {"dropout": 0.1}) == [
        "layout.context.kind=ring draws no dropout inside of attention, as model.dropout=0.1 asks; "
        "valid: ulysses, or model.dropout=0"
    ]


@pytest.mark.parametrize("family", ["transformer", "t5", "vit", "resnext"])
def test_families_that_look_at_whole_sequences(family: str) -> None:
    data = {"source": "digits"} if family in ("vit", "resnext") else {"sequence": 60}
    told = mistakes({"size": 2}, model={"family": family}, data=data)
    why = f"cuts sequences, and a {family} looks at whole ones elsewhere than in self-attention"
    assert f"layout.context.size=2 {why}; valid: 1" in told
