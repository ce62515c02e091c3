"""A check of a run before submission: whether the run fits the cluster's devices, and if not, a layout that fits."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.answer import Training, answer
from meshwright.planner.plan.choice import simplest_first
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.kept import KeptRecordings
from meshwright.planner.plan.memory import bytes_text, missing
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.report import words_to_paste
from meshwright.planner.plan.search import layout_text, search
from meshwright.planner.plan.space import ranks_per_node
from meshwright.ranks.errors import ConfigError


@dataclass(frozen=True)
class Gate:
    """The planned figures of a run's own layout.

    Attributes:
        fits: Whether the fullest rank fits its device.
        text: The layout, its seconds and memory, in one sentence.
        remedy: What to change; empty if the run fits.
    """

    fits: bool
    text: str
    remedy: str = ""


def gate_of(config: Config, cluster: Cluster) -> Gate:
    """Plan a run's own layout on a cluster; if this layout does not fit, search for one that does.

    Raises:
        ConfigError: The layout cannot be planned, as Planner.predict.
    """
    devices = config.layout.world_size
    placed = with_field(config, "layout.ranks_per_node", ranks_per_node(cluster, devices))
    models = Estimates(Planner(cluster, kept=KeptRecordings.here()))
    prediction = models.planner.predict(placed)
    models.planner.keep()
    if prediction.fits:
        return Gate(True, answer(prediction, layout_text(prediction.config), Training()))
    memory, device = prediction.fullest, bytes_text(cluster.device.memory_bytes)
    text = f"{layout_text(prediction.config)}: {bytes_text(memory.total)} of {device}: {missing(memory, cluster)}"
    try:
        found = simplest_first(search(config, cluster, devices, 1, models=models)).predictions[0]
    except ConfigError as error:
        return Gate(False, text, f"other devices: {' '.join(str(error).split())}")
    words = words_to_paste(found.config, placed)
    return Gate(False, text, f"{words} ({answer(found, layout_text(found.config), Training())})")


def refuse_unfit(config: Config, cluster: Cluster, anyway: bool) -> str:
    """Return the line on a run's plan, before the run is submitted.

    Args:
        config: The run, with its layout.
        cluster: The cluster that the run is submitted to.
        anyway: Whether a run that does not fit passes, with the line.

    Raises:
        ConfigError: The run does not fit, or cannot be planned.
    """
    try:
        gate = gate_of(config, cluster)
    except ConfigError as error:
        if anyway:
            return f"not planned on {cluster.name}: {' '.join(str(error).split())}"
        raise
    if gate.fits:
        return f"planned on {cluster.name}: {gate.text}"
    if anyway:
        return f"planned on {cluster.name}, does not fit: {gate.text}"
    raise ConfigError.of("layout", gate.text, f"does not fit {cluster.name}", f"{gate.remedy or '-'}, or --anyway")
