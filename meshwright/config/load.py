"""Reading of runs: a YAML file and `key.sub=value` words become a frozen Config, or a ConfigError of all mistakes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from meshwright.config.effects import EFFECTS, without_effect
from meshwright.config.kinds import foreign_fields, release_kind
from meshwright.config.messages import UNKNOWN, nearest, nearest_choice, problems_of
from meshwright.config.registry import check_plugins, load_entry
from meshwright.config.rules import broken_rules
from meshwright.config.schema import Config
from meshwright.config.scope import answered
from meshwright.config.section import shown
from meshwright.config.shorthand import PRECISIONS, begin_anew, in_words, spell_out, spelt_out
from meshwright.config.yaml_text import MAX_LEVELS, plain_values, told, yaml_text
from meshwright.configs import SCHEMA, shipped
from meshwright.ranks.errors import ConfigError, MeshwrightError, Problem

DECIDED = ("layout", "batch.micro", "memory")
"""Sections that the planner decides if the layout is open. Before that the effect of fields in them is unknown."""

OF_UNKNOWN = "is of an unknown section"
OPEN = "layout=auto"
"""The word that leaves the layout to the planner."""
ELSEWHERE = ("data.source", "data.mixture", "data.tokenizer")
"""The files of a run that a planner does not read: only shapes matter, and the files may be on another machine."""

WEIGHTS_FIELD = "model.from"
WEIGHTS = "meshwright.training.convert:read_folder"
ADAPTER = "meshwright.training.convert.adapters:read_adapter"
"""The reader of a Hugging Face folder's settings, named as text, so that this module imports no torch."""

MAX_BYTES = 2**20


def model_names() -> list[str]:
    """Return the names of the models that a run can name."""
    return list(shipped("models"))


@dataclass(frozen=True)
class RunTree:
    """A run file's keys, and the words on top of the keys.

    With `layout: auto` the planner finds the layout: `auto` is True, `tree` has no layout, and `plan` is the section
    `plan` of the file, which no other run has.
    """

    tree: dict[str, Any]
    auto: bool = False
    plan: Any = None
    words: tuple[str, ...] = ()


def read_run(path: Path, overrides: Iterable[str] = ()) -> RunTree:
    """Read a run file, or a shipped run by name, without checks.

    `layout=auto` and words on `plan` are removed from the words of the result. Raises ConfigError if the file cannot be
    read.
    """
    return run_tree(read_yaml(run_file(path)), overrides)


def run_tree(tree: dict[str, Any], overrides: Iterable[str] = ()) -> RunTree:
    """Return a run's keys with the words, as `read_run` does for a file."""
    words = tuple(overrides)
    auto = [word for word in words if word == OPEN]
    if not auto and tree.get("layout") != "auto":
        return RunTree(tree, words=words)
    asked = [word for word in words if word.partition("=")[0].partition(".")[0] == "plan"]
    plan = {"plan": deepcopy(tree.get("plan", {}))}
    if problems := [problem for problem in (_override(plan, word, ()) for word in asked) if problem]:
        raise ConfigError(problems)
    fields = {key: value for key, value in tree.items() if key not in ("layout", "plan")}
    return RunTree(fields, True, plan["plan"], tuple(word for word in words if word not in (*auto, *asked)))


def load_undecided(path: Path, overrides: Iterable[str] = (), *, elsewhere: bool = False) -> Config:
    """Read a run for a caller that searches layouts itself, so that `layout: auto` has no meaning.

    `elsewhere`: True if the corpus and the tokenizer may be missing here. Raises ConfigError as `load_config`.
    """
    run = read_run(path, overrides)
    return parse_run(run.tree, run.words, undecided=DECIDED, unread=ELSEWHERE if elsewhere else ())


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run file, or a shipped run by name, apply the overrides, and check all of it.

    Raises ConfigError with all mistakes at once.
    """
    return parse_run(read_yaml(run_file(Path(path))), overrides)


def run_file(path: Path) -> Path:
    """Return the path itself if it is a file, else the file of the shipped run of that name, if any."""
    return path if path.is_file() else shipped("runs").get(str(path), path)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping. Raises ConfigError for any other file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # bounded: /dev/zero has no end
        if len(content) > MAX_BYTES:
            raise ConfigError.of("run", path, "is larger than 1 MiB", _shipped_runs())
        tree = plain_values(content.decode("utf-8"))
    except FileNotFoundError as error:
        rule = "is no such file" + nearest(str(path), list(shipped("runs")))
        if "=" in str(path):
            rule = "is a field, and no run stands before it"
        raise ConfigError.of("run", path, rule, _shipped_runs()) from error
    except OSError as error:
        raise ConfigError.of("run", path, f"cannot be read: {error.strerror}", _shipped_runs()) from error
    except UnicodeDecodeError as error:
        raise ConfigError.of("run", path, "is not UTF-8 text", _shipped_runs()) from error
    except yaml.YAMLError as error:
        raise ConfigError.of("run", path, told(error)) from error
    if tree is None:
        raise ConfigError.of("run", path, "is empty", _shipped_runs())
    if not isinstance(tree, dict):
        raise ConfigError.of("run", path, "holds no `key: value` lines", _shipped_runs())
    return tree


def value_of_word(key: str, text: str) -> Any:
    """Read the value of a `key=value` word. Raises ConfigError with the key if the text is no YAML."""
    try:
        return plain_values(text)
    except yaml.YAMLError as error:
        raise ConfigError.of(key, shown(text), told(error, "YAML value")) from error


def _shipped_runs() -> str:
    """Return a text with the values that are valid for a run file."""
    return "a YAML file, or one of our runs by its name: " + ", ".join(shipped("runs"))


def parse_run(
    tree: dict[str, Any],
    overrides: Iterable[str] = (),
    *,
    laid_over: Collection[str] = (),
    undecided: Collection[str] = (),
    unread: Collection[str] = (),
) -> Config:
    """Check a tree that a user wrote, as `parse_config` does. In addition every field must have an effect (effects.py).

    Args:
        laid_over: fields of the tree that were set on top of a run file, like overrides.
        undecided: sections that a planner will decide; no field is refused for lack of effect because of these.
        unread: fields that name files which will not be opened here. With `model.from` among these fields the model is
            unknown, and rules over several fields are not checked.
    """
    return _parse(tree, list(overrides), laid_over, undecided, unread)


def parse_config(tree: dict[str, Any], overrides: Iterable[str] = (), *, unread: Collection[str] = ()) -> Config:
    """Check a tree of plain values from a program, such as the full dump of a config, with overrides on top. `unread`
    as in parse_run."""
    return _parse(tree, list(overrides), None, unread=unread)


def _parse(
    tree: dict[str, Any],
    overrides: list[str],
    laid_over: Collection[str] | None,
    undecided: Collection[str] = (),
    unread: Collection[str] = (),
) -> Config:
    """Check a tree. `laid_over`: None for a tree from a program, in which fields without effect are allowed."""
    check_plugins()
    # A copy: a sweep reads the caller's tree again, and a mistake is reported as it was typed.
    written, tree = tree, deepcopy(tree)
    spell_out(tree)
    words = list(laid_over or ())
    problems: list[Problem] = []
    for word in overrides:
        problems += filter(None, [_override(tree, word, words)])
        value: Any = None
        with suppress(yaml.YAMLError):  # a mistake that _override has reported
            value = plain_values(word.partition("=")[2])
        words.append(in_words(word.partition("=")[0], value)[0])
    spell_out(tree)
    if "plan" in tree:  # `plan` belongs to `layout: auto`, and that layout has been replaced
        rule = "has no effect where the layout is written"
        problems.append(Problem("plan", shown(tree.pop("plan")), rule, "leave it out, or layout: auto"))
    unresolved = _resolve_weights(tree)
    problems += _resolve_adapter(tree)
    # If the model's folder is on another machine, the model is unknown here: no rule can check its fields.
    elsewhere = bool(unresolved) and WEIGHTS_FIELD in unread
    problems += [] if elsewhere else unresolved
    problems += _resolve_model(tree)
    problems += _resolve_precision(tree)
    release_kind(tree, words)
    if "steps" in words and "epochs" not in words:
        tree.pop("epochs", None)  # the word sets the run's length, as a word `epochs` does over a file's steps
    problems += foreign_fields(tree, words) if laid_over is not None else ()
    config, mistakes = _validate(tree)
    problems += [mistake for mistake in mistakes if not (elsewhere and mistake.field.startswith("model."))]
    mistaken = {problem.field for problem in problems}
    if config is None:
        for field in {problem.field for problem in (*problems, *mistakes)}:
            _remove(tree, field)
        # The rest is checked without the mistaken fields, so that every mistake is reported at once.
        config, _ = _validate(tree)
    if config is not None and not elsewhere:
        problems += [problem for problem in broken_rules(config, mistaken) if problem.field not in unread]
        if laid_over is not None:
            mistaken = {problem.field for problem in problems}
            problems += without_effect(config, mistaken, words, undecided)
    if config is None or problems:
        known = [answered(problem, unknown=UNKNOWN in problem.rule) for problem in problems]
        raise ConfigError([_as_typed(problem, written, overrides) for problem in known])
    return config


def _as_typed(problem: Problem, tree: dict[str, Any], words: Iterable[str]) -> Problem:
    """Name a problem by the word that caused it, if the file lacks the section: `optimiser.lr=1`, not `{lr: 1}`."""
    section = problem.field
    typed = next((word for word in words if word.partition("=")[0].startswith(f"{section}.")), None)
    if typed is None or section.partition(".")[0] in tree or not (UNKNOWN in problem.rule or section == "plan"):
        return problem
    key, _, text = typed.partition("=")
    return replace(
        problem, field=key, value=shown(text), rule=problem.rule.replace(UNKNOWN, f"{OF_UNKNOWN}, {section}")
    )


def dump_tree(config: Config) -> dict[str, Any]:
    """Return the resolved config as the tree of a run file, without fields that have no effect."""
    tree = config.model_dump(mode="json", by_alias=True)
    for field in (field for effect in EFFECTS if not effect.holds(config) for field in effect.fields):
        _remove(tree, field)
    if not tree["precision"]["loss_scale"]:
        del tree["precision"]["loss_scale"]  # none of its fields has an effect
    return tree


def run_text(config: Config, comment: str = "") -> str:
    """Return the text of a run file of the resolved config.

    The first line names the schema in this installation, without a network address. Editors with the YAML language
    server then complete and check the file.
    """
    return f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n{comment}{dump_config(config)}"


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back."""
    return yaml_text(dump_tree(config))


def _override(tree: dict[str, Any], word: str, earlier: Collection[str]) -> Problem | None:
    """Apply a word to the tree; return the word's problem, if any. `earlier`: fields that earlier words have set."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        return Problem("override", word, "is not of the form key.sub=value", "steps=100, optimizer.lr=1e-3")
    try:
        field, value = in_words(key, value_of_word(key, text))
    except ConfigError as error:
        return error.problems[0]
    *parents, last = field.split(".")
    if len(parents) > MAX_LEVELS:
        return Problem(shown(key), shown(text), "is nested deeper than any key")
    node, path = tree, ""
    for parent in parents:
        path = f"{path}.{parent}".removeprefix(".")
        child = spelt_out(path, node.get(parent))
        if child is None:
            child = {}
        if not isinstance(child, dict):
            return Problem(key, text, f"cannot be set: {parent}={shown(child)} is a value, not a section")
        node[parent] = child
        node = child
    begin_anew(node, field, value, earlier)
    node[last] = value
    return None


def _resolve_model(tree: dict[str, Any]) -> list[Problem]:
    """Replace a model's name, or a section with `base`, by the fields of the named model with changes on top."""
    model = tree.get("model")
    if isinstance(model, str):
        model = {"base": model}
    if not isinstance(model, dict) or "base" not in model:
        return []
    fields = dict(model)
    base = fields.pop("base")
    tree["model"] = fields
    if base not in model_names():
        rule = "is no model that we have" + nearest(str(base), model_names())
        return [Problem("model", shown(base), rule, ", ".join(model_names()))]
    tree["model"] = laid_over(read_yaml(shipped("models")[base]), fields)
    return []


def laid_over(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields with changes on top. A nested section is merged, or replaced if the change names a `kind`."""
    merged = fields | changes
    for name, change in changes.items():
        before = fields.get(name)
        if isinstance(before, dict) and isinstance(change, dict) and "kind" not in change:
            merged[name] = before | change
    return merged


def _resolve_weights(tree: dict[str, Any]) -> list[Problem]:
    """Replace `model.from` by the fields of the folder's model. The folder's tokenizer becomes the data's default."""
    model, data = tree.get("model"), tree.get("data", {})
    if not isinstance(model, dict) or "from" not in model:
        return []
    fields = dict(model)
    source = fields.pop("from")
    tree["model"] = fields
    if "base" in fields:
        return [Problem("model.base", shown(fields["base"]), "has no effect beside model.from", "one of them")]
    wanted = fields.pop("family", None)
    try:
        found = load_entry(WEIGHTS)(str(source), None if wanted is None else str(wanted))
    except MeshwrightError as error:
        return [Problem(WEIGHTS_FIELD, shown(source), f"cannot be read: {error}")]
    # The run's fields of the model take precedence over the folder's.
    tree["model"], tree["weights"] = laid_over(found.model, fields), str(source)
    if found.tokenizer is not None and (data is None or isinstance(data, dict)):
        tree["data"] = {"tokenizer": str(found.tokenizer)} | (data or {})
    return []


def _resolve_adapter(tree: dict[str, Any]) -> list[Problem]:
    """Add the fields of the folder that `model.adapter.from` names."""
    model = tree.get("model")
    adapter = model.get("adapter") if isinstance(model, dict) else None
    if not isinstance(adapter, dict) or adapter.get("from") is None:
        return []
    try:
        found = load_entry(ADAPTER)(str(adapter["from"]))
    except MeshwrightError as error:
        return [Problem("model.adapter.from", shown(adapter["from"]), f"cannot be read: {error}")]
    tree["model"] = {**tree["model"], "adapter": found | adapter}
    return []


def _resolve_precision(tree: dict[str, Any]) -> list[Problem]:
    """Refuse an unknown name of a precision."""
    name = tree.get("precision")
    if not isinstance(name, str):
        return []
    tree["precision"] = {}
    rule = "is no precision" + nearest_choice("precision", name, list(PRECISIONS))
    return [Problem("precision", shown(name), rule, f"{', '.join(PRECISIONS)}, or a section of level and dtype")]


def _validate(tree: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        return None, problems_of(error, model_names())


def _remove(tree: dict[str, Any], field: str) -> None:
    *parents, last = field.split(".")
    node: Any = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)
