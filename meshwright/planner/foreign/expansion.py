"""Variables of a shell script: words, whole numbers and conditions, without running a command.

| text                       | value                                                                         |
|----------------------------|-------------------------------------------------------------------------------|
| `$N` `${N}` `${N[0]}`      | of a variable, or of an array's element                                       |
| `${N:-w}` `${N-w}`         | a default; `=` also assigns, `+` replaces the value of a variable that is set |
| `${#N}` `${!N}`            | the length or number of elements; the value of the variable that N names      |
| `${N%w}` `${N#w}` `${N:1}` | a piece of the value                                                          |
| `${N/a/b}` `${N^^}`        | the value with letters replaced                                               |
| `$((...))` `$[...]`        | a whole number                                                                |
| `$(...)`                   | the output of echo, cat, sed's `s`, expr, bc, basename and dirname            |

A text without a known value keeps its `$`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase, translate
from typing import Any

from meshwright.planner.foreign.bash import Node, Piped, Simple, end_of, parsed, words_of

MOST_LETTERS = 100_000
"""Letters of a variable's value; a longer one is cut."""

MOST_BITS = 64
"""The largest exponent and shift."""

Value = str | dict[str, str]
"""A variable's text, or an array's elements by index or key."""

ASSIGNMENT = re.compile(r"(?s)(\w+)(?:\[([^]]*)\])?(\+?)=(.*)")
_NAME = re.compile(r"\w+|[@*#?$!-]")
_UNKNOWN = re.compile("[$`]")


class Variables:
    """A script's variables, and words with these."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values = values

    def changed(self) -> None:
        """Note a change of a variable."""

    def beside(self, name: str) -> str | None:
        """Return the text of a file that the script names; None if unknown."""
        return None

    def assigned(self, match: re.Match[str]) -> None:
        """Read an assignment (ASSIGNMENT): of a text, an element, or an array."""
        name, index, plus, raw = match.groups()
        before = self.values.get(name)
        if raw.startswith("(") and raw.endswith(")"):
            elements = dict(before) if plus and isinstance(before, dict) else {}
            for word in words_of(raw[1:-1]):
                keyed = re.fullmatch(r"(?s)\[([^]]+)\]=(.*)", word)
                for text in [self.text(keyed[2])] if keyed else self.fields(word):
                    elements[self.text(keyed[1]) if keyed else str(len(elements))] = text
            self.assign(name, elements)
            return
        text = self.text(raw)
        if index is None and not (plus and isinstance(before, dict)):
            self.assign(name, f"{before or ''}{text}" if plus else text)
            return
        key, known = self.text(index or "0"), before if isinstance(before, dict) else {}
        self.assign(name, known | {key: f"{known.get(key, '')}{text}" if plus else text})

    def assign(self, name: str, value: Value) -> None:
        self.values[name] = value[:MOST_LETTERS] if isinstance(value, str) else value
        self.changed()

    def words(self, raw_words: Iterable[str]) -> list[str]:
        """Expand words; each gives none, one or several."""
        return [field for raw in raw_words for field in self.fields(raw)]

    def fields(self, raw: str) -> list[str]:
        """Expand a word to words: values without quotes are split at spaces."""
        found: list[str] = []
        begun: str | None = None
        for text, how in self.pieces(raw):
            texts = [text] if how == "quoted" else text.split("\0") if how == "listed" else split_at_spaces(text)
            for index, each in enumerate(texts if text or how != "listed" else ()):
                if index and begun is not None:
                    found.append(begun)
                    begun = None
                if each or how != "split":
                    begun = f"{begun or ''}{each}"
        return found if begun is None else [*found, begun]

    def text(self, raw: str, *, quoted: bool = False) -> str:
        """Expand a word to one text. `quoted`: quotes are letters, as in a here-document."""
        return "".join(text.replace("\0", " ") for text, _ in self.pieces(raw, quoted=quoted))[:MOST_LETTERS]

    def pattern(self, raw: str) -> str:
        """Expand a pattern; quoted text has no wildcards."""
        pieces = self.pieces(raw, plain="wild")
        return "".join(re.sub(r"([*?[])", r"[\1]", text) if how == "quoted" else text for text, how in pieces)

    def pieces(self, raw: str, *, quoted: bool = False, plain: str = "quoted") -> Iterator[tuple[str, str]]:
        """Yield a word's pieces: (text, `quoted`, `split` at spaces, or elements `listed`). `plain`: the word for text
        without quotes."""
        at = 0
        while at < len(raw):
            end, letter = end_of(raw, at), raw[at]
            if letter == "$" and raw[at + 1 : at + 2] == "'" and not quoted:
                yield raw[at + 2 : end - 1], "quoted"
            elif letter in "$`":
                name = _NAME.match(raw, at + 1) if end == at + 1 else None
                end = name.end() if name else end
                value = self.expansion(raw[at:end])
                # An unknown value is one word, with the spaces of its command.
                how = "quoted" if quoted or value == raw[at:end] else "split"
                yield ("\0".join(value.values()), "listed") if isinstance(value, dict) else (value, how)
            elif letter == '"' and not quoted:
                yield from [*self.pieces(raw[at + 1 : end - 1], quoted=True)] or [("", "quoted")]
            elif letter == "'" and not quoted:
                yield raw[at + 1 : end - 1], "quoted"
            elif letter == "\\":
                keeps = quoted and raw[at + 1 : end] not in ('"', "\\", "$", "`", "\n")
                yield raw[at:end] if keeps else raw[at + 1 : end].replace("\n", ""), "quoted"
            else:
                end = at + 1
                yield letter, plain
            at = end

    def expansion(self, raw: str) -> Value:
        """Return the value of `$NAME`, `${...}`, `$((...))` or `$(...)`; the text itself if unknown."""
        value: Value | None
        if raw.startswith("$((") and raw.endswith("))"):
            value = self.whole(raw[3:-2])
        elif raw.startswith("$["):
            value = self.whole(raw[2:-1])
        elif raw.startswith(("$(", "`")):
            value = self.output(raw[2:-1] if raw[0] == "$" else raw[1:-1])
        else:
            value = self.parameter(raw[2:-1]) if raw.startswith("${") else self.lookup(raw[1:])
        return raw if value is None else value

    def lookup(self, name: str, index: str | None = None) -> Value | None:
        """Return a variable's value; None without one. `index`: of an array's element, `@` for all."""
        value = self.values.get(name, {} if name in ("@", "*") else "0" if name == "#" else None)
        if not isinstance(value, dict):
            return value if index in (None, "@", "*", "0") else None
        if index in ("@", "*") or name in ("@", "*"):
            return value
        key = "0" if index is None else self.text(index)
        if key in value or not value:
            return value.get(key)
        position = self.integer(key)
        return None if position is None else value.get(str(position % len(value) if position < 0 else position))

    def parameter(self, inner: str) -> Value | None:
        """Return the value of `${inner}`; None if unknown."""
        sign = inner[0] if inner[:1] in ("#", "!") and len(inner) > 1 else ""
        match = re.match(r"(\w+|[@*#?$!-])(?:\[([^]]*)\])?", inner[len(sign) :])
        if match is None:
            return None
        name, rest = match[1], inner[len(sign) + match.end() :]
        value = self.lookup(name, match[2])
        if sign == "#":
            return None if value is None else str(len(value))
        if sign:
            return self.lookup(value) if isinstance(value, str) else None
        if default := re.fullmatch(r"(?s)(:?)([-=+?])(.*)", rest):
            return self.default(name, value, *default.groups())
        return self.edited(value, rest) if rest and isinstance(value, str) else None if rest else value

    def default(self, name: str, value: Value | None, colon: str, sign: str, raw: str) -> Value | None:
        """Return the value of `${NAME:-raw}`, `${NAME=raw}` or `${NAME:+raw}`. With a colon an empty variable counts as
        unset."""
        is_set = value is not None and (not colon or bool(value))
        if sign == "+":
            return self.text(raw) if is_set else ""
        if is_set or sign == "?":
            return value
        if sign == "=":
            self.assign(name, self.text(raw))
        return self.text(raw)

    def edited(self, value: str, rest: str) -> str | None:
        """Return a piece of a value, `${NAME%rest}`, or the value with letters replaced; None if unknown."""
        if cut := re.fullmatch(r"(?s)(##?|%%?)(.*)", rest):
            return trimmed(value, cut[1], self.pattern(cut[2]))
        if put := re.fullmatch(r"(?s)(//?)([#%]?)(.+?)(?:(?<!\\)/(.*))?", rest):
            wanted, text = re.sub(r"\\[zZ]$", "", translate(self.pattern(put[3]))), self.text(put[4] or "")
            begin, end = "^" if put[2] == "#" else "", "$" if put[2] == "%" else ""
            return re.sub(f"{begin}{wanted}{end}", lambda _: text, value, count=0 if put[1] == "//" else 1)
        if rest in ("^", "^^", ",", ",,"):
            count = len(value) if len(rest) == 2 else 1
            return (value[:count].upper() if rest[0] == "^" else value[:count].lower()) + value[count:]
        if cut := re.fullmatch(r":\s*([^:]*)(?::\s*(.+))?", rest):
            begun, count_or_none = self.integer(cut[1]), self.integer(cut[2] or str(len(value)))
            # A negative count leaves out as many letters at the end.
            return None if begun is None or count_or_none is None else value[begun:][:count_or_none]
        return None

    def output(self, text: str) -> str | None:
        """Return the output of the command of `$(...)`; None if unknown."""
        body = parsed(text)
        node = body[0] if len(body) == 1 else None
        said = self.printed(node.parts if isinstance(node, Piped) else (node,))
        return None if said is None or _UNKNOWN.search(said) else said.rstrip("\n")

    def printed(self, commands: Sequence[Node | None]) -> str | None:
        """Return the output of commands in a pipe; None if unknown."""
        text: str | None = None
        for node in commands:
            if not isinstance(node, Simple):
                return None
            for document in node.documents:
                text = document.text if document.is_plain else self.text(document.text, quoted=True)
            text = self.output_of([*self.words(node.words), ""], text)
            if text is None:
                return None
        return text

    def output_of(self, words: Sequence[str], given: str | None) -> str | None:
        """Return a command's output; None if unknown. `words`: with an empty last one; `given`: its input."""
        name, *behind = words[:-1] or words
        if name == "echo":
            return " ".join(behind[1:] if behind[:1] in (["-e"], ["-n"]) else behind) + "\n"
        if name == "cat" and behind:
            texts = [self.beside(each) for each in behind]
            return None if None in texts else "".join(filter(None, texts))
        if name == "sed" and behind:
            expression, *files = [each for each in behind if not each.startswith("-")] or [""]
            return replaced_lines(expression, self.beside(files[0]) if files else given)
        if name in ("cat", "tee"):
            return given
        if name in ("basename", "dirname") and behind:
            before, _, last = behind[0].rstrip("/").rpartition("/")
            return last.removesuffix(*behind[1:2] or [""]) if name == "basename" else before or "."
        text = given if name == "bc" else " ".join(behind) if name == "expr" else None
        return None if text is None else self.whole(text)

    def whole(self, text: str) -> str | None:
        """Return a whole number as text; None if unknown."""
        value = self.integer(text)
        return None if value is None else str(value)

    def integer(self, text: str) -> int | None:
        """Compute an expression of whole numbers, with its assignments; None if a value is unknown."""
        text = self.text(text, quoted=True).strip()
        if "," in text:
            return [self.integer(each) for each in text.split(",")][-1]
        if step := re.fullmatch(r"(\w+)\s*(\+\+|--)|(\+\+|--)\s*(\w+)", text):
            text = f"{step[1] or step[4]} {(step[2] or step[3])[0]}= 1"
        if match := re.fullmatch(r"(?s)(\w+)\s*([-+*/%]?)=(?!=)(.*)", text):
            name, sign, rest = match.groups()
            value = self.integer(f"{name} {sign} ({rest})" if sign else rest)
            if value is not None and not name.isdigit():
                self.assign(name, str(value))
            return value
        if choice := re.fullmatch(r"(?s)([^?]+)\?([^:]+):(.+)", text):
            text = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
        for sign, word in (("&&", " and "), ("||", " or "), ("/", "//")):
            text = text.replace(sign, word)
        try:
            return self.computed(ast.parse(re.sub(r"!(?!=)", " not ", text).strip() or "0", mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def computed(self, node: ast.expr) -> int:
        """Compute an expression. Raises ValueError for an unknown value."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            # bash takes an unset variable for 0, but the environment may set it.
            text = self.lookup(node.id)
            value = self.integer(text) if isinstance(text, str) and text != node.id else None
            if value is not None:
                return value
        if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
            return int(_SIGNS[type(node.op)](self.computed(node.operand)))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = self.computed(node.left), self.computed(node.right)
            if not isinstance(node.op, ast.Pow | ast.LShift) or 0 <= right <= MOST_BITS:
                # As in bash, numbers have 64 bits.
                return (int(_OPERATIONS[type(node.op)](left, right)) + 2**63) % 2**64 - 2**63
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATIONS:
            left, right = self.computed(node.left), self.computed(node.comparators[0])
            return int(_OPERATIONS[type(node.ops[0])](left, right))
        if isinstance(node, ast.BoolOp):
            together = all if isinstance(node.op, ast.And) else any
            return int(together([self.computed(each) for each in node.values]))
        if isinstance(node, ast.IfExp):
            return self.computed(node.body if self.computed(node.test) else node.orelse)
        raise ValueError(ast.unparse(node))


def divided(left: int, right: int) -> int:
    """Return a quotient without its fraction, also of negative numbers."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_SIGNS: dict[type, Callable[[int], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.inv,
}  # fmt: skip
_OPERATIONS: dict[type, Callable[[int, int], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: divided,
    ast.Mod: lambda left, right: left - right * divided(left, right), ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
_TEXTS_COMPARED = ("=", "==", "!=", "=~", "<", ">")


_FILLED = re.compile(r"(?:`[^`]*`|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\S)+")


def split_at_spaces(text: str) -> list[str]:
    """Split at spaces outside of commands without a known output; the first text is empty if the text begins with a
    space, and the last one if it ends with a space."""
    return [*[""] * text[:1].isspace(), *_FILLED.findall(text), *[""] * text[-1:].isspace()]


def replaced_lines(expression: str, text: str | None) -> str | None:
    """Return the text after sed's `s/WORD/TEXT/`; None if unknown, or for a pattern that is no word."""
    match = re.fullmatch(r"(?s)s(\W)([\w@{}<>%. -]+)\1((?:(?!\1).)*)\1(g?)", expression)
    if match is None or text is None:
        return None
    return "".join(line.replace(match[2], match[3], -1 if match[4] else 1) for line in text.splitlines(keepends=True))


def trimmed(value: str, sign: str, pattern: str) -> str:
    """Return a value without the shortest (`#`, `%`) or longest (`##`, `%%`) begin or end that a pattern matches."""
    counts = range(len(value) + 1)
    for count in counts if len(sign) == 1 else reversed(counts):
        rest = len(value) - count
        if fnmatchcase(value[:count] if sign[0] == "#" else value[rest:], pattern):
            return value[count:] if sign[0] == "#" else value[:rest]
    return value


class Condition:
    """A condition of `[`, `test` or, if `double`, `[[`. Its truth is None if a value is unknown."""

    def __init__(self, variables: Variables, words: Sequence[str], *, double: bool) -> None:
        self.variables, self.left, self.double = variables, list(words), double

    def truth(self) -> bool | None:
        found = [self.all_of()]
        while self.takes("||", "-o"):
            found.append(self.all_of())
        return True if True in found else None if None in found else False

    def takes(self, *words: str) -> bool:
        """Take the next word if it is one of `words`."""
        is_next = self.left[:1] != [] and self.left[0] in words
        del self.left[:is_next]
        return is_next

    def all_of(self) -> bool | None:
        found = [self.single()]
        while self.takes("&&", "-a"):
            found.append(self.single())
        return False if False in found else None if None in found else True

    def single(self) -> bool | None:
        if self.takes("!"):
            truth = self.single()
            return None if truth is None else not truth
        if self.takes("(", "\\("):
            truth = self.truth()
            self.takes(")", "\\)")
            return truth
        raw, *rest = self.left or [""]
        if rest and rest[0] in (*_COMPARED, *_TEXTS_COMPARED):
            del self.left[:3]
            return self.compared(raw, *[*rest, ""][:2])
        if rest and re.fullmatch(r"-[a-zA-Z]", raw):
            del self.left[:2]
            if raw == "-v":
                return self.variables.text(rest[0]) in self.variables.values
            return self.is_filled(rest[0], raw == "-n") if raw in ("-n", "-z") else None
        del self.left[:1]
        return self.is_filled(raw, wanted=True)

    def is_filled(self, raw: str, wanted: bool) -> bool | None:
        """Return True if a word has letters, as `wanted`. As in `${NAME:-default}`, an unset variable is empty."""
        text = self.variables.text(raw)
        if re.fullmatch(r"\$(\{\w+\}|\w+)", raw.strip('"')) and text == raw.strip('"'):
            return not wanted
        return None if _UNKNOWN.search(text) else bool(text) == wanted

    def compared(self, left_raw: str, sign: str, right_raw: str) -> bool | None:
        """Compare two words; None if one is unknown."""
        left, right = self.variables.text(left_raw), self.variables.text(right_raw)
        if sign in ("=", "==", "!=") and right_raw in ('""', "''"):
            return self.is_filled(left_raw, wanted=sign == "!=")
        if _UNKNOWN.search(left) or (_UNKNOWN.search(right) and sign != "=~"):
            return None
        if sign in _COMPARED:
            values = [self.variables.integer(each) for each in (left, right)]
            return None if None in values else bool(_COMPARED[sign](*values))
        if sign == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return None
        if sign in ("<", ">"):
            return left < right if sign == "<" else left > right
        same = fnmatchcase(left, self.variables.pattern(right_raw)) if self.double else left == right
        return same if sign != "!=" else not same
