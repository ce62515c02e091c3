"""Local tensors as parts of the reference's: parts of weights, found by value, and explanations of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.parity.compare import factor_of
from meshwright.parity.explain import explain_tensors
from meshwright.parity.locate import locate
from meshwright.parity.parts import Part, find_part, missing_places, parts_alike
from meshwright.parity.record import PartFacts, SideRecord, write_record
from meshwright.parity.reference import cast_model
from meshwright.parity.tensors import TensorFile, write_tensors

WHOLE = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
HEADS = [*range(2), *range(4, 6), *range(8, 10)]
TWO = [{"tensor": 0}, {"tensor": 1}]


@pytest.mark.parametrize(
    "local",
    [WHOLE, WHOLE[3:7], WHOLE[:, 2:4], WHOLE[4:8, 3:6], WHOLE[HEADS], WHOLE.flatten()[7:30], WHOLE[:0]],
    ids=["whole", "rows", "columns", "block", "fused", "flat", "empty"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_found_by_its_values(local: torch.Tensor, dtype: torch.dtype) -> None:
    part = find_part("w", local.to(dtype), WHOLE.to(dtype))
    assert part is not None
    assert torch.equal(part.take(WHOLE), local)
    assert Part.from_json(part.as_json()) == part


def test_a_single_element_of_a_column_is_a_part(tmp_path: Path) -> None:
    """torch keeps the stride of 24, and refuses to read bytes of such a tensor."""
    whole = torch.arange(48, dtype=torch.float64).view(2, 24)
    single = whole[:1, 5]
    assert single.stride() == (24,)
    write_tensors(tmp_path / "one.safetensors", {"x": single})
    assert TensorFile(tmp_path / "one.safetensors").get("x").tolist() == [5]
    assert find_part("column", single, whole[:, 5]) == Part("column", ((0,),))


def test_rows_of_padding_are_no_part_of_the_reference() -> None:
    padded = torch.cat([WHOLE[8:], torch.ones(2, 6)])
    part = find_part("w", padded, WHOLE)
    assert part is not None
    assert str(part) == "[8:12, :]"
    assert not part.take(WHOLE)[4:].any()
    assert find_part("w", torch.randn(3, 6), WHOLE) is None


def test_what_no_rank_holds_is_counted() -> None:
    parts = [find_part("w", WHOLE[:4], WHOLE), find_part("w", WHOLE[6:, :3], WHOLE)]
    assert missing_places([part for part in parts if part], (12, 6)) == 6 * 3 + 2 * 6


@pytest.mark.parametrize(
    "whole",
    [torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(4, 6), torch.tensor([0, 1, 0, 1])],
    ids=["documents that are packed alike", "labels"],
)
@pytest.mark.parametrize("dim", [0, -1])
def test_of_equal_slices_a_rank_may_have_taken_any(whole: torch.Tensor, dim: int) -> None:
    first, second = whole.chunk(2, dim)
    assert not missing_places([*parts_alike("w", first, whole), *parts_alike("w", second, whole)], whole.shape)
    if whole.ndim > 1 and dim == -1:
        assert missing_places([*parts_alike("w", first, whole), *parts_alike("w", first, whole)], whole.shape) == 12


@pytest.mark.parametrize(
    "locals_, kind, factor",
    [
        ([WHOLE, WHOLE], "copy", None),
        ([WHOLE[:6], WHOLE[6:]], "cut", None),
        ([WHOLE[[0, 1, 2, 9, 10, 11]], WHOLE[3:9]], "cut", None),
        ([0.3 * WHOLE, 0.7 * WHOLE], "partial", None),
        ([2 * WHOLE, 2 * WHOLE], "wrong", 2.0),
        ([WHOLE, WHOLE.flip(0)], "wrong", None),
    ],
    ids=["copy", "cut", "zigzag", "partial", "doubled", "other order"],
)
def test_outputs_are_explained(locals_: list[torch.Tensor], kind: str, factor: float | None) -> None:
    found = explain_tensors({rank: x.double() for rank, x in enumerate(locals_)}, WHOLE.double(), 1e-6, TWO)
    assert found.kind == kind
    assert found.factor == pytest.approx(factor)


def test_a_factor_is_of_all_elements() -> None:
    assert factor_of(3 * WHOLE, WHOLE) == pytest.approx(3.0)
    assert factor_of(WHOLE + 1, WHOLE) is None


@pytest.mark.parametrize(
    "own, dim, stride, index",
    [(6, 0, 1, "[6:12, :]"), (6, 0, 2, "[3:6,9:12, :]"), (3, 1, 1, "[:, 3:6]"), (8, 0, 1, "[8:12, :]")],
    ids=["rows", "gate and up", "columns", "padded table"],
)
def test_megatrons_attributes_say_the_part(own: int, dim: int, stride: int, index: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(*(own if d == dim else n for d, n in enumerate(WHOLE.shape))))
    vars(weight).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    places = {"pipe": (0, 2), "tp": (1, 2)}
    named = dict(model.named_parameters())
    parts, lost = locate(named, {"weight": WHOLE}, {}, load=True, slices_of=None, places=places)
    assert lost == {}
    assert str(parts["weight"]) == index
    assert torch.equal(weight, parts["weight"].take(WHOLE))


@pytest.mark.parametrize(
    "dtype, table",
    [(torch.float64, torch.complex128), (torch.float32, torch.complex64), (torch.bfloat16, torch.complex64)],
)
def test_a_cast_keeps_the_imaginary_part_of_rotary_tables(dtype: torch.dtype, table: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
    turns = model.turns
    cast_model(model, dtype)
    assert model.weight.dtype == dtype
    assert model.turns.dtype == table
    assert torch.equal(model.turns.to(turns.dtype), turns)


def test_a_rank_without_rows_has_the_loss_of_one_microbatch(tmp_path: Path) -> None:
    """Each microbatch's loss is 0 on this rank, with the gradient 1: the sum of both is no loss scaled by 2."""
    losses = {("output", step, ""): torch.tensor(0.0) for step in (0, 1)}
    gradients = {("output-gradient", step, ""): torch.tensor(1.0) for step in (0, 1)}
    write_record(tmp_path, "rank-0", losses | gradients, PartFacts([0.0], {}, {"branch": 1}))
    side = SideRecord(tmp_path, "rank-0", PartFacts)
    assert side.call("output-gradient", "", 0, 1) == torch.tensor(1.0)
