"""Layouts files: which keys replace a run's keys, and errors before any start, under the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.ranks.errors import ConfigError
from meshwright.tools.compare.job import cluster_of
from meshwright.tools.compare.layouts import Contender, LayoutRequest, contenders_of, from_files, split_words

RUN = """
model: {base: gpt2-mini, dropout: 0.0}
batch: {global: 8, micro: 4}
layout: {tensor: {kind: megatron, size: 2}, transport: torch}
memory: {recompute: auto}
steps: 20
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def layouts(run: Path, text: str, *words: str, name: str = "some.yaml") -> list[Contender]:
    path = run.parent / name
    path.write_text(text)
    return from_files(run, words, [path])


def test_a_layout_is_said_whole_and_other_keys_lie_over_the_runs(run: Path) -> None:
    (contender,) = layouts(run, "layout: {data: {size: 2}}\nbatch: {micro: 2}")
    assert contender.name == "some"
    assert contender.config.layout.summary == "data 2 (allreduce)"
    assert contender.config.layout.transport == "auto"
    assert (contender.config.micro, contender.config.batch.global_) == (2, 8)
    assert contender.config.memory.recompute == "auto"


def test_without_a_layout_the_runs_stands(run: Path) -> None:
    (contender,) = layouts(run, "memory: {recompute: none}")
    assert contender.config.layout.summary == "data 1 (allreduce), tensor 2"
    assert contender.config.memory.recompute == "none"


def test_several_in_a_file_have_names_or_numbers(run: Path) -> None:
    text = "layouts:\n  - {name: x, layout: {}}\n  - {layout: {}}\n  - {name: x, layout: {}}"
    assert [contender.name for contender in layouts(run, text)] == ["x-1", "some-2", "x-2"]
    text = "layouts: [{name: x}, {name: x-1}, {name: x}]"
    assert [contender.name for contender in layouts(run, text)] == ["x-2", "x-1", "x-3"]


def test_the_command_lines_words_come_last(run: Path) -> None:
    (contender,) = layouts(run, "layout: {data: {size: 2}}", "layout.data.sync=zero1", "model.hidden=64", "steps=9")
    assert contender.config.layout.data.sync == "zero1"
    assert (contender.config.model.hidden, contender.config.steps) == (64, 9)


def test_a_whole_run_file_is_a_layouts_file(run: Path) -> None:
    (contender,) = from_files(run, (), [run])
    assert (contender.name, contender.config.layout.transport) == ("run", "torch")


@pytest.mark.parametrize(
    "text, message",
    [
        ("layout: {data: {size: 3}}", r"some.yaml: layout.data.size=3 does not divide batch.global=8"),
        ("layout: {daat: {size: 2}}", r"some.yaml: layout.daat=.* is an unknown key \(did you mean data\?\)"),
        ("layouts: [{layout: {}}, {name: q, layout: {data: {size: 5}}}]", r"some.yaml, q: layout.data.size=5 does not"),
        ("model: {hidden: 64}", r"some.yaml: model.hidden=64 is not the run's, .* valid: \d+, or leave it out"),
        ("batch: {global: 16}", r"some.yaml: batch.global=16 is not the run's"),
        ("layouts: {a: {}}", "--layouts=.*some.yaml is no list of layouts"),
        ("layouts: [{layout: {}}]\nsteps: 3", "--layouts=.*some.yaml is no list of layouts"),
        ("- layout: {}", "--layouts=.*some.yaml holds no `key: value` lines"),
    ],
)
def test_mistakes_name_their_file(run: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts(run, text)


def test_mistakes_of_all_files_are_told_at_once(run: Path) -> None:
    files = []
    for name, size in (("x.yaml", 3), ("y.yaml", 5)):
        files.append(run.parent / name)
        files[-1].write_text(f"layout: {{data: {{size: {size}}}}}")
    with pytest.raises(ConfigError) as caught:
        from_files(run, (), files)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match=r"--layouts=.*z.yaml is no such file"):
        from_files(run, (), [run.parent / "z.yaml"])


def test_words_without_an_equals_sign_are_files_behind_the_option() -> None:
    assert split_words(["b.yaml", "steps=3"], [Path("a.yaml")]) == (["steps=3"], [Path("a.yaml"), Path("b.yaml")])
    assert split_words(["b.yaml", "steps=3"], []) == (["b.yaml", "steps=3"], [])


def test_what_is_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    none = cluster_of(None)
    assert none is None
    with pytest.raises(ConfigError, match="--layouts=none leaves nothing to compare"):
        contenders_of(LayoutRequest(run, (), ()), none)
    with pytest.raises(ConfigError, match="--devices=4 says what to plan for, and nothing is planned"):
        contenders_of(LayoutRequest(run, (), [run], devices=4), none)
    with pytest.raises(ConfigError, match="--top=2 needs a cluster to plan for"):
        contenders_of(LayoutRequest(run, (), (), top=2), none)
    with pytest.raises(ConfigError, match="--cluster=nowhere is no cluster"):
        cluster_of("nowhere")


def test_the_calibrated_file_is_taken_where_none_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    here = Path(__file__).resolve().parents[2] / "planner" / "calibrate" / "small.yaml"
    Path("cluster.yaml").write_text(here.read_text())
    assert (cluster := cluster_of(None)) is not None
    assert cluster.name == "small"


def test_the_planners_layouts(run: Path) -> None:
    small = str(Path(__file__).resolve().parents[2] / "planner" / "calibrate" / "small.yaml")
    fixed = ("layout.tensor={kind: none}", "layout.data.size=2", "layout.pipeline.size=1", "batch.micro=4")
    words = ("model.layers=1", "model.hidden=64", "model.heads=2", "data.sequence=32", "memory.recompute=none", *fixed)
    contenders = contenders_of(LayoutRequest(run, words, (), top=2, devices=2), cluster_of(small))
    assert [contender.name for contender in contenders] == ["plan-1", "plan-2"]
    assert all(contender.config.layout.world_size == 2 for contender in contenders)
