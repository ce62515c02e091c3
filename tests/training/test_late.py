"""Numbers that are read one step late, as on a GPU: the same bits and lines, and the same errors one step later."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api import train
from meshwright.config import Config, load_config
from meshwright.ranks.flight_recorder import DEVICE, Waiting
from meshwright.ranks.mesh import Mesh
from meshwright.training.loop import Trainer
from tests.harness import build
from tests.ranks.flips import flip
from tests.ranks.runs import RUN
from tests.training.replicas import EXPAND, Rows, config_of, ended, outcome, run_layout, spoil

STEPS = 5
KEYS = "step", "loss", "grad_norm", "learning_rate", "loss_scale", "applied"

SERIAL: dict[str, Any] = {"data": {"size": 1}}
FP16 = {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 2.0**20, "interval": 2, "max_skips": 40}}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1, clipped": ({"data": {"size": 2, "sync": "zero1"}}, {"optimizer": {"clip": 0.01}}),
    "stages, unclipped": ({"data": {"size": 1}, "pipeline": {"size": 2}}, {"optimizer": {"clip": None}}),
    "server, sgd": ({"data": {"size": 2, "sync": "server-loss"}}, {"optimizer": {"name": "sgd", "lr": 0.1}}),
    "O2 that overflows": (SERIAL, {"precision": FP16}),
    "O1 that overflows": (SERIAL, {"precision": FP16 | {"level": "O1"}, "optimizer": {"name": "momentum"}}),
    "muon": (SERIAL, {"optimizer": {"name": "muon", "clip": 0.01}}),
    "muon that overflows": (SERIAL, {"precision": FP16, "optimizer": {"name": "muon"}}),
    "offload that overflows": (SERIAL, {"precision": FP16, "memory": {"offload": {"to": "host"}}}),
}


def changed(layout: dict[str, Any], changes: dict[str, Any]) -> Config:
    tree = config_of(layout).model_dump(by_alias=True)
    sections = {name: tree[name] | section for name, section in changes.items()}
    return Config.model_validate(tree | {"steps": 20} | sections)


def flushed(mesh: Mesh, config: Config) -> list[tuple[dict[str, Any], float, float]]:
    """Return the lines of four steps, flushed after the second and the last; each with the seconds of the step's own
    phases, and from the end of the step before."""
    trainer, lines, phases = Trainer(build(config, mesh), Rows(config), late=True), [], []
    for step in range(4):
        lines += trainer.turn(None)[0]
        assert trainer._last is not None
        phases.append(trainer._last.phases)
        lines += trainer.flush() if step % 2 else []
    since = [None, *(own.ended for own in phases)]
    return [
        (line, own.seconds_since(None), own.seconds_since(before))
        for line, own, before in zip(lines, phases, since, strict=False)
    ]


def test_a_step_that_is_flushed_took_as_long_as_any() -> None:
    """By the host's reads, a flushed step took no time: an H100 showed 18 M tokens a second before a validation. The
    time after a flush is no part of the next step."""
    [(first, second, third, fourth)] = run_layout(flushed, changed(SERIAL, {}))
    for (line, by_itself, _), number in ((first, 1), (third, 3)):
        assert (line["step"], line["step_seconds"]) == (number, by_itself)
    for (line, _, since_the_last), number in ((second, 2), (fourth, 4)):
        assert (line["step"], line["step_seconds"]) == (number, since_the_last)
        assert line["step_seconds"] >= 0.999 * sum(line["phase_seconds"].values())


def trained(mesh: Mesh, config: Config, late: bool) -> tuple[list[dict[str, str]], list[torch.Tensor]]:
    """Return the lines of some steps, flushed after the second, and all tensors that a checkpoint would have."""
    trainer = Trainer(build(config, mesh), Rows(config), late=late)
    lines = []
    for step in range(STEPS):
        lines += trainer.turn(None)[0]
        assert len(lines) == (step + 1 if not late else max(step, 2 * (step > 1)))
        lines += trainer.flush() if step == 1 else []
    lines += trainer.flush()
    optimizer, slots = trainer.parts.optimizer, trainer.parts.strategy.slots
    states = [optimizer.held.tensors(index).values() for index in range(len(slots))]
    values = [flat.values for flat in trainer.parts.strategy.weights] + [x for each in states for x in each]
    return [{key: str(line[key]) for key in KEYS} for line in lines], [x.clone() for x in values]


@pytest.mark.parametrize("case", RUNS)
def test_the_same_bits(case: str) -> None:
    config = changed(*RUNS[case])
    at_once, late = (run_layout(trained, config, late) for late in (False, True))
    for (lines, values), (late_lines, late_values) in zip(at_once, late, strict=True):
        assert late_lines == lines
        assert [line["step"] for line in lines] == [str(step) for step in range(1, STEPS + 1)]
        assert {line["applied"] for line in lines} == ({"False", "True"} if "overflows" in case else {"True"})
        for mine, theirs in zip(late_values, values, strict=True):
            assert torch.equal(mine, theirs)


def spoiled(mesh: Mesh, config: Config, victim: int) -> tuple[int, str, str, bool]:
    return spoil(Trainer(build(config, mesh), Rows(config), late=True), EXPAND, victim, math.nan)


def test_a_gradient_that_is_no_number_is_named_in_the_next_step() -> None:
    config = config_of({"data": {"size": 1}, "tensor": {"kind": "megatron", "size": 2}})
    for step, kind, text, untouched in run_layout(spoiled, config, 1):
        assert (step, kind) == (4, "DivergedError")
        assert text.startswith("step 3: the gradient norm is nan: the run has diverged; the gradient of ")
        assert f"the weights of {EXPAND} on rank 1 are not finite" in text
        assert untouched, "a step without a norm was applied"


def test_a_last_step_that_diverges_is_seen_when_it_is_flushed() -> None:
    def run(mesh: Mesh, config: Config) -> tuple[int, str, str]:
        trainer = Trainer(build(config, mesh), Rows(config), late=True)
        trainer.parts.model.get_parameter(EXPAND).data.view(-1)[1] = math.nan
        assert ended(trainer, 1) == (1, "", "")
        return ended(trainer, 0, flushes=True)

    for step, kind, text in run_layout(run, config_of(SERIAL)):
        assert (step, kind) == (2, "DivergedError")
        assert text.startswith("step 1: the gradient norm is nan: the run has diverged; the gradient of tokens.weight")


def awaited(mesh: Mesh, config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Return the verb and ranks of the waits that are known while the host waits for a step's numbers."""
    trainer, known = Trainer(build(config, mesh), Rows(config), late=True), list[Waiting]()

    class Copied:
        def synchronize(self) -> None:
            known.extend(mesh.recorder.whereabouts().waiting)

    trainer.turn(None)
    assert trainer._last is not None
    trainer._last._copied = Copied()  # type: ignore[assignment]
    trainer.turn(None)
    return [(wait.verb, wait.ranks) for wait in known]


def test_a_host_that_waits_for_its_device_is_seen_by_the_watchdog() -> None:
    """A device that waits for no rank adds no wait."""
    assert run_layout(awaited, config_of({"data": {"size": 2}})) == [[(DEVICE, (0, 1))] * 2] * 2
    assert run_layout(awaited, config_of(SERIAL)) == [[]]


def flipped(mesh: Mesh, config: Config, victim: int) -> tuple[int, str]:
    trainer = Trainer(build(config, mesh), Rows(config), late=True)
    assert outcome(trainer, 2) == (2, "")
    if mesh.rank == victim:
        flip(trainer.parts.model.get_parameter(EXPAND), 5, 3)
    return outcome(trainer, 4)


def test_a_flipped_bit_is_seen_in_the_next_step() -> None:
    for step, text in run_layout(flipped, config_of({"data": {"size": 3}}), 2):
        assert step == 4
        assert text.startswith(f"step 3: rank 2 differs from ranks 0 and 1, which agree ({EXPAND})")


def test_a_run_that_is_resumed_ends_with_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of bf16 and the masters are equal, with a validation after each checkpoint, as on a GPU with ordered
    kernels."""
    once = Trainer.__init__
    monkeypatch.setattr(Trainer, "__init__", lambda self, *parts, **more: once(self, *parts, **more | {"late": True}))
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["precision=bf16", "layout={data: 2, transport: threads}", "steps=4", "checkpoint={every: 2, keep: 2}"]
    out = tmp_path / "out"
    train(load_config(tmp_path / "run.yaml", words), out)
    first = read_lines(out)
    shutil.rmtree(out / "checkpoints" / "step-4")
    train(load_config(out / "config.yaml"), out, resume=True)
    assert [line["step"] for line in first] == ["1", "2", "3", "4"]
    assert read_lines(out) == first


def read_lines(out: Path) -> list[dict[str, str]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: str(line[key]) for key in KEYS} | {"held out": str(line.get("validation_loss"))} for line in lines]
