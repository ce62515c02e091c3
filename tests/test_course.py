"""docs/course: each exercise fails with the lesson's words, and passes once the marked line is mended."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright import load, verify
from meshwright.cli import app
from meshwright.ranks.errors import ConfigError
from tests.patience import PATIENCE_SECONDS

COURSE = Path(__file__).resolve().parent.parent / "docs/course"
LESSONS = sorted(path.stem for path in COURSE.glob("[1-9]-*.md"))
MEND = re.compile(r"^(?P<indent> *).*  # mend\n", re.MULTILINE)
QUICK = {("5-sub-graphs", True), ("7-experts", True), ("2-columns-and-rows", False), ("9-any-script", False)}
"""Exercises that start processes, and the tested state (whether solved), without --long."""


def block_of(lesson: str, language: str) -> str:
    """Return the lesson's last block in a language: the exercise's command, its output, or the solution."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (COURSE / f"{lesson}.md").read_text(), re.DOTALL)
    return str(blocks[-1])


def command_of(lesson: str) -> list[str]:
    """Return the exercise's command; a later command may mark the counted numbers."""
    blocks = re.findall(r"```sh\n(.*?)```", (COURSE / f"{lesson}.md").read_text(), re.DOTALL)
    return str([block for block in blocks if "count.py" not in block][-1]).split()


def exercise_of(lesson: str) -> Path:
    return COURSE.parent.parent / command_of(lesson)[-1]


def copied(lesson: str, folder: Path, *, solved: bool) -> Path:
    """Copy the exercise into a new folder, unchanged or with the marked line mended."""
    file = exercise_of(lesson)
    text, solution = file.read_text(), block_of(lesson, "yaml" if file.suffix == ".yaml" else "python")
    assert len(MEND.findall(text)) == 1
    mended = MEND.sub(
        lambda match: "".join(match["indent"] + line for line in solution.splitlines(keepends=True)), text
    )
    for beside in COURSE.glob(f"{file.stem}.*"):
        (folder / beside.name).write_text(beside.read_text())
    (folder / file.name).write_text(mended if solved else text)
    return folder / file.name


def parts_of(page: str) -> tuple[str, dict[str, Any]]:
    """Return the page without its facts, and the facts."""
    match = re.search(r'id="facts">(.*?)</script>', page, re.DOTALL)
    assert match
    return page.replace(match[1], ""), json.loads(match[1])


def module_of(path: Path) -> Any:
    """Import a script outside of the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_its_command_writes(tmp_path: Path) -> None:
    """`make site` runs the command of docs/course/index.md: the page is in no clone, and needs no network."""
    *words, file = module_of(COURSE.parent / "site/pictures.py").command()
    ran = CliRunner().invoke(app, [*words, str(tmp_path / file)])
    assert ran.exit_code == 0, ran.output
    page, facts = parts_of((tmp_path / file).read_text())
    assert re.findall(r"(?:src|href)=.https?:", page) == []
    assert facts["grid"]
    assert facts["weights"]
    assert f"PICTURE := docs/course/{file}\n" in (COURSE.parents[1] / "Makefile").read_text()


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_has_an_idea_a_picture_and_an_exercise(lesson: str) -> None:
    text = (COURSE / f"{lesson}.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Look", "Exercise"]
    assert text.count("<details") == 1
    assert len(text.split()) < 400, "a lesson is short"
    assert f"({lesson}.md)" in (COURSE / "index.md").read_text()


COUNTED = [lesson for lesson in LESSONS if "count.py" in (COURSE / f"{lesson}.md").read_text()]


@pytest.mark.parametrize("lesson", COUNTED)
def test_numbers_are_marked_once_the_line_is_mended(
    lesson: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The solution's numbers are right, the zeros in the lesson's command are not; no message has a right number."""
    text = (COURSE / f"{lesson}.md").read_text()
    file = copied(lesson, tmp_path, solved=True)
    for name in ("count.py", "4_stages.yaml"):
        (tmp_path / name).write_text((COURSE / name).read_text())
    asked = shlex.split(re.findall(r"count\.py (.+)", text)[0])
    solution = re.findall(r"`((?:\w+=\d+ ?)+)`", text.split("<details")[1])[0]
    answers = dict(word.split("=") for word in solution.split())
    assert list(answers) == [word.split("=")[0] for word in asked[1:]]

    count = module_of(tmp_path / "count.py")

    def mark(words: list[str]) -> tuple[int, str]:
        code = count.main([asked[0], *words])
        return code, capsys.readouterr().out

    assert mark(solution.split())[0] == 0
    code, wrong = mark(asked[1:])
    assert code == 1
    for name, number in answers.items():
        assert f"{name}=0 is not the number" in wrong
        assert f"={number}" not in wrong
    error = block_of(lesson, "text")
    assert not any(re.search(rf"\b{number}\b", error) for number in answers.values() if len(number) > 1), "told already"
    if file.suffix == ".yaml":
        file.write_text((COURSE / file.name).read_text())
        assert "mend the run file first" in mark(solution.split())[1]


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if exercise_of(lesson).suffix == ".yaml"])
def test_a_run_file_is_refused(lesson: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(copied(lesson, tmp_path, solved=False))
    assert len(refused.value.problems) == 1, "an exercise has one mistake"
    assert block_of(lesson, "text").strip() in str(refused.value)


@pytest.mark.parametrize(
    "lesson, solved",
    [
        pytest.param(lesson, solved, marks=[] if (lesson, solved) in QUICK else pytest.mark.long)
        for lesson in LESSONS
        for solved in (False, True)
        if solved or exercise_of(lesson).suffix == ".py"
    ],
)
def test_an_exercise_is_marked(lesson: str, solved: bool, tmp_path: Path) -> None:
    file = copied(lesson, tmp_path, solved=solved)
    if file.suffix == ".yaml":
        verify(load(file), steps=1).check()
        return
    program, *words = command_of(lesson)
    start = [sys.executable] if program == "python" else [sys.executable, "-m", program]
    ran = subprocess.run(
        [*start, *words[:-1], str(file)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path
    )
    assert ran.returncode == (0 if solved else 1), ran.stderr
    assert solved or block_of(lesson, "text").strip() in ran.stdout + ran.stderr
