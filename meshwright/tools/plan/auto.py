"""`layout: auto` in a run file: the planner decides, when the command begins.

| what           | from                                                                                     |
|----------------|------------------------------------------------------------------------------------------|
| the cluster    | `plan: {cluster: NAME or FILE}`; without it cluster.yaml, which `calibrate` has written  |
| the devices    | the launcher's ranks (torchrun, srun, mpirun); `plan: {devices: N}`; GPUs here, or cores |
| ranks per node | those that start here                                                                    |

What a `key=value` word sets stays. Every rank plans for itself, and all find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.config import Config, parse_run
from meshwright.config.load import DECIDED, RunTree
from meshwright.data.files import ShowProgress, silent
from meshwright.decisions import this_machine
from meshwright.errors import ConfigError
from meshwright.section import with_field
from meshwright.tools.plan.cluster import CALIBRATED, cluster_names, load_cluster
from meshwright.tools.plan.search import search
from meshwright.tools.plan.space import fixed_fields

_KEYS = ("cluster", "devices")


def planned_config(run: RunTree, overrides: Sequence[str] = (), report: ShowProgress = silent) -> Config:
    """The run with the fastest layout that fits. Raises ConfigError as parse_run and search do."""
    asked = _asked(run.plan)
    config = parse_run(run.tree, overrides, undecided=DECIDED)
    machine = this_machine()
    cores = machine.gpus if config.device != "cpu" and machine.gpus else machine.cores
    # A launcher's ranks are there; their number is no choice any more.
    devices = machine.world_size if machine.joined else asked.get("devices") or cores
    config = with_field(config, "layout.ranks_per_node", machine.ranks_here(devices))
    name = asked.get("cluster")
    if not name and not CALIBRATED.is_file():
        rule = "says nothing of where to run: layout: auto asks for plan: {cluster: ...}, or for cluster.yaml here"
        valid = f"meshwright calibrate (writes {CALIBRATED}), or {', '.join(cluster_names())}"
        raise ConfigError.of("plan.cluster", "none", rule, valid)
    cluster = load_cluster(name or str(CALIBRATED))
    # The launcher has placed the ranks already: no layout may assume other nodes.
    fixed = fixed_fields(overrides) | {"layout.ranks_per_node"}
    return search(config, cluster, devices, 1, fixed=fixed, report=report).predictions[0].config


def _asked(section: Any) -> dict[str, Any]:
    """The `plan` section, checked."""
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
