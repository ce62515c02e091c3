"""`layout: auto` in a run file: the planner decides, when the command begins.

| what           | from                                                                                     |
|----------------|------------------------------------------------------------------------------------------|
| the cluster    | `plan: {cluster: NAME or FILE}`; without it cluster.yaml, which `calibrate` has written  |
| the devices    | the launcher's ranks (torchrun, srun, mpirun); `plan: {devices: N}`; GPUs here, or cores |
| ranks per node | those that start here                                                                    |

What a `key=value` word sets stays. Every rank plans for itself, and all find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from meshwright.config import Config, load_config, parse_run
from meshwright.config.load import read_yaml
from meshwright.data.progress import ShowProgress as Report
from meshwright.data.progress import silent
from meshwright.errors import ConfigError
from meshwright.machine import usable_cores
from meshwright.tools.plan.cluster import CALIBRATED

AUTO = "auto"
KEYS = ("cluster", "devices")
DECIDED = ("layout", "batch.micro", "memory")
"""What the planner decides, so that a run file cannot know what of it will have an effect."""

Bar = Callable[[], AbstractContextManager[Report]]


def load_run(path: Path, overrides: Sequence[str] = (), bar: Bar = lambda: nullcontext(silent)) -> Config:
    """load_config, of which `layout: auto` has become a layout. `bar`: gives what a search reports to, while it lasts.

    Raises ConfigError as load_config and search do.
    """
    tree = read_yaml(path)
    if tree.get("layout") != AUTO:
        return load_config(path, overrides)
    del tree["layout"]
    asked = _asked(tree.pop("plan", {}))
    config = parse_run(tree, overrides, undecided=DECIDED)
    from meshwright.environment import read_environment
    from meshwright.launch import joined
    from meshwright.tools.plan.cluster import load_cluster
    from meshwright.tools.plan.search import search
    from meshwright.tools.plan.space import fixed_fields

    environment = read_environment()
    devices = environment.world_size if joined() else asked.get("devices") or _devices_here(config)
    here = environment.local_world_size if joined() else devices
    layout = config.layout.model_copy(update={"ranks_per_node": here})
    fixed = fixed_fields(overrides) | {"layout.ranks_per_node"}
    cluster = load_cluster(asked.get("cluster") or _calibrated())
    config = config.model_copy(update={"layout": layout})
    with bar() as report:
        found = search(config, cluster, devices, 1, fixed=fixed, report=report)
    return found.predictions[0].config


def free_tree(path: Path) -> dict[str, Any]:
    """A run file's keys, for who looks for layouts itself: `layout: auto` says nothing to it."""
    tree = read_yaml(path)
    if tree.get("layout") == AUTO:
        del tree["layout"]
        tree.pop("plan", None)
    return tree


def load_free(path: Path, overrides: Sequence[str] = ()) -> Config:
    """load_config of a free tree."""
    return parse_run(free_tree(path), overrides, undecided=DECIDED)


def _asked(section: Any) -> dict[str, Any]:
    """The `plan` section."""
    if not isinstance(section, dict):
        raise ConfigError.of("plan", section, "is no section", "{cluster: NAME or FILE, devices: N}")
    for key, value in section.items():
        if key not in KEYS:
            raise ConfigError.of(f"plan.{key}", value, "is an unknown key", ", ".join(KEYS))
    devices = section.get("devices", 1)
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigError.of("plan.devices", devices, "is not a whole number", "a whole number >= 1")
    if not isinstance(section.get("cluster", ""), str):
        raise ConfigError.of("plan.cluster", section["cluster"], "is no text", "a cluster's name or file")
    return section


def _calibrated() -> str:
    from meshwright.tools.plan.cluster import cluster_names

    if not CALIBRATED.is_file():
        rule = "says nothing of where to run: layout: auto asks for plan: {cluster: ...}, or for cluster.yaml here"
        valid = f"meshwright calibrate (writes {CALIBRATED}), or {', '.join(cluster_names())}"
        raise ConfigError.of("plan.cluster", "none", rule, valid)
    return str(CALIBRATED)


def _devices_here(config: Config) -> int:
    """GPUs, where the run would use them; else cores."""
    import torch

    if config.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return usable_cores()
