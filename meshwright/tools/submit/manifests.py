"""Manifests as text, with the user's patch applied by Kubernetes' strategic merge.

maps       merged key by key; null removes a key
lists      of named objects: merged object by object, by the key in MERGE_KEYS; all other lists are replaced
$patch     delete: removes the map or the named object; replace: puts the patch's in place of the old one (in a list:
           a separate item, `- $patch: replace`); merge: the default
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.ranks.errors import ConfigError

Tree = dict[str, Any]

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "replicatedJobs": "name",
    "workerGroupSpecs": "groupName",
}
"""By the list's field: the keys of core/v1 (patchMergeKey), of JobSet and of RayCluster."""

_DIRECTIVE = "$patch"
_DELETE, _REPLACE, _MERGE = "delete", "replace", "merge"


def read_patch(path: Path) -> list[Tree]:
    """Return the documents of a patch file. Raises ConfigError if the file cannot be read or has no maps."""
    try:
        documents = [tree for tree in yaml.safe_load_all(path.read_text()) if tree is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("patch", path, f"cannot be read ({error})", "a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError.of("patch", path, f"is no YAML ({' '.join(str(error).split())})", "a YAML file") from error
    for tree in documents:
        if not isinstance(tree, dict):
            raise ConfigError.of("patch", path, "holds a document that is no map", "key: value")
    return documents


def patched(manifests: Sequence[Tree], path: Path | None) -> list[Tree]:
    """Merge a patch file's documents into the manifests.

    A document is merged into the manifest of equal `kind`; without `kind` into the last manifest, which is the job.
    Raises ConfigError for a kind without a manifest.
    """
    trees = list(manifests)
    for patch in [] if path is None else read_patch(path):
        kinds = [str(tree.get("kind", "")) for tree in trees]
        resource_kind = patch.get("kind", kinds[-1])
        # Else a patch for a missing kind would have no effect.
        if resource_kind not in kinds:
            raise ConfigError.of("patch", path, f"is for a {resource_kind}, of which there is none", ", ".join(kinds))
        index = kinds.index(resource_kind)
        trees[index] = _merged(trees[index], patch, f"{path}: ")
    return trees


def _merged(tree: Any, patch: Tree, where: str) -> Tree:
    """Merge a patch into a map. `where`: the file and the path of fields, for messages."""
    directive = patch.get(_DIRECTIVE, _MERGE)
    unknown = [key for key in patch if str(key).startswith("$") and key != _DIRECTIVE]
    if unknown or directive not in (_REPLACE, _MERGE):
        rule = f"has {unknown[0] if unknown else f'{_DIRECTIVE}: {directive}'}, which has no meaning there"
        raise ConfigError.of(
            "patch", where.rstrip(":. "), rule, f"{_DIRECTIVE}: {_REPLACE}, {_MERGE}; {_DELETE} below a field"
        )
    merged = dict(tree) if isinstance(tree, dict) and directive == _MERGE else {}
    for key, value in patch.items():
        here = f"{where}{key}"
        if key == _DIRECTIVE:
            continue
        if value is None or (isinstance(value, dict) and value.get(_DIRECTIVE) == _DELETE):
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merged(merged.get(key), value, f"{here}.")
        elif isinstance(value, list) and key in MERGE_KEYS:
            merged[key] = _merged_list(merged.get(key) or [], value, MERGE_KEYS[key], here)
        else:
            merged[key] = value
    return merged


def _merged_list(items: Sequence[Tree], patches: Sequence[Any], name: str, where: str) -> list[Tree]:
    """Merge patches into a list: old items in the old order, then new items."""
    # In Kubernetes' strategic merge an item `$patch: replace` replaces the whole list.
    if {_DIRECTIVE: _REPLACE} in patches:
        items, patches = [], [patch for patch in patches if patch != {_DIRECTIVE: _REPLACE}]
    merged = {item[name]: item for item in items}
    for patch in patches:
        if not isinstance(patch, dict) or name not in patch:
            raise ConfigError.of("patch", where, f"has an item without {name}, by which it is merged", f"{name}: ...")
        if patch.get(_DIRECTIVE) == _DELETE:
            merged.pop(patch[name], None)
        else:
            merged[patch[name]] = _merged(merged.get(patch[name]), patch, f"{where}[{patch[name]}].")
    return list(merged.values())


def manifest_text(manifests: Sequence[Tree], comments: Sequence[str]) -> str:
    """Return the manifests as one YAML file, with comments at the top."""
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes texts of several lines as blocks, and no aliases for repeated objects."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    # As a block a shell script stays readable.
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
