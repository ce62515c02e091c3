"""A JobSet or a PyTorchJob: a pod a node, and the run file beside it in a ConfigMap.

A pod's shell starts its ranks with the variables that torchrun would set, and passes SIGTERM on to them. torchrun's own
agent is of no use here: it ends with 1 whatever its ranks end with, and the engine must tell a run that was stopped
(started again, as often as it takes) from one that failed (started again `restarts` times).

| engine     | who a pod is                       | a stopped run ends with | and is started again by            |
|------------|------------------------------------|-------------------------|------------------------------------|
| JobSet     | JOB_COMPLETION_INDEX               | 75                      | podFailurePolicy and failurePolicy |
| PyTorchJob | RANK, MASTER_ADDR (the operator's) | 138, "retryable" there  | restartPolicy: ExitCode            |
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from meshwright.errors import ConfigError
from meshwright.launch.signals import STOPPED_EXIT_CODE
from meshwright.section import Count, Positive, Size
from meshwright.tools.submit.job import JobSettings, Submission

PORT = 29500
RETRYABLE_EXIT_CODE = 138
"""Kubeflow's code for "start me again", which is the user's to give."""

_RUN_FOLDER = "/etc/meshwright"
_NODE = "node"

_SHELL = """\
export WORLD_SIZE={world} LOCAL_WORLD_SIZE={per_node} MASTER_ADDR={address} MASTER_PORT={port}
first=$(({per_node} * {node}))
pids=
trap 'kill -TERM $pids' TERM
for local in $(seq 0 {last}); do
  LOCAL_RANK=$local RANK=$((first + local)) {words} &
  pids="$pids $!"
done
code=0
for pid in $pids; do
  wait "$pid"; ended=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; ended=$?; done
  [ "$ended" -le "$code" ] || code=$ended
done
{closing}
"""
"""A wait ends early when a signal comes: it is taken up again as long as the rank lives."""


class Kubernetes(JobSettings):
    """`image`: has meshwright. `volume`: a claim that all nodes can write to, mounted at `mount`; --out lies there.

    `grace`: seconds that a pod has to save; `restarts`: of a run that fails; `memory`: bytes of a node's /dev/shm.
    """

    shares_folders: ClassVar[bool] = False
    suffix: ClassVar[str] = ".yaml"

    image: str
    volume: str
    mount: str = "/runs"
    kind: Literal["jobset", "pytorchjob"] = "jobset"
    namespace: str | None = None
    grace: Positive = 300
    restarts: Count = 3
    memory: Size = 8 * 2**30

    @property
    def folder(self) -> Path:
        return Path(self.mount)

    def text(self, submission: Submission) -> str:
        if not submission.out.is_relative_to(self.mount):
            rule = f"does not lie on the volume, which the pods see at {self.mount}"
            raise ConfigError.of("--out", submission.out, rule, f"{self.mount}/{submission.name}")
        metadata = {"name": submission.name} | ({"namespace": self.namespace} if self.namespace else {})
        run = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**metadata, "name": f"{submission.name}-run"},
            "data": {"run.yaml": submission.run.read_text()},
        }
        job = self._job_set(submission) if self.kind == "jobset" else self._pytorch_job(submission)
        documents = [run, {**job, "metadata": metadata}]
        return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)

    def command(self, file: Path) -> list[str]:
        return ["kubectl", "apply", "--filename", str(file)]

    def _job_set(self, submission: Submission) -> dict[str, Any]:
        """The whole set starts again when one pod fails. A stop, or a pod that was evicted, costs no restart."""
        address = f"{submission.name}-{_NODE}-0-0.{submission.name}"
        shell = self._shell(submission, address, PORT, "$JOB_COMPLETION_INDEX", 'exit "$code"')
        stopped = {
            "action": "FailJob",
            "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [STOPPED_EXIT_CODE]},
        }
        evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        job = {
            "parallelism": submission.nodes,
            "completions": submission.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [stopped, evicted]},
            "template": self._pod(submission, shell, "Never"),
        }
        again = {
            "name": "stopped",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": self.restarts, "rules": [again]},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
        }
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {}, "spec": spec}

    def _pytorch_job(self, submission: Submission) -> dict[str, Any]:
        closing = f'[ "$code" -ne {STOPPED_EXIT_CODE} ] || exit {RETRYABLE_EXIT_CODE}\nexit "$code"'
        shell = self._shell(submission, '"$MASTER_ADDR"', '"$MASTER_PORT"', "$RANK", closing)
        pod = self._pod(submission, shell, None)
        pod["spec"]["containers"][0]["name"] = "pytorch"  # by which the operator knows it
        replicas = {"Master": 1, "Worker": submission.nodes - 1}
        specs = {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": pod}
            for role, count in replicas.items()
            if count
        }
        policy = {"backoffLimit": self.restarts, "cleanPodPolicy": "None"}
        spec = {"runPolicy": policy, "pytorchReplicaSpecs": specs}
        return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}, "spec": spec}

    def _shell(self, submission: Submission, address: str, port: object, node: str, closing: str) -> str:
        """The pod's program. It always says --resume: a pod that is started again does not know that it is."""
        words = submission.train_words("python", Path(_RUN_FOLDER, "run.yaml"), resume=True)
        per_node = submission.ranks_per_node
        world = submission.config.layout.world_size
        return _SHELL.format(
            world=world, per_node=per_node, last=per_node - 1, address=address, port=port, node=node,
            words=shlex.join(words), closing=closing,
        )  # fmt: skip

    def _pod(self, submission: Submission, shell: str, restart_policy: str | None) -> dict[str, Any]:
        per_node = submission.ranks_per_node
        amounts: dict[str, Any] = {"cpu": str(per_node * self.cpus)}
        if submission.uses_gpus:
            amounts["nvidia.com/gpu"] = per_node
        container = {
            "name": "ranks",
            "image": self.image,
            "command": ["sh", "-c", shell],
            "resources": {"requests": {"cpu": amounts["cpu"]}, "limits": amounts},
            "volumeMounts": [
                {"name": "runs", "mountPath": self.mount},
                {"name": "run-file", "mountPath": _RUN_FOLDER},
                {"name": "shared-memory", "mountPath": "/dev/shm"},  # NCCL's and gloo's, within the node
            ],
        }
        spec = {
            "terminationGracePeriodSeconds": self.grace,
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.volume}},
                {"name": "run-file", "configMap": {"name": f"{submission.name}-run"}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": str(self.memory)}},
            ],
        }
        return {"spec": spec if restart_policy is None else {"restartPolicy": restart_policy, **spec}}


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as one, and what is there twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
