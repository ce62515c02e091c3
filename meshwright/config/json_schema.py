"""JSON Schema (draft 2020-12) of run files, for editors that complete and check a run while a user writes.

The schema accepts every file that `load_config` accepts, with short forms. It refuses every mistake of a single field:
unknown keys, values of a wrong kind, beyond a bound, or outside of the choices. Rules over several fields, and fields
without an effect, are checked by the commands alone. (`load_config` reads a number in quotes; the schema marks one.)

configs/run.schema.json knows our strategies; `meshwright config --schema` also prints the strategies of other packages.
"""

from __future__ import annotations

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from meshwright.config.load import read_yaml
from meshwright.config.meanings import field_meanings
from meshwright.config.messages import Schema
from meshwright.config.registry import entries
from meshwright.config.schema import Config
from meshwright.config.section import Section
from meshwright.config.shorthand import PRECISIONS, SHORTHANDS, Shorthand
from meshwright.configs import shipped

UNDECIDED: Schema = {"enum": [None, False, "auto", "none"]}
"""Values that are allowed for a field without effect."""


class _Described(GenerateJsonSchema):
    """pydantic's schema, with the docstrings beneath fields as descriptions."""

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        made = super().model_schema(schema)
        names = {field.alias or name: name for name, field in schema["cls"].model_fields.items()}
        meanings = field_meanings(schema["cls"])
        for key, inner in made.get("properties", {}).items():
            inner.pop("title", None)
            if line := meanings.get(names[key]):
                inner.setdefault("description", line)
        return made


def config_schema(section: type[Section] = Config) -> Schema:
    """Return pydantic's schema of a section's fields, without short forms. Nested sections are `$ref` references."""
    return section.model_json_schema(schema_generator=_Described)


def run_schema() -> Schema:
    """Return the schema of a run file, with short forms."""
    schema = config_schema()
    definitions, fields = schema["$defs"], schema["properties"]
    for section in (schema, *definitions.values()):
        for name, inner in section["properties"].items():
            # The default of a section is omitted: long, and a repetition of the fields' defaults.
            field_schema = {
                key: value for key, value in inner.items() if key != "default" or not isinstance(value, dict)
            }
            # Sizes may be written as 16M. Only an example in pydantic's schema, of the field or a branch, marks a size.
            size = {"type": "string", "pattern": "^[0-9]+[kKmMgG]$"}
            sized = any("examples" in branch for branch in (field_schema, *field_schema.get("anyOf", ())))
            section["properties"][name] = _either(field_schema, size) if sized else field_schema
    _open_data(definitions, fields["data"])
    _open_models(definitions, fields["model"])
    for branch in definitions["Layout"]["properties"]["tensor"]["oneOf"]:
        section = definitions[_name(branch)]
        section["required"] = list(dict.fromkeys(["kind", *section.get("required", ())]))
    for path in sorted(SHORTHANDS, key=lambda path: -path.count(".")):  # sections in others first
        _open_section(schema, path, SHORTHANDS[path])
    fields["precision"] = _either(fields["precision"], {"enum": list(PRECISIONS)})
    every = {"type": "object", "properties": {"every": {"type": "integer", "minimum": 1}}, "required": ["every"]}
    memory, metrics = definitions["MemorySection"]["properties"], definitions["Metrics"]["properties"]
    memory["recompute"] = _either(memory["recompute"], every | {"additionalProperties": False})
    metrics["tensorboard"] = {"type": "boolean", "deprecated": True, "description": "Version 0.1.0's sinks."}
    _open_layout(fields)
    title = "A run of Meshwright: `meshwright config FIELD` says what a field means"
    open_layout = {"properties": {"layout": {"const": "auto"}}, "required": ["layout"]}
    schema |= {"title": title, "if": {"required": ["plan"]}, "then": open_layout}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _either(field: Schema, *others: Schema) -> Schema:
    """Allow other forms for a field. The description and the default stay at the top level of the schema."""
    notes = {key: field[key] for key in ("description", "default") if key in field}
    return notes | {"anyOf": [{key: value for key, value in field.items() if key not in notes}, *others]}


def _name(reference: Schema) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _open_section(root: Schema, path: str, shorthand: Shorthand) -> None:
    """Accept a bare value in place of a section: the value of a shorthand's field, if no other field is required."""
    *parents, last = path.split(".")
    node = root
    for parent in parents:
        node = root["$defs"][_name(node["properties"][parent])]
    field = node["properties"][last]
    branches = [root["$defs"][_name(branch)] for branch in field.get("oneOf", field.get("anyOf", [field]))]
    forms: list[Schema] = [{"enum": [None, False, "none"]}] if shorthand.off else []
    for name in filter(None, (shorthand.word, shorthand.number)):
        for branch in branches:
            if name in branch["properties"] and not set(branch.get("required", ())) - {name}:
                form = branch["properties"][name]
                form = {key: value for key, value in form.items() if key not in ("description", "default")}
                forms += [form] if form not in forms else []
    node["properties"][last] = _either(field, *forms)


def _open_data(definitions: Schema, field: Schema) -> None:
    """Make the kind optional, and accept fields of other kinds with values that decide nothing."""
    sections = [definitions[_name(branch)] for branch in field["oneOf"]]
    field["anyOf"] = field.pop("oneOf")
    everything = {key: None for section in sections for key in section["properties"]}
    for section in sections:
        properties = section["properties"]
        if "mixture" in properties:
            weights = {"type": "object", "additionalProperties": properties["mixture"]["items"]["prefixItems"][1]}
            properties["mixture"] = _either(properties["mixture"], weights)
        if "template_arguments" in properties:
            values = {
                "type": "object",
                "additionalProperties": properties["template_arguments"]["items"]["prefixItems"][1],
            }
            properties["template_arguments"] = _either(properties["template_arguments"], values)
        old = {
            "enum": ["auto", properties["kind"]["const"]],
            "deprecated": True,
            "description": "Version 0.1.0's kind.",
        }
        section["properties"] = (
            properties | {key: UNDECIDED for key in everything if key not in properties} | {"objective": old}
        )
        section["required"] = [key for key in section.get("required", ()) if key != "kind"]


def _open_models(definitions: Schema, field: Schema) -> None:
    """Accept a model by name, or `base` (a name) or `from` (a Hugging Face folder) with changed fields on top."""
    trees = {name: read_yaml(path) for name, path in shipped("models").items()}
    for branch, family in zip(field["oneOf"], entries("models"), strict=True):
        section = definitions[_name(branch)]
        properties = section["properties"]
        by_default = "family" not in section.get("required", ())
        model_names = [
            name for name, tree in trees.items() if tree.get("family", family if by_default else None) == family
        ]
        fitting = [name for name, tree in trees.items() if tree.keys() <= properties.keys()]
        said: list[Schema] = [{"required": ["family"]}, {"required": ["from"]}]
        said += [{"required": ["base"], "properties": {"base": {"enum": model_names}}}] if model_names else []
        if by_default:
            said.append({"not": {"anyOf": [{"required": ["base"]}, {"required": ["from"]}]}})
        section["required"] = [key for key in section.get("required", ()) if key != "family"]
        properties |= {
            "base": {"enum": fitting, "description": "The model whose fields these lie over."},
            "from": {"type": "string", "description": "A Hugging Face folder, or a name: its fields and its weights."},
        }
        section |= {"anyOf": said, "not": {"required": ["base", "from"]}}
    field["anyOf"] = [{"enum": list(trees)}, *field.pop("oneOf")]


def _open_layout(fields: Schema) -> None:
    """Accept `layout: auto`, and only with this layout the section `plan`."""
    plan = {
        "type": "object",
        "description": "Beside layout: auto, where the planner shall lay the run out.",
        "additionalProperties": False,
        "properties": {
            "cluster": {"type": "string", "description": "A cluster's name, or a file of calibrate."},
            "devices": {"type": "integer", "minimum": 1, "description": "Its devices; all that are here."},
        },
    }
    fields["layout"] = _either(fields["layout"], {"const": "auto"})
    fields["plan"] = plan
