"""A run's files next to the checkpoints: a line a step, the resolved config, TensorBoard's events, a picture."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.compute.models.chain import chain_of
from meshwright.compute.models.preferences import reward_metrics
from meshwright.config import Config, load_config, parse_config
from meshwright.config.schema import Precision
from meshwright.data.packed import open_packed
from meshwright.ranks.comm import DONE
from meshwright.ranks.errors import LaunchError, MeshwrightError, PluginError
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training import meeting, step_report
from meshwright.training.checkpoint import Checkpoint, find_checkpoint, load_weights
from meshwright.training.loop import Trainer
from meshwright.training.metric import KEYS, Metric
from meshwright.training.metrics import MetricsWriter, StepWork, metrics_line, peak_flops
from meshwright.training.sinks import TrackedRun, open_sinks
from meshwright.training.step_report import TABLE, RankClock, StepReports, row_of
from tests.fuzz.check import Stream
from tests.harness import build
from tests.training.runs import config_for, lines_of, make_corpus, run, run_as
from tests.workers import run_ranks

PEAK = 1e9
REPORT_BYTES = (12 + 1) * 8
"""Twelve numbers, and the hash of the replicas' common tensors."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def config_of(corpus: Path, sync: str = "allreduce", size: int = 2, **changes: Any) -> Config:
    model = config_for(corpus).model.model_dump() | {"dropout": 0.0}
    layout = {"data": {"size": size, "sync": sync}, "transport": "torch"}
    common = {"model": model, "batch": {"global": 12}, "steps": 4, "checkpoint": {"every": 0}, "layout": layout}
    return config_for(corpus, **common | changes)


@pytest.fixture(scope="module")
def whole_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with everything turned on."""
    config = config_of(
        corpus,
        validation={"every": 2, "batches": 3},
        metrics={"tensorboard": True, "peak_flops": PEAK},
        memory={"empty_cache_every": 3},
        optimizer={"lr": 1e-2, "schedule": {"warmup": 2, "decay": "linear", "floor": 0.0}},
    )
    out = tmp_path_factory.mktemp("run")
    (out / "config.yaml").write_text("steps: 4")  # the config.yaml of `train` is tested below
    assert run_as("counting_releases", config, out) == ""
    return out


def papers_flops(model: Any, s: int) -> float:
    """Return the flops of one sequence by the paper's formula."""
    h, layers, V = model.hidden, model.layers, model.padded_vocabulary
    return 96 * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))


def assert_phases(line: dict[str, Any]) -> None:
    assert list(line["phase_seconds"]) == ["passes", "data_parallel", "optimizer"]
    assert all(seconds > 0 for seconds in line["phase_seconds"].values())
    assert sum(line["phase_seconds"].values()) <= line["step_seconds"] + 1e-4  # two clocks
    assert all(0 <= share < 1 for share in line["idle_shares"])


def test_every_field(whole_run: Path, corpus: Path) -> None:
    lines = lines_of(whole_run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    config = config_of(corpus)
    model = config.model
    for line in lines:
        assert set(line) - {"validation_loss", "validation_accuracy"} == {
            "step", "loss", "tokens", "tokens_per_second", "step_seconds", "learning_rate", "grad_norm", "loss_scale",
            "applied", "peak_memory_bytes", "sent_bytes", "flops_per_second", "mfu", "utilisation", "phase_seconds",
            "idle_shares", "days_for_300g_tokens", "paper_flops_per_second", "own_seconds", "straggler",
        }  # fmt: skip
        assert 2 < line["loss"] < math.log(model.padded_vocabulary) + 0.5
        assert line["tokens"] == 12 * 12
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])
        assert line["flops_per_second"] == pytest.approx(
            12 * chain_of(config).flops_per_sample(config) / line["step_seconds"]
        )
        assert line["mfu"] == pytest.approx(line["flops_per_second"] / (2 * PEAK))
        assert line["paper_flops_per_second"] == pytest.approx(12 * papers_flops(model, 12) / line["step_seconds"])
        assert line["days_for_300g_tokens"] == pytest.approx(3e11 / line["tokens_per_second"] / 3600 / 24)
        assert_phases(line)
        assert len(line["idle_shares"]) == 1
        assert 0 < line["grad_norm"] < 100
        assert (line["loss_scale"], line["applied"]) == (1.0, True)
        assert 50e6 < line["peak_memory_bytes"] < 10e9
        assert len(line["utilisation"]) == len(line["own_seconds"]) == 2
        assert all(seconds > 0 for seconds in line["own_seconds"])
        assert all(0 < share <= 1 for share in line["utilisation"])
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.005, 0.01, 0.01, 0.005])
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]


def test_peak_that_is_not_known(corpus: Path, tmp_path: Path) -> None:
    run(config_of(corpus, steps=1), tmp_path)
    assert lines_of(tmp_path)[0]["mfu"] is None
    assert peak_flops("auto", torch.device("cpu"), Precision()) is None
    assert peak_flops(5e12, torch.device("cpu"), Precision()) == 5e12


@pytest.mark.parametrize(
    "gpu, precision, peak",
    [
        ("NVIDIA H100 80GB HBM3", Precision(level="O2", dtype="bf16"), 989e12),
        ("NVIDIA H100 80GB HBM3", Precision(), 494.5e12),
        ("NVIDIA A100-SXM4-80GB", Precision(tf32=False), 19.5e12),
        ("Tesla V100-SXM2-32GB", Precision(), 15.7e12),
        ("NVIDIA A100-SXM4-80GB", Precision(dtype="float64"), 19.5e12),
        ("NVIDIA L4", Precision(), None),
    ],
)
def test_the_peak_is_that_of_the_runs_products(gpu: str, precision: Precision, peak: float | None) -> None:
    with patch.object(torch.cuda, "get_device_name", lambda device: gpu):
        assert peak_flops("auto", torch.device("cuda", 0), precision) == peak


@pytest.mark.few(2)
@pytest.mark.parametrize("sync, size", [("allreduce", 3), ("zero1", 2), ("server-loss", 3), ("zero3", 2)])
def test_loss_is_the_global_mean(
    sync: str, size: int, corpus: Path, whole_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The loss is equal to twelve digits under any layout, and one process prints."""
    run(config_of(corpus, sync, size, steps=1), tmp_path)
    line, expected = lines_of(tmp_path)[0], lines_of(whole_run)[0]
    for key in ("loss", "grad_norm"):
        assert line[key] == pytest.approx(expected[key], rel=1e-12, abs=0)
    assert line["tokens"] == expected["tokens"]
    assert capfd.readouterr().out.count("step 1/1") == 1


def parameter_bytes(config: Config) -> int:
    def count(mesh: Mesh) -> int:
        return sum(bucket.values.numel() for bucket in build(config, mesh).strategy.buckets) * 8

    counts: list[int] = run_ranks(count, Grid(config.layout.axes))
    return counts[0]


@pytest.mark.parametrize("sync, size, norm", [("allreduce", 3, 0), ("ring", 2, 0), ("zero1", 3, 10)])
def test_sent_bytes(sync: str, size: int, norm: int, corpus: Path, tmp_path: Path) -> None:
    """2(n-1)/n of the gradients, and the norm's 8 bytes if ranks own parts; the step report is sent over all axes."""
    config = config_of(corpus, sync, size, steps=3)
    run(config, tmp_path)
    expected = 2 * (size - 1) * parameter_bytes(config) // size + norm
    for line in lines_of(tmp_path)[1:]:
        assert line["sent_bytes"]["data+pipe"] == (size - 1) * REPORT_BYTES
        assert line["sent_bytes"]["data"] == pytest.approx(expected, abs=size)


def second_step(mesh: Mesh, config: Config) -> tuple[dict[str, int], set[str]]:
    """Return the reported bytes of the second step, known on rank 0 alone, and the axes with messages from this
    rank."""
    trainer = Trainer(build(config, mesh), Stream(config))
    trainer.turn(None)
    (line,), _ = trainer.turn(None)
    sent: Any = line.get("sent_bytes")
    assert (sent is None) == (mesh.rank > 0)
    return sent, {axes for axes, count in mesh.ledger.sent_bytes().items() if count}


@pytest.mark.parametrize("sync, shares", [("allreduce", 2), ("ring", 2), ("zero1", 2)])
def test_sent_bytes_of_stages(sync: str, shares: int) -> None:
    """A tied table is summed over the replicas of the first and the last of three stages: four ranks."""
    model = {"layers": 3, "hidden": 16, "heads": 2, "positions": 8, "vocabulary": 300, "vocabulary_multiple": 8}
    layout = {"data": {"size": 2, "sync": sync}, "pipeline": {"size": 3}, "transport": "torch"}
    config = parse_config({
        "model": model | {"dropout": 0.0}, "data": {"sequence": 8}, "batch": {"global": 8, "micro": 2},
        "layout": layout, "precision": {"dtype": "float64"}, "steps": 2,
    })  # fmt: skip
    (sent, first_used), *others = run_ranks(second_step, Grid(config.layout.axes), config)
    for used in (first_used, *(used for _, used in others)):
        assert used <= set(sent)
    assert sent["data+ends"] == shares * 3 * 304 * 16 * 8 // 4


def plain_loss(mesh: Mesh, run_folder: Path, corpus: Path, num_windows: int) -> float:
    """Return the mean over the first windows of the validation file, window by window, by torch's cross entropy."""
    checkpoint = Checkpoint(find_checkpoint(run_folder))
    config = config_of(corpus, size=1)
    parts = build(config, mesh)
    load_weights(parts.model, parts.specs, mesh, checkpoint)
    parts.model.eval()
    tokens = torch.from_numpy(open_packed(corpus).tokens("validation").astype("int64"))
    losses = []
    with torch.no_grad():
        for start in range(0, num_windows * 12, 12):
            window = tokens[start : start + 13]
            hidden = parts.model.hidden(window[None, :-1])[0]
            logits = hidden @ parts.model.get_parameter("tokens.weight")[: config.model.vocabulary].T
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("sync", ["allreduce", "zero3"])
def test_validation_loss(sync: str, corpus: Path, tmp_path: Path) -> None:
    """A validation reads whole global batches from the file's beginning, over two ranks, without the run's dropout."""
    model = config_of(corpus).model.model_dump() | {"dropout": 0.5}
    run(config_of(corpus, sync, model=model, steps=2, validation={"every": 2, "batches": 3}), tmp_path)
    (expected,) = run_ranks(plain_loss, Grid((("data", 1),)), tmp_path, corpus, 3 * 12)
    assert lines_of(tmp_path)[-1]["validation_loss"] == pytest.approx(expected, rel=1e-12)
    assert lines_of(tmp_path)[-1].keys() == KEYS - {"dropped_share", "root", *reward_metrics([0.0, 0.0, 0.0, 1.0])}


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    assert {key for row in rows for key in re.findall(r"`(\w+)[.`]", row)} == KEYS
    assert {name for name, metric in TABLE.items() if metric.shown} <= KEYS


def test_a_metric_of_another_package_that_has_a_name_of_ours_is_refused() -> None:
    for name in ("loss", "busy_seconds", "tokens_per_second"):
        with patch.object(step_report, "entries", lambda group, name=name: {name: Metric("sum", "math:sqrt")}):
            with pytest.raises(PluginError, match=f"the metric {name} of another package has the name of a number"):
                step_report.all_metrics()


def meets(mesh: Mesh, config: Config, corpus: Path) -> str:
    known = {"load": Metric("max")} if mesh.rank else {}
    with patch.object(meeting, "entries", lambda group: known), pytest.raises(LaunchError) as caught:
        meeting.meet(mesh, meeting.facts_of(config, corpus))
    return str(caught.value)


def test_ranks_that_know_of_different_metrics_do_not_begin(corpus: Path) -> None:
    """One host has a package that the other host lacks."""
    config = config_of(corpus, size=2)
    for text in run_ranks(meets, Grid(config.layout.axes), config, corpus, transport="torch"):
        assert "the metrics of other packages" in text
        assert "load" in text


def test_overflow_is_marked(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precision = {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 2.0**40}}
    with pytest.raises(LaunchError, match="every step overflowed"):
        run(config_of(corpus, precision=precision, steps=3), tmp_path)
    lines = lines_of(tmp_path)
    assert [line["applied"] for line in lines] == [False] * 3
    assert [line["loss_scale"] for line in lines] == [2.0**40, 2.0**39, 2.0**38]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[0]["grad_norm"] in ("inf", "nan")
    assert "overflow: step skipped" in capfd.readouterr().out
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_lines_are_strict_json(tmp_path: Path) -> None:
    """Programs without NaN can read the file of a diverged run."""
    writer = MetricsWriter(tmp_path, 0)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "sent_bytes": {"data": 1}})
    writer.close()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": "nan", "grad_norm": "inf", "sent_bytes": {"data": 1}}
    assert math.isnan(float(line["loss"]))


def test_free_memory_is_given_back(whole_run: Path) -> None:
    """One of four steps is divisible by 3."""
    assert [(whole_run / f"releases-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_tensorboard(whole_run: Path) -> None:
    events = EventAccumulator(str(whole_run / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    assert scalars[-1].value == pytest.approx(lines_of(whole_run)[-1]["loss"], rel=1e-6)
    assert "validation_loss" in events.Tags()["scalars"]


def test_picture(whole_run: Path) -> None:
    assert (whole_run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_config_reloads(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, steps=1)
    run(config, tmp_path)
    assert load_config(tmp_path / "config.yaml") == config
    assert Checkpoint(find_checkpoint(tmp_path)).config == config


def test_resumed_file_has_each_step_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')
    MetricsWriter(tmp_path, 3).close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_busy_clock_counts_work() -> None:
    clock = RankClock(torch.device("cpu"), FlightRecorder())
    assert sum(index * index for index in range(300_000)) > 0
    assert clock.lap()[0] > 0


def report(busy: float = 1.0, pipeline: float = 1.0, tasks: float = 1.0) -> dict[str, Any]:
    """Return the numbers of one rank."""
    return {
        "loss": 0.5, "stop": False, "next_counts": [8], "busy_seconds": busy, "own_seconds": 0.5, "dropped_pairs": 0.0,
        "pipeline_seconds": pipeline, "task_seconds": tasks, "peak_memory_bytes": 1, "sent_bytes": (3, 0, 0),
        "root": [], "rewards": [],
    }  # fmt: skip


def arrived(*each: dict[str, Any]) -> StepReports:
    """Return the reports of all ranks, received."""
    return StepReports(TABLE, each[0], torch.stack([row_of(TABLE, values) for values in each]), DONE)


WORK = StepWork(tokens=6 * 10**6, flops=6.0, paper_flops=8.0, peak_flops=None)


def line_of(grid: Grid, *each: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a step of 2 seconds."""
    sent = [3, *(0 for _ in grid.axis_sets[1:])]
    return metrics_line(2.0, WORK, arrived(*(values | {"sent_bytes": sent} for values in each)), grid)


def test_utilisation_that_nobody_can_tell() -> None:
    line = line_of(Grid((("data", 2), ("pipe", 1))), *(report(busy) for busy in (1, math.nan)))
    assert line["utilisation"] == [0.5, None]


def test_idle_shares_are_of_stages() -> None:
    """Two replicas of two stages have a longest pipeline phase of 4 seconds."""
    reports = [
        report(pipeline=4, tasks=3),
        report(pipeline=3, tasks=2),
        report(pipeline=2, tasks=1),
        report(pipeline=2, tasks=2),
    ]
    line = line_of(Grid((("data", 2), ("pipe", 2))), *reports)
    assert line["idle_shares"] == [(0.25 + 0.75) / 2, 0.5]


def test_estimates() -> None:
    """3 million tokens a second: 3e11 tokens take 1e5 seconds."""
    line = line_of(Grid((("data", 1), ("pipe", 1))), report())
    assert line["days_for_300g_tokens"] == pytest.approx(1e5 / 86400)
    assert line["paper_flops_per_second"] == 4.0


def test_a_report_arrives_as_it_was_sent() -> None:
    """A report keeps every bit: NaN, integers beyond float64's, and negative numbers."""
    sent = report() | {"loss": -0.1, "busy_seconds": math.inf, "peak_memory_bytes": 2**60 + 1, "hashes": [-(2**63), 5]}
    (read,) = ({name: arrived(sent)[name][0] for name in sent},)
    assert read == sent | {"sent_bytes": [3, 0, 0]}
    assert math.isnan(arrived(report(math.nan))["busy_seconds"][0])


def test_a_metric_says_how_the_ranks_numbers_become_one() -> None:
    table = {reduce: Metric(reduce, dtype="int64") for reduce in ("each", "sum", "any", "max")}
    rows = [dict.fromkeys(table, 3), dict.fromkeys(table, 0)]
    reports = StepReports(table, rows[0], torch.stack([row_of(table, values) for values in rows]), DONE)
    assert {name: reports.reduced(name) for name in table} == {"each": [3, 0], "sum": 3, "any": True, "max": 3}
    assert arrived(report(), report()).reduced("sent_bytes") == [3, 0, 0]


def exchanged(mesh: Mesh) -> tuple[list[float], bool, list[Any], list[Any]]:
    rank = mesh.rank
    mine = report() | {"loss": rank / 2, "next_counts": [rank, 8], "stop": rank == 1, "sent_bytes": (5, rank)}
    reports = StepReports.begin(mesh, TABLE, mine)
    return reports["loss"], reports.reduced("stop"), reports["next_counts"], reports["sent_bytes"]


def test_what_all_must_know_is_read_by_column() -> None:
    answers = run_ranks(exchanged, Grid((("data", 3), ("pipe", 1))))
    for answer in answers:
        assert answer == ([0.0, 0.5, 1.0], True, [[0, 8], [1, 8], [2, 8]], [[5, 0], [5, 1], [5, 2]])


def test_a_driver_that_does_not_answer_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML has no utilisation under MIG."""
    asked: list[object] = []

    def refuse(device: object) -> int:
        asked.append(device)
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    clock = RankClock(torch.device("cuda"), FlightRecorder())
    clock._driver = True
    assert math.isnan(clock.lap()[0])
    assert math.isnan(clock.lap()[0])
    assert len(asked) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_full_log_drops_lines_with_one_warning(small_disk: Path) -> None:
    """Lines are whole: a line that fits in part is removed."""
    writer = MetricsWriter(small_disk, 0)
    (small_disk / "other").write_bytes(bytes(40 * 1024))
    said = {}
    for step in range(1, 41):
        if step == 36:
            (small_disk / "other").unlink()
        if notes := writer.write({"step": step, "loss": 1.0, "words": "w" * 1000}):
            said[step] = notes
    writer.close()
    first = min(said)
    assert 10 < first < 36
    path = small_disk / "metrics.jsonl"
    lost = f"step {first} and those that follow are not in it until it can be written again"
    assert said == {
        first: [f"warning: {path} cannot be written: No space left on device; {lost}"],
        36: [f"{path} is written again, from step 36 on"],
    }
    assert [line["step"] for line in lines_of(small_disk)] == [*range(1, first), *range(36, 41)]


def test_removed_log_is_begun_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    writer = MetricsWriter(out, 0)
    assert writer.write({"step": 1}) == []
    shutil.rmtree(out)
    (note,) = writer.write({"step": 2})
    assert note == f"warning: {out / 'metrics.jsonl'} was removed during the run: it begins anew with step 2"
    assert writer.write({"step": 3}) == []
    writer.close()
    assert [line["step"] for line in lines_of(out)] == [2, 3]


def test_log_that_becomes_unwritable(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    writer = MetricsWriter(out, 0)
    shutil.rmtree(out)
    out.write_text("in the way")
    (note,) = writer.write({"step": 1})
    assert note.startswith(f"warning: {out / 'metrics.jsonl'} cannot be written: ")
    assert writer.write({"step": 2}) == []
    out.unlink()
    assert writer.write({"step": 3}) == [f"{out / 'metrics.jsonl'} is written again, from step 3 on"]
    writer.close()


def test_full_disk_ends_tensorboard_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrackedRun(tmp_path, "5eed", "meshwright", True, {})
    writer = MetricsWriter(tmp_path, 0, open_sinks(Config().metrics, run))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    assert writer.write({"step": 1, "loss": 1.0}) == [
        "warning: tensorboard cannot be written: [Errno 28] No space left on device; it ends before step 1"
    ]
    assert writer.write({"step": 2, "loss": 1.0}) == []
    writer.close()


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"step": "x"}'])
def test_damaged_log_is_named_by_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(
        MeshwrightError, match=r"metrics.jsonl line 2 is no step's metrics: mend the line, or move the file aside"
    ):
        MetricsWriter(tmp_path, 3)


def test_a_driver_that_does_not_answer_ends_no_run() -> None:
    """NVML refuses under MIG or without permission. The clock asks NVML once, and the utilisation is unknown."""
    silent = patch.object(torch.cuda, "utilization", side_effect=RuntimeError("NVML: Insufficient Permissions"))
    with patch.object(step_report, "find_spec", lambda name: name), silent as asked:
        clock = step_report.RankClock(torch.device("cuda", 0), FlightRecorder())
        assert [math.isnan(clock.lap()[0]) for _ in range(3)] == [True] * 3
    assert asked.call_count == 1
