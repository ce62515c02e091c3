"""examples/towers: two towers on sub-grids of ranks equal one device, and send only vectors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.installed import install
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent
TOWERS = ROOT / "examples/towers"

LAYOUTS = {
    "one rank": "layout.tensor={kind: none}",
    "towers 2": "layout.tensor={kind: towers, size: 2}",
    "rows 2": "layout.tensor={kind: towers, size: 1, replicas: 2}",
    "towers 2, rows 2": "layout.tensor={kind: towers, size: 2, replicas: 2}",
    "towers 2, cut 2": "layout.tensor={kind: towers, size: 2, cut: 2}",
    "towers 2, replicas 2": "layout={tensor: {kind: towers, size: 2}, data: {size: 2, sync: zero1}} batch.micro=8",
    "towers 2, pipe 2": "layout={tensor: {kind: towers, size: 2}, pipeline: {size: 2}} batch.micro=8",
    "zero3": "layout={tensor: {kind: towers, size: 2}, data: {size: 2, sync: zero3}} batch.micro=8 memory.recompute=1",
}
"""Words by layout. Two replicas contrast 8 samples each, as one device does with batch.micro=8."""

SMALL = (
    "batch.global=16 batch.micro=16 model.hidden=32 model.heads=2 model.embedding=16 layout.transport=torch threads=1"
)

DRIVER = """
import json, re, sys
from pathlib import Path
import torch
import meshwright as mw
from meshwright.ranks.errors import ConfigError
from meshwright.compute.model import IGNORED
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.rank_model import build_kit, build_model
from tests.harness import counted_step


def words(text):
    return re.split(r" (?=[a-z.]+=)", text)


def proved(run, small, layout):
    verdict = mw.verify(mw.load(run, [*words(small), *words(layout)]), steps=3)
    return {"holds": verdict.holds} | {
        kind: verdict.worst(kind).error for kind in ("loss", "gradient", "weight")
    }


def losses(run, small):
    config = mw.load(run, [*words(small), "layout.tensor={kind: none}", "precision.dtype=float64"])
    mesh = solo_mesh(torch.device("cpu"), config.grid.names)
    model = build_model(config, build_kit(config, mesh), mesh)
    batch = config.data.open(config, Path()).train.samples(0, 16)
    batch["labels"][3] = IGNORED
    h = model.hidden_states(batch)[0]
    return {"h": h.tolist(), "loss": model(batch, {"labels": 1 / 15})[0].item(),
            "right": model.num_correct(h, batch)[0].item()}


def sent(run, small, layout):
    config = mw.resolve(mw.load(run, [*words(small), *words(layout)]))
    return [counted_step(config, rank).mesh.ledger.sent_bytes() for rank in range(config.layout.world_size)]


def resumed(run, small, layouts):
    wide = [*words(small), "precision.dtype=float64"]
    first, alone = ([*wide, *words(layouts[name])] for name in ("towers 2", "one rank"))
    mw.train(mw.load(run, [*first, "steps=3"]), "out/moved")
    mw.train(mw.load(run, [*alone, "steps=6"]), "out/moved", resume=True)
    mw.train(mw.load(run, [*alone, "steps=6"]), "out/alone")
    return [[step["loss"] for step in mw.history(f"out/{name}")] for name in ("moved", "alone")]


def refused(run, change):
    try:
        mw.load(run, change)
    except ConfigError as error:
        return str(error)


def samples(run):
    config = mw.load(run)
    train = config.data.open(config, Path()).train
    from towers.shapes_samples import CAPTIONS, WORDS
    batch, part = train.samples(0, 4096), train.samples(4090, 10)
    said = [" ".join(WORDS[word] for word in row) for row in batch["words"].tolist()]
    same = bool((batch["images"][4090:] == part["images"][:6]).all())
    red = [i for i, text in enumerate(said) if "red" in text and "white" not in text][:20]
    return {"first": said[0], "different": len(set(said)), "same": same, "right": [
        [said[i], batch["images"][i].float().unflatten(1, (2, -1)).unflatten(3, (2, -1)).amax((2, 4)).tolist()]
        for i in red]}


if __name__ == "__main__":
    run, small, layouts, changes = json.loads(sys.argv[1])
    Path("result.json").write_text(json.dumps({
        "proved": {name: proved(run, small, layout) for name, layout in layouts.items()},
        "losses": losses(run, small),
        "sent": {name: sent(run, small, layout) for name, layout in layouts.items()},
        "resumed": resumed(run, small, layouts),
        "refused": [refused(run, change) for change in changes],
        "samples": samples(run),
    }))
"""
"""All that needs the example's package: a process reads entries before the first config."""

REFUSED = {
    "layout.tensor.kind=subgraph cuts a batch's rows over ranks": ["layout.tensor={kind: subgraph, size: 2}"],
    "bits.kind=layout-free computes a batch in portions": ["bits=layout-free", "layout.tensor={kind: none}"],
    "layout.tensor.kind=towers places towers on sub-grids, and a gpt2": ["model={family: gpt2}", "data={kind: text}"],
    "model.patch=5 does not divide model.image=16": ["model.patch=5"],
    "model.words=8 is fewer than the 16 words of a caption": ["model.words=8"],
    "layout.tensor.cut=3 does not divide model.heads=4": ["layout.tensor.cut=3"],
    "batch.micro=64": ["layout.data.size=2"],
}
"""Changes of the run file by the beginning of a message."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("towers")
    project = tomllib.loads((TOWERS / "pyproject.toml").read_text())["project"]
    install(folder, project["entry-points"], project["name"])
    (folder / "driver.py").write_text(DRIVER)
    order = json.dumps([str(TOWERS / "run.yaml"), SMALL, LAYOUTS, list(REFUSED.values())])
    path = os.pathsep.join(map(str, (folder, TOWERS, ROOT)))
    done = subprocess.run(
        [sys.executable, "driver.py", order],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_one_device_computes(result: Any, layout: str) -> None:
    """The reference is plain torch on whole parameters, in float64."""
    proof = result["proved"][layout]
    assert proof["holds"], proof
    assert proof["loss"] < 1e-12, proof
    assert proof["gradient"] < 1e-12, proof
    assert proof["weight"] < 1e-10, proof


def test_the_loss_is_the_mean_of_both_softmaxes(result: Any) -> None:
    """The loss is CLIP's, number by number; a row without a label only serves as a contrast."""
    said = result["losses"]
    images, texts = said["h"]
    scores = [[sum(map(float.__mul__, image, text)) / (16 * 0.1) for text in texts] for image in images]
    total, right = 0.0, 0
    for i in (row for row in range(16) if row != 3):
        column = [scores[j][i] for j in range(16)]
        for row in (scores[i], column):
            total += (math.log(sum(map(math.exp, row))) - row[i]) / 2 / 15
        right += max(scores[i]) == scores[i][i]
    assert said["loss"] == pytest.approx(total, rel=1e-12)
    assert said["right"] == right


def test_a_rank_sends_the_vectors_of_one_tower(result: Any) -> None:
    """B E numbers a step, in the forward pass alone: no gradient of a weight crosses sub-grids."""
    vectors = 16 * 16 * 4
    for sent in result["sent"]["towers 2"]:
        assert {axis: count for axis, count in sent.items() if count} == {"tower": vectors}
    for sent in result["sent"]["towers 2, rows 2"]:
        assert sent["tower"] == vectors // 2
    for alone, shared in zip(result["sent"]["rows 2"], result["sent"]["towers 2, rows 2"], strict=False):
        assert shared["rows"] == alone["rows"]  # the vectors of both towers
        assert 0.4 < shared["data+rows"] / alone["data+rows"] < 0.6  # the gradients of one tower instead of both


def test_a_checkpoint_of_two_towers_goes_on_on_one_rank(result: Any) -> None:
    moved, alone = result["resumed"]
    assert len(moved) == 6
    assert moved == pytest.approx(alone, rel=1e-10)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize("index, message", list(enumerate(REFUSED)))
def test_what_towers_do_not_support_is_refused(result: Any, index: int, message: str) -> None:
    assert message in (result["refused"][index] or "nothing is refused")


def test_captions_say_what_images_show(result: Any) -> None:
    said = result["samples"]
    assert said["different"] == 4096
    assert said["same"]
    assert len(said["first"].split()) == 16
    for text, brightest in said["right"]:
        words = text.split()
        for start in (1, 9):
            if words[start] != "red":
                continue
            row, column = words[start + 4] == "bottom", words[start + 5] == "right"
            red, green, blue = (channel[row][column] for channel in brightest)
            assert red > 200, text
            assert max(green, blue) < 60, text
