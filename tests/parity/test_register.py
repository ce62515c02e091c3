"""The register of a library's plans: right ones pass, wrong ones are named, and an interrupted register goes on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshwright.parity import ParityResult, collect, register, run_check
from meshwright.parity.check import ParityCheck
from meshwright.parity.command import run_words
from meshwright.parity.register import reason_of
from meshwright.parity.registered import same_weights, small_config
from meshwright.ranks.errors import ConfigError, ParityError

REGISTER = ["register", "transformers"]


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return {told["model_type"]: told for told in map(json.loads, (folder / "register.jsonl").read_text().splitlines())}


def test_a_register_of_tensor_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transformers 5.24 each rank keeps its own gradient of apertus' activation, and the norms of Qwen3's heads are
    summed again in the second of two backward passes."""
    words = [*REGISTER, "--out", str(tmp_path)]
    types, tried = ("apertus", "granite", "qwen3"), []
    checks = [found for found in register.checks_of(["tensor"], "") if found[0] in types]

    def count(check: ParityCheck) -> ParityResult:
        tried.append(check.words)
        return run_check(check)

    monkeypatch.setattr(register, "run_check", count)
    monkeypatch.setattr(register, "checks_of", lambda *_: checks)
    assert run_words(words) == 1
    assert tried == [*types]
    found = entries(tmp_path)
    assert (found["granite"]["verdict"], found["granite"]["text"]) == ("passes", "")
    assert [(found[each]["verdict"], found[each]["kind"]) for each in ("apertus", "qwen3")] == [
        ("fails", "missing reduction"), ("fails", "accumulation")
    ]  # fmt: skip
    assert found["apertus"]["module"].endswith("mlp.act_fn")
    assert "tensor: 3 tried, 2 fails, 1 passes" in capsys.readouterr().out
    assert "missing reduction at model.layers.1.mlp.act_fn" in (tmp_path / "register.html").read_text()
    # The last line is lost, and one is of another version: they are tried again.
    lines = (tmp_path / "register.jsonl").read_text().splitlines()
    other = lines[0].replace(found["apertus"]["library"], "transformers 0.1")
    (tmp_path / "register.jsonl").write_text(f"{other}\n{lines[1]}\n")
    assert run_words(words) == 1
    assert tried == [*types, "apertus", "qwen3"]


def test_a_folder_that_gives_another_model_is_no_verdict() -> None:
    model = torch.nn.Linear(3, 2)
    same_weights(model, copy.deepcopy(model))
    other = copy.deepcopy(model)
    other.bias.data += 1
    with pytest.raises(ParityError, match="bias is another after saving and reading, without a plan"):
        same_weights(model, other)


def test_sections_of_positions_fit_the_head() -> None:
    """Text models of Qwen2-VL and GLM-4V cut a head by sections."""
    assert small_config(CONFIG_MAPPING["qwen2_vl_text"]).rope_parameters["mrope_section"] == [1, 1, 2]


def test_expert_plans_are_of_types_with_experts() -> None:
    found = [model_type for model_type, _ in register.checks_of(["expert"], "qwen3")]
    assert "qwen3_moe" in found
    assert "qwen3" not in found


def test_wrong_words_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--plans.*sideways.*tensor, tensor4, expert"):
        run_words([*REGISTER, "--plans", "sideways", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--only.*no_such_type"):
        run_words([*REGISTER, "--only", "no_such_type", "--out", str(tmp_path)])


def test_a_reason_is_the_exception() -> None:
    text = "rank 0 failed: Traceback\n  File x\n    raise y\nValueError: too small\n(the job had been restarted 1 time)"
    assert reason_of(text) == "ValueError: too small"
    assert reason_of("rank 0 failed: memory ended") == "rank 0 failed: memory ended"


def test_a_file_of_checks_has_dataclasses_with_annotations_as_text(tmp_path: Path) -> None:
    file = tmp_path / "checks.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import torch\n"
        "import meshwright.parity as parity\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    width: int = 4\n"
        "@parity.check(ranks=2)\n"
        "def right(job):\n"
        "    model = torch.nn.Linear(Sizes().width, 3)\n"
        "    job.reference(model, lambda m, x: m(x).square().mean(), lambda g: torch.randn(4, 4, generator=g))\n"
        "    job.parallel(torch.nn.parallel.DistributedDataParallel(job.copy()), batch=job.rows('data'))\n"
    )
    (check,) = collect(file)
    assert run_check(check).verdict == "equal to the reference"
