"""Recorded runs and the comparison of runs: right layouts hold, mistakes are found with the module, records can be
read."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import parity
from meshwright.parity import recorder
from meshwright.parity.check import ParityResult
from meshwright.parity.command import run_words
from meshwright.parity.recorded import RecordedRun
from meshwright.parity.runs import compare_runs, wholes_of
from meshwright.parity.sampling import are_aligned, coarser, sampled, strides_of
from meshwright.parity.tensors import TensorFile, write_tensors
from meshwright.ranks.errors import ParityError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.parity.training import train
from tests.patience import PATIENCE_SECONDS
from tests.workers import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ONE, DATA, TENSOR, BOTH = {}, {"data": 2}, {"tp": 2}, {"data": 2, "tp": 2}


def recorded(mesh: Mesh, folder: Path, ranks: dict[str, int], runs: list[dict[str, Any]]) -> None:
    """Record several runs of one layout on the same processes. A run has a folder name, and arguments of `recording`
    and `train`."""
    for run in runs:
        options = {key: run[key] for key in ("most", "perturb", "steps") if key in run}
        with parity.recording(folder / run["name"], axes=run.get("axes", ranks), **options):
            train(ranks, run.get("wrong", ""), micro=run.get("micro", 1), wrap=run.get("wrap", ""))


def record_all(folder: Path, ranks: dict[str, int], *runs: dict[str, Any]) -> None:
    run_ranks(recorded, Grid(tuple(ranks.items()) or (("data", 1),)), folder, ranks, list(runs), transport="torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compared runs, each recorded once."""
    folder = tmp_path_factory.mktemp("runs")
    moved = [{"name": name, "perturb": 1, **more} for name, more in (("one", {}), ("one-sampled", {"most": 64}))]
    record_all(folder, ONE, {"name": "one"}, {"name": "micro", "micro": 2}, {"name": "version", "wrong": "version"},
               {"name": "one-sampled", "most": 64}, *moved)  # fmt: skip
    wrong = [{"name": f"tp-{wrong}", "wrong": wrong} for wrong in ("forward", "backward", "version", "rate")]
    record_all(folder, TENSOR, {"name": "tp"}, {"name": "tp", "perturb": 1}, {"name": "tp-sampled", "most": 64},
               {"name": "tp-forward-sampled", "most": 64, "wrong": "forward"}, *wrong)  # fmt: skip
    record_all(folder, DATA, {"name": "data"}, {"name": "data", "perturb": 1},
               {"name": "ddp", "wrap": "ddp"}, {"name": "fsdp2", "wrap": "fsdp2"},
               {"name": "fsdp2", "wrap": "fsdp2", "perturb": 1},
               *({"name": f"data-{wrong}", "wrong": wrong} for wrong in ("reduction", "data")))  # fmt: skip
    record_all(folder, BOTH, {"name": "both"}, {"name": "both-untold", "axes": {}},
               {"name": "both-forward", "axes": {}, "wrong": "forward", "steps": (1,)})  # fmt: skip
    return folder


def compared(folder: Path, first: str, second: str) -> list[ParityResult]:
    return compare_runs(RecordedRun.read(folder / first), RecordedRun.read(folder / second))


@pytest.mark.parametrize(
    "first, second",
    [("one", "micro"), ("one", "tp"), ("one", "data"), ("one", "ddp"), ("one", "fsdp2"), ("one", "both"),
     ("one", "both-untold"),
     ("fsdp2", "tp"), ("data", "tp"), ("tp", "data"),
     ("data", "both"), ("tp", "tp"), ("one-sampled", "tp-sampled"), ("one-sampled", "tp")],
)  # fmt: skip
def test_right_runs_are_equal(folder: Path, first: str, second: str) -> None:
    results = compared(folder, first, second)
    assert [result.check.name for result in results] == ["step 1", "step 2"]
    for result in results:
        assert result.holds, result.verdict
        assert {"loss", "gradient", "weight"} <= {row.kind for row in result.rows}
        assert len(result.modules) > 8


@pytest.mark.parametrize(
    "first, second, module, kind",
    [
        ("one", "version", "blocks.1", "wrong values"),
        ("tp", "tp-version", "blocks.1", "wrong values"),
        ("one", "tp-forward", "blocks.1", "missing reduction"),
        ("one", "tp-backward", "blocks.1", "missing reduction"),
        ("one", "both-forward", "blocks.1", "missing reduction"),
        ("data", "tp-forward", "blocks.1", "missing reduction"),
        ("data", "tp-backward", "blocks.1", "missing reduction"),
        ("one-sampled", "tp-forward-sampled", "blocks.1", "missing reduction"),
        ("one", "tp-rate", "(all parameters)", "optimizer"),
        ("one", "data-reduction", "head", "missing reduction"),
        ("one", "data-data", "(data)", "wrong data"),
    ],
)
def test_a_mistake_is_found_where_it_is(folder: Path, first: str, second: str, module: str, kind: str) -> None:
    result = compared(folder, first, second)[0]
    assert result.finding is not None, "not seen"
    assert result.finding.kind == kind, result.verdict
    assert f"{result.finding.module}.".startswith(f"{module}."), result.verdict


def test_a_layout_says_what_a_rank_holds(folder: Path) -> None:
    """A user's file tells each rank's parts if the values do not. A wrong part is a finding."""
    rows, columns = ("up.weight", "up.bias"), ("down.weight",)

    def part(name: str, rank: int, turn: int = 0) -> tuple[str, tuple[slice, ...]]:
        own = slice(32 * (rank ^ turn), 32 * (rank ^ turn) + 32)
        if name.endswith(rows):
            return name, (own, slice(None))[: 2 if name.endswith("weight") else 1]
        everything = (slice(None),) * (1 if "norm" in name or name.endswith("bias") else 2)
        return name, (slice(None), own) if name.endswith(columns) else everything

    for one, two in (("one", "tp"), ("one-sampled", "tp-sampled")):
        runs = RecordedRun.read(folder / one), RecordedRun.read(folder / two)
        result = compare_runs(*runs, part)[0]
        assert result.holds, result.verdict
        finding = compare_runs(*runs, lambda name, rank: part(name, rank, 1))[0].finding
        assert finding is not None
        assert finding.kind == "wrong part"


def refused(folder: Path, first: str, second: str) -> str:
    with pytest.raises(ParityError) as caught:
        compared(folder, first, second)
    return str(caught.value)


def test_what_cannot_be_compared_is_said_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    assert "record it once more, to the same folder, with --perturb 1" in refused(folder, "micro", "one")
    assert "holds no record: make one with" in refused(folder, "nothing", "one")
    (tmp_path / "half").mkdir()
    shutil.copytree(folder / "tp/rank-1", tmp_path / "half/rank-1")  # a link would be refused
    assert "lacks rank 0 of 2" in refused(tmp_path, "half", "half")
    (tmp_path / "mixed").mkdir()
    shutil.copytree(folder / "one/rank-0", tmp_path / "mixed/rank-0")
    shutil.copytree(folder / "data", tmp_path / "mixed/perturbed-1")
    assert "took other samples" in refused(tmp_path, "mixed", str(folder / "one"))


def test_a_record_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ParityError, match=r"the record cannot be written to .*file/out.*\(Not a directory\): give a"):
        with parity.recording(tmp_path / "file/out"):
            pass
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(recorder, "write_tensors", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(ParityError, match=r"first weights cannot be written .*No space left on device"):
        with parity.recording(tmp_path / "full"):
            nn.Linear(2, 2)(torch.ones(2))
    with pytest.raises(ParityError, match=r"rank 0 recorded nothing: .* start ranks by torchrun"):
        with parity.recording(tmp_path / "empty"):
            pass


def test_a_record_says_what_it_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, clip, words in (("kept", False, ""), ("clipped", True, ", with gradients before clipping")):
        with parity.recording(tmp_path / name, steps=(1, 2, 5)):
            for _ in range(3):
                model(torch.ones(3, 2)).sum().backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        kept = tmp_path / name / "rank-0"
        size = sum(file.stat().st_size for file in kept.iterdir()) / 1e6
        said = f"recorded steps 1, 2 of the one process in {kept}: {size:.1f} MB{words}; the run ended before step 5\n"
        assert capsys.readouterr().err == said


def train_counted(wrong: str) -> None:
    """Make two steps of a model with running statistics. `wrong`: lost moments, or another momentum of the
    statistics."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3 if wrong == "buffer" else 0.1),
                          nn.Linear(6, 2)).double()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if wrong == "moments":
            optimizer.state[model[2].weight]["exp_avg_sq"].mul_(1.5)


@pytest.mark.parametrize("wrong, kind, module", [("moments", "optimizer", "2"), ("buffer", "wrong buffer", "1")])
def test_states_and_buffers_are_recorded(wrong: str, kind: str, module: str, tmp_path: Path) -> None:
    for name, mistake, seed in (("one", "", None), ("one", "", 1), ("same", "", None), ("other", wrong, None)):
        with parity.recording(tmp_path / name, perturb=seed):
            train_counted(mistake)
    assert all(result.holds for result in compared(tmp_path, "one", "same"))
    results = compared(tmp_path, "one", "other")
    found = next(result.finding for result in results if not result.holds)
    assert found is not None
    assert (found.kind, found.module) == (kind, module), [result.verdict for result in results]


class Container(nn.Module):
    """A model with parts that are called one by one, like Lightning's modules in one process, or all at once, as under
    DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.body, self.head = nn.Flatten(), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.flat(x)).relu())


def test_a_container_is_recorded_by_its_parts(tmp_path: Path) -> None:
    for name, seed in (("parts", None), ("parts", 1), ("whole", None), ("wrong", None)):
        torch.manual_seed(5)
        model = Container().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with parity.recording(tmp_path / name, perturb=seed):
            for _ in range(2):
                x, y = torch.randn(8, 2, 3, dtype=torch.float64), torch.randint(0, 3, (8,))
                for micro, labels in zip(x.chunk(2), y.chunk(2), strict=True):
                    parts = model.forward if name != "whole" else model
                    loss = nn.functional.cross_entropy(parts(micro), labels) / 2
                    (loss * (2 if name == "wrong" else 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
    run = RecordedRun.read(tmp_path / "parts").ranks[0]
    assert list(run.first) == ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert run.step(2).facts.passes == 2
    right = compared(tmp_path, "parts", "whole")
    assert [result.holds for result in right] == [True, True], [result.verdict for result in right]
    assert any("only " in note and "calls: (the model)" in note for note in right[0].notes)
    found = compared(tmp_path, "parts", "wrong")[0].finding
    assert found is not None
    assert found.kind == "scaled", found


def train_closed(closed: bool, clip: float, scale: float) -> None:
    """Make two steps of two microbatches. `closed`: the optimizer calls a closure that makes the last microbatch, with
    `clip`."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for number, part in enumerate(torch.randn(6, 4, dtype=torch.float64).chunk(2)):

            def backward(part: Tensor = part, number: int = number) -> float:
                loss = model(part).square().mean() * (scale if number else 1.0)
                loss.backward()
                if number and clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return float(loss.detach())

            if not closed or not number:
                backward()
        optimizer.step(backward if closed else None)
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_gradients_of_a_closure_are_those_of_the_step(clip: float, tmp_path: Path) -> None:
    for name, closed, limit, scale, seed in (
        ("open", False, clip, 1.0, None), ("open", False, clip, 1.0, 1), ("closed", True, clip, 1.0, None),
        ("scaled", True, clip, 3.0, None), ("clipped", True, 0.02, 1.0, None),
    ):  # fmt: skip
        with parity.recording(tmp_path / name, perturb=seed):
            train_closed(closed, limit, scale)
    right = compared(tmp_path, "open", "closed")
    assert all(result.holds for result in right), [result.verdict for result in right]
    assert ({"gradient", "clipped"} if clip else {"gradient"}) <= {row.kind for row in right[0].rows}
    assert "gradient" in {row.kind for row in compared(tmp_path, "open", "scaled")[0].rows if not row.holds}
    found = compared(tmp_path, "open", "clipped")[0].finding
    assert found is not None
    assert found.kind == "clipping" or not clip, found


def test_clipping_of_each_microbatch_is_named(tmp_path: Path) -> None:
    for name, each, seed in (("once", False, None), ("once", False, 1), ("each", True, None)):
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with parity.recording(tmp_path / name, perturb=seed):
            for _ in range(2):
                for number, part in enumerate(torch.randn(6, 4, dtype=torch.float64).chunk(2)):
                    model(part).square().mean().backward()
                    if each or number:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
    found = compared(tmp_path, "once", "each")[0].finding
    assert found is not None
    assert (found.kind, found.module) == ("clipping", "(all parameters)"), found
    assert "adds 1 more to what it has clipped" in found.text


def record_counted(mesh: Mesh, folder: Path, means: list[str]) -> None:
    """Record two steps of data parallelism with unequal labels. `own`: each rank takes the mean over the rank's own
    labels."""
    size = mesh.comm("data").size
    for name, seed in ((name, seed) for name in means for seed in ((None, 1) if size == 1 else (None,))):
        torch.manual_seed(9)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with parity.recording(folder / f"{size}-{name}", axes={"data": size}, perturb=seed):
            for _ in range(2):
                x, y = torch.randint(0, 16, (8, 4)), torch.randint(0, 16, (8, 4))
                y[:3] = -100
                ids, labels = (rows.chunk(size)[mesh.rank] for rows in (x, y))
                count = (labels if name == "own" else y).ne(-100).sum() / (1 if name == "own" else size)
                logits = model(ids).flatten(0, 1)
                (nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / count).backward()
                for parameter in model.parameters() if size > 1 else ():
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= size
                optimizer.step()
                optimizer.zero_grad()


def test_a_mean_of_means_is_named(tmp_path: Path) -> None:
    for size, means in ((1, ["own"]), (2, ["own", "all"])):
        run_ranks(record_counted, Grid((("data", size),)), tmp_path, means, transport="torch")
    assert all(result.holds for result in compared(tmp_path, "1-own", "2-all"))
    found = compared(tmp_path, "1-own", "2-own")[0].finding
    assert found is not None
    assert (found.kind, found.module) == ("token counts", "(loss)"), found
    assert "over its own labels, 0.2, 0.8 of all" in found.text


def train_hidden(scale: float, shown: bool) -> None:
    """Step flat copies, like ZeRO: the parameters have no gradient at the optimizer's step. `scale`: of the copies'
    gradients."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    flat = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(list(model.parameters()) if shown else flat, lr=1e-2)
    for _ in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
        for own, p in zip(flat, model.parameters(), strict=True):
            if not shown:
                own.grad, p.grad = scale * p.grad, None
        optimizer.step()
        optimizer.zero_grad()
        for own, p in zip(flat, model.parameters(), strict=True):
            if not shown:
                p.data.copy_(own.data)


def test_an_optimizer_with_tensors_of_its_own_is_compared_by_weights(tmp_path: Path) -> None:
    """Gradients that no recorder has seen get no row."""
    for name, scale, shown, seed in (("one", 1.0, False, None), ("one", 1.0, False, 1), ("same", 1.0, True, None),
                                     ("same", 1.0, True, 1), ("wrong", 2.0, False, None)):  # fmt: skip
        with parity.recording(tmp_path / name, perturb=seed):
            train_hidden(scale, shown)
    for first, second in (("one", "one"), ("one", "same"), ("same", "one")):
        right = compared(tmp_path, first, second)
        assert all(result.holds for result in right), [result.verdict for result in right]
        assert any(note.startswith("not compared: gradients, which no param") for note in right[0].notes)
    for first in ("one", "same"):
        found = compared(tmp_path, first, "wrong")[0].finding
        assert found is not None
        assert (found.kind, found.module) == ("optimizer", "(all parameters)"), found
        assert "the updates of all parameters are the reference's times 2:" in found.text


def step_clipped(rank: int, size: int, wrong: str, clip: float = 0.1) -> None:
    """Make two clipped steps of data parallelism by hand. `wrong`: the mistake."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
        nn.functional.cross_entropy(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        if wrong == "order":
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for name, parameter in model.named_parameters() if size > 1 else ():
            if not (wrong == "unreduced" and name == "0.weight"):
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= size
        parts = [list(model.parameters())] if wrong != "each" else [[p] for p in model.parameters()]
        for part in parts if wrong not in ("order", "none") else ():
            nn.utils.clip_grad_norm_(part, clip)
        optimizer.step()
        optimizer.zero_grad()


def record_clipped(mesh: Mesh, folder: Path, wrongs: list[str]) -> None:
    ranks = mesh.comm("data").size
    for wrong in wrongs:
        with parity.recording(folder / f"{ranks}-{wrong}", axes={"data": ranks}):
            step_clipped(mesh.rank, ranks, wrong)
    if ranks == 1:
        with parity.recording(folder / "1-", perturb=1):
            step_clipped(0, 1, "")


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clipped")
    run_ranks(record_clipped, Grid((("data", 1),)), folder, [""], transport="torch")
    run_ranks(record_clipped, Grid((("data", 2),)), folder, ["", "unreduced", "order", "each", "none"],
              transport="torch")  # fmt: skip
    return folder


@pytest.mark.parametrize(
    "wrong, kind, module, words",
    [
        ("unreduced", "missing reduction", "0", "the gradient of 0.weight is different on ranks with the same part"),
        ("order", "clipping", "(all parameters)", "before clipping, and not behind it: each rank clips its own"),
        ("each", "clipping", "(all parameters)", "all gradients are right before clipping; behind it that of 0.weight"),
        ("none", "clipping", "(all parameters)", "not clipped"),
    ],
)
def test_causes_before_clipping_are_named(clipped: Path, wrong: str, kind: str, module: str, words: str) -> None:
    right = compared(clipped, "1-", "2-")
    assert all(result.holds for result in right), [result.verdict for result in right]
    assert {"gradient", "clipped", "weight"} <= {row.kind for row in right[0].rows}
    found = compared(clipped, "1-", f"2-{wrong}")[0].finding
    assert found is not None
    assert (found.kind, found.module) == (kind, module), found
    assert words in found.text


def without_gradients_before(folder: Path, old: Path) -> None:
    """Rewrite a record in the old form without gradients before clipping."""
    shutil.copytree(folder, old)
    for file in old.rglob("step-*.safetensors"):
        kept = TensorFile(file)
        known = {key: kept.get(key).clone() for key in kept.keys if not key.startswith("gradient|")}
        write_tensors(file, {key.replace("clipped|", "gradient|"): x for key, x in known.items()})
        facts = json.loads(file.with_suffix(".json").read_text())
        file.with_suffix(".json").write_text(json.dumps({key: x for key, x in facts.items() if key != "clips"}))


@pytest.mark.parametrize("old_first", [False, True])
@pytest.mark.parametrize("old_second", [False, True])
def test_records_without_gradients_before_clipping_compare(
    clipped: Path, tmp_path: Path, old_first: bool, old_second: bool
) -> None:
    for name, old in (("1-", old_first), ("2-", old_second), ("2-unreduced", old_second)):
        (without_gradients_before if old else shutil.copytree)(clipped / name, tmp_path / name)
    result = compared(tmp_path, "1-", "2-")[0]
    assert result.holds, result.verdict
    told = [note for note in result.notes if "gradients before clipping" in note]
    missing = (tmp_path / ("2-" if old_second else "1-")) if old_first != old_second else None
    assert told == ([f"not compared: gradients before clipping, which {missing} does not keep"] if missing else [])
    found = compared(tmp_path, "1-", "2-unreduced")[0].finding
    assert found is not None
    # With the norm of the reference, the cause is found as in a check. An old reference has no norm.
    known = "0" if not old_first else "(all parameters)"
    assert (found.kind, found.module) == ("missing reduction", known), found


ENDING = """
import pathlib, sys, threading, time, torch

class Freed(torch.nn.Identity):
    def __del__(self):
        pathlib.Path(sys.argv[1]).write_text(str(ran.is_set()))

def main():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Freed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    awaited.set()

awaited, ran = threading.Event(), threading.Event()
threading.Thread(target=lambda: (awaited.wait(), time.sleep(0.02), ran.set())).start()
main()
sys.exit(int(sys.argv[2]))
"""


def test_threads_that_wait_run_before_a_script_is_freed(tmp_path: Path) -> None:
    """torch frees DDP while joining gloo's threads, which may wait for Python's lock: one run in three never ended."""
    script, freed = tmp_path / "ending.py", tmp_path / "freed"
    script.write_text(ENDING)
    words = [sys.executable, "-m", "meshwright.parity", "record", "--out", str(tmp_path / "out"), str(script)]
    ran = subprocess.run([*words, str(freed), "3"], cwd=ROOT, timeout=PATIENCE_SECONDS)
    assert (ran.returncode, freed.read_text()) == (3, "True")


def test_a_model_is_freed_as_its_script_frees_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, alive = torch.optim.SGD(model.parameters(), lr=0.1), weakref.ref(model)
    with parity.recording(tmp_path, steps=(1,)):
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        del model
        assert alive() is None


def test_a_killed_run_leaves_what_it_had(tmp_path: Path) -> None:
    """The command records an unchanged script. The steps before the kill can be compared."""
    words = [sys.executable, "-m", "meshwright", "parity", "record", "--out", str(tmp_path / "killed"), "--steps"]
    running = subprocess.Popen([*words, ",".join(map(str, range(1, 4000))), "-m", "tests.parity.training",
                                "--steps", "100000"], cwd=ROOT, stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while not (tmp_path / "killed/rank-0/step-3.json").exists() and time.monotonic() < until:
            assert running.poll() is None, "ended by itself"
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    run = RecordedRun.read(tmp_path / "killed")
    assert run.steps[:3] == [1, 2, 3]
    step = run.ranks[0].step(3)
    assert all(torch.isfinite(x).all() for x in step.tensors.values())
    with pytest.raises(ParityError, match="with --perturb 1"):
        run_words(["compare", str(tmp_path / "killed"), str(tmp_path / "killed")])


def test_the_command_says_steps_and_what_nobody_saw(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_words(["compare", str(folder / "one-sampled"), str(folder / "tp-sampled"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [check["check"] for check in told["checks"]] == ["step 1", "step 2"]
    assert any("compared by samples and norms" in note for note in told["checks"][0]["notes"])
    assert "dropout layers were off" in told["checks"][0]["notes"]
    norms = [row["name"] for row in told["checks"][0]["comparisons"] if row["kind"] == "norm"]
    assert {"output of blocks.1", "gradient of blocks.0.up.weight", "weight of tokens.weight"} <= set(norms)
    assert run_words(["compare", str(folder / "one"), str(folder / "tp-forward")]) == 1
    assert "step 1[tp2]: missing reduction at blocks.1" in capsys.readouterr().out


def test_samples_of_parts_are_parts_of_samples() -> None:
    x = torch.arange(64 * 32.0).view(64, 32)
    strides = strides_of(x.shape, 64)
    assert x[:: strides[0], :: strides[1]].numel() <= 64
    halves = [sampled(half, strides) for half in x.chunk(2, 1)]
    assert torch.equal(torch.cat(halves, 1), sampled(x, strides))
    assert torch.equal(coarser(sampled(x, (1, 2)), (1, 2), strides), sampled(x, strides))
    assert torch.equal(torch.cat([sampled(x[:5], (2, 1)), sampled(x[5:], (2, 1), (5, 0))]), sampled(x, (2, 1)))
    assert are_aligned([(64, 16), (64, 32)], (8, 4))
    assert not are_aligned([(64, 15), (64, 17)], (1, 4))


def test_ranks_are_put_together_in_every_way() -> None:
    places: list[Mapping[str, int]] = [{"data": d, "tp": t} for d in range(2) for t in range(2)]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    held = {rank: x.chunk(2)[place["data"]].chunk(2, 1)[place["tp"]] for rank, place in enumerate(places)}
    assert any(x.shape == whole.shape and torch.equal(x, whole) for _, whole in wholes_of(held, places))
    copies = dict.fromkeys(range(4), x)
    assert torch.equal(next(wholes_of(copies, places))[1], x)
