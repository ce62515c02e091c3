"""Programs in common styles: right programs hold; mistakes are found, with the right modules and kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.ranks.launch import Ranks, run
from tests.parity.styles.__main__ import MODULES, marks_of, result_of, run_styles
from tests.parity.styles.style import STYLES

FEW = {
    "tensor": ["gqa:", "gqa:late_scale", "gqa:no_sum_down", "gqa:kv_mean", "lora:", "lora:thawed", "muon:shard"],
    "data": ["ddp_accumulate:", "ddp_accumulate:report_means", "ddp_accumulate:last_microbatch", "batch_norm:running",
             "ddp_hook:bf16", "fsdp_accumulate:divided_before_clip", "scheduled:scheduler_never"],
    "cut": ["ring:", "ring:document_leak"],
    "routed": ["experts:", "experts:aux_per_micro", "experts:router_local"],
    "stages": ["interleaved:", "interleaved:norm_twice"],
    "sums": ["row_parallel:", "row_parallel:lost", "row_parallel:twice", "row_parallel:rounded"],
    "owners": ["owners:", "momentum_by_owners:", "clipped:", "clipped:local", "clipped:thawed", "top_level:local",
               "policy:own_statistics", "used_thrice:first", "sums_in_transit:bf16", "contrastive:rounded",
               "moving_bias:gates"],
    "pieces": ["pieces:", "pieces:piece"],
}  # fmt: skip
"""At least one case of each mistake that was once missed. The cases of a group share processes."""


def check_cases(names: list[str], folder: Path) -> None:
    axes = {STYLES[name.partition(":")[0]].axes for name in names}
    assert len(axes) == 1, axes
    run(run_styles, Ranks(axes.pop()), names=names, out=folder, precision="")
    for name in names:
        style, _, wrong = name.partition(":")
        result = result_of(STYLES[style], wrong, folder)
        if not wrong:
            assert result.holds, (name, result.verdict)
            continue
        plant = next(plant for plant in STYLES[style].plants if plant.wrong == wrong)
        assert marks_of(result, plant) == (True, True, True), (name, result.verdict)
        assert result.remedy
        assert result.seen_by_losses.startswith("an allclose of the losses would have ")


@pytest.mark.few(3)
@pytest.mark.parametrize("group", FEW)
def test_some_programs_and_their_mistakes(group: str, tmp_path: Path) -> None:
    check_cases(FEW[group], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_a_style_and_all_its_mistakes(style: str, tmp_path: Path) -> None:
    assert MODULES
    check_cases([f"{style}:{wrong}" for wrong in ("", *(plant.wrong for plant in STYLES[style].plants))], tmp_path)
