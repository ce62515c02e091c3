"""Which layouts are asked for: from the command's words to entries.

What the planner says of a layout, in the numbers that are compared; or why it says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from meshwright.config import Config
from meshwright.data.progress import ShowProgress, silent
from meshwright.errors import ConfigError
from meshwright.machine import usable_cores
from meshwright.tools.compare.layouts import Entry, from_files, from_planner, told_apart
from meshwright.tools.compare.result import Predicted, StagePrediction
from meshwright.tools.plan.auto import load_free
from meshwright.tools.plan.cluster import CALIBRATED, Cluster, load_cluster
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.search import search
from meshwright.tools.plan.space import fixed_fields

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
        self, config: Config, devices: int, top: int, fixed: Collection[str], report: ShowProgress = silent
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


@dataclass(frozen=True)
class Asked:
    """`words`: `key=value`, for every layout. `files`: of layouts. `top`: so many of the planner's, on `devices`."""

    run: Path
    words: Sequence[str]
    files: Sequence[Path]
    top: int | None = None
    devices: int | None = None


def split_words(words: Sequence[str], files: Sequence[Path]) -> tuple[list[str], list[Path]]:
    """The overrides, and all files: `--layouts a.yaml b.yaml` gives the option the first, and words the rest.

    A word without `=` is a file then. Without --layouts it stays a word, and is refused as an override.
    """
    more = [Path(word) for word in words if "=" not in word] if files else []
    return [word for word in words if "=" in word or not files], [*files, *more]


def entries_of(asked: Asked, foresight: Foresight, report: ShowProgress = silent) -> list[Entry]:
    """The files' layouts, then the planner's.

    Raises ConfigError for a mistake in a file, where the search does, and where nothing is asked for.
    """
    if asked.devices is not None and asked.top is None:
        raise ConfigError.of(
            "--devices", asked.devices, "says what to plan for, and nothing is planned", "with --top K"
        )
    if not asked.files and asked.top is None:
        raise ConfigError.of("--layouts", "none", "leaves nothing to compare", "--layouts FILE ..., or --top K")
    entries = from_files(asked.run, asked.words, asked.files) if asked.files else []
    if asked.top is None:
        return entries
    devices = asked.devices or torch.cuda.device_count() or usable_cores()
    config = load_free(asked.run, asked.words)
    return told_apart([*entries, *foresight.best(config, devices, asked.top, fixed_fields(asked.words), report)])
