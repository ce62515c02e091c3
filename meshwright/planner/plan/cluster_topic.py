"""The fields of a cluster file, for `meshwright config cluster`; read from the section classes."""

from __future__ import annotations

from meshwright.config.json_schema import config_schema
from meshwright.config.reference import FieldFacts, SectionFacts, Topic
from meshwright.config.section import Section, shown
from meshwright.planner.plan.cluster import Cluster, Device, KnownError, Level, Links, Measured
from meshwright.ranks.errors import ConfigError

TOPIC = "cluster"

SECTIONS: dict[str, type[Section]] = {
    TOPIC: Cluster,
    f"{TOPIC}.device": Device,
    f"{TOPIC}.links.torch": Links,
    f"{TOPIC}.links.torch.levels": Level,
    f"{TOPIC}.links.torch.measured": Measured,
    f"{TOPIC}.checked": KnownError,
}
"""The sections of a cluster file, each before its inner sections."""

NUMBERS = ("efficiency", "low_efficiency", "attention_efficiency", "bandwidth_bytes_per_second")
"""Curves of a device that may be given as one number; a level's bandwidth is always a number."""

_WORDS = {
    "number": "a number", "integer": "a whole number", "string": "a text", "boolean": "true, false",
    "object": "a section", "array": "a list",
}  # fmt: skip


def cluster_topic(name: str) -> Topic:
    """Return the topic of `cluster`, or of one of its sections. Raises ConfigError for another name."""
    asked = [path for path in SECTIONS if path == name or name == TOPIC]
    if asked:
        return Topic(name, (), tuple(section_facts(path) for path in asked))
    section, _, key = name.rpartition(".")
    facts = [each for each in section_facts(section).fields if each.name == name] if section in SECTIONS else []
    if not facts:
        known = [*SECTIONS, *(each.name for path in SECTIONS for each in section_facts(path).fields)]
        near = [path for path in known if path.rpartition(".")[2] == key]
        raise ConfigError.of("FIELD", name, "is no field of a cluster file", ", ".join(near or SECTIONS))
    return Topic(name, tuple(facts), ())


def section_facts(path: str) -> SectionFacts:
    """Return a section's fields by their names in a file."""
    section = SECTIONS[path]
    properties = config_schema(section)["properties"]
    fields = []
    for key, field in section.model_fields.items():
        node = properties[field.alias or key]
        default = "" if field.is_required() or field.default is None else shown(field.default)
        kinds = node.get("anyOf", [node])
        valid = " or ".join(dict.fromkeys(map(valid_of, kinds)))
        if section is Device and key in NUMBERS:
            valid = f"a number or {valid}"
        fields.append(FieldFacts(f"{path}.{field.alias or key}", node.get("description", ""), default, valid))
    about = " ".join((section.__doc__ or "").split())
    return SectionFacts(path, "", about, tuple(fields))


def valid_of(node: dict[str, object]) -> str:
    """Return the values that a field takes, in words."""
    choices = node.get("enum") or ([node["const"]] if "const" in node else [])
    if isinstance(choices, list) and choices:
        return ", ".join(map(str, choices))
    if node.get("type") == "null":
        return "null"
    if node.get("type") == "array" and "prefixItems" not in node:
        return "a list of points [x, y]" if "prefixItems" in str(node.get("items")) else "a list"
    return _WORDS.get(str(node.get("type")), "a section")
