"""Plants stay alive: each plant's replaced text is in the package once, and a test found the plant in the last run."""

from __future__ import annotations

import pytest

from tests.plants.plant import REPOSITORY, Plant, page_with, plants, read_found

PLANTS = plants()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_it_can_be_planted(plant: Plant) -> None:
    text = (REPOSITORY / "meshwright" / plant.file).read_text()
    assert text.count(plant.old) == 1, f"{plant.file} has changed: find another place in tests/plants/plants.yaml"
    compile(text.replace(plant.old, plant.new), plant.file, "exec")
    assert all((REPOSITORY / asked.partition("::")[0]).exists() for asked in plant.tests)


def test_each_was_found_and_the_page_says_so() -> None:
    answers = read_found()
    assert [plant.name for plant in PLANTS if not answers.get(plant.name)] == [], "`python -m tests.plants`"
    page = (REPOSITORY / "tests/plants/README.md").read_text()
    assert page_with(page, PLANTS, answers) == page, "`python -m tests.plants` writes the table"
