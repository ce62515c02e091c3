"""`meshwright calibrate`: runs measuring jobs one after another, and makes the cluster file from the answers.

Ranks are started by the same launcher as a run's, with one thread each. The first job has a rank on every device. Then
one job for each backend and number of ranks times the links. On CPUs a small run of each backend measures a rank's
memory beyond tensors, and another run the host's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import torch

from meshwright.config import Config, parse_config
from meshwright.config.section import parse_counts
from meshwright.data.files import ShowProgress, silent
from meshwright.planner.calibrate.fit import fit_device, fit_links, merged, rounded
from meshwright.planner.calibrate.kernels import measure_device
from meshwright.planner.calibrate.links import measure_links, measure_overlap, measure_turns
from meshwright.planner.calibrate.report import writer_of
from meshwright.planner.calibrate.timing import CallTimer, Effort, lower_quartile, meeting
from meshwright.planner.plan.cluster import Cluster, Level, Links
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.errors import ConfigError, LaunchError
from meshwright.ranks.grid import PIPE
from meshwright.ranks.launch import Rank, Ranks, joined, run
from meshwright.ranks.machine import Machine, memory_bytes, processor_name, usable_cores
from meshwright.ranks.transports import TransportName
from meshwright.training.measured_run import MeasuredRun, measure_run

MEMORY_RUN: dict[str, Any] = {
    "model": {"layers": 1, "hidden": 256, "heads": 4, "positions": 128, "vocabulary": 8192},
    "data": {"sequence": 128},
    "batch": {"global": 8},
    "layout": {"tensor": {"kind": "megatron", "size": 2}},
    "device": "cpu",
}
"""A run that measures a CPU process' memory beyond tensors. No gradients are summed, since these might be in memory
that ranks share."""

HOST_RUN: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 128, "heads": 4, "positions": 16, "vocabulary": 512, "dropout": 0.0},
    "data": {"sequence": 16},
    "batch": {"global": 8, "micro": 1},
    "device": "cpu",
}
"""A run with a step that is mostly the host's work. Kernels take a third of the time and replace the contents of the
caches, as in any run. With hidden 16 the host's code and data stayed cached, and the host took half the time."""
HOST_STEPS = 40


@dataclass(frozen=True)
class MeasuredMachine:
    """The parts of a machine to measure."""

    kind: Literal["cpu", "cuda"]
    devices: int
    """The number of devices; each is measured by one rank."""
    ranks: tuple[int, ...]
    """The numbers of ranks to measure links among."""
    backends: tuple[TransportName, ...]
    """The backends to measure links with."""


def measured_machine(ranks: str | None, device: str) -> MeasuredMachine:
    """Return the parts to measure. `ranks`: as `2,4`; None: 2 and 4 on CPUs, powers of two up to all GPUs.

    Raises ConfigError for devices or numbers of ranks that this machine does not have.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError.of("--device", device, "is no kind of device", "auto, cpu, cuda")
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise ConfigError.of("--device", device, "finds no GPU", "cpu")
    if device == "cpu" or not gpus:
        backends: tuple[TransportName, ...] = ("torch", "mpi") if Machine.here().has_mpi else ("torch",)
        return MeasuredMachine(
            "cpu", usable_cores(), parse_counts("--ranks", ranks or "2,4", "ranks", least=2), backends
        )
    powers = [2**power for power in range(1, gpus.bit_length()) if 2**power <= gpus]
    counts = tuple(powers) if ranks is None else parse_counts("--ranks", ranks, "ranks", least=2)
    if any(count > gpus for count in counts):
        raise ConfigError.of("--ranks", ranks, f"is more than the {gpus} GPUs here", f"up to {gpus}")
    return MeasuredMachine("cuda", gpus, counts, ("torch",))


def calibrate(out: Path, machine: MeasuredMachine, effort: Effort, report: ShowProgress = silent) -> Cluster:
    """Measure the machine and write `out`.

    Raises ConfigError, before anything is measured, if `out` cannot be written; LaunchError; Interrupted.
    """
    if joined():
        raise LaunchError("calibrate starts its own ranks: run it outside of torchrun, srun and mpirun")
    with writer_of(out) as write:
        on_cpu = machine.kind == "cpu"
        jobs = 1 + on_cpu + len(machine.backends) * (len(machine.ranks) + on_cpu)
        runs = _Runs(out.absolute().parent, machine, effort, report, jobs)
        each = runs.launch("device", machine.devices, "torch")
        # A core gets an equal share of the machine's memory, a GPU has its own.
        memory = memory_bytes() // machine.devices if machine.kind == "cpu" else each[0]["memory"]
        device = fit_device(machine.kind, memory, merged([of["points"] for of in each]))
        links: dict[TransportName, Links] = {}
        turns: list[tuple[float, float]] = []
        for backend in machine.backends:
            answers = {ranks: runs.launch("links", ranks, backend)[0] for ranks in machine.ranks}
            if machine.kind == "cpu":  # kept from the last backend, which `auto` chooses
                turns = [(float(ranks), rounded(answer["turns"])) for ranks, answer in sorted(answers.items())]
            if answers:
                links[backend] = fit_links(
                    {ranks: answer["points"] for ranks, answer in answers.items()}, answers[min(answers)]["overlaps"]
                )
            else:  # a single GPU: messages to another GPU would pass through the host
                links[backend] = Links(
                    levels=(
                        Level(
                            latency_seconds=device.launch_seconds,
                            bandwidth_bytes_per_second=device.host_link_bytes_per_second,
                        ),
                    )
                )
        cluster = Cluster(
            name=out.stem,
            source=source_of(machine),
            device=device,
            devices_per_node=machine.devices,
            host_memory_bytes=None if on_cpu else memory_bytes(),
            cores=machine.devices if machine.kind == "cpu" else None,
            turns=tuple(turns) or None,
            links=cast(Any, links),
        )
        if machine.kind == "cpu":
            # Last, since both values are differences between a run and the prediction by this file.
            for backend in machine.backends:
                reserved = runs.reserved_bytes(cluster, backend)
                links[backend] = links[backend].model_copy(update={"reserved_bytes": reserved})
            device = device.model_copy(update={"python_seconds_per_part": runs.part_seconds(cluster)})
            cluster = cluster.model_copy(update={"links": links, "device": device})
        write(cluster)
    return cluster


@dataclass
class _Runs:
    """The jobs of a calibration, with a report of progress."""

    disk: Path
    machine: MeasuredMachine
    effort: Effort
    report: ShowProgress
    jobs: int
    done: int = 0

    def reserved_bytes(self, cluster: Cluster, backend: TransportName) -> int:
        """Measure a rank's memory beyond tensors: the peak resident memory in a run of two steps, minus the tensors as
        replayed by the planner.

        The run's model is not tiny: kernels of usual size and the first calls of a transport load code and allocate a
        tenth of such a rank's memory.
        """
        config, made = self.measured(MEMORY_RUN, f"memory, {backend}, 2 ranks", 2, f"layout.transport={backend}")
        return max(rank.peak_bytes for rank in made.ranks) - Planner(cluster).predict(config).fullest.reserved

    def part_seconds(self, cluster: Cluster) -> float:
        """Measure the host's seconds per pass through a part of the chain, beyond the kernels that the planner times.

        The difference of a small model's step to the prediction, divided by the number of forward and backward passes.
        """
        config, made = self.measured(HOST_RUN, "host", HOST_STEPS)
        # The first half of the steps warms up.
        beyond = lower_quartile(made.seconds[HOST_STEPS // 2 :]) - Planner(cluster).predict(config).seconds
        return rounded(max(0.0, beyond) / (2 * config.num_microbatches * (config.model.num_blocks + 2)))

    def measured(self, tree: dict[str, Any], what: str, steps: int, *words: str) -> tuple[Config, MeasuredRun]:
        """Run `steps` steps of a model on a text; return the config and the measured run.

        Args:
            tree: The run file's content.
            what: The run's name, for the report.
            steps: Number of steps.
            words: Further `key=value` words.
        """
        self.report(what, self.done / self.jobs)
        with TemporaryDirectory(prefix="meshwright-calibrate-") as name:
            folder = Path(name)
            (folder / "text.txt").write_text("a rank's memory\n" * 1000)
            config = parse_config(tree, [f"data.source={folder / 'text.txt'}", *words])
            made = measure_run(config, config.data.prepare(config, silent), folder / "run", steps)
        self.done += 1
        return config, made

    def launch(self, what: str, ranks: int, backend: TransportName) -> list[dict[str, Any]]:
        """Run one job, "device" or "links"; return the ranks' answers."""
        self.report(f"{what}, {backend}, {ranks} ranks", self.done / self.jobs)
        function = measure_devices if what == "device" else measure_all_links
        job = Ranks(((PIPE, ranks),), backend, self.machine.kind, name="calibrate")
        more: dict[str, Any] = {"disk": self.disk}
        if what == "links":
            # The overlap is one number per backend, measured among the fewest ranks.
            more = {"overlap": ranks == min(self.machine.ranks, default=0)}
        results: list[dict[str, Any]] = run(function, job, effort=asdict(self.effort), **more)
        self.done += 1
        return results


def measure_devices(rank: Rank, effort: Mapping[str, Any], disk: Path) -> dict[str, Any]:
    """Measure this rank's device, while all other ranks of the machine do the same."""
    where, asked = rank.mesh.device, Effort(**effort)
    timer = CallTimer(where, asked.point_seconds, meeting(rank.mesh.world, where, rank.stop), asked.cold_bytes)
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else 0
    return {"points": measure_device(asked, timer, disk), "memory": memory}


def measure_all_links(rank: Rank, effort: Mapping[str, Any], overlap: bool) -> dict[str, Any]:
    """Measure the links to the other ranks of the machine."""
    asked = Effort(**effort)
    return {
        "points": measure_links(asked, rank.mesh, rank.stop),
        "overlaps": measure_overlap(asked, rank.mesh, rank.stop) if overlap else None,
        "turns": measure_turns(asked, rank.mesh, rank.stop) if rank.mesh.device.type == "cpu" else None,
    }


def source_of(machine: MeasuredMachine) -> str:
    """Return the sentence of the cluster file on the measured devices, the software and the date."""
    if machine.kind == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"core of {processor_name()}"
    day = datetime.now(UTC).date().isoformat()
    text = f"meshwright calibrate, {day}: {machine.devices} x {device}, torch {torch.__version__}"
    return text if machine.ranks else text + "; a lone GPU: the level is its link to the host"
