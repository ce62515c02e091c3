"""Findings as tables for a terminal and as plain values for a script."""

from __future__ import annotations

import re

from rich.table import Column, Table

from meshwright.output.tables import print_table
from meshwright.output.terminal import table_console
from meshwright.tools.branches.findings import Bound, Findings, RegionGroup, unnumbered

_FIRST_NUMBER = re.compile(r"\d+")


def as_dict(findings: Findings) -> dict[str, object]:
    """Return the findings for `--json`. Flops are counted for one forward pass of a microbatch."""
    return {
        "samples": findings.rows,
        "flops": findings.total_flops,
        "longest_chain_flops": findings.longest_flops,
        "residuals": findings.lone,
        "regions": [_group_dict(findings, group) for group in findings.groups],
        "layouts": {value: _bounds_dict(bounds) for value, bounds in findings.layouts.items()},
    }


def _group_dict(findings: Findings, group: RegionGroup) -> dict[str, object]:
    region = group.region
    alike = region.form != "split/join"
    return {
        "form": region.form,
        "places": list(group.places),
        "enter": region.enter,
        "leave": region.leave,
        "num_branches": len(region.flops),
        "branches": list(region.names),
        "flops": region.flops[0] if alike else list(region.flops),
        "share": group.total_flops / findings.total_flops,
        "branch": list(group.cut_by),
        "bounds": _bounds_dict(group.bounds),
    }


def _bounds_dict(bounds: dict[int, Bound]) -> dict[str, dict[str, float]]:
    return {str(size): {"all": of.all_ranks, "one": of.one_subgrid} for size, of in bounds.items()}


def render(findings: Findings) -> None:
    """Print the regions and the layouts as tables, and the number of residual joins, which are not listed."""
    console = table_console()
    console.print(
        f"{flops_text(findings.total_flops)} FLOP: a microbatch of {findings.rows} forward, without layout; "
        "products count 2 a multiplication, other operators 1 an element"
    )
    print_table(console, _regions(findings))
    gain = findings.total_flops / findings.longest_flops
    console.print(
        f"Not listed: {findings.lone} joins of a value with what one branch alone makes of it (residuals). The longest "
        f"chain of operators has {1 / gain:.1%} of the work: whole operators side by side gain {gain:.2f}x at most."
    )
    if findings.layouts:
        print_table(console, _layouts(findings))
    console.print(
        "Bounds: against one rank, as if sending took no time; assigned by cost, also where the sub-grids do not "
        "divide the branches and a layout would be refused."
    )


def _regions(findings: Findings) -> Table:
    """Build the table with one row for each group of regions."""
    sizes = " ".join(f"{size:>4}" for size in findings.groups[0].bounds) if findings.groups else ""
    table = Table(
        Column("where", overflow="fold"),
        "enter, leave",
        Column("branches", overflow="fold"),
        Column("FLOP each", justify="right"),
        Column("of model", justify="right"),
        "branch:",
        f"all ranks\n{sizes}",
        f"one\n{sizes}",
        title="Branches (bounds by sub-grids, of these regions alone: common layers on all ranks, or on one sub-grid)",
    )
    for group in findings.groups:
        region = group.region
        if region.form == "split/join":  # one line a branch, without the layer numbers
            each = region.flops
            names = [name if len(group.places) == 1 else unnumbered(name) for name in region.names]
        else:  # equal heads or columns are one line
            each, names = region.flops[:1], [f"{len(region.flops):,} {region.form}"]
        table.add_row(
            place_text(group.places),
            f"{region.enter}, {region.leave}",
            "\n".join(names),
            "\n".join(map(flops_text, each)),
            f"{group.total_flops / findings.total_flops:.1%}",
            ", ".join(group.cut_by) or "-",
            *_bounds_texts(group.bounds),
        )
    return table


def _layouts(findings: Findings) -> Table:
    """Build the table with one row for each value of layout.tensor.branch."""
    sizes = " ".join(f"{size:>4}" for size in next(iter(findings.layouts.values())))
    table = Table(
        "branch:",
        Column("assigned", justify="right"),
        f"common: all\n{sizes}",
        f"common: one\n{sizes}",
        title="layout.tensor: {kind: subgraph, size: g}: bounds for the whole model",
    )
    for value, bounds in findings.layouts.items():
        assigned = sum(group.total_flops for group in findings.groups if value in group.cut_by)
        table.add_row(value, f"{assigned / findings.total_flops:.1%}", *_bounds_texts(bounds))
    return table


def _bounds_texts(bounds: dict[int, Bound]) -> tuple[str, str]:
    """Return `1.98 3.90 7.52` twice: with common layers on all ranks, and on one sub-grid."""
    everyone = " ".join(f"{of.all_ranks:4.2f}" for of in bounds.values())
    return everyone, " ".join(f"{of.one_subgrid:4.2f}" for of in bounds.values())


def place_text(places: tuple[str, ...]) -> str:
    """Abbreviate blocks.0.attention, blocks.1.attention as `blocks.0-1.attention`; `-` is the model itself."""
    numbers = [int(match[0]) for match in map(_FIRST_NUMBER.search, places) if match]
    # Paths without a layer number are not abbreviated.
    if len(places) == 1 or len(numbers) < len(places):
        return places[0] or "-"
    runs: list[list[int]] = []
    for layer in sorted(set(numbers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return _FIRST_NUMBER.sub(shown, places[0], count=1)


def flops_text(flops: float) -> str:
    """Format flops as `1.53 G`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.2f} {unit}"
    return f"{flops:.0f}"
