"""Manifests as text, and the user's patch over them: Kubernetes' strategic merge.

maps       are merged key by key; null takes a key out
lists      of named objects are merged object by object, by the key of MERGE_KEYS; all others are replaced
$patch     delete takes the map or the named object out, replace puts the patch's in its place (in a list: an item
           of its own, `- $patch: replace`), merge says what is done anyway
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
"""By the field that holds the list: core/v1's own keys (patchMergeKey), and those of JobSet and RayCluster."""

_DIRECTIVE = "$patch"
_DELETE, _REPLACE, _MERGE = "delete", "replace", "merge"


def read_patch(path: Path) -> list[Tree]:
    """The documents of a patch file. Raises ConfigError where it is none."""
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
    """The manifests with a patch file's documents merged into them: each into the manifest of its `kind`, one without
    a kind into the last, the job itself. Raises ConfigError where a document fits none."""
    trees = list(manifests)
    for patch in [] if path is None else read_patch(path):
        kinds = [str(tree.get("kind", "")) for tree in trees]
        kind = patch.get("kind", kinds[-1])
        # A patch for a missing kind would be lost silently.
        if kind not in kinds:
            raise ConfigError.of("patch", path, f"is for a {kind}, of which there is none", ", ".join(kinds))
        place = kinds.index(kind)
        trees[place] = _merged(trees[place], patch, f"{path}: ")
    return trees


def _merged(tree: Any, patch: Tree, where: str) -> Tree:
    """`where`: the file and the fields that lead here, for messages."""
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
    """The items in their order, what the patch adds after them."""
    # Kubernetes' own form: an item that says replace stands for the whole list.
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
    """The manifests as one YAML file, below comments."""
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as one, and what is there twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    # A shell script is read by people as well: as a block, not as one line with \n in it.
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
