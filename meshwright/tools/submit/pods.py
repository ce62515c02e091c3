"""A node of a run as a pod: the settings of pods, and one template for all kinds of job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.config.registry import entries
from meshwright.config.section import Count, Positive, Size
from meshwright.tools.submit.forms import Label, Variable, in_form
from meshwright.tools.submit.image import IMAGE_USER
from meshwright.tools.submit.job import Engine, Submission
from meshwright.tools.submit.node_shell import RUN_FOLDER, NodePlace, alive_shell

_TAINT = re.compile(r"(?P<key>[\w./-]+)(=(?P<value>[\w.-]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
_RESOURCE = re.compile(r"(?P<name>[a-z0-9.-]+/[\w.-]+)(:(?P<count>[1-9]\d*))?")


Taint = Annotated[str, in_form(_TAINT, "is no taint as kubectl writes it: KEY, KEY:EFFECT or KEY=VALUE:EFFECT")]
Resource = Annotated[
    str, in_form(_RESOURCE, "is no device plugin's resource, such as rdma/ib or vpc.amazonaws.com/efa:4")
]


class PodSettings(Engine):
    """Settings of a pod. Fields of a pod that have no setting are set by `patch`."""

    image: str
    """A container image that has meshwright (and ray, for a RayJob): REGISTRY/meshwright:cuda."""
    volume: Label
    """A PersistentVolumeClaim that all nodes can write to; --out lies there."""
    mount: Annotated[str, in_form(r"/[^:]*", "is no full path without a colon")] = "/runs"
    """Where the pods see the volume."""
    user: Count = IMAGE_USER
    """User and group of the ranks, and the volume's group (fsGroup): the image's, 1000; 0 is root."""
    namespace: Label | None = None
    """The namespace; that of kubectl's context."""
    grace: Positive = 300
    """Seconds that a pod has to save when it is stopped."""
    memory: Size | None = None
    """Memory of a pod, requested and its limit, such as 64G; /dev/shm counts."""
    shm: Annotated[Size, Field(validate_default=True)] = "8G"  # type: ignore[assignment]
    """Size of a pod's /dev/shm, for NCCL and gloo within the node."""
    queue: Label | None = None
    """Kueue's LocalQueue (the label kueue.x-k8s.io/queue-name)."""
    priority: Label | None = None
    """The pods' PriorityClass."""
    secrets: tuple[Label, ...] = ()
    """A Secret whose keys become variables, such as one with HF_TOKEN. Repeat it for more."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """A variable of the ranks: env.NCCL_DEBUG=INFO."""
    rdma: Resource | None = None
    """A network device of a pod, with locked memory: rdma/ib, or vpc.amazonaws.com/efa:4."""
    locked_memory: Literal["capability", "node"] = "capability"
    """With rdma: capability adds IPC_LOCK; node adds nothing, the nodes' containerd sets LimitMEMLOCK=infinity."""
    host_network: bool = False
    """Whether pods use the node's own network, as some RDMA set-ups want."""
    tolerations: tuple[Taint, ...] = ()
    """A taint that is tolerated: KEY, KEY:EFFECT or KEY=VALUE:EFFECT. Repeat it for more."""
    selector: dict[str, str] = Field(default_factory=dict)
    """A label that nodes must have: selector.gpu.example.com/model=h100."""
    service_account: Label | None = None
    """The pods' service account."""
    pull_secrets: tuple[Label, ...] = ()
    """A Secret with which the image is pulled. Repeat it for more."""
    patch: Path | None = None
    """A YAML file that is merged over what is written (strategic merge)."""

    def pod(
        self,
        submission: Submission,
        name: str,
        shell: str | None,
        restart_policy: str | None,
        *,
        node_place: NodePlace | None = None,
        head: bool = False,
    ) -> dict[str, Any]:
        """Return a pod's template. `shell`: the container's program; None: the image's own. `node_place`: the node's
        place in the job, for probes; None: no probes. `head`: whether the pod is Ray's head, which runs no ranks."""
        port = metrics_port(submission) if not head else None
        container = {
            "name": name,
            "image": self.image,
            **({"command": ["sh", "-c", shell]} if shell else {}),
            "ports": [{"name": "metrics", "containerPort": port}] if port else [],
            "env": [{"name": key, "value": value} for key, value in self.env.items()],
            "envFrom": [{"secretRef": {"name": secret}} for secret in self.secrets],
            "resources": _HEAD_RESOURCES if head else self._resources(submission),
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}} if self.adds_lock and not head else {},
            **(probes_of(alive_shell(submission, node_place)) if node_place else {}),
            "volumeMounts": [
                {"name": "runs", "mountPath": self.mount},
                {"name": "run-file", "mountPath": RUN_FOLDER},
                {"name": "shared-memory", "mountPath": "/dev/shm"},  # NCCL's and gloo's, within the node
            ],
        }
        scraped = {"scrape": "true", "port": str(port), "path": "/metrics"}
        user = {"runAsUser": self.user, "runAsGroup": self.user, "runAsNonRoot": self.user != 0}
        shared = {"medium": "Memory", "sizeLimit": str(self.shm)}
        spec = {
            "restartPolicy": restart_policy,
            "terminationGracePeriodSeconds": self.grace,
            "priorityClassName": self.priority,
            "serviceAccountName": self.service_account,
            "imagePullSecrets": [{"name": secret} for secret in self.pull_secrets],
            "nodeSelector": {} if head else self.selector,
            "tolerations": [toleration_of(text) for text in self.tolerations],
            # Without fsGroup only root can write to a new volume. OnRootMismatch: no change of owners at each start.
            "securityContext": {**user, "fsGroup": self.user, "fsGroupChangePolicy": "OnRootMismatch"},
            # With the node's network a pod needs this policy to resolve the cluster's names, such as rank 0's.
            **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if self.host_network and not head else {}),
            "containers": [_said(container)],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.volume}},
                {"name": "run-file", "configMap": {"name": f"{submission.name}-run"}},
                {"name": "shared-memory", "emptyDir": shared},
            ],
        }
        return {
            **(
                {"metadata": {"annotations": {f"prometheus.io/{key}": value for key, value in scraped.items()}}}
                if port
                else {}
            ),
            "spec": _said(spec),
        }

    @property
    def locks(self) -> bool:
        """Whether the ranks' network needs locked memory. The node's shell then obtains the right to lock, or fails."""
        return self.rdma is not None

    @property
    def adds_lock(self) -> bool:
        return self.locks and self.locked_memory == "capability"

    def _resources(self, submission: Submission) -> dict[str, Any]:
        """Return the requests and limits of a pod.

        Cores are requested without a limit. A limit would be a quota per tenth of a second, after which the kernel
        suspends all threads of the node's ranks. Devices and memory have a limit equal to the request.
        """
        both: dict[str, Any] = {}
        if self.memory:
            both["memory"] = str(self.memory)
        if submission.uses_gpus:
            both["nvidia.com/gpu"] = submission.ranks_per_node
        if self.rdma:
            device = _RESOURCE.fullmatch(self.rdma)
            assert device is not None
            both[device["name"]] = int(device["count"] or 1)
        requests = {"cpu": str(submission.ranks_per_node * self.cores(submission)), **both}
        return {"requests": requests, "limits": both} if both else {"requests": requests}


def metrics_port(submission: Submission) -> int | None:
    """Return the port at which the run serves metrics; None without a sink that answers requests."""
    metrics = submission.config.metrics
    return metrics.port if any(entries("sinks")[name].answers for name in metrics.sinks) else None


def toleration_of(text: str) -> dict[str, str]:
    taint = _TAINT.fullmatch(text)
    assert taint is not None, text
    value, effect = taint["value"], taint["effect"]
    toleration = {"key": taint["key"], "operator": "Exists" if value is None else "Equal"}
    toleration |= {} if value is None else {"value": value}
    return toleration | ({"effect": effect} if effect else {})


def probes_of(alive: str) -> dict[str, Any]:
    """Return the probes of a pod. `alive`: a script that fails unless all ranks have a recent record.

    Startup may take a day (8640 checks every 10 s), for the preparation of data. A pod is ready while the check
    succeeds, and is killed after half an hour of failures. Ranks themselves end waits that take too long.
    """
    check = {"exec": {"command": ["sh", "-c", alive]}, "timeoutSeconds": 10}
    return {
        "startupProbe": {**check, "periodSeconds": 10, "failureThreshold": 8640},
        "readinessProbe": {**check, "periodSeconds": 10},
        "livenessProbe": {**check, "periodSeconds": 60, "failureThreshold": 30},
    }


_HEAD_RESOURCES = {"requests": {"cpu": "1", "memory": "4Gi"}}


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without None and without empty texts, lists and maps. Zero and false are kept."""
    return {
        key: value
        for key, value in fields.items()
        if value is not None and (value or not isinstance(value, Sequence | Mapping))
    }
