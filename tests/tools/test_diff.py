"""Two runs' folders, one changed by a bit, a file, or a forger: the change is named, and the runs are never equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compute.parameters.root import VERSION
from meshwright.ranks.errors import MismatchError, UndecidedError
from meshwright.tools.diff import difference
from meshwright.training.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.training.checkpoint.shard import Stored, write_shard
from tests.training.runs import config_for, make_corpus, run

Change = Callable[[Path], None]
"""Takes a checkpoint's folder."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make four steps over two ranks, with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    layout = {"data": {"size": 2, "sync": "zero1"}, "transport": "threads"}
    changes = {"precision": "float32", "bits": "layout-free", "steps": 4, "checkpoint": {"every": 2, "keep": 2}}
    return run(config_for(make_corpus(folder), **changes, layout=layout), folder / "out")


@pytest.fixture
def other(out: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(out, tmp_path / "other"))


def shard_in(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flip(place: Callable[[bytearray], int], bit: int = 4) -> Change:
    """Flip a bit of the first shard."""

    def change(folder: Path) -> None:
        content = bytearray(shard_in(folder).read_bytes())
        content[place(content)] ^= bit
        shard_in(folder).write_bytes(content)

    return change


def header_bytes(content: bytearray) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def zero(folder: Path) -> None:
    content = bytearray(shard_in(folder).read_bytes())
    start = max(8000, header_bytes(content))
    content[start:] = bytes(len(content) - start)
    shard_in(folder).write_bytes(content)


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (folder / name).write_bytes(change((folder / name).read_bytes()))


def forge(folder: Path) -> None:
    """Write another tensor with right digests and the old recorded root, as a malicious writer would."""
    path = shard_in(folder)
    manifest = read_manifest(folder)
    index = next(number for number, file in enumerate(manifest.files) if file.file == path.name)
    parts = []
    with safe_open(path, "pt") as stored:
        for run in manifest.runs:
            if index in (group := manifest.groups[run.group]) and run.key in stored.keys():  # noqa: SIM118
                first = run.bounds(group.index(index))[0]
                tensor = stored.get_tensor(run.key).clone()
                tensor.view(-1)[5] += run.key == "weight/positions.weight"
                parts.append(Stored(run.key, f"{run.kind} of {run.parameter}", run.shape, run.box, tensor, first))
    entry, _ = write_shard(path, parts)
    files = tuple(entry if file.file == entry.file else file for file in manifest.files)
    replace(manifest, files=files).write(folder)


def swap(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


DAMAGED: dict[str, tuple[Change, str]] = {
    "the last byte of a tensor": (flip(lambda content: len(content) - 1), "rank-0.safetensors is damaged: "),
    "a byte near the end": (flip(lambda content: len(content) - 100), "rank-0.safetensors is damaged: "),
    "the first byte of a tensor": (flip(header_bytes, 128), "rank-0.safetensors is damaged: "),
    "the header": (flip(lambda content: 40), "rank-0.safetensors is damaged: its SHA-256"),
    "the header's length": (flip(lambda content: 0, 1), "rank-0.safetensors"),
    "zeros": (zero, "rank-0.safetensors is damaged: "),
    "a short shard": (lambda folder: rewrite(folder, "rank-0.safetensors", lambda content: content[:-8]), "bytes, not"),
    "a missing shard": (lambda folder: shard_in(folder).unlink(), "rank-0.safetensors is missing"),
    "two shards for each other": (swap, "rank-0.safetensors"),
    "the manifest": (
        lambda folder: rewrite(folder, MANIFEST, lambda content: content.replace(b'"step": ', b'"step": 1', 1)),
        "manifest.json is damaged",
    ),
    "the tokenizer": (
        lambda folder: rewrite(folder, "tokenizer.json", lambda content: content.replace(b"1", b"2", 1)),
        "tokenizer.json is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("turned", [False, True])
def test_a_damaged_checkpoint_is_named_and_not_equal(out: Path, other: Path, name: str, turned: bool) -> None:
    change, message = DAMAGED[name]
    change(other / "checkpoints" / "step-4")
    runs = (other, out) if turned else (out, other)
    found = difference(*runs)
    assert found.equal is False
    assert any(message in str(damage) for damage in found.damages), found.damages
    assert all(str(other) in str(damage) for damage in found.damages)
    with pytest.raises(MismatchError, match=r"(?s)step-4"):
        found.check()


def test_a_flipped_bit_is_named_by_file_tensor_and_element(out: Path, other: Path) -> None:
    flip(lambda content: len(content) - 1)(other / "checkpoints" / "step-2")
    found = difference(out, other)
    (part,) = found.parts
    (damage,) = found.damages
    assert (found.checkpoint, found.compared, part.differing, part.first) == (2, (2,), 1, part.last)
    assert damage.tensor == part.tensor
    assert damage.file == str(other / "checkpoints" / "step-2" / "rank-0.safetensors")
    result = CliRunner().invoke(app, ["diff", str(out), str(other)])
    assert f"{damage.file} is damaged: {damage.tensor}, bytes 0 to " in result.stdout
    assert isinstance(result.exception, MismatchError)


def test_the_same_damage_on_both_sides_is_not_equal(out: Path, tmp_path: Path) -> None:
    both = [Path(shutil.copytree(out, tmp_path / name)) for name in ("a", "b")]
    for folder in both:
        flip(lambda content: len(content) - 1)(folder / "checkpoints" / "step-4")
    found = difference(*both)
    assert (found.equal, len(found.damages), found.parts) == (False, 2, ())


def test_recorded_roots_are_not_believed(out: Path, other: Path) -> None:
    forge(other / "checkpoints" / "step-4")
    found = difference(out, other)
    assert (found.damages, found.checkpoint, found.parts[0].tensor) == ((), 4, "weight of positions.weight")
    quick = CliRunner().invoke(app, ["diff", str(out), str(other), "--roots"])
    assert quick.exit_code == 0
    assert quick.stdout.startswith("equal by their roots, nothing was read: 4 steps")


def test_equal_runs_say_what_was_read(out: Path, other: Path) -> None:
    said = CliRunner().invoke(app, ["diff", str(out), str(other)])
    assert said.exit_code == 0
    assert said.stdout.startswith("equal to the bit: 4 steps and the checkpoints that both have (step 2, step 4); ")
    assert "losses and norms of 4 steps; all " in said.stdout
    assert " tensors were read, " in said.stdout


def test_another_root_is_another_checkpoint_without_reading(out: Path, other: Path) -> None:
    folder = other / "checkpoints" / "step-2"
    manifest = read_manifest(folder)
    replace(manifest, roots=replace(manifest.roots, state=f"{VERSION}{0:016x}")).write(folder)
    found = difference(out, other, roots=True)
    assert (found.equal, found.checkpoint, found.parts[0].tensor) == (False, 2, "all tensors, by their roots")
    assert difference(out, other).equal, "the bytes are the same, whatever the root says"
    replace(manifest, roots=replace(manifest.roots, state=None)).write(folder)
    with pytest.raises(UndecidedError, match="step-2 has no root of its tensors: leave out --roots to read them"):
        difference(out, other, roots=True).check()


def test_another_progress_is_another_checkpoint(out: Path, other: Path) -> None:
    folder = other / "checkpoints" / "step-4"
    manifest = read_manifest(folder)
    replace(manifest, progress=replace(manifest.progress, samples=49)).write(folder)
    assert difference(out, other).parts[0].tensor == "samples of the progress (48 and 49)"


@pytest.mark.parametrize("left", ["none", "another step"])
def test_runs_without_a_common_checkpoint_are_not_called_equal(out: Path, other: Path, left: str) -> None:
    steps = other / "checkpoints"
    for step in (2, 4):
        if left == "none" or step == 4:
            shutil.rmtree(steps / f"step-{step}")
    if left == "another step":
        (steps / "step-2").rename(steps / "step-3")
    result = CliRunner().invoke(app, ["diff", str(out), str(other)])
    assert isinstance(result.exception, UndecidedError)
    assert (result.exception.exit_code, "equal to the bit" in result.stdout) == (3, False)
    held = "none" if left == "none" else "step 3"
    text = "not shown to be equal: losses and norms of 4 steps agree, and the runs have no checkpoint in common "
    assert str(result.exception) == f"{text}({out} has step 2, step 4, {other} has {held})"
    told = CliRunner().invoke(app, ["diff", str(out), str(other), "--json"])
    assert json.loads(told.stdout)["equal"] is None
