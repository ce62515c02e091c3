"""A real Slurm on the tests' nodes: slurmctld on the first, slurmd on each, munged for all, in separate folders."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.nodes.network import Network, Running
from tests.patience import PATIENCE_SECONDS

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
START_SECONDS = PATIENCE_SECONDS

_CONFIG = """
ClusterName=tests
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=8
JobRequeue=1
MpiDefault=none
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why there can be no Slurm on this machine, or an empty text."""
    if os.geteuid() != 0:
        return "Slurm's daemons want to be root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin") is None]
    return f"no {', '.join(missing)} here (Debian: slurm-wlm, munge)" if missing else ""


@dataclass
class Slurm:
    """A cluster on a started network. `folder`: a short path, because the folder has a socket."""

    network: Network
    folder: Path
    cores: int = 2

    def start(self) -> None:
        """Start the daemons, and return when every node is idle."""
        self.folder.chmod(0o755)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        nodes = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={self.cores} Gres=gpu:2" for node in self.network.nodes
        ]
        head = self.network[0]
        text = _CONFIG.format(head=f"{head.name}({head.address})", folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")  # no real GPUs
        version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/{version}\n")
        files = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed", "key")}
        self._daemon(0, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files.values())
        self._wait((self.folder / "munge.socket").exists, "munged")
        self._daemon(0, "slurmctld", "-D")
        for index in range(len(self.network.nodes)):
            self._daemon(index, "slurmd", "-D")
        count = len(self.network.nodes)
        self._wait(lambda: self.ask("sinfo", "--noheader", "--format=%T %D").split() == ["idle", str(count)], "nodes")

    def _daemon(self, index: int, *words: str) -> None:
        self.network[index].start(*words, variables=self.variables)

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_SECONDS
        while not condition():
            logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"{what} did not come up: {logs}"
            time.sleep(0.2)

    def ask(self, *words: str) -> str:
        """Run a command of Slurm on the first node. Return stdout, also after a failure."""
        running = self.network[0].start(*words, variables=self.variables)
        running.wait(30)
        return running.text

    def srun(self, *words: str) -> Running:
        return self.network[0].start("srun", *words, variables=self.variables)

    def sbatch(self, script: Path, folder: Path) -> int:
        """Submit a script, and return the job's number."""
        answer = self.ask("sbatch", f"--chdir={folder}", str(script))
        found = re.search(r"Submitted batch job (\d+)", answer)
        assert found, answer
        return int(found[1])

    def state(self, job: int) -> str:
        """Return RUNNING, PENDING, COMPLETED, FAILED, ..."""
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", str(job)))
        return found[1] if found else "gone"

    def wait_for(self, job: int, states: Sequence[str], seconds: float) -> str:
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state}"
            time.sleep(0.5)
        return state
