"""Sinks of a step's numbers in addition to metrics.jsonl: TensorBoard and experiment trackers. No torch here.

| sink        | a run is            | with `metrics.offline: true` stored in        | a resumed run                |
|-------------|---------------------|-----------------------------------------------|------------------------------|
| tensorboard | a folder of events  | OUT/tensorboard, as always                    | purges steps made again      |
| wandb       | a run of a project  | OUT/wandb, which `wandb sync` sends later     | has the same id              |
| mlflow      | a run of experiment | OUT/mlflow.db: `mlflow ui --backend-store-uri`| is found by a tag            |
| trackio     | a run of a project  | trackio's own folder, as always               | has the same name            |
| prometheus  | a page, /metrics    | memory, until the run ends                    | is a new page                |

If installed, wandb 0.31, mlflow 3.17, trackio 0.43 and prometheus-client 0.26 are tested by
tests/training/test_sinks.py.

A new sink is a `Sink` and a line in the registry. A tracker that cannot begin ends the run before the first step. A
tracker that fails later is dropped with a warning, since the run and metrics.jsonl do not depend on trackers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config.registry import entries
from meshwright.config.section import leaves_of
from meshwright.ranks.errors import ConfigError, MeshwrightError

if TYPE_CHECKING:
    from meshwright.config.schema import Metrics


@dataclass(frozen=True)
class TrackedRun:
    """A run's description for trackers. `name`: the run's identity, kept by resumes; `settings`: the config's tree."""

    folder: Path
    name: str
    project: str
    offline: bool
    settings: Mapping[str, Any]
    first_step: int = 0
    address: str = "127.0.0.1"
    port: int = 9464

    @classmethod
    def of(cls, metrics: Metrics, folder: Path, name: str, settings: Mapping[str, Any], first_step: int) -> TrackedRun:
        return cls(folder, name, metrics.project, metrics.offline, settings, first_step, metrics.address, metrics.port)


@dataclass(frozen=True)
class Tracker:
    """A receiver of each step's numbers, by two functions of a package."""

    write: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


@dataclass(frozen=True)
class Sink:
    """A tracker that a run may name in `metrics.sinks`. `package`: the module that must be installed. `extra`:
    Meshwright's extra that installs the package; empty: named like the package.

    `projects`: reads `metrics.project`. `remote`: can send numbers to another machine, so reads `metrics.offline`.
    `optional`: named by default, so a run without the package gets a warning and is not refused. `answers`: serves
    numbers at `metrics.address` and `metrics.port`.
    """

    open: Callable[[TrackedRun], Tracker]
    package: str
    projects: bool = True
    remote: bool = True
    optional: bool = False
    extra: str = ""
    answers: bool = False

    @property
    def remedy(self) -> str:
        """Return the command that installs the package."""
        return f'pip install "meshwright[{self.extra or self.package}]"'


def open_tensorboard(run: TrackedRun) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Steps that a resumed run makes again are purged, else the curve would jump back.
    board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            board.add_scalar(key, value, step)

    return Tracker(write, board.close)


def open_wandb(run: TrackedRun) -> Tracker:
    import wandb

    tracked = wandb.init(
        project=run.project, id=run.name, name=run.folder.name, dir=str(run.folder), config=dict(run.settings),
        mode="offline" if run.offline else "online", resume="allow",
    )  # fmt: skip
    return Tracker(lambda step, scalars: tracked.log(dict(scalars), step=step), tracked.finish)


def open_mlflow(run: TrackedRun) -> Tracker:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.folder}/mlflow.db" if run.offline else None)
    experiment = client.get_experiment_by_name(run.project)
    experiment_id = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
    tag = "meshwright.run"
    if before := client.search_runs([experiment_id], f"tags.`{tag}` = '{run.name}'", max_results=1):
        run_id = before[0].info.run_id
    else:
        run_id = client.create_run(experiment_id, tags={tag: run.name}, run_name=run.folder.name).info.run_id
        for field, value in leaves_of(run.settings).items():
            client.log_param(run_id, field, value)

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            client.log_metric(run_id, key, value, step=step)

    return Tracker(write, lambda: client.set_terminated(run_id))


def open_trackio(run: TrackedRun) -> Tracker:
    import trackio

    name = f"{run.folder.name}-{run.name}"
    tracked = trackio.init(project=run.project, name=name, config=dict(run.settings), resume="allow")
    return Tracker(lambda step, scalars: tracked.log(dict(scalars), step=step), tracked.finish)


def open_prometheus(run: TrackedRun) -> Tracker:
    """Answer http://ADDRESS:PORT/metrics with the newest step's numbers, in Prometheus' text format.

    Raises ConfigError if the port is taken, or the address is none of this host's.
    """
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry = CollectorRegistry()  # only the run's numbers, not Python's or the process's
    labels = {"run": run.name, "folder": run.folder.name}
    gauges: dict[str, Any] = {}
    try:
        server, thread = start_http_server(run.port, addr=run.address, registry=registry)
    except OSError as error:  # a taken port, an unknown host name
        address = f"{run.address}:{run.port}"
        rule = f"cannot be listened at for prometheus, as {address}: {error.strerror or error}"
        raise ConfigError.of("metrics.port", run.port, rule, "a free port, or metrics.address of this host") from error

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for key, value in {"step": step, **scalars}.items():
            if key not in gauges:
                name = "meshwright_" + re.sub(r"\W", "_", key, flags=re.ASCII)
                gauges[key] = Gauge(name, f"{key} of the newest step", list(labels), registry=registry)
            gauges[key].labels(**labels).set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Tracker(write, close)


TENSORBOARD = Sink(open_tensorboard, "tensorboard", projects=False, remote=False, optional=True)
"""A folder of events in the run's: tensorboard --logdir OUT/tensorboard."""
WANDB = Sink(open_wandb, "wandb")
"""Weights & Biases: offline in OUT/wandb, which `wandb sync` sends later."""
MLFLOW = Sink(open_mlflow, "mlflow")
"""MLflow: offline in OUT/mlflow.db, which `mlflow ui --backend-store-uri` shows."""
TRACKIO = Sink(open_trackio, "trackio", remote=False)
"""trackio, in its own folder."""
PROMETHEUS = Sink(open_prometheus, "prometheus_client", projects=False, remote=False, extra="prometheus", answers=True)
"""A page for Prometheus at metrics.address and metrics.port: /metrics, with the newest step's numbers."""


def require_sinks(metrics: Metrics) -> None:
    """Raise ConfigError if a sink that is not optional lacks its package."""
    for name in metrics.sinks:
        sink = entries("sinks")[name]
        package = sink.package
        if find_spec(package) is None and not sink.optional:
            rule = f"needs {package}, which is not installed"
            raise ConfigError.of("metrics.sinks", name, rule, f"{sink.remedy}, or leave it out")


def absent_sinks(metrics: Metrics) -> dict[str, str]:
    """Return {sink: a warning with the extra to install} for optional sinks of the run without an installed package."""
    absent = {}
    for name in metrics.sinks:
        package = entries("sinks")[name].package
        if entries("sinks")[name].optional and find_spec(package) is None:
            absent[name] = f"warning: no {name}: {package} is not installed (pip install 'meshwright[{package}]')"
    return absent


def open_sinks(metrics: Metrics, run: TrackedRun) -> dict[str, Tracker]:
    """Open the tracker of each sink that is not absent, by name. Raises MeshwrightError if a tracker cannot begin."""
    opened: dict[str, Tracker] = {}
    for name in (name for name in dict.fromkeys(metrics.sinks) if name not in absent_sinks(metrics)):
        try:
            opened[name] = entries("sinks")[name].open(run)
        except ConfigError:
            raise
        except Exception as error:  # whatever a tracker may raise
            cause = " ".join(str(error).split())
            hint = "leave it out of metrics.sinks" + (", or metrics.offline=true" if not run.offline else "")
            raise MeshwrightError(f"{name} cannot begin: {type(error).__name__}: {cause}; {hint}") from error
    return opened
