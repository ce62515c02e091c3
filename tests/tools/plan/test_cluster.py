"""Cluster files: those that ship hold what a cluster must, and a mistaken one is told all its mistakes by field."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.configs import shipped
from meshwright.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import VERBS
from meshwright.ranks.transports_section import TRANSPORTS
from meshwright.tools.plan.cluster import Cluster, interpolated, load_cluster
from meshwright.tools.plan.network import ClusterNetwork

GOOD = """
name: mine
device:
  kind: cuda
  memory: 16G
  peak: {float32: 1.0e+13}
  efficiency: [[64, 0.1], [1024, 0.5]]
  bandwidth: [[1.0e+6, 1.0e+12]]
  host_link: 1.0e+10
devices_per_node: 4
links:
  torch:
    levels: [{joins: 4, latency: 1.0e-6, bandwidth: 1.0e+11}, {latency: 1.0e-5, bandwidth: 1.0e+10}]
"""


def mistakes(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """The lines of the message about the good file with these replacements."""
    text = GOOD
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    return str(caught.value).split("\n")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_cluster(str(path)).device.memory_bytes == 16 * 2**30


def test_all_mistakes_by_field(tmp_path: Path) -> None:
    lines = mistakes(
        tmp_path,
        ("kind: cuda", "kind: gpu"),
        ("{float32: 1.0e+13}", "{float32: fast, fp4: 1.0e+14}"),
        ("[1024, 0.5]", "[1024, -1]"),
        ("host_link: 1.0e+10", "elements: {dear: 1}"),
        ("devices_per_node: 4", "devices_per_node: 0\ncore: 2"),
        ("latency: 1.0e-5, bandwidth", "latency: 1.0e-5, bandwith"),
        ("  torch:\n", "  gloo: {}\n  torch:\n    measured: [{verb: all_reduced, ranks: 2, points: 3}]\n"),
    )
    curve = "valid: a list, each a list of 2, each a number > 0"
    level = "joins, latency, bandwidth, device_bandwidth, kind"
    assert sorted(lines) == sorted(
        [
            "device.kind=gpu is none of the choices (did you mean cpu?); valid: cpu, cuda",
            "device.peak.float32=fast is not a number; valid: a number > 0",
            "device.peak.fp4=fp4 is an unknown key (did you mean fp8?); "
            "valid: float32, tf32, float64, bf16, fp16, fp8, mxfp8",
            f"device.efficiency=-1 at index 1, 1 is not above 0; {curve}",
            "device.host_link is missing; valid: a number > 0",
            "device.elements.dear=dear is an unknown key; valid: special, random",
            "devices_per_node=0 is less than 1; valid: a whole number >= 1",
            "core=2 is an unknown key (did you mean cores?); "
            "valid: name, source, checked, device, devices_per_node, cores, turns, links",
            "links.torch.levels.1.bandwidth is missing; valid: a number > 0",
            f"links.torch.levels.1.bandwith=10000000000.0 is an unknown key (did you mean bandwidth?); valid: {level}",
            "links.torch.measured.0.verb=all_reduced is none of the choices (did you mean all_reduce?); "
            f"valid: {', '.join(VERBS)}",
            f"links.torch.measured.0.points=3 is not a list of numbers; {curve}",
            f"links.gloo=gloo is an unknown key; valid: {', '.join(TRANSPORTS)}",
        ]
    )


def test_what_fields_do_not_say_alone(tmp_path: Path) -> None:
    (falling,) = mistakes(tmp_path, ("[64, 0.1]", "[2048, 0.1]"))
    assert falling.startswith("device.efficiency=[[2048, 0.1], [1024, 0.5]] has points whose first numbers do not rise")
    (endless,) = mistakes(tmp_path, ("joins: 4, ", ""))
    assert "has a level before the last that does not say how many units it joins" in endless
    (lonely,) = mistakes(tmp_path, ("bandwidth: 1.0e+10}", "bandwidth: 1.0e+10, kind: mesh}"))
    assert "has a mesh that does not say how many units it joins" in lonely
    (speechless,) = mistakes(tmp_path, ("torch:", "mpi:"))
    assert speechless.startswith("links={mpi: ")
    valid = f"a section with some of the keys {', '.join(TRANSPORTS)}"
    assert speechless.endswith(f"has no torch, which can carry every run; valid: {valid}")
    (empty,) = mistakes(tmp_path, ("[[64, 0.1], [1024, 0.5]]", "[]"))
    assert empty.startswith("device.efficiency=[] has too few items; valid: a list")


def test_sections_that_are_missing_or_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: 3\ndevices_per_node: 1\nlinks: {torch: 3, mpi: {levels: [1, {latency: 0, bandwidth: 1}]}}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    level = "a section with the keys joins, latency, bandwidth, device_bandwidth, kind"
    links = "a section with the keys levels, measured, overlaps, channels, reserved"
    name, device, torch, mpi = str(caught.value).split("\n")
    assert name == "name=3 is not a text; valid: a text"
    assert device.startswith(
        "device is missing; valid: a section with the keys kind, memory, reserved, workspaces, staged,"
    )
    assert torch == f"links.torch=3 is not a section; valid: {links}"
    assert mpi == f"links.mpi.levels.0=1 is not a section; valid: {level}"


def test_unknown_cluster_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"--cluster=frontier is no cluster that we have.*valid: .*summit"):
        load_cluster("frontier")


LIMITED_BY_POWER = ("dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72")
"""Whose largest products, one after the other, draw more power than there is."""


@pytest.mark.parametrize("name", shipped("clusters"))
def test_shipped_clusters(name: str) -> None:
    """Named as its file, with its sources; a node is a unit of some level. On GPUs bigger products get more of the
    peak, until power limits the largest; a CPU, as measured, gets most at some size, less by any smaller one, and moves
    less outside of its caches."""
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.source
    device = cluster.device
    assert len(device.efficiency) > 2
    assert len(device.bandwidth_bytes_per_second) > 2
    if device.kind == "cpu":
        shares, rates = (
            [value for _, value in curve] for curve in (device.efficiency, device.bandwidth_bytes_per_second)
        )
        best = shares.index(max(shares))
        assert best > 0
        assert shares[: best + 1] == sorted(shares[: best + 1])
        assert rates[-1] < max(rates) / 2
    else:
        for curve in (device.efficiency, device.bandwidth_bytes_per_second):
            best = max(value for _, value in curve)
            limited = [value for _, value in curve if name in LIMITED_BY_POWER and value < best]
            rising = curve if not limited else curve[: [value for _, value in curve].index(best) + 1]
            assert all(less <= more for (_, less), (_, more) in pairwise(rising))
            assert all(value > 0.75 * best for _, value in curve[len(rising) :])
    assert interpolated(device.efficiency, 1e5) <= 1
    for backend, links in cluster.links.items():
        sizes = [1]
        for level in links.levels:
            sizes.append(sizes[-1] * (level.joins or 0))
        if links.levels[-1].joins is None and len(links.levels) == 1:
            sizes.append(cluster.devices_per_node)  # one level that joins all: within the node
        assert cluster.devices_per_node in sizes
        grid = Grid((("data", 2), ("tensor", cluster.devices_per_node)))
        network = ClusterNetwork(cluster, backend, grid)
        assert 0 < network.collective("tensor", "all_reduce", 2**20) < network.collective("tensor", "all_reduce", 2**30)


@pytest.mark.parametrize("name", shipped("clusters"))
def test_a_written_cluster_has_the_keys_of_a_file(name: str) -> None:
    cluster = load_cluster(name)
    tree = cluster.model_dump(by_alias=True)
    assert {"memory", "reserved", "launch", "bandwidth", "host_link"} <= tree["device"].keys()
    assert Cluster.model_validate(tree) == cluster
