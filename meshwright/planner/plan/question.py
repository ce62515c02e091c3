"""The run that a search is asked about, from a file or from a model's name, and the `key=value` words.

A plan needs only shapes: the machine needs no corpus and no tokenizer.

With `layout: auto` in a run file the planner decides when the command begins:

| decided by     | from                                                                                     |
|----------------|------------------------------------------------------------------------------------------|
| the cluster    | `plan: {cluster: NAME or FILE}`; else cluster.yaml, written by `calibrate`               |
| the devices    | the launcher's ranks (torchrun, srun, mpirun); `plan: {devices: N}`; GPUs here, or cores |
| ranks per node | the ranks that start on this machine                                                     |

A field set by a `key=value` word keeps its value. Every rank plans, and all ranks find the same layout.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshwright.config import Config
from meshwright.config.load import DECIDED, ELSEWHERE, RunTree, load_undecided, model_names, parse_config, parse_run
from meshwright.config.section import with_field
from meshwright.configs import shipped
from meshwright.data.files import ShowProgress, silent
from meshwright.planner.foreign.job import Asked, ForeignJob
from meshwright.planner.foreign.reading import read_foreign
from meshwright.planner.plan.cluster import CALIBRATED, Cluster, load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.kept import KeptRecordings
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.search import search
from meshwright.planner.plan.software import OWN_SOFTWARE, Software
from meshwright.planner.plan.space import fixed_fields, ranks_per_node
from meshwright.ranks.errors import ConfigError
from meshwright.training.decisions import this_machine

if TYPE_CHECKING:
    from meshwright.planner.plan.predict import Prediction


@dataclass(frozen=True)
class NamedRun:
    """A run without a file: a model's name, tokens of a sequence (None: the model reads no text), samples a step."""

    model: str | None = None
    sequence: int | None = None
    batch: int | None = None

    @property
    def given(self) -> dict[str, object]:
        """The given options, by name."""
        options = {"--model": self.model, "--sequence": self.sequence, "--batch": self.batch}
        return {name: value for name, value in options.items() if value is not None}

    def config(self, words: Sequence[str], cluster: Cluster) -> Config:
        """Return the run's config, in bf16 on a cluster of GPUs. Raises ConfigError."""
        if self.batch is None:
            raise ConfigError.of("--batch", "nothing", "is given: a plan is of a step", "samples a step, such as 512")
        data = {} if self.sequence is None else {"sequence": self.sequence}
        precision = "bf16" if cluster.device.kind == "cuda" else "float32"
        tree = {"model": self.model, "data": data, "batch": {"global": self.batch}, "precision": precision}
        return parse_run(tree, words, undecided=DECIDED, unread=ELSEWHERE)


def planned_run(run: Path | None, named: NamedRun, words: Sequence[str], cluster: Cluster) -> tuple[Config, list[str]]:
    """Return the run in question, and the `key=value` words. Raises ConfigError if a file and a name are given, or
    neither."""
    words = list(words)
    if named.given and run is not None and "=" in str(run):  # the first word was parsed as the run file
        run, words = None, [str(run), *words]
    if run is not None and not run.is_file() and str(run) in model_names():
        given = " ".join(f"{name} {value}" for name, value in named.given.items() if name != "--model")
        valid = f"--model {run} {given or '--sequence N --batch N'}"
        raise ConfigError.of("run", run, "is a model, and no run file", valid)
    if run is not None and named.given:
        option, value = next(iter(named.given.items()))
        raise ConfigError.of(option, value, f"has no effect beside the run file {run}", "one of them")
    if run is None and named.model is None:
        raise ConfigError.of("run", "nothing", "is given", "RUN.yaml, or --model NAME --sequence N --batch N")
    if run is None:
        return named.config(words, cluster), words
    # The run's data files may be absent: a plan needs only shapes.
    return load_undecided(run, words, elsewhere=True), words


def asked_run(
    source: Path | None,
    run: Path | None,
    named: NamedRun,
    words: Sequence[str],
    cluster: Cluster,
    devices: int = 1,
    *,
    strict: bool = False,
) -> tuple[Config, list[str], ForeignJob | None]:
    """Return the run in question, the `key=value` words, and the job of another program.

    Args:
        source: Another program's file, in place of a run file.
        run: The run file, or the first word.
        named: The options.
        words: `key=value` words.
        cluster: The plan's cluster.
        devices: The plan's devices, which complete a job's degrees.
        strict: Whether a job with fields that a plan leaves out is refused.

    Raises:
        ConfigError: As planned_run and read_foreign, if both a run file and a job are given, or `strict` refuses.
    """
    if source is None:
        if strict:
            raise ConfigError.of("--strict", "given", "has no effect without --from", "--from FILE")
        return *planned_run(run, named, words, cluster), None
    if run is not None and "=" not in str(run):
        raise ConfigError.of("--from", source, f"has no effect beside the run file {run}", "one of them")
    words = [*([str(run)] if run is not None else []), *words]
    job = read_foreign(source, Asked(named.model, named.sequence, named.batch, devices))
    if strict and job.account.left_out:
        left_out = ", ".join(f"{name}={value}" for name, value in job.account.left_out.items())
        raise ConfigError.of("--from", source, f"has fields that a plan leaves out: {left_out}", "a file without these")
    return parse_run(job.run, words, undecided=DECIDED, unread=ELSEWHERE), words, job


def models_of(cluster: Cluster, software: Software = OWN_SOFTWARE, *, anew: bool = False) -> Estimates:
    """Return the estimates of a program on a cluster. Recordings of earlier runs are reused unless `anew`."""
    return Estimates(Planner(cluster, software, None if anew else KeptRecordings.here()))


def as_written(
    job: ForeignJob | None, words: Sequence[str], models: Estimates, devices: int
) -> Prediction | str | None:
    """Predict a job's own layout, or return the reason why there is no prediction; None without a job."""
    if job is None:
        return None
    planner = models.planner
    layout = {**job.run["layout"], "ranks_per_node": ranks_per_node(planner.cluster, devices)}
    try:
        # A program's fields may have no effect in this run, such as the format of sums in one microbatch.
        return planner.predict(parse_config(job.run | {"layout": layout}, words, unread=ELSEWHERE))
    except ConfigError as error:
        return " ".join(str(error).split())
    except KeyboardInterrupt:  # the search's answer is complete
        return "stopped"


@contextmanager
def stopped_by_signals(report: ShowProgress) -> Iterator[ShowProgress]:
    """Raise KeyboardInterrupt at Ctrl-C and SIGTERM while entered, even if a shell started this process in the
    background and ignores Ctrl-C. If Python drops the exception, the next report raises again."""
    asked: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        raise KeyboardInterrupt

    def tell(text: str, share: float | None) -> None:
        if asked:
            raise KeyboardInterrupt
        report(text, share)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield tell
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


_KEYS = ("cluster", "devices")


def planned_config(run: RunTree, overrides: Sequence[str] = (), report: ShowProgress = silent) -> Config:
    """Return the run with the fastest layout that fits. Raises ConfigError as parse_run and search do."""
    # Imported here: the `plan` command imports the choice only after its search.
    from meshwright.planner.plan.choice import simplest_first

    asked = _asked(run.plan)
    config = parse_run(run.tree, overrides, undecided=DECIDED)
    machine = this_machine()
    cores = machine.gpus if config.device != "cpu" and machine.gpus else machine.cores
    # A launcher has started its ranks, so their number is fixed.
    devices = machine.world_size if machine.joined else asked.get("devices") or cores
    config = with_field(config, "layout.ranks_per_node", machine.ranks_here(devices))
    name = asked.get("cluster")
    if not name and not CALIBRATED.is_file():
        rule = "says nothing of where to run: layout: auto asks for plan: {cluster: ...}, or for cluster.yaml here"
        valid = f"meshwright calibrate (writes {CALIBRATED}), or {', '.join(shipped('clusters'))}"
        raise ConfigError.of("plan.cluster", "none", rule, valid)
    cluster = load_cluster(name or str(CALIBRATED))
    # The launcher has placed the ranks, so the nodes are fixed.
    fixed = fixed_fields(overrides) | {"layout.ranks_per_node"}
    found = search(config, cluster, devices, 1, fixed=fixed, models=models_of(cluster), report=report)
    return simplest_first(found).predictions[0].config


def _asked(section: Any) -> dict[str, Any]:
    """Return the `plan` section, checked."""
    if not isinstance(section, dict):
        raise ConfigError.of("plan", section, "is no section", "{cluster: NAME or FILE, devices: N}")
    for key, value in section.items():
        if key not in _KEYS:
            raise ConfigError.of(f"plan.{key}", value, "is an unknown key", ", ".join(_KEYS))
    devices = section.get("devices", 1)
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigError.of("plan.devices", devices, "is not a whole number", "a whole number >= 1")
    if not isinstance(section.get("cluster", ""), str):
        raise ConfigError.of("plan.cluster", section["cluster"], "is no text", "a cluster's name or file")
    return section
