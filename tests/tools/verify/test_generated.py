"""`verify --generate`: generation under layouts equals training's forward pass, and finds planted mistakes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from meshwright.compute.bits.cached import CachedRun
from meshwright.compute.context.context import TOKENS
from meshwright.compute.context.spec import AttentionSpec
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import MismatchError
from meshwright.tools.verify import generated
from meshwright.tools.verify.generated import LAYOUTS, compare, verify_generated
from meshwright.tools.verify.generated_table import as_dict, render

RIGHT = CachedRun.attend
THREE = "one device", "1-D tensors of 2", "ring of 2", "Ulysses of 2"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text about nothing\n" for number in range(400)))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return parse_config(
        {
            "model": {"layers": 1, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 257, "dropout": 0.1},
            "data": {"source": str(text), "sequence": 64},
            "batch": {"global": 4},
            "steps": 2,
            "device": "cpu",
            "bits": {
                "kind": "layout-free", "samples": 2, "tensor": 2, "hidden": 2, "sequence": 4, "attention": "runs"
            },
        }
    )  # fmt: skip


def test_generation_is_training(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    three: dict[str, Any] = {name: LAYOUTS[name] for name in THREE}
    with patch.object(generated, "LAYOUTS", three):
        found = verify_generated(config, steps=2, tokens=80)
    found.check()
    assert found.prompts == 2
    assert found.tokens == 80
    names = [way.name for way in found.ways]
    assert names[:3] == ["training, one device", "training, 1-D tensors of 2", "training, ring of 2"]
    promised = [way for way in found.ways if way.demanded]
    assert all(way.differing == 0 and way.tokens == 80 for way in promised)
    # The usual forward pass is another sum, so the comparison must see single bits.
    (usual,) = (way for way in found.ways if not way.demanded)
    assert usual.differing > 0
    assert 0 < usual.largest < 1e-4
    render(found)
    assert "PASS: generation is training's forward pass" in capsys.readouterr().out
    assert as_dict(found)["holds"] is True


@pytest.mark.long
def test_1000_tokens_have_training_s_bits_under_six_layouts(config: Config) -> None:
    found = verify_generated(config, steps=2, tokens=1000)
    found.check()
    assert found.tokens == 1000
    layouts = [way for way in found.ways if way.name.startswith("training, ")]
    assert len(layouts) == 6
    assert all(way.differing == 0 and way.tokens == 1000 for way in found.ways if way.demanded)


def stale(self: CachedRun, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend without the first run's last key."""
    if self.cache is not None and self.index:
        self.cache[0][:, :, key.shape[TOKENS] - 1] = 0
    return RIGHT(self, query, key, value, spec)


def test_a_cache_that_forgets_a_row_fails(config: Config) -> None:
    with (
        patch.object(generated, "LAYOUTS", {name: LAYOUTS[name] for name in ("one device", *THREE[2:])}),
        patch.object(CachedRun, "attend", stale),
    ):
        found = verify_generated(config, steps=1, tokens=40)
    assert not found.holds
    failed = {way.name for way in found.ways if not way.holds}
    assert "no cache, batched" in failed or "cache, batched" in failed
    with pytest.raises(MismatchError, match="generation is not training's forward pass: "):
        found.check()


def test_missing_and_further_tokens_count_as_different() -> None:
    assert compare("a", {0: [-1.0]}, {0: [-1.0, -2.0]}).differing == 1
    assert compare("a", {0: [-1.0, -2.0]}, {0: [-1.0]}).differing == 1
    assert compare("a", {}, {0: [-1.0]}).largest == math.inf
    assert compare("a", {0: [-1.0]}, {0: [math.nan]}).differing == 1


@pytest.mark.long
def test_a_thousand_tokens_under_six_layouts(config: Config) -> None:
    found = verify_generated(config, steps=5, tokens=1000)
    found.check()
    assert found.tokens == 1000
    assert found.notes == ()
    assert sum(way.name.startswith("training") for way in found.ways) == 6
