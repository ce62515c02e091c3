"""verify sees mistakes, also mistakes that a layout shares with our run on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.ranks.errors import MismatchError, ZeroGradientError
from meshwright.tools.verify.job import Verdict, compare_runs
from meshwright.tools.verify.table import as_dict
from tests.tools.verify.cases import MODELS, Drawn, Repeated, config_for, run_layout, run_reference
from tests.tools.verify.mistakes import MISTAKES, Mistake, dead_block, dead_model, half_sums

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "data": {"layout": {"data": {"size": 2}}},
    "tensor": {"layout": {"tensor": {"kind": "megatron", "size": 2}}},
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the reference's results of each model: the same for every layout."""
    folder = tmp_path_factory.mktemp("references")
    models = ("gpt2", "transformer")
    return {model: run_reference(Drawn(config_for(model)), folder / model, STEPS) for model in models}


def verdict_with(mistake: Mistake | None, config: Config, folder: Path, reference: Path) -> Verdict:
    layout = run_layout(Drawn(config), folder / "layout", STEPS, mistake.plant if mistake else None)
    return compare_runs(config, layout, reference, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["gpt2", "transformer"])
def test_without_a_mistake_all_holds(model: str, layout: str, references: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(model, **LAYOUTS[layout])
    verdict = verdict_with(None, config, tmp_path, references[model])
    verdict.check()
    assert verdict.holds
    assert {row.kind for row in verdict.rows} == {"initial", "loss", "norm", "gradient", "weight", "state"}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.plant.__name__}-{mistake.layout}")
def test_a_mistake_is_seen(mistake: Mistake, references: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(mistake.model, **LAYOUTS[mistake.layout])
    verdict = verdict_with(mistake, config, tmp_path, references[mistake.model])
    with pytest.raises(MismatchError, match="the layout does not compute what one device computes"):
        verdict.check()
    failed = {row.kind for row in verdict.failed}
    assert failed >= set(mistake.seen)
    assert not failed & set(mistake.unseen)
    assert verdict.finding is not None
    assert mistake.kind in ("", verdict.finding.kind), verdict.hint


def test_sums_in_half_precision_are_seen(tmp_path: Path) -> None:
    """320 microbatches have equal gradients: in bf16 the sum of equal terms stops growing at the 256th."""
    shape = MODELS["untied"] | {"hidden": 8, "heads": 2, "dropout": 0.0}
    batch, precision = {"global": 320, "micro": 1}, {"level": "O2", "dtype": "bf16"}
    train = Repeated(config_for(model=shape, batch=batch, precision=precision))
    layout, reference = (run(train, tmp_path / run.__name__, 1, half_sums) for run in (run_layout, run_reference))
    verdict = compare_runs(train.config, layout, reference, 1)
    failed = [row for row in verdict.failed if row.kind == "gradient"]
    assert max(row.error for row in failed) > 0.1


@pytest.mark.parametrize("plant", [dead_block, dead_model])
def test_equal_zeros_prove_nothing(plant: Any, tmp_path: Path) -> None:
    """Both sides are dead, so all comparisons hold and prove nothing."""
    config = config_for()
    reference = run_reference(Drawn(config), tmp_path / "reference", STEPS, plant)
    layout = run_layout(Drawn(config), tmp_path / "layout", STEPS, plant)
    verdict = compare_runs(config, layout, reference, STEPS)
    assert all(row.holds for row in verdict.rows if row.kind in ("gradient", "initial"))
    dead = {name for name in verdict.zero_gradients if name.startswith("blocks.")}
    assert dead == {row.name for row in verdict.rows if row.name.startswith("blocks.")}
    assert ("tokens.weight" in verdict.zero_gradients) == (plant is dead_model)
    assert verdict.zero_gradients[-1] == ("norm.bias" if plant is dead_model else "blocks.1.feed_forward.contract.bias")
    assert as_dict(verdict)["zero_gradients"] == list(verdict.zero_gradients)
    assert as_dict(verdict)["holds"] is False
    with pytest.raises(ZeroGradientError, match=r"^the gradient of \S+ \(and of \d+ more\) is zero everywhere"):
        verdict.check()
