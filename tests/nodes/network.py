"""Nodes on one machine: each has a separate network, host name, mounts and process numbers; a bridge joins the nodes.

    lab     one process in a new network namespace, which has the bridge and all cables (and, if the test is not
            root, in a new user namespace, with the test as root)
    node i  a process of separate namespaces: eth0 10.77.0.(i + 1), host name and hosts file nodeI, /dev/shm

Nothing is made in the machine's own namespaces, and everything ends with the processes: the lab with the test's
process, a node with the node's first process. One kernel, one disk, one clock: these nodes test reactions, not speeds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent
WIRE = Path(__file__).parent / "wire.py"
NETWORK = "10.77.0"
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc", "mount", "env")
TIED = ("setpriv", "--pdeathsig", "KILL")
"""Words that end a command with the test's process."""
START_SECONDS = PATIENCE_SECONDS


def why_not() -> str:
    """Return why no nodes can be made on this machine, or an empty text."""
    if sys.platform != "linux":
        return "nodes are Linux namespaces"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]:
        return f"no {', '.join(missing)} here (Debian: util-linux, iproute2)"
    words = [*_unshare(), "sh", "-c", "ip link add br0 type bridge && mount -t tmpfs none /dev/shm"]
    tried = subprocess.run(words, capture_output=True, text=True, env=_variables())
    return "" if tried.returncode == 0 else f"no namespaces or bridges here: {tried.stderr.strip()}"


def _path() -> str:
    """Return the search path with the system's own tools, which a user's path often lacks."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _variables() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


def _unshare() -> list[str]:
    """Return the words to become root of new namespaces, for users without rights as well."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *user, *kinds]


@dataclass
class Running:
    """A command on a node. `out`: the file of stdout and stderr."""

    node: Node
    process: subprocess.Popen[bytes]
    out: Path

    def wait(self, seconds: float) -> int:
        """Return the exit code, or -999 if the command has not ended by then."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -999

    @property
    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return the processes under this command with the word in the command line, the outermost first."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if _lives(process) and any(word in part for part in _words_of(process))]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@dataclass
class Node:
    """A node of a network. `first`: the machine's number of the node's first process."""

    name: str
    address: str
    first: int
    folder: Path
    enters: tuple[str, ...]
    processes: list[subprocess.Popen[bytes]]

    def command(self, words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
        settings = {"TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT), "PATH": _path(), **(variables or {})}
        pairs = [f"{name}={value}" for name, value in settings.items()]
        return [*self.enters, "env", f"--chdir={self.folder}", *pairs, *words]

    def start(self, *words: str, variables: Mapping[str, str] | None = None) -> Running:
        """Start a command on the node; the command is killed with the test."""
        out = self.folder / f"command-{len(self.processes)}.txt"
        with out.open("wb") as sink:
            process = subprocess.Popen(
                [*TIED, *self.command(words, variables)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return Running(self, process, out)

    def run(self, *words: str) -> str:
        """Run a short command on the node, and return the output."""
        done = subprocess.run(self.command(words), capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, f"{' '.join(words)} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    def mount(self, source: Path, target: Path) -> None:
        """Bind `source` to `target`, on this node alone."""
        self.run("mount", "--bind", str(source), str(target))

    def die(self) -> None:
        """Lose power: every process of the node ends at once, and the cable is dead."""
        os.kill(self.first, signal.SIGKILL)


@dataclass
class Network:
    """Nodes at one bridge, while entered. `folder`: has a folder for each node, with the node's temporary files."""

    num_nodes: int
    folder: Path
    rate: str = ""
    nodes: list[Node] = field(default_factory=list)
    _lab: subprocess.Popen[bytes] | None = None
    _first: int = 0

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def close(self) -> None:
        """End every process of the lab and the nodes; the namespaces end with the processes."""
        for node in self.nodes:
            if psutil.pid_exists(node.first):
                node.die()
        if self._lab is not None:
            if psutil.pid_exists(self._first):
                os.kill(self._first, signal.SIGKILL)
            self._lab.wait()
        for node in self.nodes:
            for process in node.processes:
                process.wait()

    def _build(self) -> None:
        self._lab, self._first = self._holder(_unshare())
        self.lab("ip link add br0 type bridge && ip link set br0 up && ip link set lo up")
        for index in range(self.num_nodes):
            self._add_node(index)
        hosts = "".join(f"{node.address} {node.name}\n" for node in self.nodes)
        for node in self.nodes:
            self.set_hosts(node, f"127.0.0.1 localhost\n{hosts}")

    def _enter(self, process: int) -> tuple[str, ...]:
        user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        return ("nsenter", "--target", str(process), *user, "--net", "--uts", "--mount", "--pid")

    def _holder(self, words: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process that stays in new namespaces. Return the parent that waits, and the process's number."""
        process = subprocess.Popen(
            [*TIED, *words, "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # unshare complains when the child is killed
            env=_variables(),
        )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            below = psutil.Process(process.pid).children(recursive=True)
            asleep = [child.pid for child in below if _words_of(child)[:1] == ["sleep"]]
            if asleep:
                return process, asleep[0]
            time.sleep(0.01)
        raise AssertionError(f"no namespaces within {START_SECONDS:g} s")

    def lab(self, script: str) -> str:
        """Run a shell script in the bridge's namespaces."""
        words = [*self._enter(self._first), "sh", "-ec", script]
        done = subprocess.run(words, capture_output=True, text=True, env=_variables(), timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, f"{script}: {done.stderr}"
        return done.stdout

    def _add_node(self, index: int) -> None:
        name, address = f"node{index}", f"{NETWORK}.{index + 1}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        process, first = self._holder([*self._enter(self._first), *_unshare()[:1], *_unshare()[-7:]])
        number = _number_in(first, level=1)  # the lab's number of the process
        cable = f"ip link add v{index} type veth peer name eth0 netns {number} && ip link set v{index} master br0 up"
        self.lab(cable)
        node = Node(name, address, first, folder, self._enter(first), [process])
        self.nodes.append(node)
        node.run(
            "sh", "-ec", f"hostname {name}; ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up; "
            f"mount -t tmpfs none /dev/shm; {self._rate_of('eth0')}"
        )  # fmt: skip
        if self.rate:
            self.lab(self._rate_of(f"v{index}"))

    def _rate_of(self, device: str) -> str:
        if not self.rate:
            return "true"
        return f"tc qdisc add dev {device} root tbf rate {self.rate} burst 64kb latency 100ms"

    def set_hosts(self, node: Node, text: str) -> None:
        """Write the node's /etc/hosts."""
        hosts = node.folder / "hosts"
        hosts.write_text(text)
        node.mount(hosts, Path("/etc/hosts"))

    def lengthen(self, index: int, delay_seconds: float, loss: float) -> None:
        """Put a long and lossy cable between a node and the others: `delay_seconds` each way, with a share `loss` of
        frames lost."""
        self.lab(f"ip link add far type bridge && ip link set far up && ip link set v{index} master far")
        words = [
            *TIED,
            *self._enter(self._first),
            sys.executable,
            str(WIRE),
            "near0",
            "far0",
            str(delay_seconds),
            str(loss),
        ]
        self.nodes[index].processes.append(subprocess.Popen(words, stdin=subprocess.DEVNULL))
        end = time.monotonic() + START_SECONDS
        while "far0" not in (devices := self.lab("ip -brief link")) or "near0" not in devices:
            assert time.monotonic() < end, "no TAP devices"
            time.sleep(0.05)
        self.lab("ip link set near0 master br0 up && ip link set far0 master far up")

    def name_as_debian_does(self) -> None:
        """Give every node the hosts file of Debian's installer, with the node's own name at 127.0.1.1."""
        for node in self.nodes:
            others = "".join(f"{other.address} {other.name}\n" for other in self.nodes if other is not node)
            self.set_hosts(node, f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n{others}")

    def set_link(self, index: int, state: str) -> None:
        """Pull a node's cable (`down`), or put the cable back (`up`)."""
        self.lab(f"ip link set v{index} {state}")


def _number_in(process: int, level: int) -> str:
    """Return a process's number in the namespace `level` levels below the machine's."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1 + level]
    raise AssertionError(f"process {process} has no numbers")
