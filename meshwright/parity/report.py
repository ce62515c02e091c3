"""Reports of checks: a table in the terminal, a dict for scripts, and an HTML page with modules in forward order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.parity.check import ParityResult
from meshwright.parity.compare import Row
from meshwright.parity.explain import COPY, CUT, PARTIAL, WRONG, Explanation
from meshwright.parity.gradients import owner_of
from meshwright.parity.judge import ModuleLine
from meshwright.parity.remedies import REMEDIES
from meshwright.ranks.streams import say

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_ROWS = 8
KINDS = {"loss": "losses", "gradient": "gradients", "weight": "weights", "state": "states", "buffer": "buffers",
         "copy": "copies", "norm": "norms", "clipped": "clipped gradients"}  # fmt: skip


def as_dict(results: Sequence[ParityResult]) -> dict[str, Any]:
    """Return every check with finding, comparisons and modules, as a dict for JSON."""
    checks = [
        {
            "check": result.check.name,
            "file": str(result.check.file),
            "axes": dict(result.check.axes),
            "precision": result.precision,
            "holds": result.holds,
            "verdict": result.verdict,
            "finding": None if result.finding is None else asdict(result.finding) | {"remedy": result.remedy},
            "losses": result.seen_by_losses,
            "notes": list(result.notes),
            "error": result.error,
            "zero_gradients": list(result.dead),
            "seconds": round(result.seconds, 3),
            "comparisons": [asdict(row) | {"holds": row.holds} for row in result.rows],
            "modules": [asdict(line) for line in result.modules],
        }
        for result in results
    ]
    return {"holds": all(result.holds for result in results), "checks": checks}


def worst_row(rows: Sequence[Row]) -> Row:
    """Return the row with the largest error relative to the allowed error. NaN counts as largest.

    A row with an allowed error of 100 % or more has only rounding, e.g. the gradient of a key's bias, which a softmax
    cancels. Such a row is returned only if there is no other.
    """
    return max(
        rows, key=lambda row: (not row.holds, row.error != row.error, row.allowed < 1, row.error / (row.allowed or 1.0))
    )


def render(results: Sequence[ParityResult]) -> None:
    """Print a table with the worst comparison of each kind per check, then the mistakes with their places.

    A check has two lines, so that the table fits in a terminal of 80 columns.
    """
    # Columns only for kinds that some check compares, so that the table fits 80 columns.
    kinds = {
        quantity: label
        for quantity, label in KINDS.items()
        if any(row.kind == quantity for r in results for row in r.rows)
    }
    cells = [["check", *kinds.values(), ""]]
    for result in results:
        rows = [[row for row in result.rows if row.kind == quantity] for quantity in kinds]
        worst = [worst_row(of_kind) if of_kind else None for of_kind in rows]
        mark = "equal" if result.holds else "no comparison" if result.error else "DIFFERS"
        cells.append([result.check.title, *("-" if w is None else f"{w.error:.0e}" for w in worst), mark])
        allowed = ("" if w is None else f"of {w.allowed:.0e}" for w in worst)
        cells.append([f"  {result.precision}", *allowed, f"{result.seconds:.1f} s"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for result in results:
        if not result.holds:
            say(f"\n{result.check.title}: {result.error or result.verdict}")
            for row in result.failed[:MOST_ROWS]:
                say(f"  {row.kind} of {row.label}: {row.error:.1e} > {row.allowed:.1e}")
            if len(result.failed) > MOST_ROWS:
                say(f"  ... and {len(result.failed) - MOST_ROWS} more (--json lists all)")
            for word, text in (("remedy: ", result.remedy), ("", result.seen_by_losses)):
                if text:
                    say(f"  {word}{text}")
        for note in result.notes:
            say(f"{result.check.title}: {note}")


@dataclass(frozen=True)
class PageHead:
    """The first lines of a page.

    Attributes:
        program: The file of checks, or the two records, by name.
        command: The command line that wrote the page.
        recorded: Whether the page compares two recorded runs, not a program with one process.
    """

    program: str
    command: str
    recorded: bool = False


LEGEND = {
    COPY: ("equal", "each rank has the reference's tensor"),
    CUT: ("a cut", "each rank has a block or slices of the reference's tensor, and all together have the whole"),
    PARTIAL: ("a partial sum over an axis", "the sum of the ranks' tensors over the axis is the reference's"),
    WRONG: ("off by", "none of these: the relative error of the nearest of them"),
}
"""The words in a page's table of modules."""


def write_page(results: Sequence[ParityResult], path: Path, head: PageHead) -> Path:
    """Write one self-contained HTML file."""
    # Imported here, since a check in a terminal needs no templates.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    templates.filters["marks"] = as_marks
    checks = []
    for result in results:
        by_kind = {label: [row for row in result.rows if row.kind == quantity] for quantity, label in KINDS.items()}
        kinds = [
            {"label": label, "count": len(rows), "failed": sum(not r.holds for r in rows), "worst": worst_row(rows)}
            for label, rows in by_kind.items()
            if rows
        ]
        checks.append({"result": result, "modules": folded(_page_lines(result)), "kinds": kinds})
    found = dict.fromkeys(result.finding.kind for result in results if result.finding is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = templates.get_template("page.html").render(
        checks=checks, holds=all(r.holds for r in results), head=head, legend=LEGEND,
        remedies={category: REMEDIES[category] for category in found},
        date=datetime.now().astimezone().strftime("%-d %B %Y, %H:%M %Z"),
    )  # fmt: skip
    path.write_text(page, encoding="utf-8")
    return path


def as_marks(text: str) -> Markup:
    """Return the text as HTML, with words between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def folded(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fold neighbouring blocks with equal lines and without mistakes into one: `blocks.0 to 11`."""
    made: list[dict[str, Any]] = []
    at = 0
    while at < len(lines):
        block = block_at(lines, at)
        last, end = block, at + len(block)
        while end < len(lines) and is_like(block, again := block_at(lines, end)):
            last, end = again, end + len(again)
        if last is block:
            made.append(lines[at])
            at += 1
            continue
        count = (end - at) // len(block)
        match = NUMBERED.fullmatch(last[0]["name"])
        assert match is not None
        head = block[0] | {"name": f"{block[0]['name']} to {match['number']}", "note": f"{count} equal blocks"}
        made += [head, *folded(block[1:])]
        at = end
    return made


NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d+)")


def block_at(lines: Sequence[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    """Return the line of a module and the lines of all modules inside."""
    end = next((n for n in range(at + 1, len(lines)) if lines[n]["depth"] <= lines[at]["depth"]), len(lines))
    return list(lines[at:end])


def is_like(block: Sequence[dict[str, Any]], following: Sequence[dict[str, Any]]) -> bool:
    """Return True if two blocks differ only in the number, and have no mistake."""
    ours, theirs = (NUMBERED.fullmatch(lines[0]["name"]) for lines in (block, following))
    if ours is None or theirs is None or ours["before"] != theirs["before"] or len(block) != len(following):
        return False
    facts = ("depth", "type", "output", "gradient", "parameters", "first")
    names = all(
        line["name"] == following_line["name"] for line, following_line in zip(block[1:], following[1:], strict=True)
    )
    same = all(
        line[fact] == following_line[fact]
        for line, following_line in zip(block, following, strict=True)
        for fact in facts
    )
    right = not any(line["first"] or line["parameters"] or WRONG in (line["output"]["kind"], line["gradient"]["kind"])
                    for line in block)  # fmt: skip
    return names and same and right


def _page_lines(result: ParityResult) -> list[dict[str, Any]]:
    """Return the modules as table rows, parents before children, with the module of the finding marked.

    A finding without a module (data, loss, all parameters) becomes the first row.
    """
    named = None if result.finding is None else result.finding.module
    # Modules with wrong gradients of parameters are marked too, in addition to the finding's module.
    wrong = {owner_of(row.name) for row in result.failed if row.kind == "gradient"}
    lines = {line.name: line for line in reversed(result.modules)}  # of several calls the first
    above = {name: [n for n in lines if n != name and (not n or name.startswith(f"{n}."))] for name in lines}
    rows = [
        {
            "name": name.removeprefix(max(above[name], key=len, default="")).lstrip(".") or "the model",
            "path": name,
            "depth": len(above[name]),
            "type": line.type,
            "output": _words(line.output),
            "gradient": _words(line.gradient),
            "parameters": name in wrong,
            "first": name == named,
            "note": "",
        }
        for name, line in ((name, lines[name]) for name in _parents_first(result.modules))
    ]
    if result.finding is not None and named not in lines:
        head = {"name": result.finding.module.strip("()"), "path": result.finding.module, "depth": 0, "type": "",
                 "note": ""}  # fmt: skip
        said = {"kind": WRONG, "text": result.finding.kind}
        rows.insert(0, {**head, "output": said, "gradient": _words(None), "parameters": False, "first": True})
    return rows


def _parents_first(modules: Sequence[ModuleLine]) -> list[str]:
    """Return names with parents before children; lines are in the order of ending forward passes, parents last."""
    names = list(dict.fromkeys(line.name for line in modules))

    def visit(parent: str) -> list[str]:
        inside = [n for n in names if n != parent and (not parent or n.startswith(f"{parent}."))]
        # Direct children: modules that are in no other module of `inside`.
        children = [n for n in inside if not any(n.startswith(f"{outer}.") for outer in inside)]
        return [x for child in children for x in (child, *visit(child))]

    return [*([""] if "" in names else []), *visit("")]


def _words(explanation: Explanation | None) -> dict[str, str]:
    if explanation is None:
        return {"kind": "none", "text": ""}
    e = explanation
    text = {CUT: "a cut", PARTIAL: f"a partial sum over {e.axis}"}.get(e.kind, "equal")
    if e.kind == WRONG:
        times = "" if e.factor is None else f", {e.factor:.3g} times the reference's"
        text = f"off by {e.error:.1e}{times}" if e.error < float("inf") else "another shape"
    return {"kind": e.kind, "text": text}
