"""The kind of data that a run reads: decided once, when the config is read, by the model's family and the source.

A run need not write `data.kind`: each family reads one form of batches and has a kind of its own, and a source that can
be nothing else (a tsv file is pairs) decides for itself. `data.objective: pairs | spans`, the name until 0.1.0, still
says the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from meshwright.compute.models.section import Network
from meshwright.config.registry import default_family, entries
from meshwright.config.section import decides_nothing, fields_meet, shown
from meshwright.data.section import DataSection
from meshwright.ranks.errors import Problem

DECISIVE = ("model.family", "data.kind", "data.objective", "data.source")


def data_for(model: Network, **fields: Any) -> DataSection:
    """A data section of the kind that the model's family reads by itself."""
    section: DataSection = entries("data")[model.data_kind].model_validate({"kind": model.data_kind} | fields)
    return section


def with_kind(data: object, model: object) -> object:
    """The fields written of `data` with its kind, and without those of other kinds; a section is left as it is.

    `model`: the model's section, or what was written of it.
    """
    if not isinstance(data, Mapping):
        return data
    fields, network = dict(data), _network(model)
    objective = fields.pop("objective", "auto")
    if "kind" not in fields:
        fields["kind"] = _chosen(fields, network) if objective == "auto" else objective
    elif objective != "auto":
        return fields | {"objective": objective}  # two words for one thing: the old one is an unknown key
    section = _section(fields["kind"])
    return fields if section is None else {key: value for key, value in fields.items() if not _foreign(key, section)}


def release_kind(tree: dict[str, Any], words: Collection[str]) -> None:
    """Let the kind be decided anew where words on top of the file give it a model that does not read the file's."""
    data = tree.get("data")
    if not isinstance(data, dict) or fields_meet(["data.kind"], words):
        return
    if fields_meet(["data.objective"], words):
        data.pop("kind", None)
    elif fields_meet(["model"], words):
        section, network = _section(data.get("kind", data.get("objective"))), _network(tree.get("model"))
        if section is not None and network is not None and section.gives != network.reads:
            tree["data"] = {key: value for key, value in data.items() if key not in ("kind", "objective")}


def foreign_fields(tree: Mapping[str, Any], words: Collection[str]) -> Iterator[Problem]:
    """The fields of other kinds of data that the user wrote: they have no effect.

    `words`: the fields that were set on top of the file. One that these have switched off lies idle, and is no mistake.
    """
    data, network = tree.get("data"), _network(tree.get("model"))
    kinded = with_kind(data, tree.get("model"))
    if not isinstance(data, Mapping) or not isinstance(kinded, Mapping) or network is None:
        return
    kind, section = kinded["kind"], _section(kinded["kind"])
    for key, value in data.items() if section is not None else ():
        excused = fields_meet(DECISIVE, words) and not fields_meet([f"data.{key}"], words)
        if section is None or not _foreign(key, section) or decides_nothing(value) or excused:
            continue
        others = {name: other for name, other in entries("data").items() if key in other.model_fields}
        forms = {other.gives for other in others.values()}
        families = [name for name, family in entries("models").items() if family.reads in forms]
        valid = f"leave it out, or data.kind={', '.join(others)} of a model.family={', '.join(families)}"
        yield Problem(f"data.{key}", shown(value), f"has no effect on data.kind={kind}", valid)


def _network(model: object) -> type[Network] | None:
    """The family's section; None where there is no such family."""
    if isinstance(model, Network):
        return type(model)
    named = {} if model is None else model
    family = named.get("family", default_family()) if isinstance(named, Mapping) else None
    return entries("models").get(family) if isinstance(family, str) else None


def _section(kind: object) -> type[DataSection] | None:
    return entries("data").get(kind) if isinstance(kind, str) else None


def _chosen(fields: Mapping[str, Any], network: type[Network] | None) -> str:
    if network is None:
        return Network.data_kind
    suitable = {kind: section for kind, section in entries("data").items() if section.gives == network.reads}
    return next((kind for kind, section in suitable.items() if section.claims(fields)), network.data_kind)


def _foreign(key: str, section: type[DataSection]) -> bool:
    """Whether a key is a field of another kind of data, and not of this one."""
    known = any(key in other.model_fields for other in entries("data").values())
    return known and key not in section.model_fields
