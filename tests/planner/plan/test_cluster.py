"""Shipped cluster files are complete, and a mistaken file gets one message with all mistakes by field."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.configs import shipped
from meshwright.planner.plan.answer import sureness
from meshwright.planner.plan.cluster import Cluster, interpolated, load_cluster
from meshwright.planner.plan.cluster_topic import SECTIONS, cluster_topic
from meshwright.planner.plan.network import ClusterNetwork
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import VERBS
from meshwright.ranks.transports import TRANSPORTS

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
    """Return the lines of the message about the good file with these replacements."""
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
            "device.elements.dear=dear is an unknown key; valid: special, random, mixed, strided",
            "devices_per_node=0 is less than 1; valid: a whole number >= 1",
            "core=2 is an unknown key (did you mean cores?); "
            "valid: name, source, checked, device, devices_per_node, host_memory, cores, turns, links",
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
    links = "a section with the keys levels, measured, overlaps, tax, channels, reserved"
    name, device, torch, mpi = str(caught.value).split("\n")
    assert name == "name=3 is not a text; valid: a text"
    assert device.startswith(
        "device is missing; valid: a section with the keys kind, capability, like, memory, reserved, workspaces,"
    )
    assert torch == f"links.torch=3 is not a section; valid: {links}"
    assert mpi == f"links.mpi.levels.0=1 is not a section; valid: {level}"


def test_unknown_cluster_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"--cluster=frontier is no cluster that we have.*valid: .*summit"):
        load_cluster("frontier")


LIMITED_BY_POWER = ("dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72")
"""Clusters with devices that need more power than available for a sequence of the largest products."""


@pytest.mark.parametrize("name", shipped("clusters"))
def test_shipped_clusters(name: str) -> None:
    """A cluster has the file's name, and sources; a node is a unit of some level. On GPUs larger products reach more of
    the peak, until power limits the largest. A CPU, as measured, reaches most at some size and less at smaller sizes,
    and has less bandwidth outside of caches."""
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


SHEET = """
device: {kind: cuda, memory: 48e9, bandwidth: 864e9, peak: {bf16: 362e12, float32: 91.6e12, fp8: 733e12}}
devices_per_node: 4
links: {torch: {levels: [{joins: 4, bandwidth: 20e9}, {bandwidth: 23e9}]}}
"""


def of_text(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_cluster(str(path))


def test_a_data_sheet_s_numbers_are_a_cluster_file(tmp_path: Path) -> None:
    """A data sheet's curves are a device's of the same class, with sides of products scaled by the cube root of the
    peaks' ratio."""
    cluster, lender = of_text(tmp_path, SHEET), load_cluster("dgx-h100")
    device = cluster.device
    assert (cluster.name, device.like, device.memory_bytes) == ("mine", "dgx-h100", 48 * 10**9)
    ratio = 362e12 / 9.89e14
    assert [share for _, share in device.efficiency] == [share for _, share in lender.device.efficiency]
    assert device.efficiency[-1][0] == pytest.approx(8192 * ratio ** (1 / 3))
    assert device.bandwidth_bytes_per_second[-1][1] == pytest.approx(0.87 * 864e9)
    assert device.bandwidth_bytes_per_second[-1][0] / device.bandwidth_bytes_per_second[0][0] == pytest.approx(1000)
    assert [level.latency_seconds for level in cluster.links["torch"].levels] == [3e-6, 8e-6]
    assert "curves and figures that it leaves out: dgx-h100" in cluster.source
    said = sureness(cluster, 4096)
    assert "dgx-h100's device (predictions for it were met to 14%), scaled to its peaks" in said


@pytest.mark.parametrize(
    "peak, kind, like",
    [
        ("{bf16: 2e15, mxfp8: 4e15}", "cuda", "dgx-b200"), ("{bf16: 3e14, fp8: 6e14}", "cuda", "dgx-h100"),
        ("{bf16: 7e13}", "cuda", "dgx-a100"), ("{fp16: 6e13}", "cuda", "summit"),
        ("{float32: 1e11}", "cpu", "two-cores"),
    ],
)  # fmt: skip
def test_the_class_of_a_device_lends_its_curves(peak: str, kind: str, like: str, tmp_path: Path) -> None:
    text = SHEET.replace("{bf16: 362e12, float32: 91.6e12, fp8: 733e12}", peak).replace("kind: cuda", f"kind: {kind}")
    assert of_text(tmp_path, text).device.like == like
    named = text.replace(f"kind: {kind}", f"kind: {kind}, like: mi300x")
    assert of_text(tmp_path, named).device.like == "mi300x"


def test_a_share_stands_for_a_curve_and_own_curves_stay(tmp_path: Path) -> None:
    half = of_text(tmp_path, SHEET.replace("kind: cuda", "kind: cuda, efficiency: 0.5")).device
    assert interpolated(half.efficiency, 100) == interpolated(half.efficiency, 1e5) == 0.5
    assert half.like == "dgx-h100"  # the bandwidth is a data sheet's still
    assert of_text(tmp_path, GOOD).device.like is None
    assert of_text(tmp_path, GOOD).source == ""


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("kind: cuda", "kind: cuda, like: l400", r"device\.like=l400 is no cluster that we have; valid: .*l40s"),
        ("bandwidth: 864e9", "bandwidth: fast", r"device\.bandwidth"),
        ("bandwidth: 864e9", "bandwidth: -1", r"device\.bandwidth"),
        ("memory: 48e9", "memory: much", r"device\.memory=much"),
        ("bf16: 362e12", "bf16: quick", r"device\.peak"),
        ("kind: cuda", "kind: gpu", r"device\.kind=gpu"),
        ("bandwidth: 23e9", "bandwidth: 23e9, speed: 3", r"speed=3 is an unknown key"),
        ("devices_per_node: 4", "", r"devices_per_node is missing"),
    ],
)  # fmt: skip
def test_mistakes_in_a_data_sheet_are_told_by_field(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in SHEET
    with pytest.raises(ConfigError, match=said):
        of_text(tmp_path, SHEET.replace(old, new, 1))


SHEETS = {
    "l40s": (362e12, 864e9, 48e9), "a10g": (70e12, 600e9, 24e9), "rtx-4090": (165.2e12, 1008e9, 24e9),
    "h100-pcie": (756.5e12, 2000e9, 80e9), "h100-nvl": (835.5e12, 3900e9, 94e9),
    "rtx-pro-6000": (503.8e12, 1597e9, 96e9), "g5.48xlarge": (70e12, 600e9, 24e9),
    "g6.48xlarge": (121e12, 300e9, 24e9), "g6e.48xlarge": (362e12, 864e9, 48e9),
    "p5.48xlarge": (989e12, 3350e9, 80e9), "a3-highgpu-8g": (989e12, 3350e9, 80e9),
    "a3-megagpu-8g": (989e12, 3350e9, 80e9), "nd-h100-v5": (989e12, 3350e9, 80e9),
    "p4d.24xlarge": (312e12, 1555e9, 40e9), "nd-a100-v4": (312e12, 1555e9, 40e9),
}  # fmt: skip
"""Dense bf16 operations a second, bytes a second and bytes of memory, from the data sheets."""


@pytest.mark.parametrize("name", SHEETS)
def test_shipped_devices_are_their_data_sheets(name: str) -> None:
    device = load_cluster(name).device
    flops, rate, memory = SHEETS[name]
    assert device.peak_flops_per_second["bf16"] == flops
    assert device.bandwidth_bytes_per_second[-1][1] == pytest.approx(0.87 * rate, rel=0.02)
    # A sheet's GB is between 1e9 bytes and nvidia-smi's figure, less the driver's memory.
    assert memory * 0.99 <= device.memory_bytes <= memory * 1.08


INSTANCES = {
    "p5.48xlarge": 400e9, "p4d.24xlarge": 50e9, "g5.48xlarge": 12.5e9, "g6.48xlarge": 12.5e9, "g6e.48xlarge": 50e9,
    "a3-highgpu-8g": 100e9, "a3-megagpu-8g": 200e9, "nd-h100-v5": 400e9, "nd-a100-v4": 200e9,
}  # fmt: skip
"""Bytes a second out of a node, from the clouds' pages."""


@pytest.mark.parametrize("name", INSTANCES)
def test_cloud_instances_have_their_networks(name: str) -> None:
    cluster = load_cluster(name)
    outer = cluster.links["torch"].levels[-1]
    assert cluster.devices_per_node == 8
    assert 0.79 <= outer.bandwidth_bytes_per_second / INSTANCES[name] <= 0.93


def test_config_lists_the_fields_of_a_cluster_file() -> None:
    done = CliRunner().invoke(app, ["config", "cluster"])
    assert done.exit_code == 0
    for section in SECTIONS.values():
        for key, field in section.model_fields.items():
            assert field.alias or key in done.stdout
    fields = [facts for path in SECTIONS for facts in cluster_topic(path).sections[0].fields]
    assert all(facts.meaning for facts in fields), [facts.name for facts in fields if not facts.meaning]
    (bandwidth,) = cluster_topic("cluster.device.bandwidth").fields
    assert bandwidth.valid == "a number or a list of points [x, y]"
    with pytest.raises(ConfigError, match=r"cluster\.bandwidth is no field.*valid: cluster\.device\.bandwidth, "):
        cluster_topic("cluster.bandwidth")
    assert json.loads(CliRunner().invoke(app, ["config", "cluster", "--json"]).stdout)["sections"]
