"""What is not a whole checkpoint of this model and optimizer is refused, by the file's name and before it is used."""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
from pathlib import Path

import pytest

import meshwright
from meshwright.build import build
from meshwright.checkpoint import Checkpoint, find_checkpoint, newest_step, restore
from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.config import Config
from meshwright.errors import CheckpointError
from meshwright.grid import Grid
from meshwright.mesh import Mesh
from meshwright.shard import Box
from tests.checkpoint.states import run_leg
from tests.data_parallel.test_equality import config_for
from tests.workers import run_ranks

ONE, TWO = Grid((("data", 1),)), Grid((("data", 2),))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(run_leg, TWO, config_for("zero1", 2), None, folder, 0, 2)
    return folder / "step-2"


@pytest.fixture
def step(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "step-2"))


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for name, shape in checkpoint.shapes.items():
        checkpoint.read(name, "weight", Box(tuple(0 for _ in shape), shape))


def test_whole_one_is_read(step: Path) -> None:
    read_all(step)
    assert {path.name for path in step.iterdir()} == {MANIFEST, "rank-0.safetensors", "rank-1.safetensors"}


@pytest.mark.parametrize("shard", ["rank-0.safetensors", "rank-1.safetensors"])
@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.999999])
def test_flipped_bit_in_a_shard(step: Path, shard: str, where: float) -> None:
    path = step / shard
    flip(path, int(where * 8 * path.stat().st_size))
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is damaged: its SHA-256")):
        read_all(step)


def test_any_flipped_bit_in_the_manifest(step: Path) -> None:
    """Either it is refused, or it says what it said before (an E for an e in a number)."""
    path = step / MANIFEST
    good, content = read_manifest(step), path.read_bytes()
    choose = random.Random(1)
    right = 0
    for _ in range(100):
        flip(path, choose.randrange(8 * len(content)))
        try:
            read = read_manifest(step)
        except CheckpointError as error:
            right += str(path) in str(error)
        else:
            assert read == good
            right += 1
        path.write_bytes(content)
    assert right == 100


@pytest.mark.parametrize("left", [0.0, 0.3, 0.99])
def test_truncated_manifest(step: Path, left: float) -> None:
    path = step / MANIFEST
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    with pytest.raises(CheckpointError, match=re.escape(f"{path} cannot be read")):
        Checkpoint(step)


def test_manifest_of_a_later_format(step: Path) -> None:
    body = json.loads((step / MANIFEST).read_text()) | {"format": 99}
    body.pop("checksum")
    from meshwright.checkpoint.manifest import _checksum

    (step / MANIFEST).write_text(json.dumps(body | {"checksum": _checksum(body)}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads format 1"):
        Checkpoint(step)


def test_truncated_shard(step: Path) -> None:
    path = step / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is damaged: ")):
        Checkpoint(step)


def test_missing_shard(step: Path) -> None:
    (step / "rank-1.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"rank-1\.safetensors is missing; remove its folder to go on from an older"
    ):
        Checkpoint(step)


def test_folder_without_a_manifest_is_no_checkpoint(step: Path) -> None:
    (step / MANIFEST).unlink()
    assert newest_step(step.parent) is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(step.parent)
    with pytest.raises(CheckpointError, match=f"it has no {MANIFEST}"):
        Checkpoint(step)


def test_found_by_its_folder_its_parent_or_its_run(step: Path) -> None:
    shutil.copytree(step, step.parent / "step-10")  # newer by number, not by name
    run = step.parent / "run"
    shutil.copytree(step.parent, run / "checkpoints", ignore=shutil.ignore_patterns("run"))
    assert find_checkpoint(step) == step
    assert find_checkpoint(step.parent) == step.parent / "step-10"
    assert find_checkpoint(run) == run / "checkpoints" / "step-10"


def refusal(mesh: Mesh, config: Config, folder: Path) -> str:
    parts = build(config, mesh)
    try:
        restore(parts, Checkpoint(folder))
    except CheckpointError as error:
        return str(error)
    return "taken up"


def refused(step: Path, **changes: object) -> str:
    texts: list[str] = run_ranks(refusal, ONE, config_for("allreduce", 1, **changes), step)
    return texts[0]


def test_same_run_is_taken_up(step: Path) -> None:
    assert refused(step) == "taken up"


def test_another_width(step: Path) -> None:
    model = config_for("allreduce", 1).model.model_dump() | {"hidden": 12}
    assert re.search(r"is of another model: \S+ should be \[.*12\], and it has \[.*24\]", refused(step, model=model))


@pytest.mark.parametrize("layers, text", [(3, "it has no such parameter"), (1, "which this one has not")])
def test_another_depth(step: Path, layers: int, text: str) -> None:
    model = config_for("allreduce", 1).model.model_dump() | {"layers": layers}
    answer = refused(step, model=model)
    assert "is of another model" in answer
    assert text in answer


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_another_optimizer(step: Path, name: str) -> None:
    answer = refused(step, optimizer={"name": name})
    assert f"optimizer.name={name} cannot go on from those of adamw; keep optimizer.name=adamw" in answer


def test_no_pickle_can_be_loaded() -> None:
    """No file of the package imports pickle or calls torch.load, which would run what a crafted file says."""
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    for path in Path(meshwright.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {module.split(".")[0] for module in modules}, path
            if isinstance(node, ast.Attribute) and node.attr == "load":
                assert not (isinstance(node.value, ast.Name) and node.value.id in {"torch", "np", "numpy"}), path
            if isinstance(node, ast.Attribute) and node.attr.endswith("_object"):
                raise AssertionError(f"{path}: {node.attr} pickles")  # torch.distributed's, mpi4py's lower case


def test_crafted_pickle_is_not_run(step: Path, tmp_path: Path) -> None:
    """A shard that is a pickle with a shell command in it: refused, and nothing has run."""
    victim = tmp_path / "victim"
    (step / "rank-0.safetensors").write_bytes(f"cos\nsystem\n(S'touch {victim}'\ntR.".encode())
    with pytest.raises(CheckpointError, match="is damaged"):
        read_all(step)
    assert not victim.exists()
