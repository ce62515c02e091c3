"""The machine's answers to a process, of faked systems: Linux with and without cgroups, macOS."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.ranks.machine import (
    available_memory_bytes,
    forget_cached,
    memory_bytes,
    peak_resident_bytes,
    usable_cores,
)
from meshwright.strategies.memory.store import _reserve

GIB = 2**30
PAGES = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}
LINUX = SimpleNamespace(sched_getaffinity=lambda process: {0, 3}, cpu_count=lambda: 8, sysconf=PAGES.__getitem__)
MACOS = SimpleNamespace(cpu_count=lambda: 8, sysconf=PAGES.__getitem__)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def linux(tmp_path: Path) -> Path:
    """Make a machine of 16 GiB with a warm page cache."""
    facts = (
        f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1000 kB\nMemAvailable: {10 * GIB // 1024} kB\nHugePages_Total: 0\n"
    )
    write(tmp_path / "proc/meminfo", facts)
    return tmp_path


def limited(root: Path, group: str, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / names[0], f"{limit}\n")
    write(folder / names[1], f"{used}\n")
    write(folder / "memory.stat", f"anon 5\n{names[2]} {cached}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_a_warm_page_cache_is_available(linux: Path) -> None:
    assert available_memory_bytes(linux, LINUX) == 10 * GIB
    assert memory_bytes(linux, LINUX) == 16 * GIB


def test_a_group_of_version_2_and_the_groups_above_it_limit(linux: Path) -> None:
    write(linux / "proc/self/cgroup", "0::/job/step\n")
    limited(linux, "job/step", V2, "max", 0, 0)
    assert (memory_bytes(linux, LINUX), available_memory_bytes(linux, LINUX)) == (16 * GIB, 10 * GIB)
    limited(linux, "job", V2, str(6 * GIB), 5 * GIB, 3 * GIB)
    assert (memory_bytes(linux, LINUX), available_memory_bytes(linux, LINUX)) == (6 * GIB, 4 * GIB)
    limited(linux, "job/step", V2, str(2 * GIB), 3 * GIB, 0)
    assert (memory_bytes(linux, LINUX), available_memory_bytes(linux, LINUX)) == (2 * GIB, 0)


def test_a_container_that_is_its_own_top(linux: Path) -> None:
    write(linux / "proc/self/cgroup", "0::/docker/0123\n")
    limited(linux, ".", V2, str(4 * GIB), GIB, 0)
    assert available_memory_bytes(linux, LINUX) == 3 * GIB


def test_a_group_of_version_1_limits(linux: Path) -> None:
    write(linux / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/slurm/job\n")
    limited(linux, "memory/slurm/job", V1, str(9223372036854771712), 0, 0)
    assert available_memory_bytes(linux, LINUX) == 10 * GIB
    limited(linux, "memory/slurm/job", V1, str(3 * GIB), 2 * GIB, GIB)
    assert (memory_bytes(linux, LINUX), available_memory_bytes(linux, LINUX)) == (3 * GIB, 2 * GIB)


def test_macos_has_no_proc(tmp_path: Path) -> None:
    assert usable_cores(LINUX) == 2
    assert usable_cores(MACOS) == 8
    assert memory_bytes(tmp_path, MACOS) == 16 * GIB
    assert available_memory_bytes(tmp_path, MACOS) == 8 * GIB


def test_the_peak_is_in_bytes_everywhere() -> None:
    assert peak_resident_bytes("linux") == 1024 * peak_resident_bytes("darwin")
    assert peak_resident_bytes() > 10 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_this_machine() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert 0 < available_memory_bytes() <= memory_bytes()


def test_files_where_the_system_has_fewer_calls(tmp_path: Path) -> None:
    for system in (os, MACOS):
        with (tmp_path / "file").open("wb+") as file:
            _reserve(file.fileno(), 5000, system)
            assert os.fstat(file.fileno()).st_size == 5000
            forget_cached(file.fileno(), system)
            with pytest.raises(OSError, match=r"No space left|File too large"):
                _reserve(file.fileno(), 2**60, system)
