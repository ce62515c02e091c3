"""Texts for Kubernetes, KubeRay and SkyPilot match the published schemas.

JobSet, Trainer and core/v1: the models that the Kubeflow project makes from the schemas (kubeflow-trainer-api).
RayJob, PyTorchJob and SkyPilot's task: the fields of the published references, written down in schemas/; pods inside
are core/v1's as well. If `sky` is installed, `sky` reads the task.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from meshwright.ranks.errors import ConfigError
from meshwright.tools.submit import job
from tests.tools.submit.asked import containers, documents, pods, task, task_text, text_of

KINDS = ("jobset", "trainjob", "rayjob", "pytorchjob")

MODELS = {
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?"
FORMS = {
    "failurePolicy.action": "FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts|RestartJob",
    "onJobFailureReasons": "((BackoffLimit|Deadline|MaxFailedIndexes)Exceeded)|FailedIndexes|PodFailurePolicy",
    "medium": "(Memory)?",
    "mountPath": "/.*",
    "claimName": LABEL,
    "containerName": LABEL,
    "groupName": LABEL,
    "cpu": QUANTITY,
    "memory": QUANTITY,
    "sizeLimit": QUANTITY,
    "nvidia.com/gpu": QUANTITY,
}
"""Formats of text fields that the models leave open, by the field's name."""

EVERYTHING = (
    "queue=team", "priority=high", "secrets=hf", "secrets=wandb", "env.HF_HOME=/runs/hf", "memory=64G",
    "rdma=rdma/ib:2", "host_network=true", "tolerations=nvidia.com/gpu", "tolerations=team=a:NoSchedule",
    "service_account=trainer", "selector.cloud.example.com/pool=h100",
    "pull_secrets=registry", "namespace=team", "shm=16G", "grace=60",
)  # fmt: skip


def settings_of(kind: str, settings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the settings of a kind; a RayJob runs Ray's program, and no helper can give this program a capability."""
    return (*settings, "locked_memory=node") if settings and kind == "rayjob" else settings


def schema(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text()))


def values_of(tree: Any, below: str = "") -> Iterator[tuple[str, object]]:
    """Yield every plain value with the value's field; for an action, with the field of the action's rule."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from (
            values_of(value, below if key == "rules" else key)
            if isinstance(value, dict | list)
            else ([(f"{below}.{key}" if key == "action" else key, value)])
        )
    for value in tree if isinstance(tree, list) else ():
        yield from values_of(value, below) if isinstance(value, dict | list) else [(below, value)]


def check(manifest: dict[str, Any]) -> None:
    """Check that a manifest has only fields of the API, with values of the right type and format."""
    from kubeflow_trainer_api import models  # imported here: takes 1.5 s, which a worker's collection can save

    kind = manifest["kind"]
    if kind in MODELS:
        read = getattr(models, MODELS[kind]).from_dict(manifest)
        assert read is not None
        assert read.to_dict() == manifest  # the models leave out unknown fields
    else:
        schema(kind.lower()).validate(manifest)
    for pod in pods(manifest):
        spec = models.IoK8sApiCoreV1PodSpec.from_dict(pod)
        assert spec is not None
        assert spec.to_dict() == pod
    wrong = [
        (key, value)
        for key, value in values_of(manifest)
        if not re.fullmatch(FORMS.get(key, ".*"), str(value), re.DOTALL)
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", [{}, {"device": "cuda"}, {"nodes": 1}, {"nodes": 4}], ids=str)
@pytest.mark.parametrize("settings", [(), EVERYTHING], ids=["plain", "everything"])
def test_manifests_hold_to_the_schemas(kind: str, run: Path, asked: dict[str, Any], settings: tuple[str, ...]) -> None:
    manifests = documents(kind, run, *settings_of(kind, settings), **asked)
    for manifest in manifests:
        check(manifest)
    assert manifests[0]["data"]["run.yaml"] == run.read_text()
    assert manifests[0]["metadata"]["name"] == "my-run-run"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slip", [{"backOffLimit": 0}, {"restartPolicy": "Sometimes"}, {"hostNetwork": "yes"}], ids=str)
def test_the_check_sees_a_slip_in_a_pod(kind: str, slip: dict[str, Any], run: Path) -> None:
    manifest = next(manifest for manifest in documents(kind, run) if pods(manifest))
    pods(manifest)[0].update(slip)
    with pytest.raises((AssertionError, ValueError)):
        check(manifest)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_sees_a_slip_in_a_job(kind: str, run: Path) -> None:
    *_, manifest = documents(kind, run)
    manifest["spec"]["suspended"] = True
    with pytest.raises((AssertionError, ValidationError), match="suspended"):
        check(manifest)
    _, manifest = documents("jobset", run)
    manifest["spec"]["failurePolicy"]["rules"][0]["action"] = "Again"
    with pytest.raises((AssertionError, ValueError), match="Again"):
        check(manifest)


@pytest.mark.parametrize("kind", KINDS)
def test_named_settings_reach_every_pod_that_trains(kind: str, run: Path) -> None:
    manifests = documents(kind, run, *settings_of(kind, EVERYTHING), device="cuda")
    training = [pod for pod in pods(manifests) if pod["containers"][0]["name"] != "ray-head"]
    assert training
    for pod in training:
        (container,) = pod["containers"]
        assert container["env"] == [{"name": "HF_HOME", "value": "/runs/hf"}]
        assert container["envFrom"] == [{"secretRef": {"name": "hf"}}, {"secretRef": {"name": "wandb"}}]
        locked = None if kind == "rayjob" else {"capabilities": {"add": ["IPC_LOCK"]}}
        assert container.get("securityContext") == locked
        devices = {"memory": str(64 * 2**30), "nvidia.com/gpu": 2, "rdma/ib": 2}
        assert container["resources"] == {"requests": {"cpu": "12", **devices}, "limits": devices}
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"},
        ]
        named = ("priorityClassName", "serviceAccountName", "nodeSelector", "imagePullSecrets", "hostNetwork")
        assert [pod[name] for name in named] == [
            "high", "trainer", {"cloud.example.com/pool": "h100"}, [{"name": "registry"}], True,
        ]  # fmt: skip
        assert pod["terminationGracePeriodSeconds"] == 60
    assert [manifest["metadata"].get("labels") for manifest in manifests] == [
        *[None] * (len(manifests) - 1), {"kueue.x-k8s.io/queue-name": "team"},
    ]  # fmt: skip
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"team"}


@pytest.mark.parametrize("kind", KINDS)
def test_cores_are_requested_without_a_limit(kind: str, run: Path) -> None:
    for container in containers(documents(kind, run, "cpus=4")):
        resources = container["resources"]
        assert resources["requests"]["cpu"] == ("1" if container["name"] == "ray-head" else "8")
        assert "limits" not in resources


def test_a_train_job_ships_its_runtime(run: Path) -> None:
    """The runtime has the labels that Trainer reads, and Trainer makes the JobSet of kind=jobset."""
    _, runtime, job = documents("trainjob", run)
    assert job["spec"] == {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "my-run"},
        "trainer": {"numNodes": 2},
    }
    shipped, (_, job_set) = runtime["spec"]["template"]["spec"], documents("jobset", run)
    (replicated,) = shipped["replicatedJobs"]
    assert replicated["template"].pop("metadata") == {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    assert json.dumps(shipped).replace('"node"', '"ranks"') == json.dumps(job_set["spec"]).replace('"node"', '"ranks"')
    assert [container["name"] for container in containers(runtime)] == ["node"]


def test_a_ray_job_has_a_worker_a_node_and_the_script(run: Path) -> None:
    files, job = documents("rayjob", run, "cpus=3", "restarts=5", device="cuda")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (5, True)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (workers,) = cluster["workerGroupSpecs"]
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    assert workers["rayStartParams"] == {"num-cpus": "6"}
    assert spec["entrypoint"] == "python /etc/meshwright/run_ray.py"
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300", "PYTHONSAFEPATH": "1"}
    }
    placement = placement_in(files["data"]["run_ray.py"])
    assert (placement.file, placement.restarts, placement.cpus, placement.gpus) == ("/etc/meshwright/run.yaml", 0, 3, 1)
    for pod in pods(job):
        assert {"name": "run-file", "mountPath": "/etc/meshwright"} in pod["containers"][0]["volumeMounts"]


def placement_in(script: str) -> Any:
    names: dict[str, Any] = {"__name__": "script"}
    with patch.object(sys, "path", list(sys.path)):  # the script drops the current folder
        exec(compile(script, "script", "exec"), names)
    return names["PLACEMENT"]


def test_ray_s_script_has_the_run_file_in_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_text(run.read_text() + "# a 'quote', a \"quote\" and a \\\n")
    placement = placement_in(text_of("ray", run, ["cpus=2", "restarts=1"]))
    assert placement.run == run.read_text()
    assert (placement.file, placement.nodes, placement.ranks_per_node) == ("", 2, 2)
    assert placement.words == [
        "-m", "meshwright", "train", "RUN", "device=cpu", "--out", "/shared/first", "--resume",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ray = job.engine_of("ray", [])
    assert ray.command(Path("a b/my script.py"), "a")[-2:] == ["python", "a b/my script.py"]
    for file in ("/elsewhere/script.py", "$(touch x).py", "a;b.py", "`x`.py", "a'b.py", "%x%.py"):
        with pytest.raises(ConfigError, match=r"(?s)^--to=.*(does not lie in|has a character that a shell would read)"):
            ray.command(Path(file), "a")


def test_a_pytorch_job_says_that_it_is_legacy(run: Path) -> None:
    text = text_of("kubernetes", run, ["image=i", "volume=v", "kind=pytorchjob"])
    assert "# PyTorchJob is legacy" in text
    assert "kind=trainjob" in text
    assert "legacy" not in text_of("kubernetes", run, ["image=i", "volume=v"])
    master, worker = containers(documents("pytorchjob", run, device="cuda")[1])
    assert master == worker
    assert len(containers(documents("pytorchjob", run, nodes=1)[1])) == 1


TASKS = ({}, {"device": "cuda"}, {"nodes": 1})
SKY = (
    "spot=true", "infra=gcp/us-central1", "memory=64G", "env.A=b", "secrets=HF_TOKEN", "setup=pip install x", "cpus=4",
    "setup=ulimit -l unlimited",
)  # fmt: skip


@pytest.mark.parametrize("asked", TASKS, ids=str)
def test_a_sky_task_holds_to_the_reference(run: Path, asked: dict[str, Any]) -> None:
    schema("skypilot").validate(task(run, **asked))
    written = task(run, *SKY, **asked)
    schema("skypilot").validate(written)
    assert written["file_mounts"] == {"/etc/meshwright/run.yaml": str(run)}
    assert (written["volumes"], written["secrets"]) == ({"/runs": "runs"}, {"HF_TOKEN": None})
    assert written["setup"] == "pip install x\nulimit -l unlimited\n"
    assert written["resources"].get("accelerators") == ("H100:2" if asked.get("device") else None)
    assert (written["resources"]["memory"], written["resources"]["use_spot"]) == ("64+", True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # SkyPilot's warnings
@pytest.mark.skipif(find_spec("sky") is None, reason="no SkyPilot here: pip install skypilot, in a venv of its own")
@pytest.mark.parametrize("asked", TASKS, ids=str)
def test_sky_itself_reads_a_task(run: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    import sky

    file = tmp_path / "task.yaml"
    file.write_text(task_text(run, *SKY, **asked))
    read = sky.Task.from_yaml(str(file))
    (resources,) = read.resources
    assert (read.name, read.num_nodes, read.volumes) == ("my-run", asked.get("nodes", 2), {"/runs": "runs"})
    cpus = 16 if asked.get("nodes") == 1 else 8
    assert (resources.cpus, resources.memory, resources.use_spot) == (f"{cpus}+", "64+", True)
    assert (resources.accelerators or {}) == ({"H100": 2} if asked.get("device") else {})
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
