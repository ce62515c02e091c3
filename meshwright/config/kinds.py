"""The kind of data that a run reads, decided once, when the config is read, from the model's family and the source.

`data.kind` is optional. Each family reads one form of batches and has a default kind. A source of only one possible
kind (a tsv file has pairs) decides instead. `data.objective: pairs | spans`, the name until 0.1.0, is still read.
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
    """Return a data section of the family's default kind, with the given fields."""
    section: DataSection = entries("data")[model.data_kind].model_validate({"kind": model.data_kind} | fields)
    return section


def with_kind(data: object, model: object) -> object:
    """Return the written fields of `data` with the kind added and fields of other kinds removed.

    A `data` that is no mapping, such as a finished section, is returned unchanged. `model`: the model's section, or the
    written fields.
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
    """Remove the file's kind of data if words on top of the file choose a model that cannot read this kind.

    `with_kind` then decides the kind anew. A `data.kind` among the words is kept.
    """
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
    """Yield a problem for each field of another kind of data that the user wrote, since the field has no effect.

    `words`: the fields that were set on top of the file. A field of the file that a word has left idle is no mistake.
    """
    data, network = tree.get("data"), _network(tree.get("model"))
    kinded = with_kind(data, tree.get("model"))
    if not isinstance(data, Mapping) or not isinstance(kinded, Mapping) or network is None:
        return
    data_kind, section = kinded["kind"], _section(kinded["kind"])
    for key, value in data.items() if section is not None else ():
        excused = fields_meet(DECISIVE, words) and not fields_meet([f"data.{key}"], words)
        if section is None or not _foreign(key, section) or decides_nothing(value) or excused:
            continue
        others = {name: candidate for name, candidate in entries("data").items() if key in candidate.model_fields}
        forms = {candidate.gives for candidate in others.values()}
        families = [name for name, family in entries("models").items() if family.reads in forms]
        valid = f"leave it out, or data.kind={', '.join(others)} of a model.family={', '.join(families)}"
        yield Problem(f"data.{key}", shown(value), f"has no effect on data.kind={data_kind}", valid)


def _network(model: object) -> type[Network] | None:
    """Return the section class of a model's family; None for an unknown family."""
    if isinstance(model, Network):
        return type(model)
    named = {} if model is None else model
    family = named.get("family", default_family()) if isinstance(named, Mapping) else None
    return entries("models").get(family) if isinstance(family, str) else None


def _section(data_kind: object) -> type[DataSection] | None:
    return entries("data").get(data_kind) if isinstance(data_kind, str) else None


def _chosen(fields: Mapping[str, Any], network: type[Network] | None) -> str:
    if network is None:
        return Network.data_kind
    suitable = {data_kind: section for data_kind, section in entries("data").items() if section.gives == network.reads}
    return next((data_kind for data_kind, section in suitable.items() if section.claims(fields)), network.data_kind)


def _foreign(key: str, section: type[DataSection]) -> bool:
    """True if a key is a field of another kind of data, but not of this one."""
    known = any(key in candidate.model_fields for candidate in entries("data").values())
    return known and key not in section.model_fields
