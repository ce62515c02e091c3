"""A paper as data: papers/NAME.yaml says on which cluster and with which run it was measured; csv files hold its
tables.

| key           | what it says                                                                          |
|---------------|---------------------------------------------------------------------------------------|
| title, source | what it is                                                                            |
| cluster       | a name of meshwright/configs/clusters                                                 |
| fitted        | laid over that cluster's file, where the paper's programs go at another pace than ours |
| software      | a preset of meshwright/configs/software.yaml, where it is not as our own runs'        |
| run           | the run that all its rows share                                                       |
| tables        | csv files beside it; lines that begin with # say where the numbers come from          |
| assumed       | what the paper does not say and we took, a sentence each                              |
| limit         | the mean error that docs/validation.md admits, which a test holds                     |
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config import Config, parse_config
from meshwright.config.load import read_yaml
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.software import OWN_SOFTWARE, Software, load_program

PAPERS = Path(__file__).resolve().parent / "papers"

Line = Mapping[str, str]
"""A line of a table: column -> text."""


@dataclass(frozen=True)
class Paper:
    """See the module. `tables`: by the file's name without its ending; `has_fit`: whether there is a fitted cluster."""

    name: str
    title: str
    source: str
    cluster: Cluster
    software: Software
    run: dict[str, Any]
    tables: dict[str, tuple[Line, ...]]
    assumed: tuple[str, ...]
    limit: float
    has_fit: bool

    def planner(self, **software: Any) -> Planner:
        """A planner for the paper's programs on its cluster. `software`: fields that are not as in the paper's file."""
        return Planner(self.cluster, self.software.model_copy(update=software))

    def config(self, changes: Mapping[str, Any]) -> Config:
        """The paper's run with these sections over its own. Raises ConfigError where that is no legal run."""
        return parse_config(merged(self.run, changes))


def load_paper(name: str, *, fitted: bool = True) -> Paper:
    """By its file's name. `fitted`: on the cluster as the paper's programs found it, where the file tells of that."""
    tree = read_yaml(PAPERS / f"{name}.yaml")
    tables = {Path(file).stem: read_table(PAPERS / file) for file in tree.pop("tables")}
    cluster, changes, assumed = load_cluster(tree.pop("cluster")), tree.pop("fitted", {}), tuple(tree.pop("assumed"))
    software = load_program(tree.pop("software")).software if "software" in tree else OWN_SOFTWARE
    if fitted:
        cluster = Cluster.model_validate(merged(cluster.model_dump(by_alias=True), changes))
    return Paper(
        name=name, cluster=cluster, software=software, tables=tables, assumed=assumed, has_fit=bool(changes), **tree
    )


def read_table(path: Path) -> tuple[Line, ...]:
    """The lines of a csv file, without its comments."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(line for line in file if not line.startswith("#")))


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with another one laid over it; sections are merged, other values replaced."""
    result = deepcopy(dict(tree))
    for key, value in changes.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result
