"""Runs from a program: the commands as functions, on configs instead of files (docs/api.md).

Every function raises `ConfigError` for a mistake before any process starts, `LaunchError` if a rank dies, and
`Interrupted` if a user stops the run. All three are `MeshwrightError`s. Only `train` prints.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import Config, parse_config, parse_run
from meshwright.config.load import read_run, run_tree
from meshwright.training import decisions

if TYPE_CHECKING:
    from meshwright.planner.plan.search import SearchResult
    from meshwright.tools.compare.result import Comparison
    from meshwright.tools.verify.job import Verdict
    from meshwright.training.follow import Each
    from meshwright.training.parts import Parts


def load(run: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Read and check a run. `layout: auto` asks the planner, as the command does.

    Args:
        run: a run file, the name of a shipped run, or a dict of fields.
        overrides: `key=value` words on top of the run.

    Raises:
        ConfigError: with all mistakes at once.
    """
    if isinstance(run, Mapping):
        file, parse = run_tree(dict(run), overrides), parse_config
    else:
        file, parse = read_run(Path(run), overrides), parse_run
    if not file.auto:
        return parse(file.tree, file.words)
    # Imported here: the planner and torch take seconds, and most calls need neither.
    from meshwright.planner.plan.question import planned_config

    return planned_config(file, file.words)


def resolve(config: Config) -> Config:
    """Replace every `auto` by the value that this machine runs with. `train` and the others do so themselves."""
    return decisions.resolve(config, decisions.this_machine()).config


def train(config: Config, out: str | Path, *, resume: bool = False, each: Each | None = None) -> Path:
    """Run the config on local ranks and write the run to a folder.

    Args:
        out: the folder of the run; also returned.
        resume: continue from the newest checkpoint in `out`.
        each: called in a thread of this process with the numbers of every step, in the form of `history`. A true
            answer ends the run a step or two later, with a checkpoint. An exception ends the run and is raised here.
    """
    from meshwright.training.job import train as run_training

    run_training(config, Path(out), resume=resume, each=each)
    return Path(out)


def history(out: str | Path) -> list[dict[str, Any]]:
    """Read the numbers of every step from a run's folder: one dict a step, with the keys of metrics.jsonl.

    The run may still be training. Raises DataError if the folder has no metrics.jsonl, or a damaged one.
    """
    from meshwright.training.follow import METRICS, read_history

    return read_history(Path(out) / METRICS)


def verify(config: Config, *, steps: int = 5, as_configured: bool = False) -> Verdict:
    """Compare `steps` steps of the layout with plain torch on one device, in float64 unless `as_configured`.

    The verdict has the result in `holds` and all comparisons in `rows`; `check()` raises an error for a difference.
    """
    from meshwright.tools.verify.job import verify as run_verification

    return run_verification(config, steps=steps, as_configured=as_configured)


def plan(
    config: Config, cluster: str, devices: int | None = None, *, top: int = 5, fixed: Collection[str] = ()
) -> SearchResult:
    """Find the fastest layouts of a run that fit on a cluster: `predictions`, the fastest first.

    Args:
        cluster: the name of a shipped cluster, or a cluster file.
        devices: number of devices; by default the number of ranks of the config's layout.
        top: number of layouts to return.
        fixed: fields that keep the config's values.
    """
    from meshwright.planner.plan.cluster import load_cluster
    from meshwright.planner.plan.search import search

    return search(config, load_cluster(cluster), devices or config.layout.world_size, top, fixed=fixed)


def compare(
    layouts: Mapping[str, Config], out: str | Path, *, steps: int = 6, rounds: int = 1, cluster: str | None = None
) -> Comparison:
    """Run configs of one task on this machine in turns, and write a page on the comparison to the new folder `out`.

    Args:
        layouts: configs by the names that the page shows.
        steps: number of steps of each run.
        rounds: number of runs of each config.
        cluster: the cluster for predictions of step times; by default cluster.yaml of the current folder, if any.

    Raises:
        ConfigError: if the configs differ in more than their layouts.
    """
    from meshwright.tools.compare.job import Order, cluster_of
    from meshwright.tools.compare.job import compare_layouts as run_comparison
    from meshwright.tools.compare.layouts import from_configs

    return run_comparison(from_configs(layouts), Order(Path(out).name, Path(out), steps, rounds), cluster_of(cluster))


def save(parts: Parts, folder: str | Path, step: int, *, samples: int = 0) -> Path:
    """Write the state of all ranks as the checkpoint `folder`/step-N and return its path. Collective over the world.

    Args:
        parts: this rank's parts of the run.
        step: N, the number of the step.
        samples: number of samples that the run has read, stored for a resumed run.

    Raises:
        CheckpointError: if the checkpoint cannot be written.
    """
    from meshwright.training.checkpoint import CheckpointWriter, pieces_of
    from meshwright.training.checkpoint.manifest import Origin
    from meshwright.training.checkpoint.restore import progress_of

    origin = Origin(parts.config.model_dump(mode="json", by_alias=True))
    writer = CheckpointWriter(Path(folder), parts.mesh, sys.maxsize, origin, {})
    writer.save(progress_of(parts, step, samples), pieces_of(parts))
    writer.wait()
    return Path(folder) / f"step-{step}"
