"""What the planner says of a layout, in the numbers that are compared; or why it says nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from meshwright.compare.layouts import Entry, from_planner
from meshwright.compare.result import Predicted, StagePrediction
from meshwright.config import Config
from meshwright.data.progress import Progress, silent
from meshwright.errors import ConfigError
from meshwright.plan.cluster import CALIBRATED, Cluster, load_cluster
from meshwright.plan.predict import Planner, Prediction
from meshwright.plan.search import search

NO_CLUSTER = f"Nothing was predicted: no --cluster, and no {CALIBRATED} here, which `meshwright calibrate` writes."


class Foresight:
    """Predicts layouts on one cluster; without a cluster it says why not."""

    def __init__(self, cluster: Cluster | None) -> None:
        self.cluster = cluster
        self._planner = Planner(cluster) if cluster is not None else None

    @classmethod
    def on(cls, name: str | None) -> Foresight:
        """On a named cluster or a file's; where none is named on the calibrated one, if there is one here.

        Raises ConfigError where there is no such cluster.
        """
        if name is None and CALIBRATED.is_file():
            name = str(CALIBRATED)
        return cls(load_cluster(name) if name is not None else None)

    @property
    def name(self) -> str:
        """The cluster's, empty without one."""
        return self.cluster.name if self.cluster is not None else ""

    @property
    def silence(self) -> str:
        """Why nothing is predicted at all; empty where it is."""
        return "" if self.cluster is not None else NO_CLUSTER

    def of(self, config: Config) -> tuple[Predicted | None, str]:
        """A prediction, or the reason why there is none."""
        if self._planner is None:
            return None, self.silence
        try:
            return predicted_of(self._planner.predict(config)), ""
        except ConfigError as error:
            return None, str(error)

    def best(
        self, config: Config, devices: int, top: int, fixed: Collection[str], report: Progress = silent
    ) -> list[Entry]:
        """The planner's `top` fastest layouts that fit on so many devices; fields of `fixed` keep the run's values.

        Raises ConfigError as the search does.
        """
        if self.cluster is None:
            raise ConfigError.of("--top", top, "needs a cluster to plan for", "--cluster NAME or FILE, or --layouts")
        found = search(config, self.cluster, devices, top, fixed=fixed, report=report)
        return from_planner(prediction.config for prediction in found.predictions)


def predicted_of(prediction: Prediction) -> Predicted:
    """A prediction in the numbers that are compared."""
    stages = []
    for memory, traffic in zip(prediction.memory, prediction.traffic, strict=True):
        sent: dict[str, int] = {}
        for (axis, _), entry in traffic.items():
            sent[axis] = sent.get(axis, 0) + entry.sent_bytes
        stages.append(StagePrediction(asdict(memory), sent))
    return Predicted(prediction.seconds, dict(prediction.phases), tuple(stages))
