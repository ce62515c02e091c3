"""Edges of the check itself: ids at the ends of ranges, narrower types, several stages, scripts without a guard."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright import parity
from meshwright.parity import kinds
from meshwright.parity.batches import changed_positions, ids_of, with_boundaries, with_changes
from meshwright.parity.check import ParityCheck, ParityResult
from meshwright.parity.compare import narrow_type
from meshwright.parity.gradients import Mistake
from meshwright.parity.job import ParityJob
from meshwright.parity.parts import find_part
from meshwright.parity.program import SteppedProgram, still_optimizers, takes_job
from meshwright.parity.reference import check_repeatable, moves_buffers
from meshwright.parity.remedies import REMEDIES
from meshwright.parity.worker import call_check
from meshwright.ranks.errors import ParityError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.patience import PATIENCE_SECONDS
from tests.workers import run_ranks

RANDOM = torch.Generator().manual_seed(5)
GRADIENT = torch.randn(40, 6, dtype=torch.float64, generator=RANDOM)


def test_ends_of_ranges_are_among_the_ids() -> None:
    ids = torch.full((6, 8), 3)
    ids[0, 0] = -100
    changed = with_boundaries(ids, 32, (2, 4))
    assert {0, 7, 8, 15, 16, 23, 24, 31} <= set(changed.flatten().tolist())
    assert changed[0, 0] == -100
    assert torch.equal(with_boundaries(ids, 3, (2,)), ids), "3 is no id of a table of 3 rows"


def test_ids_are_known_by_what_tables_are_given() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "places": nn.Embedding(9, 4), "head": nn.Linear(4, 7)})
    batch = {"tokens": torch.tensor([[5, 2, 7, 1, 4]]), "labels": torch.tensor([[3, 0, 6, 2]]),
             "mask": torch.ones(1, 5, dtype=torch.long), "positions": torch.tensor([[0, 1, 0, 1]])}  # fmt: skip

    def loss(model: nn.ModuleDict, batch: dict[str, Tensor]) -> Tensor:
        h = model["table"](batch["tokens"][:, :-1]) + model["places"](batch["positions"])
        return model["head"](h).sum()

    assert ids_of(model, loss, batch, "labels") == {"tokens": 9, "labels": 7}


def test_a_probe_changes_one_position_of_most_rows() -> None:
    assert changed_positions(5, 8) == [0, 7, 4, None, 0]
    assert changed_positions(1, 8) == [4]
    ids = torch.arange(12).view(2, 6)
    assert (with_changes(ids, 12) != ids).nonzero().tolist() == [[0, 0], [1, 5]]


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda x: x.to(torch.bfloat16).double(), "bfloat16"),
        (lambda x: x.to(torch.float16).double(), "float16"),
        (lambda x: (0.4 * x).to(torch.float16).double() + (0.6 * x).to(torch.float16).double(), "float16"),
        (lambda x: x.float().double() * (1 + 1e-7), "float32"),
        (lambda x: x + 5e-4 * torch.randn(x.shape, dtype=x.dtype, generator=RANDOM), ""),
        (lambda x: x + 1e-14, ""),
    ],
    ids=["bf16", "fp16", "sum of fp16", "float32", "another error", "float64"],
)
def test_a_narrower_type_is_known_by_its_rounding(change: Callable[[Tensor], Tensor], name: str) -> None:
    assert narrow_type([change(GRADIENT)], [GRADIENT], "float64") == name


def test_rows_of_one_axis_and_pieces_of_another_are_a_part() -> None:
    whole = torch.arange(8 * 8).view(8, 8)
    part = find_part("tokens", whole[4:][:, [0, 1, 6, 7]], whole)
    assert str(part) == "[4:8, 0:2,6:8]"


def test_every_kind_has_a_remedy() -> None:
    documented = re.findall(r"^\| ([a-z ]+?) +\|", kinds.__doc__ or "", re.MULTILINE)[1:]
    assert set(documented) == set(REMEDIES)
    check = ParityCheck("cut", Path("cut.py"), (("data", 2),), "float64")
    result = ParityResult(check, "float64", 0.0, finding=Mistake("cut update", "body", "its update is cut"))
    assert result.remedy.endswith("docs/parity_findings.md#cut-update)")


def test_the_job_is_given_to_a_step_of_three_places() -> None:
    assert takes_job(lambda model, batch, job: None)
    assert not takes_job(lambda model, batch: None)
    assert not takes_job(lambda model, batch, scale=1.0: None)


def program_of(model: object) -> SteppedProgram:
    return SteppedProgram(model, frozenset(), None, lambda *_: 0.0, None, None, None, lambda b: b, True, True, False)


def test_stages_of_a_rank_have_the_names_of_the_whole() -> None:
    first, last = nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"3": nn.Linear(2, 2)})
    assert list(program_of([first, last]).weights()) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert "layers.0.weight" in program_of({"layers.0": nn.Linear(2, 2)}).weights()
    with pytest.raises(ParityError, match=r"two stages of this rank have a parameter 0\.weight"):
        program_of([first, nn.ModuleDict({"0": nn.Linear(2, 2)})]).weights()


def test_a_probe_leaves_weights_as_they_are() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(3)).sum().backward()
    with still_optimizers():
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_policy_casts_on_one_process_too() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model, x = nn.Linear(8, 4), torch.randn(3, 8, generator=RANDOM)
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        y = model(batch)
        seen.append(y.dtype)
        return y.square().mean()

    value = parity.cast_like(policy, loss)(model, x)
    value.backward()
    cast = nn.functional.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16()).float()
    assert torch.equal(value, cast.square().mean())
    assert seen == [torch.float32]
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


def statistics_and_rounding(mesh: Mesh, folder: Path) -> None:
    """The reference's own statistics do not move, and the reference's own rounding is reported."""

    def check(job: ParityJob) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        loss = lambda model, batch: model(batch).float().square().mean()  # noqa: E731
        job.reference(model, loss=loss, batch=lambda generator: torch.randn(8, 4, generator=generator))
        known, recipe = job._known
        assert torch.equal(known[1].running_mean, torch.zeros(3))
        assert check_repeatable(known, recipe) == "float32"
        assert moves_buffers(known, recipe)
        job.parallel(job.copy())

    call_check(check, mesh, "float64", folder)


def test_statistics_stay_and_rounding_is_told(tmp_path: Path) -> None:
    run_ranks(statistics_and_rounding, Grid((("data", 2),)), tmp_path, transport="torch")


SCRIPT = """
import torch
import meshwright.parity as parity

@parity.check(ranks=2)
def linear(job):
    batch = lambda generator: torch.randn(8, 4, generator=generator)
    job.reference(torch.nn.Linear(4, 3), loss=lambda model, batch: model(batch).float().square().mean(), batch=batch)
    job.parallel(job.copy())

for check in linear.parity_checks:
    result = parity.run_check(check)
    print(result.verdict, result.precision, *result.notes, sep="|")
"""


def test_a_script_needs_no_guard_and_float32_inside_is_compared_in_float32(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_SECONDS,
                         cwd=Path(__file__).resolve().parents[2])  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    note = "the reference rounds to float32 inside: compared in float32"
    assert ran.stdout.splitlines() == [f"equal to the reference|float32|{note}"]
