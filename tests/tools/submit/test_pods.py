"""Pods for an operator: the user fits the image, RDMA's memory is locked or refused, probes are true."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from meshwright.ranks.errors import ConfigError
from meshwright.ranks.flight_recorder import Whereabouts
from meshwright.ranks.hang import Record
from meshwright.tools.submit.image import IMAGE, IMAGE_USER, LOCK_HELPER
from tests.tools.submit.asked import containers, documents, pods, stub, with_stubs, written

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("jobset", "trainjob", "rayjob", "pytorchjob")
DOCKERFILE = (ROOT / "packaging/docker/Dockerfile.cuda").read_text()


def test_the_image_that_manifests_name_is_the_one_that_is_built() -> None:
    assert f'org.opencontainers.image.ref.name="{IMAGE}"' in DOCKERFILE
    assert f"-t {IMAGE} ." in DOCKERFILE
    assert f"/usr/local/bin/{LOCK_HELPER}" in DOCKERFILE
    assert re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[1] == str(IMAGE_USER)  # type: ignore[index]
    assert f"useradd --create-home --uid {IMAGE_USER} " in DOCKERFILE
    named = [
        (path.name, image)
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for image in re.findall(r"[\w./#-]*\bmeshwright:[\w.-]+", path.read_text())
        if "__" not in image
    ]
    tags = {image.rpartition("/")[2].rpartition("#")[2] for _, image in named if re.match(r".*meshwright:\w", image)}
    assert IMAGE in tags
    assert tags <= {IMAGE, "meshwright:cpu"}, named


def test_the_image_has_what_nccl_opens() -> None:
    installed = re.search(r"apt-get install --yes --no-install-recommends \\\n(.*?)&&", DOCKERFILE, re.DOTALL)
    assert installed is not None
    packages = installed[1].replace("\\", " ").split()
    assert {"libibverbs1", "ibverbs-providers", "libcap2-bin", "util-linux", "gcc"} <= set(packages)
    assert "setcap cap_ipc_lock=ep" in DOCKERFILE


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_owns_its_volume(kind: str, run: Path) -> None:
    for pod in pods(documents(kind, run)):
        assert pod["securityContext"] == {
            "runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True, "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
        }  # fmt: skip
    for pod in pods(documents(kind, run, "user=0")):
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (0, False)


def test_a_way_to_lock_memory_without_effect_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="locked_memory=node has no effect without rdma"):
        documents("jobset", run, "locked_memory=node")
    with pytest.raises(ConfigError, match=r"locked_memory=capability has no effect on Ray's own program"):
        documents("rayjob", run, "rdma=rdma/ib")
    assert "securityContext" in containers(documents("rayjob", run, "rdma=rdma/ib", "user=0"))[1]
    for container in containers(documents("jobset", run, "rdma=rdma/ib", "locked_memory=node")):
        assert "securityContext" not in container
        assert LOCK_HELPER in container["command"][2]  # the shell always tests the limit


def lock_shell(run: Path) -> str:
    (container,) = containers(documents("jobset", run, "rdma=rdma/ib"))
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    shell: str = container["command"][2]
    assert "ulimit" not in containers(documents("jobset", run))[0]["command"][2]
    return shell


RANK = "; ".join(
    [
        "grep CapEff /proc/self/status > caps-$RANK",
        'echo "${LD_LIBRARY_PATH-} $TMPDIR" > kept-$RANK',
        "ulimit -l > limit-$RANK",
    ]
)


def in_pod(shell: str, folder: Path, prefix: str, **variables: str) -> subprocess.CompletedProcess[str]:
    folder.chmod(0o777)
    stub(folder, "python", f"cd {folder}; {RANK}")
    environment = with_stubs(folder, JOB_COMPLETION_INDEX="0", **variables)
    return subprocess.run(
        [*prefix.split(), "sh", "-c", f"ulimit -l 64; {shell}"], env=environment, capture_output=True, text=True
    )


AS_USER = "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all"
"""A user that is not root, whom the container's capabilities.add reaches as a bound alone."""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root may become another user")
def test_a_user_without_the_capability_is_told_instead_of_falling_back(run: Path, tmp_path: Path) -> None:
    open_to_others(tmp_path)
    done = in_pod(lock_shell(run), tmp_path, AS_USER)
    assert done.returncode == 1
    assert "RDMA cannot lock memory: ulimit -l is 64 KiB" in done.stderr
    assert not list(tmp_path.glob("caps-*"))


def open_to_others(folder: Path) -> None:
    """Let other users read pytest's folders, which only their maker may read, on each level of the temporary files."""
    for place in (folder, *folder.parents):
        if place == Path(tempfile.gettempdir()) or place.parent == place:
            return
        place.chmod(0o755)


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("setcap")), reason="root may give capabilities"
)
def test_the_helper_gives_a_user_locked_memory(run: Path, tmp_path: Path) -> None:
    """The helper is setpriv as in the Dockerfile. Ranks keep the variables that a privileged start clears."""
    open_to_others(tmp_path)
    helper = tmp_path / LOCK_HELPER
    shutil.copy(str(shutil.which("setpriv")), helper)
    helper.chmod(0o755)
    if subprocess.run(["setcap", "cap_ipc_lock=ep", helper], capture_output=True).returncode:
        pytest.skip("this file system keeps no capabilities")
    done = in_pod(lock_shell(run), tmp_path, AS_USER, LD_LIBRARY_PATH="/some lib", TMPDIR="/some/tmp")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        caps = (tmp_path / f"caps-{rank}").read_text().split()[1]
        assert int(caps, 16) == 1 << 14
        assert (tmp_path / f"kept-{rank}").read_text() == "/some lib /some/tmp\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has the capability")
def test_root_with_the_capability_needs_no_helper(run: Path, tmp_path: Path) -> None:
    done = in_pod(lock_shell(run), tmp_path, "env")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "limit-0").read_text() == "64\n"


@pytest.mark.parametrize("kind, variable", [("jobset", "JOB_COMPLETION_INDEX"), ("pytorchjob", "RANK")])
def test_probes_tell_ranks_that_live(kind: str, variable: str, run: Path, tmp_path: Path) -> None:
    """Probes read the ranks' records, and the clock of the pod's node."""
    (container, *_) = containers(documents(kind, run))
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    (command,) = {tuple(probe["exec"]["command"]) for probe in probes}
    shell = command[2].replace("/runs/first/", f"{tmp_path}/out/")

    def alive(node: int) -> bool:
        environment = {**os.environ, variable: str(node)}
        return subprocess.run(["sh", "-c", shell], env=environment, stderr=subprocess.DEVNULL).returncode == 0

    def leave(rank: int, age: float) -> None:
        where = Whereabouts(3, "forward", "", (), {})
        Record(rank, 4, 0, "pod", 7, "running", 12.5, time.time() - age, where).write(tmp_path / "out" / "status")

    assert not alive(0)
    for rank in (0, 1):
        leave(rank, 1)
    assert alive(0)
    assert not alive(1)  # ranks 2 and 3
    leave(1, 1000)
    assert not alive(0)


def test_metrics_of_a_pod_are_found_by_prometheus(run: Path) -> None:
    """The cluster reads the metrics by intent; elsewhere a run answers on loopback alone."""
    words = ["device=cpu", "metrics.sinks=[prometheus]", "metrics.port=9500"]
    settings = ("image=i", "volume=v")
    text = written("kubernetes", run, settings, words)
    assert "metrics.port=9500 metrics.address=0.0.0.0 --out" in text
    assert "prometheus.io/port: '9500'" in text
    assert "containerPort: 9500" in text
    assert "0.0.0.0" not in written("kubernetes", run, settings, [*words, "metrics.address=10.0.0.1"])
    assert "prometheus" not in written("kubernetes", run, settings, ["device=cpu"])
    assert "0.0.0.0" not in written("slurm", run, (), words)


@pytest.mark.parametrize(
    "words, cores", [(["device=cpu"], "2"), (["device=cpu", "threads=3"], "6"), (["device=cuda"], "12"),
                     (["device=cuda", "threads=8"], "16")],
)  # fmt: skip
def test_cores_follow_from_the_device(words: list[str], cores: str, run: Path) -> None:
    text = written("kubernetes", run, ("image=i", "volume=v"), words)
    assert f"cpu: '{cores}'" in text
    each = int(cores) // 2
    batch = written("slurm", run, (), words)
    assert f"#SBATCH --cpus-per-task={each}\n" in batch
    assert f"\nsrun --cpus-per-task={each} " in batch
