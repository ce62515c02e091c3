"""`meshwright scale` prints and writes the search's findings, and a mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.config import dump_config
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.scale import STRATEGIES
from meshwright.planner.plan.space import SearchJob, legal_layouts
from meshwright.ranks.errors import ConfigError
from tests.planner.plan.clusters import FLAT
from tests.planner.plan.questions import RUN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scale")
    (made / "run.yaml").write_text(dump_config(RUN))
    (made / "here.yaml").write_text(yaml.safe_dump(FLAT.model_dump(mode="json", by_alias=True)))
    return made


def command(folder: Path, *words: str) -> str:
    files = [str(folder / "run.yaml"), "--cluster", str(folder / "here.yaml")]
    result = CliRunner().invoke(app, ["scale", *files, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_curves_are_the_search_s(folder: Path) -> None:
    words = ("layout.order=auto", "memory.recompute=none", "--devices", "2,4", "--strategies", "zero1,tesseract")
    told = json.loads(command(folder, *words, "--out", str(folder / "new"), "--json"))
    rows: dict[tuple[str, int], dict[str, Any]] = {(row["strategy"], row["devices"]): row for row in told["rows"]}
    assert list(rows) == [("zero1", 2), ("zero1", 4), ("tesseract", 2), ("tesseract", 4)]
    assert rows["tesseract", 2]["reason"] == "2 devices make no layout of this kind"
    planner, run = Planner(FLAT), STRATEGIES["zero1"].applied(RUN)
    fixed = {"layout.order", "memory.recompute", *STRATEGIES["zero1"].fixed}
    fastest = min(planner.predict(config).seconds for config in legal_layouts(SearchJob(run, FLAT, 4, fixed)))
    assert rows["zero1", 4]["seconds"] == pytest.approx(fastest)
    assert rows["tesseract", 4]["layout"].startswith("tesseract: data 1 (")
    assert [Path(path).name for path in told["written"]] == ["scaling.csv", "scaling.json", "scaling.png"]
    with pytest.raises(ConfigError, match=r"--out=.*new is there already"):
        command(folder, "--devices", "2", "--out", str(folder / "new"))


def test_a_picture_s_name_is_no_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out=curves\.png is a file's name, and curves .* a folder: curves"):
        command(folder, "--devices", "2", "--out", "curves.png")


def test_what_does_not_fit_is_said(folder: Path) -> None:
    small = yaml.safe_load((folder / "here.yaml").read_text())
    small["device"]["memory"] = 10**6
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    words = ("--cluster", str(folder / "small.yaml"), "--devices", "2", "--strategies", "data")
    text = " ".join(command(folder, *words).split())
    assert "0 legal layouts" not in text
    assert "fits" in text
