"""Where a step's numbers go besides metrics.jsonl: TensorBoard and trackers of experiments. No torch here.

| sink        | a run is            | `metrics.offline: true` keeps it in           | a run that goes on           |
|-------------|---------------------|-----------------------------------------------|------------------------------|
| tensorboard | a folder of events  | OUT/tensorboard, as always                    | purges steps made again      |
| wandb       | a run of a project  | OUT/wandb, which `wandb sync` sends later     | has the same id              |
| mlflow      | a run of experiment | OUT/mlflow.db: `mlflow ui --backend-store-uri`| is found by a tag            |
| trackio     | a run of a project  | trackio's own folder, as always               | has the same name            |

wandb 0.31, mlflow 3.17 and trackio 0.43 are held by tests/training/test_sinks.py where they are installed.

One is added by a `Sink` and its line in the registry. A tracker that cannot begin ends the run before its first step;
one that fails later is given up with a warning, since the run and metrics.jsonl do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.registry import entries
from meshwright.section import leaves_of

if TYPE_CHECKING:
    from meshwright.config.schema import Metrics


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it. `name`: its identity, which resumes keep; `settings`: its config as a tree."""

    folder: Path
    name: str
    project: str
    offline: bool
    settings: Mapping[str, Any]
    first_step: int = 0


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Sink:
    """A tracker that a run may name in `metrics.sinks`. `package`: what must be installed, and the extra that has it.

    `remote`: it can send what it gets elsewhere, so that `metrics.project` and `metrics.offline` are read.
    `optional`: runs name it by default, so that one without its package goes on, with a warning, instead of being
    refused.
    """

    open: Callable[[TrackedRun], Tracker]
    package: str
    projects: bool = True
    remote: bool = True
    optional: bool = False


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that a resumed run makes again are purged, else the curve would go back and forth.
        self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            self._board.add_scalar(key, value, step)

    def close(self) -> None:
        self._board.close()


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project, id=run.name, name=run.folder.name, dir=str(run.folder), config=dict(run.settings),
            mode="offline" if run.offline else "online", resume="allow",
        )  # fmt: skip

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(f"sqlite:///{run.folder}/mlflow.db" if run.offline else None)
        experiment = self._client.get_experiment_by_name(run.project)
        number = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        tag = "meshwright.run"
        before = self._client.search_runs([number], f"tags.`{tag}` = '{run.name}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            return
        self._id = self._client.create_run(number, tags={tag: run.name}, run_name=run.folder.name).info.run_id
        for field, value in leaves_of(run.settings).items():
            self._client.log_param(self._id, field, value)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            self._client.log_metric(self._id, key, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = f"{run.folder.name}-{run.name}"
        self._run = trackio.init(project=run.project, name=name, config=dict(run.settings), resume="allow")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


TENSORBOARD = Sink(_TensorBoard, "tensorboard", projects=False, remote=False, optional=True)
"""A folder of events in the run's: tensorboard --logdir OUT/tensorboard."""
WANDB = Sink(_Wandb, "wandb")
"""Weights & Biases: offline in OUT/wandb, which `wandb sync` sends later."""
MLFLOW = Sink(_Mlflow, "mlflow")
"""MLflow: offline in OUT/mlflow.db, which `mlflow ui --backend-store-uri` shows."""
TRACKIO = Sink(_Trackio, "trackio", remote=False)
"""trackio, in its own folder."""


def require_sinks(metrics: Metrics) -> None:
    """Raise ConfigError where the package of a sink that is not optional is not installed."""
    for name in metrics.sinks:
        sink = entries("sinks")[name]
        package = sink.package
        if find_spec(package) is None and not sink.optional:
            rule = f"needs {package}, which is not installed"
            raise ConfigError.of("metrics.sinks", name, rule, f'pip install "meshwright[{package}]", or leave it out')


def absent_sinks(metrics: Metrics) -> dict[str, str]:
    """{sink: a warning with the extra to install} of the optional sinks that the run names and this machine lacks."""
    absent = {}
    for name in metrics.sinks:
        package = entries("sinks")[name].package
        if entries("sinks")[name].optional and find_spec(package) is None:
            absent[name] = f"warning: no {name}: {package} is not installed (pip install 'meshwright[{package}]')"
    return absent


def open_sinks(metrics: Metrics, run: TrackedRun) -> dict[str, Tracker]:
    """The tracker of each sink that is not absent, by name. Raises MeshwrightError where one cannot begin."""
    opened: dict[str, Tracker] = {}
    for name in (name for name in dict.fromkeys(metrics.sinks) if name not in absent_sinks(metrics)):
        try:
            opened[name] = entries("sinks")[name].open(run)
        except Exception as error:  # whatever a tracker may raise
            cause = " ".join(str(error).split())
            hint = "leave it out of metrics.sinks" + (", or metrics.offline=true" if not run.offline else "")
            raise MeshwrightError(f"{name} cannot begin: {type(error).__name__}: {cause}; {hint}") from error
    return opened
