"""`train --explain` counts the calls and bytes of a run without running."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.planner.explain.tables import compose, explain, render
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.trace import read_trace
from meshwright.training.rank_model import rank_part
from tests.harness import build, counted_step, forward_and_backward
from tests.oracle.data_parallel import config_for as data_config
from tests.oracle.pipeline import laid_out, pipelined
from tests.oracle.tensor import config_for
from tests.planner.plan.measured import batch_of
from tests.workers import run_ranks

Counts = dict[tuple[str, str], tuple[int, int]]

LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"kind": "none"}, 2),
    ({"kind": "megatron", "size": 2}, 2),
    ({"kind": "megatron", "size": 2, "sequence_parallel": True}, 1),
    ({"kind": "tesseract", "q": 2, "d": 1}, 1),
    ({"kind": "tesseract", "q": 2, "d": 2}, 1),
    ({"kind": "subgraph", "size": 2, "common": "all", "branch": "attention-core"}, 1),
    ({"kind": "subgraph", "size": 2, "common": "one", "branch": "block"}, 1),
]


def measured(mesh: Mesh, config: Config) -> Counts:
    """Return the calls and bytes of one step without the optimizer's norm, with the valid tokens of a plan."""
    parts = build(config, mesh)
    for final in (False, True):
        batch = rank_part(batch_of(config, config.micro), parts.kit, parts.model)
        forward_and_backward(parts, batch, dict.fromkeys(parts.model.labels, 1.0), final=final)
    parts.strategy.finish()
    parts.strategy.publish()
    return {key: (entry.calls, entry.sent_bytes) for key, entry in mesh.ledger.traffic.items()}


@pytest.mark.parametrize("model", ["gpt2", "megatron-bert"])
@pytest.mark.parametrize("tensor, data", LAYOUTS, ids=str)
def test_planned_is_measured(tensor: dict[str, Any], data: int, model: str) -> None:
    config = config_for(model, tensor, data, batch={"global": 24 * data, "micro": 12}, memory={"summa": "gather"})
    planned = {key: (entry.calls, entry.sent_bytes) for key, entry in compose(config).traffic[0].items()}
    ranks = run_ranks(measured, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert ranks[0] == planned


@pytest.mark.parametrize("tensor, data", LAYOUTS, ids=str)
def test_what_autocast_sends_is_planned(tensor: dict[str, Any], data: int) -> None:
    """Products' operands and activations are sent in bf16, gradients of weights in float32."""
    precision = {"level": "O1", "dtype": "bf16"}
    more = {"batch": {"global": 24 * data, "micro": 12}, "memory": {"summa": "gather"}, "precision": precision}
    config = config_for("gpt2", tensor, data, **more)
    planned = {key: (entry.calls, entry.sent_bytes) for key, entry in compose(config).traffic[0].items()}
    assert run_ranks(measured, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)[0] == planned


def test_planned_is_measured_where_no_common_layer_is_held() -> None:
    tensor = {"kind": "subgraph", "size": 2, "common": "one", "branch": "attention-core"}
    config = config_for("bert", tensor)
    planned = {
        key: (entry.calls, entry.sent_bytes) for key, entry in counted_step(config, 1).mesh.ledger.traffic.items()
    }
    ranks = run_ranks(measured, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert ranks[1] == planned
    assert ranks[0] != planned


def test_workers_of_a_server_send_their_outputs() -> None:
    """The forward pass of server-loss, which the strategy runs, is recorded as well."""
    config = data_config("server-loss", 2)
    ledger = counted_step(config).mesh.ledger.traffic
    planned = compose(config).traffic[0]
    assert {key: (entry.calls, entry.sent_bytes) for key, entry in planned.items()} == {
        key: (entry.calls, entry.sent_bytes) for key, entry in ledger.items() if entry.calls
    }
    assert ("data", "scatter") in planned


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    render(compose(config_for("gpt2", {"kind": "tesseract", "q": 2, "d": 2})))
    text = capsys.readouterr().out
    for words in (
        "8 ranks: data 1 (allreduce), depth 2, row 2, col 2",
        "What stays",
        "dim 0 over row",
        "feed_forward.con",
    ):
        assert words in text, words


@pytest.mark.parametrize("tensor", [{"kind": "none"}, {"kind": "megatron", "size": 2}], ids=str)
def test_stages(
    tensor: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four layers in three stages: a table lists each stage's messages, the file has the run's schedule, and the
    picture all schedules."""
    monkeypatch.setenv("COLUMNS", "200")
    config = laid_out(pipelined("gpt2", 3, "axonn", tensor), pipeline={"partition": [2, 1, 1]})
    explain(config, tmp_path / "plan.json")
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    stages = [row for row in rows if row[0] in ("0", "1", "2")]
    assert [row[1] for row in stages] == ["embeddings, layers 0-1", "layers 2-2", "layers 3-3, head"]
    assert sum(float(row[3].rstrip("%")) for row in stages) == pytest.approx(100, abs=0.2)
    assert [row[4] for row in stages] == ["3", "3", "3"]
    first, middle, last = (float(row[5]) for row in stages)
    assert first == last > 0
    assert middle == pytest.approx(2 * first, abs=0.02)
    timeline = read_trace(tmp_path / "plan.json")
    assert Counter((span.stage, span.name) for span in timeline.spans) == Counter(
        (stage, f"{kind}{index}") for stage in range(3) for kind in "FB" for index in range(config.num_microbatches)
    )
    idle = [f"{share:.1%}" for share in timeline.idle_shares]
    assert [row[7] for row in stages] == idle
    assert [row[6] for row in stages] == ["0.00"] * 3  # all ranks are on this machine
    schedules = {row[0]: row[2] for row in rows if len(row) == 3 and row[0] != "in all"}
    assert list(schedules) == ["axonn (this run's)", "gpipe", "1f1b", "message-driven"]
    assert schedules["axonn (this run's)"] == f"{timeline.idle_share:.1%}"
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def on_nodes(order: list[str]) -> Config:
    """Return four replicas of two branches, on nodes of two ranks."""
    tensor = {"kind": "subgraph", "size": 2}
    layout = {"data": {"size": 4}, "tensor": tensor, "order": order, "ranks_per_node": 2}
    return config_for("gpt2", tensor, layout=layout, batch={"global": 16})


def test_what_an_order_costs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches on neighbouring ranks split within a node; branches on distant ranks split between nodes."""
    monkeypatch.setenv("COLUMNS", "200")
    for order, crossing in ((["data", "branch"], 0), (["branch", "data"], 1)):
        config = on_nodes(order)
        render(compose(config))
        text = capsys.readouterr().out
        assert f"8 ranks: {config.layout.summary}" in text
        assert "4 nodes of 2 ranks" in text
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
        (split,) = (row for row in rows if row[:2] == ["branch", "all_gather"])
        calls, sent, crossed, messages, messages_crossed = split[2:]
        assert int(messages) == 2 * int(calls)
        assert int(messages_crossed) == crossing * int(calls)
        assert float(crossed) == crossing * float(sent)
        assert float(sent) > 0


def test_nodes_are_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = compose(config_for("gpt2", {"kind": "megatron", "size": 4}))
    assert explained.ranks_per_node == 4
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert compose(config_for("gpt2", {"kind": "megatron", "size": 4})).ranks_per_node == 2


def test_no_schedule_to_trace(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"layout\.pipeline\.size=1 has no schedule to trace with --explain; valid: 2"
    ):
        explain(config_for("gpt2", {"kind": "none"}), tmp_path / "plan.json")
