"""skills/: procedures for agents. Each has a head, commands that exist, and a verdict by exit code that separates right
from wrong; llms.txt leads to all skills and pages.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.command_line import environment_for
from tests.patience import PATIENCE_SECONDS
from tests.typed_commands import read_as_typed

ROOT = Path(__file__).resolve().parent.parent
SKILLS = sorted(path.parent.name for path in (ROOT / "skills").glob("*/SKILL.md"))
LOOP = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    inputs, targets = torch.randn(4, 8), torch.randn(4, 4)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
"""
PLANT = "model[2].bias.register_hook(lambda gradient: 2 * gradient)\n"


def text_of(skill: str) -> str:
    return (ROOT / f"skills/{skill}/SKILL.md").read_text()


def blocks(skill: str, language: str) -> list[str]:
    """Return a skill's blocks of code, without the list's indentation."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", text_of(skill), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


def commands(skill: str, **values: str) -> list[str]:
    """Return the lines of a skill's shell blocks, with values in place of placeholders."""
    lines = "".join(blocks(skill, "sh")).splitlines()
    return [re.sub(r"\b[A-Z]{3,}\b", lambda found: values.get(found[0], found[0]), line) for line in lines]


def typed(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Type a line in a shell with this meshwright."""
    program = f"{shlex.quote(sys.executable)} -m meshwright.cli"
    return subprocess.run(
        re.sub(r"^meshwright\b", lambda _: program, line), shell=True, cwd=folder, env=environment_for(folder),
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip


def test_there_are_three_skills() -> None:
    assert SKILLS == ["find-the-wrong-module", "plan-a-run", "prove-a-run"]


@pytest.mark.parametrize("skill", SKILLS)
def test_a_skill_has_a_head_and_a_verdict(skill: str) -> None:
    _, head, body = text_of(skill).split("---\n", 2)
    facts = yaml.safe_load(head)
    assert set(facts) == {"name", "description"}
    assert facts["name"] == skill
    assert " Use when " in facts["description"]
    assert len(facts["description"]) <= 1024
    assert "| PASS: " in body or "| 0 | PASS: " in body
    assert "FAIL: " in body


PLACES = {
    "MODEL": "llama-mini", "SEQUENCE": "64", "BATCH": "16", "CLUSTER": "dgx-h100", "DEVICES": "4", "NODES": "1",
}  # fmt: skip


@pytest.mark.parametrize("skill", SKILLS)
def test_a_skills_commands_exist(skill: str) -> None:
    """The command line reads each command, with all options."""
    lines = commands(skill, **PLACES)
    assert lines
    for line in lines:
        program, *words = shlex.split(line.split(" > ")[0].replace("plan.yaml device", "quickstart device"))
        assert program == "meshwright"
        read_as_typed(words)


def test_an_unknown_option_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        read_as_typed(["verify", "quickstart", "--strictly"])


def test_a_proof_passes_and_a_planted_mistake_fails(tmp_path: Path) -> None:
    """The skill's check passes, and fails with the mistake that the third step plants."""
    (check,) = blocks("prove-a-run", "python")
    (line,) = [line for line in commands("prove-a-run") if "parity" in line]
    codes, findings = [], []
    for text in (check, check.replace("DistributedDataParallel(job.copy())", "job.copy()")):
        (tmp_path / "CHECKS.py").write_text(text)
        codes.append(typed(tmp_path, line).returncode)
        findings.append(json.loads((tmp_path / "parity.json").read_text())["checks"][0]["finding"])
    assert codes == [0, 1]
    assert findings[0] is None
    assert findings[1]["kind"] == "missing reduction"
    assert findings[1]["remedy"]


@pytest.mark.long
def test_a_wrong_module_is_found_and_a_mended_run_passes(tmp_path: Path) -> None:
    (tmp_path / "RIGHT.py").write_text(LOOP)
    (tmp_path / "SUSPECT.py").write_text(LOOP.replace("optimizer =", f"{PLANT}optimizer ="))
    *lines, record, compare = commands("find-the-wrong-module")
    assert [typed(tmp_path, line).returncode for line in (*lines, record, compare)] == [0, 0, 0, 1]
    first = next(each for each in json.loads((tmp_path / "compared.json").read_text())["checks"] if not each["holds"])
    assert first["finding"]["module"] == "2"
    assert "times 2" in first["finding"]["text"]
    (tmp_path / "SUSPECT.py").write_text(LOOP)
    assert typed(tmp_path, "rm -r two").returncode == 0
    assert [typed(tmp_path, line).returncode for line in (record, compare)] == [0, 0]


@pytest.mark.long
def test_a_plan_passes_and_one_that_cannot_fit_fails(tmp_path: Path) -> None:
    search, submit = commands("plan-a-run", **PLACES)
    ran = typed(tmp_path, search)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["layouts"][0]["verdict"] == "fits"
    assert typed(tmp_path, submit).returncode == 0
    large = f"{submit.replace('plan.sbatch', 'large.sbatch')} model.hidden=65536"
    refused = typed(tmp_path, large)
    assert refused.returncode == 2
    assert "does not fit dgx-h100" in refused.stderr
    (tmp_path / "plan.yaml").unlink()
    search = commands("plan-a-run", **PLACES | {"MODEL": "llama-3.1-405b", "DEVICES": "1"})[0]
    assert typed(tmp_path, search).returncode == 2


def test_llms_txt_leads_to_all_skills_and_pages() -> None:
    """`python docs/site/llms.py` writes the file; titles may change between two writes, links may not."""
    link = re.compile(r"\]\(([^)]+)\)")
    now = link.findall((ROOT / "llms.txt").read_text())
    assert [path for path in now if not (ROOT / path).is_file()] == []
    written = subprocess.run(
        [sys.executable, "-c", "import llms; print(llms.text())"], cwd=ROOT / "docs/site",
        capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert now == link.findall(written.stdout), "python docs/site/llms.py writes llms.txt anew"
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")} - {"docs/decisions.md"}
    assert {*now} >= pages | {f"skills/{name}/SKILL.md" for name in SKILLS}
