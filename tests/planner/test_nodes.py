"""Verdicts of `doctor --nodes` from given measurements. On real nodes: tests/nodes/test_doctor.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.planner.nodes import NodePair, NodeRank, NodesReport, render, with_links
from meshwright.planner.plan.cluster import load_cluster
from meshwright.ranks.errors import ConfigError


def report_of(*hosts: str) -> NodesReport:
    """Return a report of two ranks a host; links have 1 ms and 1 GB/s between hosts, 0.1 ms and 10 GB/s within
    hosts."""
    ranks = tuple(NodeRank(2 * i + j, host, "eth0", f"10.0.0.{i}", 0.0) for i, host in enumerate(hosts) for j in (0, 1))
    pairs = [NodePair((2 * i, 2 * i + 1), (host, host), 1e-4, 1e10) for i, host in enumerate(hosts)]
    pairs += [
        NodePair((2 * i, 2 * j), (hosts[i], hosts[j]), 1e-3, 1e9)
        for i in range(len(hosts))
        for j in range(i + 1, len(hosts))
    ]
    return NodesReport("torch", ranks, tuple(pairs), {"/shared": (), "/tmp": ("rank 2 on b",)})


def test_a_cluster_gets_the_links_between_its_nodes() -> None:
    base = load_cluster("two-cores")
    cluster = with_links(base, report_of("a", "b", "c"))
    inner, outer = cluster.links["torch"].levels
    assert (outer.joins, outer.latency_seconds, outer.bandwidth_bytes_per_second) == (None, 1e-3, 1e9)
    assert inner == base.links["torch"].levels[0].model_copy(update={"joins": 2})
    assert {row.ranks for row in cluster.links["torch"].measured} == {2}, "timed within a node: calibrate's"
    assert cluster.links["mpi"] == base.links["mpi"]
    assert cluster.source.endswith("links between a, b, c: meshwright doctor --nodes")


def test_one_host_has_no_links_between_nodes() -> None:
    with pytest.raises(ConfigError, match=r"gets no links between nodes: all ranks are on a; valid: 2 hosts"):
        with_links(load_cluster("two-cores"), report_of("a"))


def test_the_report_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    render(report_of("a", "b"))
    text = capsys.readouterr().out
    assert "within a" in text
    assert "a - b" in text
    assert "/shared: shared by all\n" in text
    assert "/tmp: not shared: rank 2 on b does not see it\n" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--nodes"],
            "--nodes=true measures the nodes of a job, and this process is no rank of any; valid: torchrun|srun",
        ),
        (["--cluster", "x.yaml"], "--cluster=x.yaml has no effect on one machine; valid: leave it out, or add --nodes"),
    ],
)
def test_refused(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)
