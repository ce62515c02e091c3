"""Curves of strategies over devices: growth, efficiency, and gaps with reasons."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.planner.plan.evaluator import Keep
from meshwright.planner.plan.memory import Memory
from meshwright.planner.plan.predict import Prediction
from meshwright.planner.plan.scale import (
    STRATEGIES,
    Scaling,
    ScalingQuestion,
    as_dict,
    parse_mode,
    parse_strategies,
    render,
    scale,
    write,
)
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.pipeline.span import Timeline
from tests.planner.plan.clusters import FLAT
from tests.planner.plan.questions import RUN


def laid_out(config: Config, **layout: Any) -> Config:
    tree = config.model_dump(mode="json", by_alias=True) | {"layout": layout}
    return Config.model_validate(tree)


def predicted(config: Config, seconds: float) -> Prediction:
    memory = Memory(1, 2, 3, 4, 5, 6)
    return Prediction(config, FLAT, seconds, {}, (memory,), ({},), Timeline(1, ()), 0.0, 1.0)


def find(config: Config, devices: int, fixed: Collection[str], keep: Keep) -> Prediction | str:
    """Predict replicas alone: each has two samples a second, less a part for every doubling."""
    found = laid_out(config, data={"size": devices})
    if config.layout.tensor.kind != "none" or not keep(found.layout):
        return "no such layout here"
    samples = config.batch.global_
    return predicted(found, samples / (2 * devices) * (1 + 0.25 * (devices.bit_length() - 1)))


def scaled(mode: str, *strategies: str, devices: tuple[int, ...] = (2, 4, 8)) -> Scaling:
    return scale(ScalingQuestion(RUN, FLAT, devices, mode, strategies), find)


def test_strong_keeps_the_batch_and_weak_the_samples_a_device() -> None:
    (strong,), (weak,) = scaled("strong", "data").curves, scaled("weak", "data").curves
    assert [point.samples for point in strong] == [8, 8, 8]
    assert [point.samples for point in weak] == [8, 16, 32]
    assert [point.best.seconds for point in strong] == pytest.approx([2.5, 1.5, 0.875])
    assert [point.best.seconds for point in weak] == pytest.approx([2.5, 3.0, 3.5])


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_efficiency_is_samples_a_second_and_device_in_those_of_the_fewest(mode: str) -> None:
    (curve,) = scaled(mode, "data").curves
    assert [point.efficiency for point in curve] == pytest.approx([1, 1.25 / 1.5, 1.25 / 1.75])
    assert curve[1].samples_per_second == pytest.approx(8 / 1.5)


def test_efficiency_begins_where_a_strategy_has_its_first_layout() -> None:
    def late(config: Config, devices: int, fixed: Collection[str], keep: Keep) -> Prediction | str:
        return "too full" if devices == 2 else find(config, devices, fixed, keep)

    (curve,) = scale(ScalingQuestion(RUN, FLAT, (2, 4, 8), "strong", ("data",)), late).curves
    assert [point.efficiency for point in curve] == [None, 1, pytest.approx(1.5 / 1.75)]


def test_a_gap_is_said_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = scaled("strong", "data", "tesseract")
    render(made)
    assert capsys.readouterr().out.count("no such layout here") == 3
    files = write(made, tmp_path / "new")
    assert [file.name for file in files] == ["scaling.csv", "scaling.json", "scaling.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    table = list(csv.DictReader(files[0].read_text().splitlines()))
    assert [row["reason"] for row in table] == [""] * 3 + ["no such layout here"] * 3
    assert json.loads(files[1].read_text()) == json.loads(json.dumps(as_dict(made)))
    row = as_dict(made)["rows"][0]
    assert (row["devices"], row["seconds"], row["memory_bytes"]) == (2, pytest.approx(2.5), 21)
    assert row["layout"] == "data 2 (allreduce); micro 4"


def test_without_any_layout_there_is_no_picture(tmp_path: Path) -> None:
    assert [file.name for file in write(scaled("weak", "pipeline"), tmp_path)] == ["scaling.csv", "scaling.json"]


@pytest.mark.parametrize(
    "name, kind, stages, sync",
    [
        ("data", "none", 1, "allreduce"),
        ("zero1", "none", 1, "zero1"),
        ("megatron", "megatron", 1, "ring"),
        ("pipeline", "none", 3, "ring"),
        ("best", "tesseract", 3, "ring"),
    ],
)
def test_what_a_strategy_fixes(name: str, kind: str, stages: int, sync: str) -> None:
    """A strategy fixes these fields and leaves the others to the run."""
    tensor = {"kind": "tesseract", "q": 2, "d": 2}
    run = laid_out(RUN, data={"sync": "ring"}, pipeline={"size": 3}, tensor=tensor)
    layout = STRATEGIES[name].applied(run).layout
    assert (layout.tensor.kind, layout.pipeline.size, layout.data.sync) == (kind, stages, sync)


def test_what_the_user_fixed_stays() -> None:
    given = frozenset({"layout.tensor.kind", "layout.tensor.size"})
    run = laid_out(RUN, tensor={"kind": "megatron", "size": 4})
    asked: list[tuple[Config, Collection[str]]] = []

    def note(config: Config, devices: int, fixed: Collection[str], keep: Keep) -> Prediction | str:
        asked.append((config, fixed))
        return "not here"

    data, megatron = scale(ScalingQuestion(run, FLAT, (4,), "strong", ("data", "megatron"), given), note).curves
    assert data[0].best == "layout.tensor.kind=megatron was asked for"
    assert megatron[0].best == "not here"
    ((config, fixed),) = asked
    assert config.layout.tensor == run.layout.tensor
    assert set(fixed) == {*given, "layout.pipeline.size"}


def test_mistakes() -> None:
    assert parse_strategies("best,data,best") == ("best", "data")
    for parse, text, says in [
        (
            parse_strategies,
            "fast",
            r"--strategies=fast is no strategy; valid: data, zero1, zero2, zero3, megatron, .*best",
        ),
        (parse_mode, "both", r"--mode=both is no kind of scaling; valid: strong, weak"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse(text)
    with pytest.raises(ConfigError, match=r"--devices=3 does not divide batch\.global=8 x 4: weak"):
        scaled("weak", "data", devices=(3, 4))
