"""Fields set by a function of a Python file, read without running the file, since an unknown file may do anything.

    def llama3_8b():                                         training.seq_len = 8192
        config = base()                                      (and all that base() of the same file sets)
        config.training = TrainingConfig(seq_len=8192)
        config.parallelism.tensor_parallel_degree = TWO      parallelism.tensor_parallel_degree = 2
        return config

A call is read as a mapping of the keywords, with the called name under CALLED and positional values under 0, 1, ...
Numbers, texts, lists and dictionaries are computed from literals and from the file's constants: by operators, loops,
functions of the file, and BUILT_IN functions and methods. An `if` with an unknown condition is left out with its
branches, and listed. Any other expression is read as its source text.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import ConfigError

CALLED = "()"
ELSEWHERE = "a function of another file"
QUIET = ("print", "log", "valid", "check")
"""Parts of the names of functions that set no fields."""
"""The key for a called function's name: `training.()` is TrainingConfig."""
MOST_CALLS = 20
"""Most nested calls between functions of the file."""
MOST_ITEMS = 10_000
"""Most items of a computed list: a file may ask for more than memory holds."""
UNKNOWN = object()
"""A condition that the file does not decide."""

MOST_ROUNDS = 1_000
"""Most rounds of a file's loops, and the largest exponent."""

MOST_BITS = 1_000
"""Most bits of a whole number."""

_OPERATIONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda key, values: key_of(key) in values, ast.NotIn: lambda key, values: key_of(key) not in values,
    ast.Is: operator.eq, ast.IsNot: operator.ne,
}  # fmt: skip
_SIGNS: Mapping[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
DIVISIONS = (ast.FloorDiv, ast.Div, ast.Mod)
BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "bool": bool, "len": len, "min": min, "max": max, "sum": sum, "abs": abs,
    "round": round, "sorted": sorted, "list": list, "tuple": list, "dict": dict, "math.ceil": math.ceil,
    "math.floor": math.floor, "math.prod": math.prod, "copy.copy": dict, "copy.deepcopy": deepcopy,
    "deepcopy": deepcopy, "range": lambda *bounds: list(range(*bounds)[:MOST_ITEMS]),
    "enumerate": lambda values: [list(pair) for pair in enumerate(values)],
    "zip": lambda *values: [list(pair) for pair in zip(*values, strict=False)],
}  # fmt: skip
"""Functions that are computed if all arguments are known."""
METHODS: Mapping[type, Sequence[str]] = {
    str: ("lower", "upper", "strip", "startswith", "endswith", "replace", "split", "removeprefix", "removesuffix"),
    list: ("append", "extend", "copy", "index", "count"),
    dict: ("get", "items", "keys", "values", "copy", "update", "pop", "setdefault"),
}  # fmt: skip
"""Methods that are computed, by the type of value."""


def computed(text: str) -> Any:
    """Compute an expression of numbers, `8 * 4 // 2`; return any other text unchanged."""
    try:
        return _Reader({}, {}, {}, 0).value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return text


def named_function(path: Path, function: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a function of a file sets, and the unknown conditions of branches that set fields. The
    fields of a call's result outside functions, `config = JobConfig(...)`, are returned by the variable's name. Fields
    that begin as the result of another file's function have an entry `base()`, with ELSEWHERE.

    Raises:
        ConfigError: The file has no such function or variable, or none is named.
    """
    text = path.read_text(encoding="utf-8")
    body = ast.parse(text).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    made = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)]
    names += [name for node in made for name in names_of(node)]
    if function not in names:
        rule = "names no function" if function is None else f"names {function}, which the file does not have"
        offered = [name for name in names if not name.startswith("_")][:8]
        raise ConfigError.of("--from", path, rule, " or ".join(f"{path}:{name}" for name in offered))
    undecided: list[str] = []
    fields = fields_of_function(text, str(function), undecided)
    base = str(fields.get(CALLED, ""))
    if base and not base.rpartition(".")[2][0].isupper():  # a function, no class: its fields are unknown here
        fields[f"{base}()"] = ELSEWHERE
    return fields, undecided


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
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if name not in functions and name in names_of(node):
            return dict(_Reader(functions, constants, {}, 0, undecided).value(node.value))
        if (value := _Reader({}, constants, {}, 0).settled(node.value)) is not UNKNOWN:
            constants |= dict.fromkeys(names_of(node), value)
    return _Reader(functions, constants, {}, 0, undecided).run(functions[name], {})


def names_of(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the variables that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


class _Leave(Exception):
    """`break` or `continue`; `ends`: the loop ends."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends


class _Reader:
    """Reader of one function. `names`: values by local name."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], constants: dict[str, Any], names: dict[str, Any],
                 depth: int, undecided: list[str] | None = None) -> None:  # fmt: skip
        self.functions, self.constants, self.names, self.depth = dict(functions), constants, dict(names), depth
        self.undecided: list[str] = [] if undecided is None else undecided
        self.rounds = 0

    def run(self, function: ast.FunctionDef, given: Mapping[str, Any]) -> dict[str, Any]:
        returned = self.returned(function, given)
        return returned if isinstance(returned, dict) else {}

    def returned(self, function: ast.FunctionDef, given: Mapping[str, Any]) -> Any:
        """Read a function with arguments; return its result, or None."""
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
        return self.follow(function.body)

    def follow(self, body: Sequence[ast.stmt]) -> Any:
        """Read statements in order; return the value of the first `return`, or None."""
        for node in body:
            if isinstance(node, ast.Return) and node.value is not None:
                return self.value(node.value)
            if isinstance(node, ast.If | ast.Match):
                returned = self.follow(self.branch(node))
            elif isinstance(node, ast.For | ast.While):
                returned = self.loop(node)
            elif isinstance(node, ast.With | ast.Try):
                rest = [*node.orelse, *node.finalbody] if isinstance(node, ast.Try) else []
                returned = self.follow([*node.body, *rest])
            elif isinstance(node, ast.Break | ast.Continue):
                raise _Leave(ends=isinstance(node, ast.Break))
            else:
                returned = None
                self.act(node)
            if returned is not None:
                return returned
        return None

    def act(self, node: ast.stmt) -> None:
        """Read an assignment, a call for its effect, or a function's definition."""
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            attribute = node.value
            if isinstance(attribute, ast.Attribute) and all(isinstance(each, ast.Name) for each in node.targets):
                holder = self.value(attribute.value, make=True)
                if isinstance(holder, dict) and attribute.attr not in holder:
                    value = holder[attribute.attr] = {}  # a section by a name of its own
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, self.value(ast.BinOp(node.target, node.op, node.value)))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self.value(node.value)
            self.note_effect(node.value)
        elif isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node

    def note_effect(self, node: ast.Call) -> None:
        """Give each section that another file's function gets an entry `function()`, since the function may set its
        fields."""
        name = ast.unparse(node.func)
        methods = [each for names in METHODS.values() for each in names]
        known = {name, name.rpartition(".")[2]} & {*self.functions, *BUILT_IN, *methods, "setattr"}
        if known or any(word in name for word in QUIET):
            return
        for argument in node.args:
            held = self.value(argument) if isinstance(argument, ast.Name | ast.Attribute) else None
            if isinstance(argument, ast.Attribute) and held == ast.unparse(argument):
                held = self.value(argument, make=True)
            if isinstance(held, dict):
                held[f"{name}()"] = ELSEWHERE

    def branch(self, node: ast.If | ast.Match) -> Sequence[ast.stmt]:
        """Return the statements of the branch that is taken; none, and a note, if a value is unknown."""
        if isinstance(node, ast.Match):
            subject, condition = self.settled(node.subject), f"match {ast.unparse(node.subject)}"
            for case in node.cases if subject is not UNKNOWN else ():
                patterns = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
                values = [self.value(each.value) for each in patterns if isinstance(each, ast.MatchValue)]
                if case.guard is None and (subject in values or isinstance(case.pattern, ast.MatchAs)):
                    return case.body
        else:
            known, condition = self.decided(node.test), ast.unparse(node.test)
            if known is not UNKNOWN:
                return node.body if known else node.orelse
        sets = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
        if condition not in self.undecided and any(isinstance(each, sets) for each in ast.walk(node)):
            self.undecided.append(condition)
        return []

    def loop(self, node: ast.For | ast.While) -> Any:
        """Read a loop over known values; return as `follow`."""
        for value in self.values_of(node.iter) if isinstance(node, ast.For) else iter(int, 1):
            self.rounds += 1
            if self.rounds > MOST_ROUNDS or (isinstance(node, ast.While) and self.decided(node.test) is not True):
                return None
            if isinstance(node, ast.For):
                self.assign(node.target, value)
            try:
                returned = self.follow(node.body)
            except _Leave as leave:
                returned = None
                if leave.ends:
                    return None
            if returned is not None:
                return returned
        return None

    def values_of(self, node: ast.expr) -> list[Any]:
        """Return the values that a loop runs over; none if unknown."""
        values = self.settled(node)
        return [*values] if isinstance(values, list | dict | str) else []

    def decided(self, test: ast.expr) -> Any:
        """Return a condition's truth, or UNKNOWN."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand)
            return inner if inner is UNKNOWN else not inner
        if isinstance(test, ast.BoolOp):
            sides_known = [self.decided(each) for each in test.values]
            decisive = isinstance(test.op, ast.Or)
            if any(each is not UNKNOWN and bool(each) == decisive for each in sides_known):
                return decisive
            return UNKNOWN if UNKNOWN in sides_known else not decisive
        if isinstance(test, ast.Compare):
            return self.compared(test)
        if isinstance(test, ast.Name) and test.id in self.names:
            return bool(self.names[test.id])
        value = self.settled(test)
        return value if value is UNKNOWN else bool(value)

    def compared(self, node: ast.Compare) -> Any:
        """Return a comparison's truth, or UNKNOWN. An attribute that the file does not set is not None."""
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Name) and side.id not in self.names | self.constants for side in sides):
            return UNKNOWN
        for left, sign, right in zip(sides, node.ops, node.comparators, strict=False):
            values = [self.value(side) for side in (left, right)]
            if not isinstance(sign, ast.Is | ast.IsNot) and any(
                self.settled(side) is UNKNOWN for side in (left, right)
            ):
                return UNKNOWN
            try:
                if not _OPERATIONS[type(sign)](*values):
                    return False
            except TypeError:
                return UNKNOWN
        return True

    def settled(self, node: ast.expr) -> Any:
        """Return an expression's value; UNKNOWN for a call's result and for an expression read as source text."""
        value = self.value(node)
        called = isinstance(value, dict) and CALLED in value
        return UNKNOWN if called or (not isinstance(node, ast.Constant) and value == ast.unparse(node)) else value

    def assign(self, target: ast.expr, value: Any) -> None:
        """Run an assignment: `config.training.steps = 3` sets a field of the value named `config`.

        Of several names for the results of one call the first has the call's fields.
        """
        if isinstance(target, ast.Tuple):
            several = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
            for index, inner in enumerate(target.elts):
                self.assign(inner, several[index] if index < len(several) else {})
        elif isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            holder = self.value(target.value, make=True)
            if isinstance(holder, dict):
                holder[target.attr] = value
        elif isinstance(target, ast.Subscript):
            holder, key = self.value(target.value, make=True), key_of(self.value(target.slice))
            if isinstance(holder, dict) or is_index(holder, key):
                holder[key] = value

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
        if isinstance(node, ast.Dict):
            return self.merged([(key, each) for key, each in zip(node.keys, node.values, strict=True)])
        if isinstance(node, ast.List | ast.Tuple):
            return [each for inner in node.elts for each in self.elements(inner)]
        if isinstance(node, ast.Call):
            return self.called(node)
        if isinstance(node, ast.NamedExpr):
            self.assign(node.target, self.value(node.value))
            return self.value(node.target)
        if isinstance(node, ast.Subscript):
            value = self.item(node)
        elif isinstance(node, ast.JoinedStr | ast.ListComp | ast.GeneratorExp | ast.DictComp):
            value = self.made(node)
        else:
            value = self.computed(node)
        return ast.unparse(node) if value is UNKNOWN else value

    def elements(self, node: ast.expr) -> list[Any]:
        """Return the values of a list's element; several for `*values`."""
        return self.values_of(node.value) if isinstance(node, ast.Starred) else [self.value(node)]

    def item(self, node: ast.Subscript) -> Any:
        """Return the value under a key or an index; UNKNOWN without one."""
        holder, key = self.value(node.value), key_of(self.value(node.slice))
        if isinstance(holder, dict):
            return holder.get(key, UNKNOWN)
        return holder[key] if is_index(holder, key) else UNKNOWN

    def made(self, node: ast.JoinedStr | ast.ListComp | ast.GeneratorExp | ast.DictComp) -> Any:
        """Return a text with values in it, or a list or mapping of a loop's results; UNKNOWN if a value is."""
        if isinstance(node, ast.JoinedStr):
            inner = [each.value if isinstance(each, ast.FormattedValue) else each for each in node.values]
            values = [self.settled(each) for each in inner]
            plain = all(isinstance(each, str | int) for each in values)
            formats = any(isinstance(each, ast.FormattedValue) and each.format_spec for each in node.values)
            text = "".join(map(str, values)) if plain and not formats else None
            return UNKNOWN if text is None or len(text) > MOST_ITEMS else text
        first, *more = node.generators
        if more or self.settled(first.iter) is UNKNOWN:
            return UNKNOWN
        found: list[tuple[Any, Any]] = []
        for value in self.values_of(first.iter)[:MOST_ROUNDS]:
            self.assign(first.target, value)
            if all(self.decided(each) is True for each in first.ifs):
                pair = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt, node.elt)
                found.append((self.value(pair[0]), self.value(pair[1])))
        return {key_of(key): value for key, value in found} if isinstance(node, ast.DictComp) else [x for x, _ in found]

    def computed(self, node: ast.expr) -> Any:
        """Return the value of an operator; UNKNOWN if an operand is."""
        if isinstance(node, ast.Compare):
            return self.compared(node)
        if isinstance(node, ast.IfExp):
            known = self.decided(node.test)
            return UNKNOWN if known is UNKNOWN else self.value(node.body if known else node.orelse)
        if isinstance(node, ast.BoolOp):
            values = [self.value(each) for each in node.values]
            ends = isinstance(node.op, ast.Or)
            return next((each for each in values if bool(each) == ends), values[-1])
        if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
            inner = self.settled(node.operand)
            is_known = isinstance(inner, int | float) or (isinstance(node.op, ast.Not) and inner is not UNKNOWN)
            return _SIGNS[type(node.op)](inner) if is_known else UNKNOWN
        if isinstance(node, ast.BinOp):
            return combined(self.settled(node.left), node.op, self.settled(node.right))
        return UNKNOWN

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
        """Return a call's keywords, a function's result, or the fields of the object that it returns."""
        keywords = ((ast.Constant(each.arg) if each.arg else None, each.value) for each in node.keywords)
        given, name = self.merged([*keywords]), ast.unparse(node.func)
        if name in ("getattr", "setattr") and len(node.args) > 1:
            holder, attribute, *rest = (self.value(each, make=name == "setattr") for each in node.args)
            if isinstance(holder, dict) and name == "setattr":
                holder[attribute] = rest[0]
            return holder.get(attribute, *rest[:1]) if isinstance(holder, dict) else {CALLED: name}
        function = self.functions.get(name)
        if function is not None and self.depth < MOST_CALLS:
            arguments = [*function.args.posonlyargs, *function.args.args]
            given |= {each.arg: self.value(value) for each, value in zip(arguments, node.args, strict=False)}
            inside = _Reader(self.functions, self.constants, {}, self.depth + 1, self.undecided)
            if (found := inside.returned(function, given)) is not None:
                return found
        elif (value := self.built_in(node, name, given)) is not UNKNOWN:
            return value
        # A method of a call's result: `AutoBridge.from_hf_pretrained('a/b').to_provider`.
        holder = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(node.func, ast.Attribute) and isinstance(holder, dict) and CALLED in holder:
            told = ", ".join(repr(holder[key]) for key in ("0", "1") if isinstance(holder.get(key), str | int))
            name = f"{holder[CALLED]}({told}).{node.func.attr}"[:MOST_ITEMS]
        return {CALLED: name} | {str(n): self.value(each) for n, each in enumerate(node.args)} | given

    def built_in(self, node: ast.Call, name: str, given: dict[str, Any]) -> Any:
        """Return the result of a BUILT_IN function or of a method of a known value; UNKNOWN if an argument is."""
        holder = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if name in ("dataclasses.replace", "replace") and node.args and isinstance(given, dict):
            copied = self.value(node.args[0])
            return {**copied, **given} if isinstance(copied, dict) else UNKNOWN
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        is_method = type(holder) in METHODS and method in METHODS[type(holder)]
        if is_method and isinstance(holder, str) and holder == ast.unparse(node.func.value):  # type: ignore[attr-defined]
            is_method = isinstance(node.func.value, ast.Constant)  # type: ignore[attr-defined]
        if is_method and isinstance(holder, dict) and CALLED in holder:
            return UNKNOWN
        arguments = [self.settled(each) for each in node.args]
        calls = BUILT_IN.get(name) if not is_method else getattr(holder, method)
        sizes = [1 + len(each) for each in (holder, *arguments) if isinstance(each, list | str | dict)]
        if calls is None or UNKNOWN in arguments or math.prod(sizes) > MOST_ITEMS**2:
            return UNKNOWN
        try:
            result = calls(*arguments, **given)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError):
            return UNKNOWN
        if any(isinstance(each, list | str) and len(each) > MOST_ITEMS for each in (result, holder)):
            return UNKNOWN
        if method in ("items", "keys", "values"):
            return [list(each) if isinstance(each, tuple) else each for each in result]
        return result


def combined(left: Any, sign: ast.operator, right: Any) -> Any:
    """Return the result of an operator on numbers, texts, lists or mappings; UNKNOWN for other values."""
    if isinstance(left, dict) and isinstance(right, dict) and isinstance(sign, ast.BitOr):
        return left | right
    if isinstance(sign, ast.Add) and any(isinstance(left, x) and isinstance(right, x) for x in (list, str)):
        return left + right if len(left) + len(right) <= MOST_ITEMS else UNKNOWN
    if isinstance(sign, ast.Mult) and isinstance(left, list | str) and isinstance(right, int):
        return left * right if len(left) * right <= MOST_ITEMS else UNKNOWN
    if type(sign) not in _OPERATIONS or not (isinstance(left, int | float) and isinstance(right, int | float)):
        return UNKNOWN
    if isinstance(sign, DIVISIONS) and not right:
        return 0
    if isinstance(sign, ast.Pow) and not 0 <= right <= MOST_ROUNDS:
        return UNKNOWN
    try:
        value = _OPERATIONS[type(sign)](left, right)
    except OverflowError:
        return UNKNOWN
    return UNKNOWN if isinstance(value, int) and value.bit_length() > MOST_BITS else value


def is_index(holder: Any, key: Any) -> bool:
    """Return True if a list has an element at an index."""
    return isinstance(holder, list) and isinstance(key, int) and -len(holder) <= key < len(holder)


def key_of(value: Any) -> Any:
    """Return a value as a dictionary's key; a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value
