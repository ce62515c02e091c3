"""A function on every rank: by name, with plain arguments, and the value that each rank returned."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import ConfigError, LaunchError
from meshwright.ranks.launch import Rank, Ranks, run
from meshwright.ranks.launch.function import name_of, open_ranks
from meshwright.ranks.transports import TransportName
from meshwright.training.decisions import resolve, this_machine
from tests.patience import PATIENCE_SECONDS


def describe(rank: Rank, config: Config, folder: Path, factor: int) -> dict[str, Any]:
    total = torch.tensor([float(rank.mesh.rank + 1)])
    rank.mesh.world.all_reduce(total)
    return {
        "rank": rank.mesh.rank, "sum": float(total) * factor, "axes": rank.mesh.grid.names,
        "threads": torch.get_num_threads(), "layout": config.layout.summary,
        "folder": [str(folder), isinstance(folder, Path)], "asked": rank.stop.requested,
    }  # fmt: skip


def test_each_rank_answers(transport: TransportName, tmp_path: Path) -> None:
    layout = {"data": {"size": 2}, "transport": transport}
    config = resolve(parse_config({"layout": layout, "threads": 1, "device": "cpu"}), this_machine()).config
    answers = run(describe, config, config=config, folder=tmp_path, factor=10)
    assert [answer.pop("rank") for answer in answers] == [0, 1]
    assert answers == [
        {
            "sum": 30.0, "axes": ["data", "pipe"], "threads": 1, "layout": config.layout.summary,
            "folder": [str(tmp_path), True], "asked": False,
        }
    ] * 2  # fmt: skip


PREPARED = """
import sys
from meshwright.ranks.launch import Ranks, prepare, run

def loaded(rank):
    return "colorsys" in sys.modules

if __name__ == "__main__":
    ranks = Ranks((("data", 2),), modules=MODULES)
    prepare(f"{__file__}:loaded", ranks)
    prepare(f"{__file__}:loaded", ranks)  # a server that runs is left as it is
    print(run(loaded, ranks), "colorsys" in sys.modules)
"""


@pytest.mark.parametrize("modules, there", [((), False), (("colorsys",), True)])
def test_ranks_are_forked_with_what_they_will_import(modules: tuple[str, ...], there: bool, tmp_path: Path) -> None:
    script = tmp_path / "prepared.py"
    script.write_text(PREPARED.replace("MODULES", repr(modules)))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.stdout.split() == [f"[{there},", f"{there}]", "False"], ran.stderr


def test_stages_and_recomputation_bring_the_compiler() -> None:
    """torch imports the compiler for stages and recomputation in each rank, unless the fork server has imported it."""
    decided = ("device=cpu", "threads=1", "layout.transport=torch")
    words = ((), ("layout.pipeline.size=2",), ("memory.recompute=1",))
    configs = [parse_config({}, (*decided, *more)) for more in words]
    assert [config.ranks().modules for config in configs] == [(), ("torch._dynamo",), ("torch._dynamo",)]
    inductor = ("torch._inductor.compile_fx", "torch.utils.cpp_extension")
    compiled = [parse_config({}, (*decided, f"compile={each}")) for each in ("islands", "blocks")]
    assert [config.ranks().modules for config in compiled] == [inductor, inductor]
    # Inductor may look for a GPU at its import, and no rank with a GPU may be forked from a process that has looked.
    assert parse_config({}, ("device=cuda", *decided[1:], "compile=blocks")).ranks().modules == ()


def stay_behind(rank: Rank, folder: Path) -> bool:
    """Return on rank 1 at once; return on rank 0, a second later, whether rank 1's process is still alive."""
    left = folder / "pid"
    if rank.mesh.rank == 1:
        left.write_text(str(os.getpid()))
        return True
    time.sleep(1)
    return Path("/proc", left.read_text()).exists()


def test_ranks_leave_together(tmp_path: Path) -> None:
    """A rank that had ended was a crashed peer to a rank that was still connecting: on busy machines 6 runs of 100."""
    assert run(stay_behind, 2, folder=tmp_path) == [True, True]


def returns_a_tensor(rank: Rank) -> torch.Tensor:
    return torch.ones(2)


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"returns_a_tensor returned what JSON cannot hold .*: return numbers"):
        run(returns_a_tensor, 1)


@pytest.mark.parametrize(
    "name, message",
    [
        ("steps", "steps is not of the form package.module:function"),
        ("no.such.module:steps", "function no.such.module:steps does not exist: No module named"),
        ("no/such/file.py:steps", "function no/such/file.py:steps does not exist"),
        (f"{__name__}:missing", "does not exist: 'missing'"),
    ],
)
def test_a_wrong_name_fails_before_any_process(name: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run(name, 2)


def test_a_function_inside_of_another_has_no_name() -> None:
    with pytest.raises(LaunchError, match="ranks import what they run by its name"):
        run(lambda rank: 1, Ranks((("data", 2),)))
    assert name_of(describe) == f"{__name__}:describe"


def test_a_config_is_resolved_first() -> None:
    with pytest.raises(ConfigError, match=r"a config that says auto is no machine's: .*; valid: mw\.resolve\(config\)"):
        run(describe, parse_config({}))


SCRIPT = """
from meshwright.ranks.launch import run

def square(rank, number):
    return (rank.mesh.rank + number) ** 2

if __name__ == "__main__":
    print(run(square, 2, number=3))
"""


def test_a_script_s_own_function(tmp_path: Path) -> None:
    path = tmp_path / "steps.py"
    path.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (ran.stdout, ran.stderr) == ("[9, 16]\n", "")


def test_a_notebook_s_function_is_refused_in_words() -> None:
    cell = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    ran = subprocess.run([sys.executable, "-"], input=cell, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert "LaunchError: square was defined in a notebook or at a prompt" in ran.stderr
    assert "%%writefile steps.py" in ran.stderr


@pytest.mark.parametrize("visible, index", [(1, 0), (4, 1)])
def test_the_only_gpu_that_a_rank_sees_is_its_own(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun --gpus-per-task=1 numbers each rank's GPU 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    environment = Environment(0, 1, 1, 2, 0, "slurm")
    with open_ranks(Ranks((("data", 1),), device="cuda"), environment, "own") as mesh:
        assert mesh.device == torch.device("cuda", index)


def place(rank: Rank) -> list[int]:
    return [rank.mesh.index("row"), rank.mesh.index("col")]


def test_ranks_of_split_axes() -> None:
    """The first layout has a row in two parts around a column, the second a square with rows innermost."""
    ranks = Ranks((("row", 4), ("col", 1)), nesting=(("row", 2), ("col", 1), ("row", 2)))
    assert run(place, ranks) == [[0, 0], [1, 0], [2, 0], [3, 0]]
    ranks = Ranks((("row", 2), ("col", 2)), nesting=(("col", 2), ("row", 2)))
    assert run(place, ranks) == [[0, 0], [1, 0], [0, 1], [1, 1]]
