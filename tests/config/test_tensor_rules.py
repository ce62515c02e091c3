"""The rules of tensor parallelism for a model: every mistake at once, with values that would work."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.ranks.errors import ConfigError

MODEL = {"layers": 1, "hidden": 64, "heads": 8, "positions": 64, "vocabulary": 300}


def mistakes(tensor: dict[str, Any], **changes: Any) -> list[str]:
    tree = {"model": MODEL, "batch": {"global": 16}, "data": {"sequence": 64}, "layout": {"tensor": tensor}}
    with pytest.raises(ConfigError) as caught:
        parse_config(tree | changes)
    return [str(problem) for problem in caught.value.problems]


def test_all_at_once() -> None:
    told = mistakes({"kind": "tesseract", "q": 3, "d": 2})
    assert told == [
        "layout.tensor.q=3 does not divide model.heads=8; valid: 1, 2, 4, 8",
        "layout.tensor.q=3 does not divide model.hidden=64; valid: 1, 2, 4, 8, 16, 32, 64",
        "model.vocabulary_multiple=64 is no multiple of 3, into which layout.tensor cuts the padded tables; "
        "valid: 192, any multiple of 3",
        "batch.global=16 is no multiple of layout.tensor.d x q = 6, over which a microbatch's samples are split; "
        "valid: 18, 24, any multiple of 6",
    ]


def test_positions_are_padded_as_the_vocabulary_is() -> None:
    """300 tokens in 300 rows fall into 3 parts, 64 positions in 64 rows do not."""
    model = MODEL | {"hidden": 66, "heads": 6, "vocabulary_multiple": 4}
    (told,) = mistakes({"kind": "megatron", "size": 3}, model=model)
    assert told == (
        "model.vocabulary_multiple=4 is no multiple of 3, into which layout.tensor cuts the padded tables; "
        "valid: 12, any multiple of 3"
    )
    tree = {"model": model | {"vocabulary_multiple": 12}, "data": {"sequence": 64}, "batch": {"global": 16}}
    assert parse_config(tree | {"layout": {"tensor": {"kind": "megatron", "size": 3}}}).model.longest == 64


def test_more_ranks_than_heads() -> None:
    (told,) = mistakes({"kind": "megatron", "size": 16})
    assert told == "layout.tensor.size=16 does not divide model.heads=8; valid: 1, 2, 4, 8"


def test_microbatches() -> None:
    (told,) = mistakes({"kind": "tesseract", "q": 2, "d": 2}, batch={"global": 16, "micro": 2})
    assert told.startswith("batch.micro=2 is no multiple of layout.tensor.d x q = 4")
    assert told.endswith("valid: 4, 8, 16")


def test_sequences() -> None:
    tensor = {"kind": "megatron", "size": 4, "sequence_parallel": True}
    (told,) = mistakes(tensor, data={"sequence": 62})
    assert (
        told == "layout.tensor.size=4 does not divide data.sequence=62, as sequence_parallel asks; valid: 1, 2, 31, 62"
    )


def test_the_sequence_of_images() -> None:
    vit = {"family": "vit", "image": 8, "patch": 2, "channels": 1, "classes": 10, "hidden": 16, "heads": 4, "layers": 1}
    tree = {"model": vit, "data": {"source": "digits"}, "batch": {"global": 16}}
    tensor = {"kind": "megatron", "size": 2, "sequence_parallel": True}
    with pytest.raises(ConfigError, match=r"does not divide the sequence=17 \(the patches of model\.image"):
        parse_config(tree | {"layout": {"tensor": tensor}})
    parse_config(tree | {"layout": {"tensor": tensor | {"sequence_parallel": False}}})


def test_branches() -> None:
    (told,) = mistakes({"kind": "subgraph", "size": 3}, batch={"global": 24, "micro": 3})
    assert told == "layout.tensor.size=3 does not divide model.heads=8; valid: 1, 2, 4, 8"


def test_rows_of_sub_graphs() -> None:
    """All ranks compute the common layers, each a share; if one rank does, a microbatch need not be divisible."""
    tensor = {"kind": "subgraph", "size": 4}
    (told,) = mistakes(tensor, batch={"global": 16, "micro": 2})
    split = "is no multiple of layout.tensor.size=4, over which a microbatch's samples are split"
    assert told == f"batch.micro=2 {split}; valid: 4, 8, 16"
    (told,) = mistakes(tensor, batch={"global": 6})
    assert told == f"batch.global=6 {split}; valid: 8, 12, any multiple of 4"
    tree = {"model": MODEL, "batch": {"global": 6, "micro": 3}, "data": {"sequence": 64}}
    config = parse_config(tree | {"layout": {"tensor": tensor | {"common": "one"}}})
    assert config.micro == 3


@pytest.mark.parametrize("branch", ["attention-core", "attention", "block"])
def test_sub_graphs_cut_no_table(branch: str) -> None:
    """Vocabulary, positions and hidden width are whole: 3 divides none of these."""
    model = MODEL | {"hidden": 66, "heads": 6, "positions": 65, "vocabulary_multiple": 1, "vocabulary": 301}
    tree = {"model": model, "batch": {"global": 6}, "data": {"sequence": 64}}
    config = parse_config(tree | {"layout": {"tensor": {"kind": "subgraph", "size": 3, "branch": branch}}})
    assert config.layout.axes[-1] == ("branch", 3)


def test_several_mistakes_of_sub_graphs() -> None:
    told = mistakes({"kind": "subgraph", "size": 2, "common": "some", "branch": "heads"})
    assert told == [
        "layout.tensor.common=some is none of the choices; valid: all, one",
        "layout.tensor.branch=heads is none of the choices; valid: attention-core, attention, block",
    ]


def test_depth() -> None:
    (told,) = mistakes({"kind": "tesseract", "q": 2, "d": 4})
    assert told.startswith("layout.tensor.d=4 is more than layout.tensor.q=2")
    assert told.endswith("valid: 2 or less")


def test_a_kind_that_is_none() -> None:
    (told,) = mistakes({"kind": "tesserakt", "q": 2})
    rule = "is none of the choices (did you mean tesseract?)"
    assert told == f"layout.tensor.kind=tesserakt {rule}; valid: none, megatron, tesseract, subgraph"


def test_a_key_of_another_kind() -> None:
    told = mistakes({"kind": "megatron", "q": 2})
    assert told == [
        "layout.tensor.size is missing; valid: a whole number >= 1",
        "layout.tensor.q=2 is an unknown key; valid: kind, size, sequence_parallel",
    ]
