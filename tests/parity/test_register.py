"""The register of a library's plans: right ones pass, wrong ones are named, and an interrupted register goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.parity import collect, register, run_check
from meshwright.parity.command import run_words
from meshwright.parity.register import reason_of
from meshwright.ranks.errors import ConfigError

REGISTER = ["register", "transformers"]


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return {told["model_type"]: told for told in map(json.loads, (folder / "register.jsonl").read_text().splitlines())}


def test_a_register_of_tensor_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transformers 5.24 each rank keeps its own gradient of apertus' activation."""
    words = [*REGISTER, "--only", "ap", "--out", str(tmp_path)]
    tried = []

    def count(check: Any) -> Any:
        tried.append(check.words)
        return run_check(check)

    monkeypatch.setattr(register, "run_check", count)
    monkeypatch.setattr(
        register, "checks_of", lambda *_: [found for found in every if found[0] in ("apertus", "granite")]
    )
    every = list(checks_of_tensor())
    assert run_words(words) == 1
    assert tried == ["apertus", "granite"]
    found = entries(tmp_path)
    assert (found["granite"]["verdict"], found["granite"]["text"]) == ("passes", "")
    wrong = found["apertus"]
    assert (wrong["verdict"], wrong["kind"]) == ("fails", "missing reduction")
    assert wrong["module"].endswith("mlp.act_fn")
    said = capsys.readouterr().out
    assert "tensor: 2 tried, 1 fails, 1 passes" in said
    page = (tmp_path / "register.html").read_text()
    assert "missing reduction at model.layers.1.mlp.act_fn" in page
    # Written lines are not tried again; the last is lost.
    lines = (tmp_path / "register.jsonl").read_text().splitlines()
    (tmp_path / "register.jsonl").write_text(lines[0] + "\n")
    assert run_words(words) == 1
    assert tried == ["apertus", "granite", "granite"]


checks_of = register.checks_of


def checks_of_tensor() -> Any:
    return checks_of(["tensor"], "")


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
