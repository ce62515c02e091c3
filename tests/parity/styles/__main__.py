"""`python -m tests.parity.styles`: mistakes planted in programs of many styles, through `meshwright parity`.

Prints a row a mistake (found, module, kind, the verdict), the right programs that alarm, and the counts of
docs/parity_findings.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.parity.check import ParityCheck, ParityResult, behind_rounding, judged
from meshwright.parity.worker import call_check
from meshwright.ranks.errors import MeshwrightError
from meshwright.ranks.launch import Rank, Ranks, run
from tests.parity.styles import data, frameworks, routed, sequence, tensor, terms
from tests.parity.styles.style import STYLES, Plant, Style

MODULES = (tensor, data, sequence, routed, frameworks, terms)
"""Imported to register the programs."""


def run_styles(rank: Rank, names: list[str], out: Path, precision: str) -> None:
    """Run one rank of some cases `style:wrong`. `precision`: replaces the styles' own, if given."""
    for name in names:
        found, _, wrong = name.partition(":")
        folder = out / name.replace(":", "-")
        folder.mkdir(exist_ok=True)
        chosen = STYLES[found]
        call_check(lambda job, s=chosen, w=wrong: s.run(job, w), rank.mesh, precision or chosen.precision, folder)


def result_of(chosen: Style, wrong: str, folder: Path) -> ParityResult:
    """Judge one case from the records of the ranks."""
    check = ParityCheck(f"{chosen.name}:{wrong}", Path(__file__), chosen.axes, chosen.precision)
    place = folder / f"{chosen.name}-{wrong}"

    def again() -> ParityResult:
        run(run_styles, Ranks(chosen.axes), names=[f"{chosen.name}:{wrong}"], out=folder, precision="float32")
        return judged(check, "float32", place, time.monotonic())

    return behind_rounding(judged(check, chosen.precision, place, time.monotonic()), again)


def names_it(module: str, plant: Plant) -> bool:
    """Return whether the named module is one of the mistake's modules, is inside one, or has the name of one."""
    return any(module == m or module.startswith(f"{m}.") or m in module.split(".") for m in plant.modules)


def marks_of(result: ParityResult, plant: Plant) -> tuple[bool, bool, bool]:
    """Return whether the mistake is found, at the right module, of the right kind."""
    if result.finding is None:
        return not result.holds, False, False
    return not result.holds, names_it(result.finding.module, plant), result.finding.kind in plant.kinds


def try_cases(chosen: list[Style], only: str, precision: str = "") -> dict[str, ParityResult | str]:
    """Return every case's result, or the error that ended the ranks. `precision`: replaces each style's own."""
    results: dict[str, ParityResult | str] = {}
    with TemporaryDirectory() as text:
        folder = Path(text)
        for style in chosen:
            one = replace(style, precision=precision or style.precision)
            wrongs = [w for w in ("", *(plant.wrong for plant in one.plants)) if only in f"{one.name}:{w}"]
            names = [f"{one.name}:{wrong}" for wrong in wrongs]
            try:
                run(run_styles, Ranks(one.axes), names=names, out=folder, precision=precision)
            except MeshwrightError as error:
                print(f"{one.name}: {str(error)[-1500:]}")
            for name, wrong in zip(names, wrongs, strict=True):
                try:
                    results[name] = result_of(one, wrong, folder)
                except (FileNotFoundError, MeshwrightError) as error:
                    results[name] = str(error)
    return results


def report(results: dict[str, ParityResult | str]) -> None:
    """Print a row a case, then the table."""
    lines, totals = [], [0] * 5
    for one in STYLES.values():
        if f"{one.name}:" not in results and not any(f"{one.name}:{p.wrong}" in results for p in one.plants):
            continue
        right = results.get(f"{one.name}:")
        alarm = right is not None and (isinstance(right, str) or not right.holds)
        counts = [0, 0, 0]
        if right is not None:
            told = right if isinstance(right, str) else right.verdict
            print(f"{one.name:18} {'right':18} {'FALSE ALARM ' + told if alarm else 'holds'}")
        tried = [plant for plant in one.plants if f"{one.name}:{plant.wrong}" in results]
        for plant in tried:
            result = results[f"{one.name}:{plant.wrong}"]
            marks = (False,) * 3 if isinstance(result, str) else marks_of(result, plant)
            counts = [n + mark for n, mark in zip(counts, marks, strict=True)]
            words = " ".join(w if m else f"NOT-{w}" for w, m in zip(("found", "module", "kind"), marks, strict=True))
            print(f"{one.name:18} {plant.wrong:18} {words:26} {result if isinstance(result, str) else result.verdict}")
        lines.append(f"| {one.name} | {len(tried)} | {counts[0]} | {counts[1]} | {counts[2]} | {int(alarm)} |")
        totals = [a + b for a, b in zip(totals, (len(tried), *counts, int(alarm)), strict=True)]
    print("\n| program | mistakes | found | module | kind | false alarms |\n|---|--:|--:|--:|--:|--:|")
    print("\n".join([*lines, "| **all** | " + " | ".join(map(str, totals)) + " |"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=list(STYLES))
    parser.add_argument("--only", default="", help="cases with this in their name, as gqa:twice")
    parser.add_argument("--precision", default="", choices=("float64", "float32", "bf16"), help="instead of each's own")
    arguments = parser.parse_args()
    report(try_cases([STYLES[name] for name in arguments.styles], arguments.only, arguments.precision))


if __name__ == "__main__":
    main()
