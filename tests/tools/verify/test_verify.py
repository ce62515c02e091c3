"""verify as a command: jobs of workers, a verdict, a table. test_mistakes.py has the mistakes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from meshwright.compute.models.chain import chain_of
from meshwright.config import Config, parse_config
from meshwright.config.section import with_field
from meshwright.parity.compare import Row
from meshwright.ranks.errors import LaunchError, MismatchError
from meshwright.tools.verify import job
from meshwright.tools.verify.job import FEW_FLOPS, Verdict, comparable, one_device, verify
from meshwright.tools.verify.table import as_dict, render


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text about nothing\n" for number in range(400)))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return parse_config(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 257, "dropout": 0.1},
            "data": {"source": str(text), "sequence": 16},
            "batch": {"global": 4},
            "layout": {"data": {"size": 2, "bucket": 8192}, "transport": "torch"},
        }
    )


def test_a_right_layout_holds(config: Config) -> None:
    verdict = verify(config, steps=2)
    verdict.check()
    assert {row.kind for row in verdict.rows} == {"initial", "loss", "norm", "gradient", "weight", "state"}
    names = {row.name for row in verdict.rows if row.kind == "gradient"}
    assert {"tokens.weight", "blocks.0.attention.query_key_value.bias", "norm.bias"} <= names
    assert as_dict(verdict)["holds"] is True


def test_a_small_reference_has_one_thread(config: Config) -> None:
    """A second thread would use as long as the first, waiting."""
    checked = with_field(comparable(config, as_configured=False), "device", "cpu")
    assert one_device(checked, 5).threads == 1
    steps = FEW_FLOPS // (4 * chain_of(checked).flops_per_sample(checked))
    assert [one_device(checked, number).threads for number in (steps, steps + 1)] == [1, "auto"]
    assert one_device(with_field(checked, "threads", 2), 5).threads == 2  # as the user says
    assert one_device(with_field(checked, "device", "cuda"), 5).threads == "auto"


def test_no_rank_imports_dtensors_or_the_compiler_before_they_are_met() -> None:
    """The import takes a second of a core, in the launcher and again in the fork server."""
    heavy = "{'torch._dynamo', 'torch.distributed.tensor', 'sympy'}"
    code = f"import sys, meshwright.tools.verify.table, meshwright.tools.verify.job; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


def test_a_run_whose_bits_are_layout_free_is_held_to_its_bits(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    free = with_field(config, "bits.kind", "layout-free")
    verdict = verify(free, steps=2)
    verdict.check()
    names = {row.name for row in verdict.rows if row.kind == "bits"}
    assert {"loss of step 1", "norm of step 2", "weight of tokens.weight", "exp_avg of norm.bias"} <= names
    monkeypatch.setattr(job, "BITS_WORKER", "tests.tools.verify.planted:bits_by_rank")
    wrong = verify(free, steps=1)
    assert {row.kind for row in wrong.failed} == {"bits"}
    with redirect_stdout(StringIO()) as printed:
        render(wrong)
    assert "loss of step 1: not the bits of one device" in printed.getvalue()


def test_the_bits_of_a_layout_that_cuts_layers_and_sequences_are_one_device_s(config: Config) -> None:
    tree = config.model_dump(mode="json")
    tree["model"] |= {"hidden": 64, "heads": 4}
    tree["bits"] = {"kind": "layout-free", "tensor": 2, "sequence": 2}
    tree["layout"] = {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}, "transport": "torch"}
    verdict = verify(parse_config(tree), steps=1)
    verdict.check()
    assert len([row for row in verdict.rows if row.kind == "bits"]) > 20


def plant(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "WORKER", f"tests.tools.verify.planted:{bug}")


def test_a_planted_wrong_gradient_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("wrong_gradient", monkeypatch)
    verdict = verify(config, steps=1)
    with pytest.raises(MismatchError, match="the layout does not compute what one device computes"):
        verdict.check()
    assert verdict.failed[0].kind == "gradient"
    assert verdict.finding is not None
    assert verdict.finding.text.startswith("the gradient of ")  # all outputs and their gradients are right
    with redirect_stdout(StringIO()) as printed:
        render(verdict)
    assert "FAILS" in printed.getvalue()


CRASHES = {
    "WORKER": ("killed_rank", "^the layout did not get to its end: rank 1 was killed by signal 9"),
    "REFERENCE_WORKER": ("failing_reference", "^the reference on one device did not get to its end: rank 0 failed: "),
}


@pytest.mark.parametrize("side", CRASHES)
def test_a_crash_is_one_message(side: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, message = CRASHES[side]
    monkeypatch.setattr(job, side, f"tests.tools.verify.planted:{bug}")
    with pytest.raises(LaunchError, match=message) as raised:
        verify(config, steps=1)
    assert "Traceback" not in str(raised.value)


def test_not_a_number_does_not_hold(config: Config) -> None:
    row = Row("gradient", "x", float("nan"), 1.0)
    assert not row.holds
    verdict = Verdict(config, 1, (Row("gradient", "y", 0.5, 1.0), row))
    assert verdict.worst("gradient").name == "x"
    with pytest.raises(MismatchError):
        verdict.check()
