"""The page has the facts of the tables: bytes of the ledger, blocks of the specs, and Meshwright's clock."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.config import load_config
from meshwright.planner.explain.page import CELL_HEIGHT, CELL_WIDTH, drawn_grid, page_facts, write_page
from meshwright.planner.explain.tables import Explained, compose, forecast
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from tests.planner.explain.javascript import browsed, needs_browser

SMALL = (
    "model.hidden=16 model.heads=4 model.layers=2 model.positions=16 model.vocabulary=2048 model.dropout=0 "
    "data.sequence=16 "
)
MIXTRAL = (
    "model={base: mixtral-mini, layers: 2, hidden: 16, heads: 4, key_value_heads: 2, positions: 16} data.sequence=16 "
)

MEGATRON = "layout.tensor={kind: megatron, size: 2}"
LAYOUTS = {
    "replicas": (SMALL, "layout.data.size=4 layout.data.sync=zero3"),
    "1-D": (SMALL, f"layout.data.size=2 {MEGATRON}"),
    "2-D": (SMALL, "layout.data.size=2 layout.tensor={kind: tesseract, q: 2, d: 1}"),
    "2.5-D": (SMALL, "layout.data.size=1 layout.tensor={kind: tesseract, q: 2, d: 2}"),
    "sub-graphs": (SMALL, "layout.data.size=2 layout.tensor={kind: subgraph, size: 2, common: one, branch: block}"),
    "a ring": (SMALL, "layout.data.size=1 layout.context={kind: ring, size: 4}"),
    "experts": (MIXTRAL, "layout.data.size=4 layout.data.expert=2"),
    "stages": (SMALL, f"layout.data.size=2 layout.pipeline={{size: 2, limit: 3, partition: [1, 1]}} {MEGATRON}"),
    "a v": (SMALL, "layout.data.size=1 layout.pipeline={size: 2, chunks: 2, placement: v, limit: 4} batch.micro=4"),
}
"""A model's words and a layout's words, by name."""


def words_of(text: str) -> list[str]:
    """Return the key=value words of a text; braces hold spaces."""
    return re.findall(r"\S+?=(?:\{.*?\}|\S+)", text)


@cache
def explained_run(name: str) -> Explained:
    model, layout = LAYOUTS[name]
    return compose(load_config(Path("quickstart" if model is SMALL else "llama"), words_of(f"{model} {layout}")))


@cache
def facts_of(name: str) -> dict[str, Any]:
    explained = explained_run(name)
    return page_facts(explained, forecast(explained))


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_the_ledger_s(name: str) -> None:
    """Calls and bytes of every axis and verb of every stage are listed, each once."""
    explained, found = explained_run(name), facts_of(name)
    for stage, ledger in enumerate(explained.traffic):
        calls: Counter[tuple[str, str]] = Counter()
        sent: Counter[tuple[str, str]] = Counter()
        for row in found["sendings"]:
            if row["stage"] == stage:
                calls[row["axes"], row["verb"]] += row["calls"]
                sent[row["axes"], row["verb"]] += row["bytes"]
                assert found["groups"][row["axes"]] == explained.run.grid.groups(*row["axes"].split("+"))
        assert calls == {key: entry.calls for key, entry in ledger.items()}
        assert {key: sent[key] for key in ledger} == {key: entry.sent_bytes for key, entry in ledger.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_the_specs(name: str) -> None:
    """Blocks cover each weight once, and each rank has one block of every weight of the stage, except for owners'
    weights."""
    found = facts_of(name)
    specs = {each.name: each.spec for stage in explained_run(name).run.stages for each in stage.parameters}
    assert found["weights"]
    for weight in found["weights"]:
        assert tuple(weight["shape"]) == specs[weight["name"]].shape
        assert sum(math.prod(block["lengths"]) for block in weight["blocks"]) == math.prod(weight["shape"])
        ranks = [rank for block in weight["blocks"] for rank in block["ranks"]]
        holders = [rank for stage in weight["stages"] for rank in found["stages"][stage]["ranks"]]
        assert len(ranks) == len(set(ranks))
        assert set(ranks) == set(holders) or weight["owner"] is not None


def test_owners_differ_where_layers_are_cut() -> None:
    """Layouts differ in the blocks of attention's first matrix and in the ranks with a copy of each block."""
    blocks = {}
    for name in LAYOUTS:
        weight = next(each for each in facts_of(name)["weights"] if "query_key_value.weight" in each["name"])
        blocks[name] = (len(weight["blocks"]), len(weight["blocks"][0]["ranks"]), weight["slices"])
    assert blocks == {
        "replicas": (1, 4, 4), "1-D": (2, 2, 1), "2-D": (4, 2, 1), "2.5-D": (4, 2, 1), "sub-graphs": (2, 2, 1),
        "a ring": (1, 4, 1), "experts": (1, 4, 4), "stages": (2, 2, 1), "a v": (1, 1, 1),
    }  # fmt: skip
    experts = next(each for each in facts_of("experts")["weights"] if "contract" in each["name"])
    assert (len(experts["blocks"]), experts["cut"]) == (2, {"expert": 0})


def test_what_the_others_send_to_a_root() -> None:
    """With two branches and common layers on the first rank, this rank broadcasts the bytes that the other returns in a
    sum."""
    rows = {(row["task"], row["verb"]): row for row in facts_of("sub-graphs")["sendings"] if row["part"] == "layers"}
    for task in ("forward", "backward"):
        sent, summed = rows[task, "broadcast"], rows[task, "reduce"]
        assert (summed["bytes"], summed["others"]) == (0, sent["bytes"])
        assert sent["others"] == 0


def test_a_layer_in_order() -> None:
    """A layer of 1-D is twice two products and a sum, as in Megatron's paper; a ring of 4 sends keys and values three
    times."""
    passes = {(each["part"], each["task"]): each["steps"] for each in facts_of("1-D")["passes"]}
    verbs = [step.get("verb", "products") for step in passes["layer 0", "F"]]
    assert verbs == ["products", "all_reduce", "products", "all_reduce"]
    ring = {(each["part"], each["task"]): each["steps"] for each in facts_of("a ring")["passes"]}
    assert sum(step.get("verb") == "send" for step in ring["layer 0", "F"]) == 3


@pytest.mark.parametrize("axes", [(("data", 20),), (("data", 3), ("pipe", 2), ("row", 2), ("col", 2)), (("data", 1),)])
def test_cells_do_not_overlap(axes: tuple[tuple[str, int], ...]) -> None:
    grid = Grid(axes)
    drawn = drawn_grid(grid)
    places = [(cell["x"], cell["y"]) for cell in drawn["ranks"]]
    assert len(places) == grid.world_size
    for index, (x, y) in enumerate(places):
        assert 0 <= x <= drawn["width"] - CELL_WIDTH
        assert 0 <= y <= drawn["height"] - CELL_HEIGHT
        others = places[index + 1 :]
        assert all(abs(x - left) >= CELL_WIDTH or abs(y - top) >= CELL_HEIGHT for left, top in others)


PLAYED = """<script>
const every = (chosen, act) => document.querySelectorAll(chosen).forEach(act);
const moved = (control, value) => { control.value = value; control.dispatchEvent(new Event("input")); };
for (const [select, shown] of
  [["weight", "data-block"], ["weight", "data-rank"], ["stage", "data-row"], ["pass", "data-step"]])
  for (const option of [...at(select).options]) {
    moved(at(select), option.value);
    const count = document.querySelectorAll(`[${shown}]`).length;
    for (let each = 0; each < count; each++)
      document.querySelectorAll(`[${shown}]`)[each]?.dispatchEvent(new Event("click", { bubbles: true }));
  }
every("input[type=range]", (slider) => { for (const value of [slider.min, slider.max]) moved(slider, value); });
for (const option of at("schedule").options) for (const parts of at("parts").options) {
  moved(at("schedule"), option.value);
  moved(at("parts"), parts.value);
}
at("reset").click();
document.body.dataset.played = at("arrows").querySelectorAll(".arrow").length;
at("play").click();
const tasks = () => at("timeline").querySelectorAll("g").length;
setTimeout(() => { document.body.dataset.halfway = tasks(); }, PLAYED / 2);
</script></body>"""
"""JavaScript that makes every choice once, moves every slider from end to end, and plays the run's step to the end."""


@needs_browser
@pytest.mark.parametrize("name", ["2.5-D", "sub-graphs", "a ring", "experts", "stages"])
def test_every_choice_and_slider(name: str, tmp_path: Path) -> None:
    explained, page = explained_run(name), tmp_path / "page.html"
    write_page(explained, forecast(explained), page, name)
    page.write_text(page.read_text().replace("</body>", PLAYED))
    drawn = browsed(page, tmp_path)
    played = re.search(r'data-played="(\d+)"', drawn)
    assert played, "a script stopped at an error"
    assert int(played[1]) > 0
    halfway = re.search(r'data-halfway="(\d+)"', drawn)
    assert halfway
    assert 0 < int(halfway[1]) <= len(facts_of(name)["clock"]["spans"])
    assert "NaN" not in drawn.split('type="application/json"')[0]
    assert "undefined" not in drawn.split('type="application/json"')[0]
    assert len(re.findall(r"<title>[FBW]\d+(?:\.\d)? on stage", drawn)) == len(facts_of(name)["clock"]["spans"])


@needs_browser
@pytest.mark.parametrize("name", ["2.5-D", "stages", "a v"])
def test_in_a_browser(name: str, tmp_path: Path) -> None:
    """The page draws all ranks, blocks and tasks with Meshwright's clock, and requests nothing from a network."""
    explained, page = explained_run(name), tmp_path / "page.html"
    write_page(explained, forecast(explained), page, "a run of <mine>")
    text = page.read_text()
    assert "a run of &lt;mine&gt;" in text
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\((?!#)", text)
    drawn = browsed(page, tmp_path)
    assert 'data-clock="true"' in drawn, "the page's scripts did not come to their end, or the clocks differ"
    found = facts_of(name)
    assert len(re.findall(r'data-rank="\d', drawn)) == 2 * explained.run.grid.world_size
    assert len(re.findall(r'data-row="\d', drawn)) == sum(row["stage"] == 0 for row in found["sendings"])
    assert len(re.findall(r"<title>[FBW]\d+(?:\.\d)? on stage", drawn)) == len(found["clock"]["spans"])
    assert re.search(r'class="arrow"', drawn)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    explained = explained_run("1-D")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--page=.* cannot be written .*; valid: a path that can"):
        write_page(explained, forecast(explained), tmp_path / "file/page.html", "run")


def test_facts_are_json() -> None:
    assert json.loads(json.dumps(facts_of("stages")))["clock"]["limit"] == 3


def test_the_command(tmp_path: Path) -> None:
    """`explain` prints the tables of `train --explain`, and writes a page with `--page`."""
    words = words_of(f"{SMALL} layout.data.size=2")
    ran = CliRunner().invoke(app, ["explain", "quickstart", *words, "--page", str(tmp_path / "new/page.html")])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == f"written: {tmp_path / 'new/page.html'}"
    assert "<h1>quickstart: data 2 (allreduce)</h1>" in (tmp_path / "new/page.html").read_text()
    same = CliRunner().invoke(app, ["train", "quickstart", *words, "--explain"])
    assert same.stdout == "".join(ran.stdout.splitlines(keepends=True)[:-1])
