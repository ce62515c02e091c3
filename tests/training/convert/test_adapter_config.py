"""adapter_config.json of other programs: every kind of value is read, or refused as a folder or a field is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.training.convert.adapters import read_adapter

MODEL = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "positions": 32}
RIGHT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "use_rslora": False,
         "use_dora": False, "bias": "none", "rank_pattern": {}, "modules_to_save": None}  # fmt: skip
WRONG = (None, "x", "", [1], [[1]], [], {}, {"a": 1}, -1, 0, 10**30, 0.5, True, False, float("nan"), float("inf"))


def read(folder: Path, values: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(values))
    parse_config(
        {"model": MODEL | {"adapter": read_adapter(str(folder))}, "data": {"sequence": 8}, "batch": {"global": 4}}
    )


@pytest.mark.parametrize("values", [[], "x", 3, None, {}, {"peft_type": []}])
def test_a_file_of_something_else_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"peft_type=.* is not supported; valid: LORA"):
        read(tmp_path, values)


def test_any_setting_may_be_anything(tmp_path: Path) -> None:
    read(tmp_path, RIGHT)
    outcomes = {"read": 0, "refused": 0}
    for key in RIGHT:
        for value in WRONG:
            try:
                read(tmp_path, RIGHT | {key: value})
                outcomes["read"] += 1
            except (CheckpointError, ConfigError):
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 20
