"""Fields set by a function of a Python file, read without running the file, since an unknown file may do anything.

    def llama3_8b():                                         training.seq_len = 8192
        config = base()                                      (and all that base() of the same file sets)
        config.training = TrainingConfig(seq_len=8192)
        config.parallelism.tensor_parallel_degree = TWO      parallelism.tensor_parallel_degree = 2
        return config

A call is read as a mapping of the keywords, with the called name under CALLED and positional values under 0, 1, ...
Numbers and lists are computed from literals, from the file's constants and from dictionaries of keywords. An `if` with
an unknown condition is left out with its branches, and listed. Any other expression is read as its source text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import ConfigError

CALLED = "()"
"""The key for a called function's name: `training.()` is TrainingConfig."""
MOST_CALLS = 20
"""Most nested calls between functions of the file."""
MOST_ITEMS = 10_000
"""Most items of a computed list: a file may ask for more than memory holds."""
UNKNOWN = object()
"""A condition that the file does not decide."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}  # fmt: skip
DIVISIONS = (ast.FloorDiv, ast.Div)


def computed(text: str) -> Any:
    """Compute an expression of numbers, `8 * 4 // 2`; return any other text unchanged."""
    try:
        return _Reader({}, {}, {}, 0).value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return text


def named_function(path: Path, function: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a function of a file sets, and the unknown conditions of branches that set fields.

    Raises:
        ConfigError: The file has no such function, or none is named.
    """
    text = path.read_text(encoding="utf-8")
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    if function not in names:
        rule = "names no function" if function is None else f"names {function}, which the file does not have"
        offered = [name for name in names if not name.startswith("_")][:8]
        raise ConfigError.of("--from", path, rule, " or ".join(f"{path}:{name}" for name in offered))
    undecided: list[str] = []
    return fields_of_function(text, str(function), undecided), undecided


def fields_of_function(text: str, name: str, undecided: list[str] | None = None) -> dict[str, Any]:
    """Return the fields of the object that a function of the text returns, as nested mappings.

    Args:
        text: The file's text.
        name: The function's name.
        undecided: A list for the unknown conditions of branches that set fields.

    Raises:
        KeyError: The file has no such function.
        SyntaxError: The text is no Python.
    """
    module = ast.parse(text)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    constants: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants |= {target.id: node.value.value for target in targets if isinstance(target, ast.Name)}
    return _Reader(functions, constants, {}, 0, undecided).run(functions[name], {})


class _Reader:
    """Reader of one function. `names`: values by local name."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], constants: dict[str, Any], names: dict[str, Any],
                 depth: int, undecided: list[str] | None = None) -> None:  # fmt: skip
        self.functions, self.constants, self.names, self.depth = functions, constants, dict(names), depth
        self.undecided: list[str] = [] if undecided is None else undecided

    def run(self, function: ast.FunctionDef, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = [*function.args.posonlyargs, *function.args.args]
        plain = function.args.defaults
        defaults = dict(zip([each.arg for each in arguments[len(arguments) - len(plain) :]], plain, strict=True))
        keyword = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        defaults |= {each.arg: value for each, value in keyword if value is not None}
        self.names |= {name: self.value(node) for name, node in defaults.items()} | dict(given)
        if function.args.kwarg is not None:
            known = {each.arg for each in (*arguments, *function.args.kwonlyargs)}
            rest = {name: value for name, value in given.items() if name not in known}
            self.names[function.args.kwarg.arg] = rest
        returned = self.follow(function.body)
        return returned if isinstance(returned, dict) else {}

    def follow(self, body: Sequence[ast.stmt]) -> Any:
        """Read statements in order; return the value of the first `return`, or None."""
        for node in body:
            if isinstance(node, ast.Assign):
                value = self.value(node.value)
                for target in node.targets:
                    self.assign(target, value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.assign(node.target, self.value(node.value))
            elif isinstance(node, ast.If):
                known = self.decided(node.test)
                condition = ast.unparse(node.test)
                if known is UNKNOWN and condition not in self.undecided:
                    sets = any(isinstance(each, ast.Assign | ast.AnnAssign | ast.Return) for each in ast.walk(node))
                    self.undecided += [condition] * sets
                returned = None if known is UNKNOWN else self.follow(node.body if known else node.orelse)
                if returned is not None:
                    return returned
            elif isinstance(node, ast.Return) and node.value is not None:
                return self.value(node.value)
        return None

    def decided(self, test: ast.expr) -> Any:
        """Return a condition's value, or UNKNOWN: comparisons of known values with None, numbers, texts, mappings."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand)
            return inner if inner is UNKNOWN else not inner
        if isinstance(test, ast.BoolOp):
            sides_known = [self.decided(each) for each in test.values]
            decisive = isinstance(test.op, ast.Or)
            if any(each is not UNKNOWN and bool(each) == decisive for each in sides_known):
                return decisive
            return UNKNOWN if UNKNOWN in sides_known else not decisive
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides = test.left, test.comparators[0]
            if any(isinstance(side, ast.Name) and side.id not in self.names | self.constants for side in sides):
                return UNKNOWN
            left, right = map(self.value, sides)
            named = isinstance(test.ops[0], ast.Is | ast.IsNot)
            if not named and any(self.settled(side) is UNKNOWN for side in sides):
                return UNKNOWN
            negative = isinstance(test.ops[0], ast.IsNot | ast.NotIn | ast.NotEq)
            if isinstance(test.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
                return (left == right) != negative
            if isinstance(test.ops[0], ast.In | ast.NotIn) and isinstance(right, dict):
                return (key_of(left) in right) != negative
        if isinstance(test, ast.Name) and test.id in self.names:
            return bool(self.names[test.id])
        return test.value if isinstance(test, ast.Constant) else UNKNOWN

    def settled(self, node: ast.expr) -> Any:
        """Return an expression's value; UNKNOWN for a call's result and for an expression read as source text."""
        value = self.value(node)
        called = isinstance(value, dict) and CALLED in value
        return UNKNOWN if called or (not isinstance(node, ast.Constant) and value == ast.unparse(node)) else value

    def assign(self, target: ast.expr, value: Any) -> None:
        """Run an assignment: `config.training.steps = 3` sets a field of the value named `config`.

        Of several names for the results of one call the first has the call's fields.
        """
        if isinstance(target, ast.Tuple) and isinstance(value, dict):
            for index, inner in enumerate(target.elts):
                self.assign(inner, value if index == 0 else {})
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            holder = self.value(target.value, make=True)
            if isinstance(holder, dict):
                holder[target.attr] = value

    def value(self, node: ast.expr, make: bool = False) -> Any:
        """Return an expression's value. `make`: an attribute that is no mapping becomes an empty mapping."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, self.constants.get(node.id, node.id))
        if isinstance(node, ast.Attribute):
            holder = self.value(node.value, make)
            if isinstance(holder, dict):
                if make and not isinstance(holder.get(node.attr), dict):
                    holder[node.attr] = {}
                return holder.get(node.attr, ast.unparse(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand)
            return -inner if isinstance(inner, int | float) else ast.unparse(node)
        if isinstance(node, ast.Dict):
            return self.merged([(key, each) for key, each in zip(node.keys, node.values, strict=True)])
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            values = [self.value(each) for each in node.values]
            return next((each for each in values if each), values[-1])
        if isinstance(node, ast.Subscript):
            holder, key = self.value(node.value), key_of(self.value(node.slice))
            if isinstance(holder, dict) and key in holder:
                return holder[key]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = self.value(node.left), self.value(node.right)
            if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
                return (left + right)[:MOST_ITEMS]
            if isinstance(left, list) and isinstance(right, int) and isinstance(node.op, ast.Mult):
                return (left * min(right, MOST_ITEMS // max(1, len(left)) + 1))[:MOST_ITEMS]
            if isinstance(left, int | float) and isinstance(right, int | float):
                return _OPERATIONS[type(node.op)](left, right) if right or not isinstance(node.op, DIVISIONS) else 0
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Call):
            return self.called(node)
        return ast.unparse(node)

    def merged(self, items: Sequence[tuple[ast.expr | None, ast.expr]]) -> dict[Any, Any]:
        """Return a dictionary of keys and values; a key of None unpacks a mapping (`**kwargs`)."""
        found: dict[Any, Any] = {}
        for key, each in items:
            value = self.value(each)
            if key is not None:
                found[key_of(self.value(key))] = value
            elif isinstance(value, dict):
                found |= value
        return found

    def called(self, node: ast.Call) -> Any:
        """Return a call's keywords, the fields of the object returned by a function of the file, or getattr's value."""
        keywords = ((ast.Constant(each.arg) if each.arg else None, each.value) for each in node.keywords)
        given = self.merged([*keywords])
        name = ast.unparse(node.func)
        if name == "getattr" and len(node.args) > 1:
            holder, field, *default = (self.value(each) for each in node.args)
            return holder.get(field, *default) if isinstance(holder, dict) else {CALLED: name}
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("lower", "upper"):
            text = self.settled(node.func.value)
            if isinstance(text, str):
                return text.lower() if node.func.attr == "lower" else text.upper()
        function = self.functions.get(name)
        if function is not None and self.depth < MOST_CALLS:
            positional = zip(function.args.args, node.args, strict=False)
            given |= {each.arg: self.value(value) for each, value in positional}
            inside = _Reader(self.functions, self.constants, {}, self.depth + 1, self.undecided)
            if found := inside.run(function, given):
                return found
        # A method of a call's result: `AutoBridge.from_hf_pretrained('a/b').to_provider`.
        holder = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(node.func, ast.Attribute) and isinstance(holder, dict) and CALLED in holder:
            told = ", ".join(repr(holder[key]) for key in ("0", "1") if key in holder)
            name = f"{holder[CALLED]}({told}).{node.func.attr}"
        return {CALLED: name} | {str(n): self.value(each) for n, each in enumerate(node.args)} | given


def key_of(value: Any) -> Any:
    """Return a value as a dictionary's key; a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value
