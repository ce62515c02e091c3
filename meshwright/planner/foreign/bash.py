"""Scripts of bash as trees of commands. Words keep their quotes and `$`: shell.py expands these."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass
class Document:
    """A here-document. `is_plain`: its last line is quoted, and nothing in the text is expanded."""

    end: str
    is_plain: bool
    text: str = ""


@dataclass(frozen=True)
class Simple:
    """A command of words, which may begin with assignments. `targets`: files of `>` and `>>`."""

    words: tuple[str, ...]
    targets: tuple[str, ...] = ()
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True)
class Joined:
    """`left && right` or `left || right`. `text`: of `left`."""

    sign: str
    left: Node
    right: Node
    text: str


@dataclass(frozen=True)
class Negated:
    """`! command`."""

    command: Node


@dataclass(frozen=True)
class Piped:
    """`a | b`."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Branches:
    """`if`. `choices`: (text of the condition, the condition, the commands)."""

    choices: tuple[tuple[str, Body, Body], ...]
    otherwise: Body


@dataclass(frozen=True)
class Cases:
    """`case`. `arms`: (patterns, commands)."""

    word: str
    arms: tuple[tuple[tuple[str, ...], Body], ...]


@dataclass(frozen=True)
class Loop:
    """`while` or `until`. `text`: of the condition."""

    text: str
    condition: Body
    body: Body
    is_until: bool = False


@dataclass(frozen=True)
class Each:
    """`for NAME in words`."""

    name: str
    words: tuple[str, ...]
    body: Body


@dataclass(frozen=True)
class Function:
    """A function's definition."""

    name: str
    body: Body


@dataclass(frozen=True)
class Group:
    """`{ ...; }`, or `( ... )` with variables of its own (`is_apart`)."""

    body: Body
    is_apart: bool


@dataclass(frozen=True)
class Test:
    """`[[ words ]]`."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Arithmetic:
    """`(( text ))`."""

    text: str


Node = Simple | Joined | Negated | Piped | Branches | Cases | Loop | Each | Function | Group | Test | Arithmetic
Body = tuple[Node, ...]

BLANKS = " \t"
_ENDS_WORD = frozenset(" \t\n;&|<>()")
_REDIRECT = re.compile(r"(\d*|&)(<<<|<<-?|>>|>&|<&|>\||<>|>|<)")
_ARRAY = re.compile(r"\w+(\[[^]]*\])?\+?=$")
_FUNCTION = re.compile(r"(function[ \t]+)?([\w.:-]+)[ \t]*\([ \t]*\)\s*")


def parsed(text: str) -> Body:
    """Return the commands of a script."""
    return _Parser(text).commands()


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text of several lines, such as an array's."""
    parser, words = _Parser(text), []
    while parser.gap(";&|<>()"):
        words.append(parser.word())
    return tuple(words)


def end_of(text: str, at: int) -> int:
    """Return the index behind the quoted text, escape or expansion that begins at `at`; behind a variable's dollar."""
    letter, after = text[at], text[at + 1 : at + 2]
    if letter == "\\":
        return min(at + 2, len(text))
    if letter == "'":
        return text.find("'", at + 1) + 1 or len(text)
    if letter == "$" and after == "'":
        return end_of(text, at + 1)
    closing = {'"': '"', "`": "`", "(": ")", "{": "}", "[": "]"}
    opening, begin = (after, at + 2) if letter == "$" and after and after in "({[" else (letter, at + 1)
    if opening not in closing:
        return at + 1
    # Inside of double quotes a single quote or a bracket is a letter.
    special = "\\`$" if opening == '"' else "\\" if opening == "`" else f"\\`$'\"{opening}"
    while begin < len(text) and text[begin] != closing[opening]:
        if opening == "(" and text[begin] == "#" and text[begin - 1].isspace():  # a comment in an array
            begin = text.find("\n", begin) if "\n" in text[begin:] else len(text)
        else:
            begin = end_of(text, begin) if text[begin] in special else begin + 1
    return min(begin + 1, len(text))


class _Parser:
    """A reader of a script from `at`."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.pending: list[Document] = []

    def gap(self, skipped: str) -> bool:
        """Skip blanks, lines and the letters `skipped`; return whether any text is left."""
        while True:
            self.blank()
            if self.at >= len(self.text) or self.text[self.at] not in f"\n{skipped}":
                return self.at < len(self.text)
            self.at += 1
            if self.text[self.at - 1] == "\n":
                self.read_documents()

    def blank(self) -> None:
        """Skip blanks, continued lines and comments."""
        while self.at < len(self.text):
            if self.text[self.at] in BLANKS or self.text.startswith("\\\n", self.at):
                self.at += 1 + (self.text[self.at] == "\\")
            elif self.text[self.at] == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\n;"):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def read_documents(self) -> None:
        """Read the here-documents that begin on the line before."""
        for document in self.pending:
            while self.at < len(self.text):
                line, _, _ = self.text[self.at :].partition("\n")
                self.at = min(self.at + len(line) + 1, len(self.text))
                if line.strip() == document.end:
                    break
                document.text += f"{line}\n"
        self.pending = []

    def sees(self, *words: str) -> str:
        """Return the word that the text has here, or an empty one."""
        for word in words:
            if self.text.startswith(word, self.at):
                after = self.text[self.at + len(word) : self.at + len(word) + 1]
                if word in (")", ";;", "((", "(") or not after or after in " \t\n;&|()<>":
                    return word
        return ""

    def took(self, *words: str) -> str:
        """Return as `sees`, and go on behind the word."""
        self.blank()
        word = self.sees(*words)
        self.at += len(word)
        return word

    def commands(self, *ends: str) -> Body:
        """Return the commands before one of the words `ends`."""
        found = []
        while self.gap("&") and not self.sees(*ends):
            if self.text[self.at] == ";":
                self.at += 1
                continue
            before = self.at
            found.append(self.joined())
            self.at += self.at == before  # a stray letter, such as a bracket
        return tuple(found)

    def joined(self) -> Node:
        start = self.at
        node = self.piped()
        while True:
            self.blank()
            sign = self.text[self.at : self.at + 2]
            if sign not in ("&&", "||"):
                return node
            text = self.text[start : self.at].strip()
            self.at += 2
            self.gap("")
            node = Joined(sign, node, self.piped(), text)

    def piped(self) -> Node:
        if self.took("!"):
            self.blank()
            return Negated(self.piped())
        parts = [self.command()]
        while True:
            self.blank()
            if not self.text.startswith("|", self.at) or self.text.startswith("||", self.at):
                return parts[0] if len(parts) == 1 else Piped(tuple(parts))
            self.at += 1 + self.text.startswith("|&", self.at)
            self.gap("")
            parts.append(self.command())

    def command(self) -> Node:
        readers = {
            "if": self.branches, "case": self.cases, "for": self.each, "while": self.loop, "until": self.until,
            "{": self.group, "((": self.arithmetic, "(": self.apart, "[[": self.test,
        }  # fmt: skip
        if word := self.took(*readers):
            node = readers[word]()
            self.redirects([], [], [])
            return node
        if match := _FUNCTION.match(self.text, self.at) or re.compile(r"function[ \t]+([\w.:-]+)()\s+").match(
            self.text, self.at
        ):
            self.at = match.end()
            return Function(match[2] or match[1], (self.command(),))
        words: list[str] = []
        targets: list[str] = []
        documents: list[Document] = []
        self.redirects(words, targets, documents)
        return Simple(tuple(words), tuple(targets), tuple(documents))

    def redirects(self, words: list[str], targets: list[str], documents: list[Document]) -> None:
        """Read words and redirections up to the command's end."""
        while True:
            self.blank()
            match = _REDIRECT.match(self.text, self.at)
            if match is None and (self.at >= len(self.text) or self.text[self.at] in "\n;&|()"):
                return
            if match is None:
                words.append(self.word())
                continue
            self.at = match.end()
            self.blank()
            begin = self.at
            target = self.word() if not self.text.startswith("(", self.at) else ""
            if not target:  # a command in place of a file
                self.at = end_of(self.text, self.at) if self.text.startswith("(", self.at) else self.at
                self.at += self.at == begin
            elif match[2].startswith("<<") and match[2] != "<<<":
                plain = re.sub(r"['\"\\]", "", target)
                documents.append(Document(plain, plain != target))
                self.pending.append(documents[-1])
            elif match[2] in (">", ">>", ">|") and match[1] != "2":
                targets.append(target)

    def word(self) -> str:
        """Return the word that begins here."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in _ENDS_WORD:
            self.at = end_of(self.text, self.at) if self.text[self.at] in "\\'\"`$" else self.at + 1
            if self.text.startswith("(", self.at) and _ARRAY.match(self.text[start : self.at]):
                self.at = end_of(self.text, self.at)
        return self.text[start : self.at].replace("\\\n", "")

    def branches(self) -> Node:
        choices: list[tuple[str, Body, Body]] = []
        otherwise: Body = ()
        word = "elif"
        while word == "elif":
            start = self.at
            condition = self.commands("then")
            text = self.text[start : self.at].strip(" \t\n;")
            self.took("then")
            choices.append((text, condition, self.commands("elif", "else", "fi")))
            word = self.took("elif", "else", "fi")
        if word == "else":
            otherwise = self.commands("fi")
            self.took("fi")
        return Branches(tuple(choices), otherwise)

    def cases(self) -> Node:
        self.blank()
        word, arms = self.word(), []
        self.gap("")
        self.took("in")
        while self.gap("") and not self.took("esac"):
            self.at += self.text.startswith("(", self.at)
            patterns: list[str] = []
            while self.at < len(self.text) and self.text[self.at] != ")":
                self.blank()
                patterns.append(self.word())
                self.blank()
                self.at += not self.text.startswith(")", self.at)
            self.at += 1
            arms.append((tuple(patterns), self.commands(";;", "esac")))
            self.took(";;")
        return Cases(word, tuple(arms))

    def each(self) -> Node:
        if self.took("(("):
            first, condition, after = [*self.arithmetic().text.split(";"), "", ""][:3]
            body = self.looped()
            loop = Loop(condition, (Arithmetic(condition),), (*body, Arithmetic(after)))
            return Group((Arithmetic(first), loop), is_apart=False)
        self.blank()
        name, words = self.word(), ['"$@"']
        self.gap("")
        if self.took("in"):
            words = []
            self.redirects(words, [], [])
        return Each(name, tuple(words), self.looped())

    def looped(self) -> Body:
        """Return the commands between `do` and `done`."""
        self.gap(";")
        self.took("do")
        body = self.commands("done")
        self.took("done")
        return body

    def loop(self, *, is_until: bool = False) -> Node:
        start = self.at
        condition = self.commands("do")
        text = self.text[start : self.at].strip(" \t\n;")
        return Loop(text, condition, self.looped(), is_until)

    def until(self) -> Node:
        return self.loop(is_until=True)

    def group(self) -> Node:
        body = self.commands("}")
        self.took("}")
        return Group(body, is_apart=False)

    def apart(self) -> Node:
        body = self.commands(")")
        self.took(")")
        return Group(body, is_apart=True)

    def arithmetic(self) -> Arithmetic:
        end = end_of(self.text, self.at - 1) - 1  # behind the inner bracket
        text, self.at = self.text[self.at : end], end + 2
        return Arithmetic(text)

    def test(self) -> Node:
        words: list[str] = []
        while self.gap("") and not self.took("]]"):
            sign = next((each for each in ("&&", "||", "(", ")", "<", ">") if self.text.startswith(each, self.at)), "")
            self.at += len(sign)
            words.append(sign or self.word())
            self.at += not words[-1]
            if words[-1] == "=~":  # a pattern may have brackets
                self.blank()
                pattern = re.compile(r"\S+").match(self.text, self.at)
                words.append(pattern[0] if pattern else "")
                self.at += len(words[-1])
        return Test(tuple(words))
