"""`doctor --nodes` measures the tests' network, and writes the network for the planner."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshwright.configs import shipped
from meshwright.planner.plan.cluster import load_cluster
from tests.nodes.conftest import Nodes
from tests.nodes.launchers import by_hand
from tests.patience import PATIENCE_SECONDS

SECONDS = PATIENCE_SECONDS
RATE = 40e6 / 8
"""Bytes a second of the tests' links."""


def test_nodes_links_and_folders_are_found(nodes: Nodes, tmp_path: Path) -> None:
    network, shared, own = nodes(2, rate="40mbit"), tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    network[1].mount(tmp_path / "nodes", own)
    base, out = tmp_path / "cluster.yaml", tmp_path / "links.yaml"
    shutil.copy(shipped("clusters")["two-cores"], base)
    words = ["-m", "meshwright", "doctor", "--nodes", "--cluster", str(base), "--out", str(out), "--json"]
    started = by_hand(network, [*words, "--folder", str(shared), "--folder", str(own)])
    assert [one.wait(SECONDS) for one in started] == [0, 0], started[0].text
    report = json.loads(started[0].text.splitlines()[-1])
    assert [(rank["host"], rank["interface"], rank["address"]) for rank in report["ranks"]] == [
        ("node0", "eth0", "10.77.0.1"), ("node1", "eth0", "10.77.0.2"),
    ]  # fmt: skip
    assert abs(report["ranks"][1]["clock_seconds"]) < 5
    assert report["folders"] == {str(shared): [], str(own): ["rank 1 on node1"]}
    (pair,) = report["pairs"]
    assert pair["hosts"] == ["node0", "node1"]
    assert RATE / 10 < pair["bandwidth"] < RATE * 1.2
    links = load_cluster(str(out)).links["torch"]
    assert [level.joins for level in links.levels] == [2, None]
    assert links.levels[1].bandwidth_bytes_per_second == pytest.approx(pair["bandwidth"], rel=1e-3)
    assert "{" not in started[1].text, "the first rank alone speaks"
