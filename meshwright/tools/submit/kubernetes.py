"""A job for Kubernetes: one pod per node, and the run file in a ConfigMap.

| kind       | API                           | a pod's identity      | a stopped run ends with, is started again by |
|------------|-------------------------------|-----------------------|----------------------------------------------|
| jobset     | jobset.x-k8s.io/v1alpha2      | JOB_COMPLETION_INDEX  | 75: podFailurePolicy, failurePolicy          |
| trainjob   | trainer.kubeflow.org/v1alpha1 | as for a JobSet       | as for a JobSet                              |
| rayjob     | ray.io/v1                     | a bundle of resources | 75: backoffLimit, on a new cluster           |
| pytorchjob | kubeflow.org/v1, legacy       | RANK, MASTER_ADDR     | 138, "retryable": restartPolicy ExitCode     |
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshwright.config.section import Count
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.launch.signals import STOPPED_EXIT_CODE
from meshwright.tools.submit.job import SAFE_PATH, Submission, check_out
from meshwright.tools.submit.manifests import Tree, manifest_text, patched
from meshwright.tools.submit.node_shell import RUN_FOLDER, NodePlace, node_shell
from meshwright.tools.submit.pods import PodSettings, metrics_port
from meshwright.tools.submit.ray_script import STOP_VARIABLE, script_text

RETRYABLE_EXIT_CODE = 138
"""The exit code with which a program asks Kubeflow for a restart."""

_NODE = "node"
_METRICS_ADDRESS = re.compile(r"metrics\.address=")
_QUEUE = "kueue.x-k8s.io/queue-name"

_LEGACY = (
    "PyTorchJob is legacy: the Training Operator (kubeflow.org/v1) is no longer developed. Where Kubeflow Trainer v2",
    "is installed, --set kind=trainjob takes its place; where JobSet is, kind=jobset.",
)


class Kubernetes(PodSettings):
    """A manifest for kubectl."""

    shares_folders: ClassVar[bool] = False
    suffix: ClassVar[str] = ".kubernetes.yaml"

    kind: Literal["jobset", "trainjob", "rayjob", "pytorchjob"] = "jobset"
    """jobset, trainjob (Kubeflow Trainer v2), rayjob (KubeRay), or the legacy pytorchjob."""
    restarts: Count = 3
    """How often a run that fails is started again; one that is stopped always is (a RayJob counts it)."""

    def out_of(self, out: Path | None, run: Path) -> Path:
        return out or Path(self.mount, run.stem)

    def text(self, submission: Submission) -> str:
        check_out(submission, self.mount)
        # A setting without an effect is refused.
        if self.rdma is None and "locked_memory" in self.model_fields_set:
            raise ConfigError.of("locked_memory", self.locked_memory, "has no effect without rdma", "rdma=rdma/ib")
        if self.adds_lock and self.kind == "rayjob" and self.user != 0:
            rule = "has no effect on Ray's own program as a user that is not root"
            raise ConfigError.of("locked_memory", self.locked_memory, rule, "locked_memory=node, or user=0")
        if metrics_port(submission) is not None and not any(map(_METRICS_ADDRESS.match, submission.words)):
            # Prometheus connects to the pod's address, which only the cluster can reach.
            submission = replace(submission, words=(*submission.words, "metrics.address=0.0.0.0"))
        files = {"run.yaml": submission.run_text}
        match self.kind:
            case "jobset":
                spec = self._job_set_spec(submission, "ranks")
                jobs = [self._job("jobset.x-k8s.io/v1alpha2", "JobSet", submission, spec)]
            case "trainjob":
                jobs = self._train_job(submission)
            case "rayjob":
                files["run_ray.py"] = script_text(submission, self.cores(submission), 0, f"{RUN_FOLDER}/run.yaml")
                jobs = self._ray_job(submission)
            case "pytorchjob":
                jobs = self._pytorch_job(submission)
        # The run file is part of the manifest: a pod need not see this machine's folders.
        run = self._manifest("v1", "ConfigMap", f"{submission.name}-run", data=files)
        manifests = patched([run, *jobs], self.patch)
        again = " ".join(self.command_again(Path("FILE")))
        comments = [f"A changed run of the same name (its pods cannot be changed): {again}"]
        return manifest_text(manifests, [*comments, *(_LEGACY if self.kind == "pytorchjob" else ())])

    def command(self, file: Path, name: str) -> list[str]:
        return ["kubectl", "apply", "--filename", str(file)]

    def command_again(self, file: Path) -> list[str]:
        """Return a replace command: `apply` fails on fields that cannot change. The old pods save and end first."""
        wait = f"--timeout={self.grace + 60}s"
        return ["kubectl", "replace", "--force", "--cascade=foreground", wait, "--filename", str(file)]

    def _manifest(self, version: str, resource_kind: str, name: str, **fields: Any) -> Tree:
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {"apiVersion": version, "kind": resource_kind, "metadata": {"name": name, **namespace}, **fields}

    def _job(self, version: str, resource_kind: str, submission: Submission, spec: Tree) -> Tree:
        """Return the manifest of the job itself, with the label for Kueue's queue."""
        job = self._manifest(version, resource_kind, submission.name, spec=spec)
        if self.queue:
            job["metadata"]["labels"] = {_QUEUE: self.queue}
        return job

    def _job_set_spec(self, submission: Submission, container: str, labels: Tree | None = None) -> Tree:
        """Return a JobSet's spec. If one pod fails the whole set starts again; stops and evictions count no restart."""
        address = f"{submission.name}-{_NODE}-0-0.{submission.name}"
        node_place = NodePlace("$JOB_COMPLETION_INDEX", address, locks=self.locks)
        stopped = {
            "action": "FailJob",
            "onExitCodes": {"containerName": container, "operator": "In", "values": [STOPPED_EXIT_CODE]},
        }
        evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        job = {
            "parallelism": submission.nodes,
            "completions": submission.nodes,
            "completionMode": "Indexed",
            # A single restarted pod cannot rejoin the others: the whole set starts again.
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [stopped, evicted]},
            "template": self.pod(
                submission, container, node_shell(submission, node_place), "Never", node_place=node_place
            ),
        }
        again = {
            "name": "stopped",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        template = {**({"metadata": {"labels": labels}} if labels else {}), "spec": job}
        return {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": self.restarts, "rules": [again]},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": template}],
        }

    def _train_job(self, submission: Submission) -> list[Tree]:
        """Return a TrainingRuntime with the JobSet's spec, and a TrainJob that refers to the runtime."""
        # Trainer finds the ranks by the name "node" and this label. Without a policy for torch Trainer starts no
        # torchrun; torchrun's exit code would hide whether a run was stopped or failed.
        version, runtime = "trainer.kubeflow.org/v1alpha1", "TrainingRuntime"
        spec = self._job_set_spec(submission, _NODE, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})
        shipped = {"mlPolicy": {"numNodes": submission.nodes}, "template": {"spec": spec}}
        reference = {"apiGroup": version.partition("/")[0], "kind": runtime, "name": submission.name}
        job = {"runtimeRef": reference, "trainer": {"numNodes": submission.nodes}}
        return [
            self._manifest(version, runtime, submission.name, spec=shipped),
            self._job(version, "TrainJob", submission, job),
        ]

    def _ray_job(self, submission: Submission) -> list[Tree]:
        """Return a RayJob: a cluster with a head, which runs the script, and one worker per node.

        Each attempt gets a new cluster, which also replaces a lost head. So the script itself has no restarts.
        """
        cores = submission.ranks_per_node * self.cores(submission)
        worker = {
            "groupName": "nodes",
            **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), submission.nodes),
            "rayStartParams": {"num-cpus": str(cores)},  # else KubeRay reads the CPU limit
            "template": self.pod(submission, "ray-worker", None, None),
        }
        head = {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
            "template": self.pod(submission, "ray-head", None, None, head=True),
        }
        spec = {
            "entrypoint": f"python {RUN_FOLDER}/run_ray.py",
            "runtimeEnvYAML": f'env_vars: {{{STOP_VARIABLE}: "{self.grace}", {SAFE_PATH}: "1"}}',
            "backoffLimit": self.restarts,
            "shutdownAfterJobFinishes": True,  # Kueue accepts only True
            "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": [worker]},
        }
        return [self._job("ray.io/v1", "RayJob", submission, spec)]

    def _pytorch_job(self, submission: Submission) -> list[Tree]:
        # The operator restarts a pod only for Kubeflow's retryable codes, so the shell translates a stop's code.
        closing = f'[ "$code" -ne {STOPPED_EXIT_CODE} ] || exit {RETRYABLE_EXIT_CODE}\nexit "$code"'
        node_place = NodePlace("$RANK", '"$MASTER_ADDR"', '"$MASTER_PORT"', closing, locks=self.locks)
        pod = self.pod(
            submission, "pytorch", node_shell(submission, node_place), None, node_place=node_place
        )  # required name
        specs = {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": pod}
            for role, count in {"Master": 1, "Worker": submission.nodes - 1}.items()
            if count
        }
        policy = {"backoffLimit": self.restarts, "cleanPodPolicy": "None"}
        spec = {"runPolicy": policy, "pytorchReplicaSpecs": specs}
        return [self._job("kubeflow.org/v1", "PyTorchJob", submission, spec)]
