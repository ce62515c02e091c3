"""A certificate of a run: a right run, and each planted damage, forgery and mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compute.context.context import Heads
from meshwright.compute.models.attention import SelfAttention
from meshwright.compute.parameters.fixed import FixedPoint
from meshwright.ranks.errors import ConfigError, DamagedError, DataError, MeshwrightError, MismatchError
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.tools.certificate import MOST_BYTES, NAME, differences, here, read_certificate
from meshwright.tools.certify import certify
from meshwright.tools.check_certificate import check
from meshwright.tools.keys import make_key
from meshwright.training.checkpoint.manifest import MANIFEST
from meshwright.training.checkpoint.shard import Stored, write_shard
from meshwright.training.folder import locked
from tests.training.runs import config_for, make_corpus, run

WORDS = {"precision": "float32", "steps": 6, "checkpoint": {"every": 2, "keep": 9}}
LAYOUT = {"data": {"size": 2}, "transport": "threads"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certified")


@pytest.fixture(scope="module")
def key(folder: Path) -> Path:
    make_key(folder / "me")
    return folder / "me"


@pytest.fixture(scope="module")
def made(folder: Path, key: Path) -> Path:
    """Make six steps over two ranks, with checkpoints at 2, 4 and 6, and certify the run."""
    out = run(config_for(make_corpus(folder), layout=LAYOUT, bits="layout-free", **WORDS), folder / "out")
    certify(out, key, print)
    return out


@pytest.fixture(scope="module")
def traced(made: Path, folder: Path, key: Path) -> Path:
    """Certify the run again, with a trace."""
    out = Path(shutil.copytree(made, folder / "traced"))
    certify(out, key, print, trace=True)
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """Copy the run, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def checked(out: Path, step: int | None = None, *words: str, trusted: Path | None = None) -> Any:
    return check(out / NAME, step, words, trusted=trusted, out=None, say=lambda text: None)


def flip(path: Path, place: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("step, words, state", [(5, ("layout.data=1",), False), (2, ("layout.data=3",), True)])
def test_a_step_is_computed_again_under_another_layout(
    made: Path, key: Path, step: int, words: tuple[str, ...], state: bool
) -> None:
    found = checked(made, step, *words, trusted=key.with_name("me.pub"))
    assert found.replayed.verdict == "equal"
    assert (found.replayed.first, found.state, found.owner) == (5 if step == 5 else 1, state, "me")
    assert (found.differences, found.gone, found.parts) == ((), (), ())
    found.check()


def test_the_card_names_what_was_certified(made: Path) -> None:
    card = yaml.safe_load((made / "card.yaml").read_text())["run"]
    body = read_certificate(made / NAME).body
    assert card["states"] == {each.step: each.state.root for each in body.checkpoints}
    assert card["key"] == body.key
    assert card["steps"] == "1 to 6"
    assert {"claim", "limits", "libraries", "python", "processor", "date", "command"} <= card.keys()


def rewrite_a_tensor(out: Path) -> None:
    """Change a tensor, the tensor's hashes, the header's digest and the manifest's checksum: a valid checkpoint."""
    from safetensors import safe_open

    from meshwright.training.checkpoint.manifest import read_manifest

    place = out / "checkpoints" / "step-4"
    manifest = read_manifest(place)
    number = next(index for index, file in enumerate(manifest.files) if file.size_bytes > 1000)
    path = place / manifest.files[number].file
    with safe_open(path, "pt") as shard:
        held = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    parts = []
    for item in manifest.runs:
        group = manifest.groups[item.group]
        if number not in group or item.key not in held:
            continue
        if item.parameter == "norm.bias" and item.kind == "weight":
            held[item.key].view(-1)[0] += 1
        first = item.bounds(group.index(number))[0]
        name = f"{item.kind} of {item.parameter}"
        parts.append(Stored(item.key, name, item.shape, item.box, held[item.key], first))
    entry, _ = write_shard(path, parts)
    files = list(manifest.files)
    files[number] = entry
    from dataclasses import replace

    replace(manifest, files=tuple(files)).write(place)


def in_metrics(out: Path) -> None:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines()
    line = json.loads(lines[2])
    lines[2] = json.dumps(line | {"loss": line["loss"] + 1e-12})
    path.write_text("\n".join(lines) + "\n")


def in_config(out: Path) -> None:
    path = out / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 0.02"))


PLANTS: dict[str, tuple[Callable[[Path], None], type[MeshwrightError], str]] = {
    "a flipped bit in a shard": (
        lambda out: flip(max((out / "checkpoints" / "step-4").glob("*.safetensors"), key=lambda p: p.stat().st_size)),
        DamagedError, r"step-4/rank-\d.safetensors is damaged: \w+ of \S+, bytes",
    ),
    "a flipped bit in a shard's header": (
        lambda out: flip(
            max((out / "checkpoints" / "step-4").glob("*.safetensors"), key=lambda p: p.stat().st_size), 40
        ),
        DamagedError, r"step-4/rank-\d.safetensors is damaged",
    ),
    "a flipped bit in a manifest": (
        lambda out: flip(out / "checkpoints" / "step-4" / MANIFEST, 60), DamagedError, "step-4/manifest.json",
    ),
    "a flipped bit in a tokenizer": (
        lambda out: flip(out / "checkpoints" / "step-4" / "tokenizer.json"), DamagedError, "step-4/tokenizer.json",
    ),
    "a whole other checkpoint": (
        rewrite_a_tensor, MismatchError, "step-4 is not the certified state: weight of norm.bias differs",
    ),
    "a loss": (in_metrics, MismatchError, "other losses, norms or roots in steps 3 to 4 than certified"),
    "a config": (in_config, MismatchError, r"config.yaml is not the certified one: optimizer.lr was 0.01, and is 0.02"),
    "another run": (
        lambda out: (out / "run.json").write_text('{"run": "00ff", "steps": 6}') and None,
        MismatchError, "is the run 00ff, and",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_change_is_refused_by_name(out: Path, name: str) -> None:
    plant, error, text = PLANTS[name]
    plant(out)
    with pytest.raises(error, match=text):
        checked(out, 5, "layout.data=1")
    with pytest.raises(error, match=text):
        checked(out)


def test_each_flipped_bit_of_the_certificate_is_refused(out: Path) -> None:
    content = (out / NAME).read_bytes()
    for place in range(0, len(content), 31):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (out / NAME).write_bytes(changed)
        with pytest.raises((DamagedError, MismatchError, ConfigError), match=r"certificate\.json"):
            read_certificate(out / NAME)


def test_a_changed_field_and_a_stripped_key_are_refused(out: Path, tmp_path: Path) -> None:
    text = (out / NAME).read_text()
    (out / NAME).write_text(text.replace('"last": 6', '"last": 7'))
    with pytest.raises(MismatchError, match="was changed after it was signed, or is a forgery"):
        checked(out, 5)
    make_key(tmp_path / "other")
    certify(out, tmp_path / "other", print)
    (tmp_path / "both").write_text((tmp_path / "other.pub").read_text())
    assert checked(out, trusted=tmp_path / "both").owner == "other"


def test_another_signer_is_refused(made: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    with pytest.raises(MismatchError, match=r"was signed by SHA256:\S+, and \S+other.pub has SHA256:"):
        checked(made, 5, trusted=tmp_path / "other.pub")
    assert checked(made).owner is None


def test_other_data_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds other tokens or samples than were certified"):
        checked(made, 5, f"data.source={make_corpus(tmp_path, seed=2)}")
    (tmp_path / "again").mkdir()
    corpus = make_corpus(tmp_path / "again")
    flip(max(corpus.glob("*"), key=lambda path: path.stat().st_size))
    with pytest.raises(DataError, match="is damaged"):
        checked(made, 5, f"data.source={corpus}")


@pytest.mark.parametrize(
    "step, word, wrong",
    [
        (5, "optimizer.lr=0.5", "optimizer.lr=0.5 is not the run's .0.01., and changes what is computed"),
        (5, "seed=4", "seed=4 is not the run's"),
        (5, "bits=usual", "bits.kind=usual is not the run's"),
        (7, "layout.data=1", "--step=7 is no certified step; valid: 1 to 6"),
    ],
)
def test_a_word_that_changes_the_run_is_refused(made: Path, step: int, word: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        checked(made, step, word)


def test_a_sum_that_is_wrong_in_every_replay_names_tensor_and_box(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = FixedPoint.add

    def add_less(self: FixedPoint, total: torch.Tensor, addend: torch.Tensor, **options: Any) -> None:
        add(self, total, addend * (1 - 2**-20), **options)

    monkeypatch.setattr(FixedPoint, "add", add_less)
    result = CliRunner().invoke(app, ["certify", "--check", str(made / NAME), "--step", "3"])
    assert isinstance(result.exception, MismatchError)
    assert re.search(
        r"first tensor that differs, after step 4: \w+ of \S+, \d+ of \d+ elements in the box \[", result.stdout
    )
    assert "program: two replays agree" in result.stdout
    assert "no operation is named: the certificate has no trace (meshwright certify OUT --trace)" in result.stdout


def summed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = FixedPoint.add
    monkeypatch.setattr(FixedPoint, "add", lambda self, total, x, **options: add(self, total, x * NEARLY, **options))


def attended(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Heads.attend
    monkeypatch.setattr(Heads, "attend", lambda self, *given: attend(self, *given) * NEARLY)


class Scaled(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * NEARLY


def read_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SelfAttention.forward
    monkeypatch.setattr(SelfAttention, "forward", lambda self, x, *given: forward(self, x * NEARLY, *given))


def led_back_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SelfAttention.forward
    monkeypatch.setattr(SelfAttention, "forward", lambda self, x, *given: forward(self, Scaled.apply(x), *given))


NEARLY = 1 - 2**-20
OPERATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "scores": (
        attended, "forward pass, blocks.0.attention.core (AttentionCore): outputs differ, inputs are equal",
    ),
    "a product between modules": (
        read_otherwise,
        "forward pass, blocks.0.attention (SelfAttention), at blocks.0.attention.query_key_value (CutExpand): inputs "
        "differ, and no earlier call does: an operation between modules",
    ),
    "a gradient of an input": (
        led_back_otherwise,
        "backward pass, blocks.0.attention (SelfAttention): gradients of its inputs differ, gradients of its outputs "
        "are equal",
    ),
    "a sum of gradients": (summed, "backward pass, norm.bias (BlockNorm): the parameter's gradient differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_with_other_bits_is_named(traced: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, told = OPERATIONS[name]
    plant(monkeypatch)
    result = CliRunner().invoke(app, ["certify", "--check", str(traced / NAME), "--step", "3", "layout.data=1"])
    assert isinstance(result.exception, MismatchError)
    assert f"first difference, after step 2: {told}\n" in result.stdout


def test_a_step_with_equal_bits_has_no_first_difference(traced: Path) -> None:
    found = checked(traced, 3, "layout.data=1")
    assert (found.replayed.verdict, found.operation) == ("equal", "")


def test_another_grains_difference_is_not_named_as_the_traced_grains(
    traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the fourth step's optimizer errs, so the traced passes have the certified bits."""
    begin = Optimizer.begin

    def begin_wrong(self: Optimizer, step_index: int, *given: Any, **options: Any) -> Any:
        for slot in self.slots:
            slot.parameter.data.mul_(NEARLY)
        return begin(self, step_index, *given, **options)

    monkeypatch.setattr(Optimizer, "begin", begin_wrong)
    found = checked(traced, 4)
    assert found.replayed.verdict == "program"
    calls = len(read_certificate(traced / NAME).body.trace.calls)
    told = f"no operation is named: the first rows after step 2 have the certified bits in all {calls} calls"
    assert found.operation == told


def test_without_the_traces_checkpoint_no_operation_is_named(
    traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(traced, tmp_path / "out"))
    shutil.rmtree(out / "checkpoints" / "step-2")
    attended(monkeypatch)
    told = "no operation is named: the trace begins with the checkpoint of step 2, which is not here"
    assert checked(out, 5).operation == told


@pytest.mark.parametrize(
    "change, error, wrong",
    [
        (lambda body: body["trace"]["calls"].pop(), MismatchError, "was changed after it was signed, or is a forgery"),
        (lambda body: body["trace"].update(step=4), MismatchError, "was changed after it was signed"),
        (lambda body: body.pop("trace"), MismatchError, "was changed after it was signed"),
        (lambda body: body.update(trace=None), DamagedError, "its text has another form than its content"),
        (lambda body: body["trace"].pop("step"), DamagedError, "trace.step: Field required"),
        (lambda body: body["trace"].update(more=1), DamagedError, "trace.more: Unexpected keyword argument"),
        (lambda body: body["trace"]["calls"].append("forward x"), DamagedError, "should match pattern"),
        (lambda body: body["trace"]["calls"].append("forward a\n b" + " 0" * 32), DamagedError, "should match pattern"),
        (lambda body: body["trace"].update(calls=[]), DamagedError, "at least 1 item"),
        (lambda body: body["trace"].update(calls=body["trace"]["calls"] * 3000), DamagedError, "at most 65536 items"),
    ],
)  # fmt: skip
def test_a_changed_trace_is_refused(
    traced: Path, tmp_path: Path, change: Callable[[Any], object], error: type[MeshwrightError], wrong: str
) -> None:
    tree = json.loads((traced / NAME).read_text())
    change(tree["certificate"])
    (tmp_path / NAME).write_text(json.dumps(tree, sort_keys=True, indent=1) + "\n")
    with pytest.raises(error, match=wrong):
        read_certificate(tmp_path / NAME)


def test_a_file_larger_than_any_certificate_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="it has 67,108,865 bytes; at most 67,108,864 are read"):
            read_certificate(tmp_path / NAME)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_another_processors_first_operation_is_named(traced: Path) -> None:
    """torch uses other kernels in another process: AVX2's on a processor with AVX-512, else kernels without vectors."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AVX2"):
        pytest.skip("one set of kernels here")
    words = ["-m", "meshwright", "certify", "--check", str(traced / NAME), "--step", "3", "layout.data=1", "--json"]
    told = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False,
        env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2" if capability == "AVX512" else "default"},
    )  # fmt: skip
    found = json.loads(told.stdout)
    assert found["replayed"]["verdict"] == "program", told.stderr
    # exp of the softmax; products are MKL's, which read no variable of torch.
    assert found["operation"].startswith("first difference, after step 2: forward pass, blocks.0.attention.core (")


def test_a_deleted_checkpoint_is_told_and_an_older_one_serves(out: Path) -> None:
    shutil.rmtree(out / "checkpoints" / "step-4")
    found = checked(out, 5, "layout.data=1")
    assert (found.replayed.verdict, found.replayed.first, found.gone) == ("equal", 3, (4,))


def test_a_running_run_and_a_run_without_checkpoints_are_refused(out: Path, key: Path, tmp_path: Path) -> None:
    with locked(out), pytest.raises(ConfigError, match="is being written by another run"):
        certify(out, key, print)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint, so there is no state to certify"):
        certify(out, key, print)
    with pytest.raises(ConfigError, match="is no run's folder"):
        certify(tmp_path, key, print)


def test_a_damaged_run_is_not_certified(out: Path, key: Path) -> None:
    (out / NAME).unlink()
    flip(max((out / "checkpoints" / "step-2").glob("*.safetensors"), key=lambda path: path.stat().st_size))
    with pytest.raises(DamagedError, match="step-2"):
        certify(out, key, print)
    assert not (out / NAME).exists()


def test_a_usual_run_is_certified_under_its_own_layout(
    folder: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run(config_for(folder / "corpus", layout=LAYOUT, **WORDS), tmp_path / "usual")
    made, _ = certify(out, key, print)
    assert made.body.layouts == "own"
    assert checked(out, 5).replayed.verdict == "equal"
    with pytest.raises(ConfigError, match=r"layout.data.size=1 is not the run's .2.: with bits=usual only"):
        checked(out, 5, "layout.data=1")
    certify(out, key, print, trace=True)
    attended(monkeypatch)
    assert checked(out, 5).operation == f"first difference, after step 2: {OPERATIONS['scores'][1]}"


def test_a_trace_is_of_out_alone(traced: Path) -> None:
    result = CliRunner().invoke(app, ["certify", "--check", str(traced / NAME), "--trace"])
    assert "--trace=True has no effect here" in str(result.exception)


def test_steps_before_a_change_of_the_config_are_not_certified(out: Path, key: Path) -> None:
    shutil.copy(out / "config.yaml", out / "config-4.yaml")
    in_config(out)
    made, _ = certify(out, key, print)
    assert (made.body.first, made.body.last) == (5, 6)
    with pytest.raises(ConfigError, match="--step=3 is no certified step; valid: 5 to 6"):
        checked(out, 3)


def test_another_processor_is_named() -> None:
    from dataclasses import replace

    now = here()
    told = differences(replace(now, processor="x86_64, AVX2", libraries=now.libraries | {"torch": "2.0"}), now)
    assert told[0].startswith("torch: 2.0 was certified, here is ")
    assert told[1].startswith("processor: x86_64, AVX2 was certified, here is ")
    assert differences(now, now) == []
