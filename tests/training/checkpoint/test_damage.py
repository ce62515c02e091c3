"""A folder without a whole checkpoint of this model and optimizer is refused before use, and the error names the
file."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright
from meshwright.compute.parameters.shard import Box
from meshwright.config import Config
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.checkpoint import Checkpoint, find_checkpoint, newest_step, restore
from meshwright.training.checkpoint.manifest import MANIFEST, read_manifest
from tests.harness import build
from tests.oracle.data_parallel import config_for
from tests.training.checkpoint.states import run_leg
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
    checkpoint.check_files()
    for (name, kind), parts in checkpoint.manifest.parts.items():
        checkpoint.read(name, kind, Box(tuple(0 for _ in parts[0].shape), parts[0].shape))


def test_whole_one_is_read(step: Path) -> None:
    read_all(step)
    files = {"rank-0.safetensors", "rank-1.safetensors", "tokenizer.json"}
    assert {path.name for path in step.iterdir()} == {MANIFEST, *files}
    assert {file.file for file in read_manifest(step).files} == files


@pytest.mark.parametrize("bits", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_every_flipped_bit_is_refused_by_name(step: Path, bits: int) -> None:
    """A flipped bit in any file is refused. A file's share of the bits is proportional to the file's size, at least
    1/10."""
    choose = random.Random(1)
    files = sorted(step.iterdir())
    sizes = {path: path.stat().st_size for path in files}
    for path in files:
        content = path.read_bytes()
        for _ in range(max(bits // 10, bits * sizes[path] // sum(sizes.values()))):
            bit = choose.randrange(8 * sizes[path])
            flip(path, bit)
            with pytest.raises(CheckpointError, match=re.escape(str(path))):
                read_all(step)
            path.write_bytes(content)
    read_all(step)


@pytest.mark.parametrize("shard", ["rank-0.safetensors", "rank-1.safetensors"])
@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.999999])
def test_flipped_bit_in_a_shard(step: Path, shard: str, where: float) -> None:
    path = step / shard
    flip(path, int(where * 8 * path.stat().st_size))
    said = r"bytes [\d,]+ to [\d,]+ of \S+ are not those that were written" if where else "its SHA-256"
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is damaged: {said}"):
        read_all(step)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.99])
def test_truncated_manifest(step: Path, left: float) -> None:
    path = step / MANIFEST
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    with pytest.raises(CheckpointError, match=re.escape(f"{path} cannot be read")):
        Checkpoint(step)


def rewrite(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and recompute the checksum."""
    path = step / MANIFEST
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    content = json.dumps(body, indent=1).removesuffix("\n}")
    checksum = hashlib.sha256(content.encode()).hexdigest()
    path.write_text(f'{content},\n "checksum": "{checksum}"\n}}')


def refresh(step: Path, name: str) -> None:
    """Recompute the size and SHA-256 of a changed shard in the manifest."""
    path = step / name
    content = path.read_bytes()
    header = min(8 + length(content), len(content))
    facts = {"size_bytes": len(content), "sha256": hashlib.sha256(content[:header]).hexdigest(), "header_bytes": header}
    rewrite(step, lambda body: [file.update(facts) for file in body["files"] if file["file"] == name])


def test_manifest_of_a_later_format(step: Path) -> None:
    rewrite(step, lambda body: body.update(format=99))
    with pytest.raises(CheckpointError, match=r"has format 99; this version \(.*\) reads formats 1 to 4"):
        Checkpoint(step)


def run(body: dict[str, Any]) -> dict[str, Any]:
    """Return a run that both files hold a part of, from a parameter that does not begin a bucket."""
    return next(each for each in body["runs"] if 0 < each["start"] < each["length"] < each["start"] + size(each))


def size(run: dict[str, Any]) -> int:
    return math.prod(run["lengths"])


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "file above": (lambda body: body["files"][0].update(file="../x"), r"files\.0\.file: String should match"),
    "absolute file": (lambda body: body["files"][0].update(file="/etc/passwd"), r"files\.0\.file: String should match"),
    "hidden file": (lambda body: body["files"][0].update(file=".."), r"files\.0\.file: String should match"),
    "no files": (lambda body: body.update(files=[]), "or one that is not among its files"),
    "file not listed": (lambda body: body["groups"][0].append(9), "or one that is not among its files"),
    "file twice": (lambda body: body["files"].append(body["files"][0]), "it lists a file twice"),
    "file twice in a group": (lambda body: body["groups"][0].__setitem__(0, 1), "a group names a file twice"),
    "no such group": (lambda body: run(body).update(group=99), "lies in a group of files that it does not list"),
    "group too short": (lambda body: body["groups"][run(body)["group"]].pop(), "more slices than its group has files"),
    "start too late": (lambda body: run(body).update(start=10**9), "more slices than its group has files"),
    "slices of nothing": (lambda body: run(body).update(length=0), "length: Input should be greater than 0"),
    "other slices": (
        lambda body: run(body).update(length=run(body)["length"] + 1),
        "float64, not|smaller than the parts",
    ),
    "other start": (lambda body: run(body).update(start=run(body)["start"] - 1), "float64, not|smaller than the parts"),
    "overlap": (lambda body: body["runs"].append(run(body)), "overlap|smaller than the parts"),
    "gap": (lambda body: run(body)["lengths"].__setitem__(0, run(body)["lengths"][0] - 1), "do not cover it"),
    "beyond": (lambda body: run(body)["offsets"].__setitem__(0, 10**6), "reach beyond its shape"),
    "negative": (lambda body: run(body)["offsets"].__setitem__(0, -1), "greater than or equal to 0"),
    "other dims": (lambda body: run(body)["lengths"].append(1), "another number of dims"),
    "huge": (lambda body: run(body).update(lengths=[2**61], length=2**61), "is smaller than the parts that lie in it"),
    "beyond numbers": (lambda body: run(body)["lengths"].__setitem__(0, 10**30), "runs"),
    "other shape": (lambda body: run(body)["shape"].__setitem__(0, 10**6), "disagree on its shape|do not cover it"),
    "no shape": (
        lambda body: run(body).update(shape=[], offsets=[], lengths=[]),
        "shape: Tuple should have at least 1",
    ),
    "other dtype": (lambda body: run(body).update(dtype="float32"), "disagree on its dtype|not .* of float32"),
    "no dtype": (lambda body: run(body).update(dtype="Tensor"), "String should match pattern"),
    "text for a number": (lambda body: body["progress"].update(step="2"), "progress.step: Input should be a valid int"),
    "true for a number": (
        lambda body: body["progress"].update(step=True),
        "progress.step: Input should be a valid int",
    ),
    "no progress": (lambda body: body.pop("progress"), "progress: Field required"),
    "no key": (lambda body: run(body).pop("key"), "key: Field required"),
    "more": (lambda body: body.update(code="rm"), "code: Unexpected keyword argument"),
    "runs are a text": (lambda body: body.update(runs="all"), "runs: Input should be a valid array"),
    "config is a list": (lambda body: body["origin"].update(config=[]), "config: Input should be"),
    "another header": (lambda body: body["files"][0].update(header_bytes=100), "SHA-256 is not the one"),
}


@pytest.mark.parametrize("change, text", FORGERIES.values(), ids=FORGERIES)
def test_forged_manifest(change: Callable[[dict[str, Any]], object], text: str, step: Path) -> None:
    rewrite(step, change)
    with pytest.raises(CheckpointError, match=text) as refusal:
        read_all(step)
    assert str(step) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["[]", "null", "[" * 100_000, '{"format": 2}', "\x00", '{"format": [], "checksum": 1}']
)
def test_manifest_that_is_none(text: str, step: Path) -> None:
    (step / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(step / MANIFEST))):
        Checkpoint(step)


SHARDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is smaller than the parts"),
    "header only": (lambda content: content[:100], "is smaller than the parts"),
    "a huge header": (lambda content: b"\xff" * 8 + content[8:], "holds no .* that can be read"),
    "a header of nonsense": (lambda content: content[:8] + b"\x00" * 64 + content[72:], "holds no .* that can be read"),
    "a header of a list": (
        lambda content: content[:8] + b"[1]".ljust(length(content)) + content[8 + length(content) :],
        "holds no .* read",
    ),
    "another dtype": (lambda content: content.replace(b'"F64"', b'"I64"'), "bytes of I64, not .* of float64"),
    "other keys": (
        lambda content: content.replace(b"weight/", b"freight"),
        "holds freight.*, which no run",
    ),
    "offsets of texts": (lambda content: content.replace(b"offsets", b"0ffsets"), "holds no .* that can be read"),
    "no digests": (lambda content: content.replace(b"__metadata__", b"__metadat__a"), "holds no __metadat__a that"),
}


def length(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("change, text", SHARDS.values(), ids=SHARDS)
def test_forged_shard(change: Callable[[bytes], bytes], text: str, step: Path) -> None:
    """A forged shard with a right SHA-256 in the manifest is refused. Errors of safetensors are sentences as well."""
    path = step / "rank-1.safetensors"
    path.write_bytes(change(path.read_bytes()))
    refresh(step, path.name)
    with pytest.raises(CheckpointError, match=text) as refusal:
        read_all(step)
    assert path.name in str(refusal.value)


def test_config_of_another_version(step: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["origin"]["version"] = "7.1"
        body["origin"]["config"]["optimizer"]["spin"] = 1

    rewrite(step, change)
    with pytest.raises(CheckpointError, match=r"optimizer.spin=1 is an unknown key.*it was written by meshwright 7\.1"):
        _ = Checkpoint(step).config


OLD = Path(__file__).parent / "format_2"
"""A checkpoint of version 0.2.0: elements 0 to 19 of a bucket, `w` [5, 3] and then `b` [4], in two slices."""

FORMAT_3 = OLD.with_name("format_3")
"""The same tensors by version 0.3.0: runs, SHA-256 digests of blocks, and a root of version 1."""


def as_format_1(step: Path) -> None:
    """Rewrite the checkpoint of format 2 in the format of version 0.1.0."""
    path = step / MANIFEST
    body = json.loads(path.read_text())
    shards = [file for file in body["files"] if file["file"] != "tokenizer.json"]
    kept = {key: body[key] for key in ("progress", "entries")}
    old = {"format": 1, "seed": 1, "config": body["origin"]["config"], "shards": shards, **kept}
    checksum = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(old | {"checksum": checksum}, indent=1))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_older_formats_are_read(version: int, tmp_path: Path) -> None:
    step = Path(shutil.copytree(FORMAT_3 if version == 3 else OLD, tmp_path / "step-2"))
    if version == 1:
        as_format_1(step)
    checkpoint = Checkpoint(step)
    checkpoint.check_files()
    assert checkpoint.manifest.progress.step == 2
    assert checkpoint.manifest.origin.run == ("" if version == 1 else "01d")
    assert checkpoint.config.layout.data.sync == "zero1"
    for kind, factor in (("weight", 1.0), ("exp_avg", -0.5)):
        w, b = torch.arange(15.0).view(5, 3) * factor, torch.arange(15.0, 19.0) * factor
        assert torch.equal(checkpoint.read("w", kind, Box((0, 0), (5, 3))), w)
        assert torch.equal(checkpoint.read("w", kind, Box((2, 1), (3, 2))), w[2:, 1:])
        assert torch.equal(checkpoint.read("b", kind, Box((1,), (2,))), b[1:3])
    for name in ("rank-0.safetensors", "rank-1.safetensors", MANIFEST):
        content = (step / name).read_bytes()
        flip(step / name, 8 * (len(content) - 20))
        with pytest.raises(CheckpointError, match=re.escape(str(step / name))):
            Checkpoint(step).check_files()
        (step / name).write_bytes(content)


OLD_FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "file above": (lambda body: body["entries"][0].update(file="../rank-0.safetensors"), "file: String should match"),
    "file not listed": (lambda body: body["entries"][0].update(file="other"), "other, which is not among its files"),
    "overlap": (lambda body: body["entries"].append(body["entries"][0]), "overlap|smaller than the parts"),
    "gap": (lambda body: body["entries"].pop(0), "do not cover it"),
    "entries are a text": (lambda body: body.update(entries="all"), "Input should be a valid array"),
    "no entries": (lambda body: body.pop("entries"), "Input should be a valid array"),
    "no files": (lambda body: body.pop("files"), "Input should be a valid array"),
}


@pytest.mark.parametrize("change, text", OLD_FORGERIES.values(), ids=OLD_FORGERIES)
def test_forged_manifest_of_format_2(change: Callable[[dict[str, Any]], object], text: str, tmp_path: Path) -> None:
    step = Path(shutil.copytree(OLD, tmp_path / "step-2"))
    rewrite(step, change)
    with pytest.raises(CheckpointError, match=text):
        Checkpoint(step)


def test_truncated_shard(step: Path) -> None:
    path = step / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is damaged: ")):
        Checkpoint(step)


def test_missing_shard(step: Path) -> None:
    (step / "rank-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is missing; take another checkpoint"):
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
    """No file of the package imports pickle or calls torch.load, which would run code of a crafted file."""
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    for path in Path(meshwright.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {module.split(".")[0] for module in modules}, path
            if isinstance(node, ast.Attribute) and node.attr == "load":
                assert not (isinstance(node.value, ast.Name) and node.value.id in {"torch", "np", "numpy"}), path
            if isinstance(node, ast.Attribute) and re.search("(gather|broadcast|scatter|send|recv)_object", node.attr):
                raise AssertionError(f"{path}: {node.attr} pickles")  # torch.distributed's, mpi4py's lower case


def test_crafted_pickle_is_not_run(step: Path, tmp_path: Path) -> None:
    """A shard that is a pickle with a shell command is refused, and the command does not run."""
    victim = tmp_path / "victim"
    (step / "rank-0.safetensors").write_bytes(f"cos\nsystem\n(S'touch {victim}'\ntR.".encode())
    with pytest.raises(CheckpointError, match="is damaged"):
        read_all(step)
    assert not victim.exists()
