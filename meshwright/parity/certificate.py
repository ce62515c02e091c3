"""`parity CHECKS.py --certificate FILE.yaml`: the facts of checks that hold, as YAML that a model's page can carry."""

from __future__ import annotations

import ast
import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch
import yaml

from meshwright.parity.check import ParityResult
from meshwright.parity.report import KINDS, worst_row
from meshwright.version import PACKAGE, __version__

CLAIM = "each parallel program computes on its ranks what one process computes"
LIMITS = "the samples, sizes, ranks and steps of these checks; CPU kernels"


def write_certificate(results: Sequence[ParityResult], path: Path, command: str) -> Path | None:
    """Write the certificate of results that all hold.

    Args:
        results: The checks of one file.
        path: The YAML file; its folder is made.
        command: The command line that repeats the checks.

    Returns:
        The path, or None if a result does not hold. An earlier file at the path stays.
    """
    if not all(result.holds for result in results):
        return None
    told = yaml.safe_dump({"parity": facts_of(results, command)}, sort_keys=False, allow_unicode=True, width=100)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(told, encoding="utf-8")
    return path


def facts_of(results: Sequence[ParityResult], command: str) -> dict[str, Any]:
    """Return the fields: claim, limits, checks, SHA-256 of sources, versions, processor, date, command."""
    files = sources_of(results[0].check.file)
    return {
        "claim": CLAIM,
        "limits": LIMITS,
        "checks": [check_facts(result) for result in results],
        "files": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
        **surroundings(files.values()),
        "command": command,
    }


def surroundings(files: Iterable[Path]) -> dict[str, Any]:
    """Return the fields of every certificate: versions of libraries (of the files' imports too), processor, date."""
    return {
        "libraries": {"meshwright": __version__, "torch": version("torch"), **libraries_of(files)},
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def check_facts(result: ParityResult) -> dict[str, Any]:
    """Return a check's name, axes, precision, numbers of comparisons, and the relative error of the worst one."""
    worst = worst_row(result.rows)
    return {
        "name": result.check.name + (f"[{result.check.words}]" if result.check.words else ""),
        "axes": dict(result.check.axes),
        "precision": result.narrow or result.precision,
        "compared": dict(Counter(KINDS[row.kind] for row in result.rows)),
        "worst": {
            "of": f"{worst.kind} of {worst.label}", "error": float(f"{worst.error:.2g}"),
            "allowed": float(f"{worst.allowed:.2g}"),
        },
    }  # fmt: skip


def sources_of(file: Path) -> dict[str, Path]:
    """Return the file of checks and the loaded modules of the same folder, by path from the folder."""
    folder = file.resolve().parent
    loaded = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    files = {Path(path).resolve() for path in loaded if path} | {file.resolve()}
    found = (path for path in files if path.is_relative_to(folder) and not path.is_relative_to(PACKAGE))
    names = {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
    return {name: names[name] for name in sorted(names) if "site-packages" not in name}


def libraries_of(files: Iterable[Path]) -> dict[str, str]:
    """Return the versions of the installed packages that the files import, by distribution."""
    imported = set[str]()
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    owners = packages_distributions()
    names = {owner for name in imported for owner in owners.get(name, ())} - {"meshwright", "torch"}
    return {name: version(name) for name in sorted(names, key=str.lower)}
