"""A patch over manifests is merged by the rules of Kubernetes' strategic merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.ranks.errors import ConfigError
from meshwright.tools.submit.manifests import patched
from tests.tools.submit.asked import containers, documents, pods, task

BASE = """
kind: Job
spec:
  size: 2
  labels: {a: x, b: y}
  command: [sh, -c]
  containers:
  - {name: one, image: i, env: [{name: A, value: a}, {name: B, value: b}]}
  - {name: two, image: j}
  volumes: [{name: runs, persistentVolumeClaim: {claimName: c}}]
  volumeMounts: [{name: runs, mountPath: /runs}]
"""


def merged(patch: str, tmp_path: Path) -> Any:
    file = tmp_path / "patch.yml"
    file.write_text(patch)
    (tree,) = patched([yaml.safe_load(BASE)], file)
    return tree["spec"]


@pytest.mark.parametrize(
    "patch, field, wanted",
    [
        ("{size: 3}", "size", 3),
        ("{size: null}", "size", None),
        ("{labels: {b: z, c: w, a: null}}", "labels", {"b": "z", "c": "w"}),
        ("{labels: {$patch: replace, c: w}}", "labels", {"c": "w"}),
        ("{labels: {$patch: delete}}", "labels", None),
        ("{labels: {$patch: merge, b: z}}", "labels", {"a": "x", "b": "z"}),
        ("{other: {x: null, y: {z: 1}}}", "other", {"y": {"z": 1}}),
        ("{command: [bash]}", "command", ["bash"]),
        ("{containers: [{name: two, $patch: delete}]}", "containers",
         [{"name": "one", "image": "i", "env": [{"name": "A", "value": "a"}, {"name": "B", "value": "b"}]}]),
        ("{containers: [{name: one, $patch: replace, image: k}, {name: two, tty: true}, {name: three}]}", "containers",
         [{"name": "one", "image": "k"}, {"name": "two", "image": "j", "tty": True}, {"name": "three"}]),
        ("{containers: [$patch: replace, {name: four}]}", "containers", [{"name": "four"}]),
        ("{containers: [{name: two, env: [{name: C, value: c}]}, {name: one, env: [{name: B, value: z}]}]}",
         "containers",
         [{"name": "one", "image": "i", "env": [{"name": "A", "value": "a"}, {"name": "B", "value": "z"}]},
          {"name": "two", "image": "j", "env": [{"name": "C", "value": "c"}]}]),
        ("{volumes: [{name: runs, persistentVolumeClaim: null, nfs: {server: s, path: /p}}]}", "volumes",
         [{"name": "runs", "nfs": {"server": "s", "path": "/p"}}]),
        ("{volumeMounts: [{mountPath: /runs, readOnly: true}, {mountPath: /data, name: data}]}", "volumeMounts",
         [{"name": "runs", "mountPath": "/runs", "readOnly": True}, {"mountPath": "/data", "name": "data"}]),
    ],
)  # fmt: skip
def test_the_rules_of_the_merge(patch: str, field: str, wanted: object, tmp_path: Path) -> None:
    spec = merged(f"spec: {patch}", tmp_path)
    before = yaml.safe_load(BASE)["spec"]
    assert spec.pop(field, None) == wanted
    before.pop(field, None)
    assert spec == before


@pytest.mark.parametrize(
    "patch, message",
    [
        (
            "spec: {containers: [{image: k}]}",
            r"patch.yml: spec.containers has an item without name, by which it is merged",
        ),
        (
            "spec: {volumes: [{name: runs, $retainKeys: [name]}]}",
            r"spec.volumes\[runs\] has \$retainKeys, which has no",
        ),
        ("spec: {labels: {$patch: destroy}}", r"spec.labels has \$patch: destroy, which has no meaning there"),
        ("$patch: delete", r"patch.yml has \$patch: delete, which has no meaning there"),
        ("kind: JobSet", r"is for a JobSet, of which there is none; valid: Job$"),
        ("- 1", r"holds a document that is no map"),
        ("a: [", r"is no YAML"),
    ],
)
def test_a_patch_that_cannot_be_merged_is_said(patch: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        merged(patch, tmp_path)


def test_a_patch_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^patch=.*none.yaml cannot be read"):
        patched([{"kind": "Job"}], tmp_path / "none.yaml")


def test_a_job_is_patched_and_its_files_too(run: Path, tmp_path: Path) -> None:
    """A document patches the manifest of the document's kind; a document without a kind patches the job."""
    file = tmp_path / "patch.yaml"
    file.write_text("""
metadata: {annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: rack}}
spec:
  replicatedJobs:
  - name: node
    template:
      spec:
        template:
          spec:
            containers:
            - name: ranks
              resources: {limits: {cpu: 16}}
              volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
            volumes: [{name: data, hostPath: {path: /mnt/data}}]
---
kind: ConfigMap
metadata: {labels: {team: a}}
""")
    plain, (files, job) = documents("jobset", run), documents("jobset", run, f"patch={file}")
    assert files == {**plain[0], "metadata": {**plain[0]["metadata"], "labels": {"team": "a"}}}
    assert job["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"}
    (container,), (before,) = containers(job), containers(plain[1])
    assert container["resources"] == {"requests": {"cpu": "2"}, "limits": {"cpu": 16}}
    assert container["volumeMounts"] == [
        *before["volumeMounts"], {"name": "data", "mountPath": "/data", "readOnly": True},
    ]  # fmt: skip
    assert container["command"] == before["command"]
    assert [volume["name"] for volume in pods(job)[0]["volumes"]] == ["runs", "run-file", "shared-memory", "data"]


def test_a_sky_task_is_patched(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text("resources: {network_tier: best}\nvolumes: null\nfile_mounts: {/runs: {source: 's3://b'}}\n")
    written = task(run, f"patch={file}")
    assert written["resources"]["network_tier"] == "best"
    assert "volumes" not in written
    assert written["file_mounts"] == {"/etc/meshwright/run.yaml": str(run), "/runs": {"source": "s3://b"}}
