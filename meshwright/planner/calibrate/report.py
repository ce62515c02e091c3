"""A calibrated cluster as a file, as tables for a terminal, and as plain values for a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from rich.table import Column, Table

from meshwright.output.tables import print_table
from meshwright.output.terminal import table_console
from meshwright.planner.plan.cluster import Cluster, Links, interpolated
from meshwright.ranks.errors import ConfigError

_COLUMNS = 4
"""Largest number of measured payloads in a table."""


@contextmanager
def writer_of(out: Path) -> Iterator[Callable[[Cluster], None]]:
    """Yield a function that writes the file atomically. Raises ConfigError at once if the file cannot be written."""
    valid = "a .yaml file in a folder that you may write to"
    if out.suffix not in (".yaml", ".yml") or out.is_dir():
        raise ConfigError.of("--out", out, "is no name of a YAML file", valid)
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Checked before the calibration, which takes minutes.
        partial.touch()
    except OSError as error:
        raise ConfigError.of("--out", out, f"cannot be written ({error.strerror})", valid) from error

    def write(cluster: Cluster) -> None:
        tree = cluster.model_dump(exclude_none=True, by_alias=True)
        text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
        partial.write_text(text, encoding="utf-8")
        partial.rename(out)

    try:
        yield write
    finally:
        partial.unlink(missing_ok=True)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes a curve on one line."""


_Dumper.add_representer(
    tuple,
    lambda dumper, values: dumper.represent_sequence(
        # Points and curves consist of floats and tuples; a level's links are mappings, written on separate lines.
        "tag:yaml.org,2002:seq", values, flow_style=all(type(value) in (tuple, float) for value in values)
    ),
)  # fmt: skip


def as_dict(cluster: Cluster, out: Path) -> dict[str, object]:
    """Return the cluster for `--json`."""
    return {"out": str(out), "cluster": cluster.model_dump(mode="json", by_alias=True)}


def render(cluster: Cluster, out: Path) -> None:
    """Print the device, and the verbs of each backend."""
    console = table_console()
    device = cluster.device
    peaks = ", ".join(f"{dtype} {rate / 1e9:,.1f}" for dtype, rate in device.peak_flops_per_second.items())
    curve = ", ".join(f"{side:.0f}: {share:.0%}" for side, share in device.efficiency)
    host, disk = device.host_link_bytes_per_second, device.disk_bytes_per_second
    streams = ", ".join(f"{_size(size)}: {rate / 1e9:.1f}" for size, rate in device.bandwidth_bytes_per_second)
    elements = ", ".join(
        f"{kernel_kind} {seconds * 1e9:.2f}" for kernel_kind, seconds in device.seconds_per_element.items()
    )
    shares = device.attention_efficiency or ()
    attention = ", ".join(f"{share:.0%}" for _, share in shares) or "none fused"
    for line in (
        f"{cluster.devices_per_node} devices ({device.kind}), {device.memory_bytes / 2**30:.1f} GiB each",
        f"Gflop/s: {peaks}; of it by the side of a product: {curve}; a fused attention: {attention}",
        f"GB/s by the bytes of a kernel: {streams}; host {host / 1e9:.1f}, disk {disk / 1e9:.2f}",
        f"launch {device.launch_seconds * 1e6:.2f} us; ns an element: {elements}",
    ):
        console.print(line)
    for backend, links in cluster.links.items():
        if links.measured:
            print_table(console, _table(backend, links))
    console.print(f"{out}: plan with --cluster {out}")


def _table(backend: str, links: Links) -> Table:
    level = links.levels[0]
    rate = level.bandwidth_bytes_per_second / 1e9
    title = f"{backend}: {level.latency_seconds * 1e6:,.0f} us + bytes / {rate:.2f} GB/s; "
    title += f"{links.overlaps:.0%} of a sum is hidden under computation"
    payloads = [size for size, _ in links.measured[0].points]
    # Every k-th payload, so that four columns cover small and large payloads.
    shown = payloads[:: -(-len(payloads) // _COLUMNS)]
    table = Table("verb", "ranks", *(Column(f"{_size(size)}, us", justify="right") for size in shown), title=title)
    for row in links.measured:
        times = (f"{interpolated(row.points, size, power=True) * 1e6:,.0f}" for size in shown)
        table.add_row(row.verb, str(row.ranks), *times)
    return table


def _size(num_bytes: float) -> str:
    """Format a size as `64 KiB`."""
    value, units = num_bytes, ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}"
