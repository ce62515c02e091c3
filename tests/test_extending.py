"""docs/extending*.md: a strategy of each kind from another package, found by entry point.

The pages' code is installed into a folder, as by pip, and each run trains, verifies, is planned, is saved and resumes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright.compute.models.section import Network
from meshwright.ranks.machine import find_mpiexec
from tests.installed import install
from tests.patience import PATIENCE_SECONDS

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs").glob("extending*.md"))
PAGE = "\n".join(path.read_text() for path in PAGES)
BLOCK = re.compile(r"```(?:python|yaml)\n# ([\w.]+)\n(.*?)```", re.DOTALL)
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the page's modules, runs and entry points."""
    folder = tmp_path_factory.mktemp("toys")
    for name, text in BLOCK.findall(PAGE):
        (folder / name).write_text(text)
    (project,) = TOML.findall(PAGE)
    install(folder, tomllib.loads(project)["project"]["entry-points"])
    return folder


def python(folder: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == status, f"{words}: {done.stdout}\n{done.stderr}"
    return done


def losses(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_the_page_shows_each_group() -> None:
    (project,) = TOML.findall(PAGE)
    from meshwright.config.registry import OURS

    points = tomllib.loads(project)["project"]["entry-points"]
    assert set(points) == {f"meshwright.{group}" for group in OURS} - {"meshwright.sinks"}  # a sink is no strategy
    named = {value.partition(":")[0] for names in points.values() for value in names.values()}
    assert named < {Path(name).stem for name, _ in BLOCK.findall(PAGE)}


DRIVER = """
import json, sys
from pathlib import Path
import meshwright as mw
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.space import SearchJob, legal_layouts

if __name__ == "__main__":
    run, fixed = sys.argv[1], sys.argv[2].split()
    words = ["layout.transport=torch"]  # forked ranks import nothing anew; each of MPI's imports torch
    config, out = mw.load(run, words), Path("out") / run
    mw.verify(config, steps=2).check()
    mw.train(config, out)
    mw.train(mw.load(run, [*words, "steps=6"]), out, resume=True)
    layouts = legal_layouts(SearchJob(config, load_cluster("two-cores"), config.layout.world_size, fixed))
    tried = [[l.layout.tensor.kind, l.layout.pipeline.schedule, l.layout.data.sync] for l in layouts]
    best = mw.plan(config, "two-cores", fixed=[*fixed, *sys.argv[3].split()]).predictions[0].config.layout
    Path(f"{run}.json").write_text(json.dumps({"tried": tried, "best": best.model_dump(mode="json")}))
"""
"""All commands of the page for a run, one after the other, in one process with forked ranks."""

RUNS = {
    "cut": (
        "layout.pipeline.size",
        "layout.tensor memory batch.micro",
        ["feed-forward", "message-driven", "allreduce"],
    ),
    "staged": (
        "layout.tensor layout.data.size layout.order",
        "layout.pipeline.schedule layout.data.sync memory batch.micro",
        ["none", "depth-first", "gathered"],
    ),
    "long": (
        "layout.tensor layout.pipeline.size layout.order",
        "layout.data memory batch.micro",
        ["none", "message-driven", "allreduce"],
    ),
}
"""By run: fields fixed during the search, further fields fixed with the best layout, and strategies to be tried."""


DESCRIBE = """
import json
from jsonschema import Draft202012Validator
from meshwright.cli.completion import complete_field
from meshwright.config.json_schema import run_schema
from meshwright.config.meanings import strategy_meaning
from meshwright.config.reference import all_sections, topic_of
from meshwright.config.yaml_text import plain_values
from meshwright.config.registry import NAMED_BY, entries

untold = [facts.name for topic in all_sections() for section in topic.sections for facts in section.fields
          if not facts.meaning]
untold += [f"{group} {name}" for group in NAMED_BY for name in entries(group) if not strategy_meaning(group, name)]
check = Draft202012Validator(run_schema()).iter_errors
runs = [plain_values(open(f"{run}.yaml").read()) for run in ("cut", "staged", "long")]
wrong = [error.message for run in runs for error in check(run)]
print(json.dumps({
    "untold": untold, "wrong": wrong, "sync": topic_of("layout.data.sync.gathered").fields[0].meaning,
    "size": topic_of("layout.tensor.feed-forward.size").fields[0].meaning, "completed": complete_field("model.in"),
}))
"""


def test_they_are_described_as_ours_are(toys: Path) -> None:
    """Each field and strategy has a line, the schema accepts their runs, and a shell completes the fields."""
    assert json.loads(python(toys, "-c", DESCRIBE).stdout) == {
        "untold": [],
        "wrong": [],
        "sync": "Every rank gathers all gradients and sums them itself.",
        "size": "Ranks that a feed-forward is cut over.",
        "completed": ["model.inner"],
    }


ASKED = """
import json
from pathlib import Path
from typer.testing import CliRunner
import meshwright as mw
from meshwright.cli import app

def run(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.exception
    return result.stdout

mw.train(mw.load("cut.yaml", ["layout.tensor=none", "checkpoint.every=0", "layout.transport=threads"]), "out/asked")
run("convert", "export", "out/asked", "--out", "asked-hf")
run("convert", "import", "asked-hf", "--out", "again/checkpoints/step-0")
(stored,) = Path("again/checkpoints/step-0").glob("*.safetensors")
told = json.loads(run("eval", "out/asked", "--task", "counted", "--samples", "9", "--json"))
run("submit", "cut.yaml", "device=cpu", "--on", "batch", "--set", "queue=large", "--to", "cut.sh")
print(json.dumps({"told": told, "settings": json.loads(Path("asked-hf/config.json").read_text())}))
"""


def test_commands_ask_for_them(toys: Path) -> None:
    """The family is exported and imported again, the task measured, and the engine's file written."""
    from safetensors.torch import load_file

    asked = json.loads(python(toys, "-c", ASKED).stdout.splitlines()[-1])
    assert (asked["told"]["asked"], asked["settings"]["n_inner"]) == (9 * 16, 64)
    assert 0 <= asked["told"]["right"] <= 9 * 16
    assert (toys / "cut.sh").read_text().startswith("#!/bin/sh\n#BATCH queue=large nodes=1\n")
    (published,) = (toys / "asked-hf").glob("*.safetensors")
    (ours,) = (toys / "again" / "checkpoints" / "step-0").glob("*.safetensors")
    theirs, weights = load_file(published), load_file(ours)
    assert weights["weight/blocks.1.expand.weight"].equal(theirs["layer.1.up.weight"].t())
    assert weights["weight/tokens.weight"][:257].equal(theirs["embedding.weight"])
    told = python(toys, "-m", "meshwright", "eval", "out", "--task", "count", status=2).stderr
    assert "counted" in told


@pytest.mark.few(1)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.timeout(600)  # several commands, each with new ranks: slow on a busy machine
def test_they_train_verify_plan_and_go_on(run: str, toys: Path) -> None:
    fixed, chosen, wanted = RUNS[run]
    (toys / "driver.py").write_text(DRIVER)
    python(toys, "driver.py", f"{run}.yaml", fixed, chosen)
    planned, out = json.loads((toys / f"{run}.yaml.json").read_text()), toys / "out" / f"{run}.yaml"
    layout = planned["best"]
    assert wanted in planned["tried"]
    assert [layout["tensor"]["kind"], layout["pipeline"]["schedule"], layout["data"]["sync"]] == wanted
    trained = losses(out)
    assert len(trained) == 6
    assert trained[-1] < trained[0]
    metric = [json.loads(line)["largest_weight"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len({*metric}) == 6  # each step has changed the weights
    assert min(metric) > 0
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-2", "step-4", "step-6"}


def test_what_cannot_be_used_is_said_in_a_line(tmp_path: Path) -> None:
    """The line names the package, the entry point and the cause, also for a command that uses no strategy."""
    points = {
        "meshwright.tensor": {"absent": "no_such_module:Kit", "megatron": "json:loads", "wrong": "json:loads"},
        "meshwright.optimizers": {"raises": "raising:LION"},
    }
    install(tmp_path, points, "bad-toys")
    (tmp_path / "raising.py").write_text("raise OSError('no licence')")
    (tmp_path / "run.yaml").write_text("steps: 1")
    told = python(tmp_path, "-m", "meshwright", "train", "run.yaml", status=1).stderr.strip()
    assert told.splitlines() == [
        "meshwright: "
        "bad-toys: the entry point absent of meshwright.tensor, no_such_module:Kit, cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_module'; "
        "bad-toys: the entry point megatron of meshwright.tensor, json:loads, has the name of another tensor entry; "
        "bad-toys: the entry point wrong of meshwright.tensor, json:loads, is no TensorSection; "
        "bad-toys: the entry point raises of meshwright.optimizers, raising:LION, cannot be loaded: "
        "OSError: no licence"
    ]


def test_the_values_of_a_field_are_those_of_the_registry(toys: Path) -> None:
    wrong = ["layout.tensor.kind=feed", "optimizer.name=lyon", "data.kind=count", "model.family=bigrams"]
    told = python(toys, "-m", "meshwright", "verify", "staged.yaml", *wrong, status=2).stderr
    assert "none, megatron, tesseract, subgraph, feed-forward" in told
    choices = "adamw, sgd, momentum, muon, lion"
    assert f"optimizer.name=lyon is none of the choices (did you mean lion?); valid: {choices}" in told


def test_documents_are_kept_apart_by_who_can(toys: Path) -> None:
    apart = ["data={kind: text, documents: separate, sequence: 16}", "model.family=gpt2", "layout.context.kind=keys"]
    told = python(toys, "-m", "meshwright", "verify", "long.yaml", *apart, status=2).stderr
    assert (
        "layout.context.kind=keys attends over all of a sample, and its documents are separate; valid: ulysses" in told
    )
    told = python(toys, "-m", "meshwright", "verify", "cut.yaml", apart[0], status=2).stderr
    assert "model.family=bigram attends over all of a sample, and its documents are separate; valid: data" in told


def test_a_cut_that_is_not_equal_is_a_mistake_with_the_sizes_that_work(toys: Path) -> None:
    told = python(toys, "-m", "meshwright", "verify", "cut.yaml", "layout.tensor.size=3", status=2).stderr
    assert told == "meshwright: layout.tensor.size=3 does not divide model.inner=64; valid: 1, 2, 4, 8, 16, 32, 64\n"


REGISTERING = """
import meshwright as mw

if __name__ == "__main__":
    layout = {"data": {"size": 2}, "pipeline": {"size": 2, "schedule": "depth-first"}, "transport": TRANSPORT}
    model = {"layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 260, "vocabulary_multiple": 4}
    tree = {"model": model, "data": {"sequence": 8}, "batch": {"global": 8, "micro": 2}, "layout": layout, "steps": 2}
    tree |= {"optimizer": {"name": "lion", "lr": 1e-3}, "device": "cpu", "threads": 1, "metrics": {"sinks": []}}
    mw.register("optimizers", "lion", "lion:LION")
    mw.register("schedules", "depth-first", "depth_first:DEPTH_FIRST")
    config = mw.load(tree)
    mw.train(config, f"out-{TRANSPORT}")
    assert len(mw.history(f"out-{TRANSPORT}")) == 2
"""


@pytest.mark.parametrize(
    "transport",
    ["torch", pytest.param("mpi", marks=[pytest.mark.long, pytest.mark.skipif(find_mpiexec() is None, reason="MPI")])],
)
def test_a_script_registers_what_its_ranks_then_know(transport: str, tmp_path: Path) -> None:
    """Two strategies of the page, from modules in the script's folder, need no package; the script runs elsewhere."""
    (tmp_path / "study").mkdir()
    for name, text in BLOCK.findall(PAGE):
        if name.startswith(("lion", "depth_first")):
            (tmp_path / "study" / name).write_text(text)
    script = tmp_path / "study" / "study.py"
    script.write_text(f"TRANSPORT = {transport!r}\n{REGISTERING}")
    python(tmp_path, str(script))


def test_a_fact_of_experts_that_is_a_property_of_its_own_is_refused() -> None:
    """The planner and the optimizer ask `routing`, and would never see a separate property."""
    with pytest.raises(TypeError, match=r"Own says bias_rate, num_experts by itself: its `routing` says it"):

        class Own(Network):
            @property
            def num_experts(self) -> int:
                return 4

            bias_rate = property(lambda self: 0.1)
