"""Flags of a launch script, read without running the script.

TP=${TP:-8}                         a variable, its default if the environment sets none
ARGS=(--num-layers 32 "--fp8-format hybrid")        an array; a quoted word may hold a flag and its value
ARGS+=(--swiglu)                    appended
if [[ ... ]]; then ... fi           if known values do not decide: both branches are read, and the condition is listed
torchrun pretrain.py ${ARGS[@]}     the command
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from meshwright.planner.foreign.literals import computed

MOST_EXPANSIONS = 50
"""Rounds of expansion: variables may name each other."""


@dataclass
class Script:
    """Flags, words and unknown conditions of a script.

    Attributes:
        flags: Values by flag, without the dashes; "" for a flag without a value. The last occurrence counts.
        words: All words of the launch command, expanded.
        undecided: Conditions that known values do not decide; both branches were read.
    """

    flags: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def read_script(text: str) -> Script:
    """Read a shell script, or a line of flags. Variables without a value keep the text `$NAME`."""
    script, variables, skipping = Script(), dict[str, list[str]](), list[bool | None]()
    for line in statements(text):
        if condition := re.match(r"(?:el)?if\s+(.*?);?\s*(?:then)?$", line):
            if line.startswith("elif"):
                before = skipping.pop() if skipping else None
                # A branch after a taken one is skipped; a branch after an undecided one is read.
                skipping.append(True if before is False else None)
                continue
            truth = decided(condition[1].rstrip("; ").removesuffix("then").strip(), variables)
            if truth is None:
                script.undecided.append(condition[1])
            skipping.append(None if truth is None else not truth)
        elif line == "else":
            if skipping and skipping[-1] is not None:
                skipping[-1] = not skipping[-1]
        elif line == "fi":
            if skipping:
                skipping.pop()
        elif not any(skipping):
            take(line, script, variables)
    return script


def statements(text: str) -> Iterator[str]:
    """Yield a script's lines without comments, with continued lines and arrays of several lines joined."""
    whole = re.sub(r"\\\r?\n", " ", text)
    held, depth = "", 0
    for line in whole.splitlines():
        words = without_comment(line)
        depth += words.count("(") - words.count(")")
        held = f"{held} {words}".strip()
        if depth <= 0:
            if held:
                yield from (command.strip() for command in split_commands(held))
            held, depth = "", 0
    if held:
        yield held


def without_comment(line: str) -> str:
    """Cut a line at a `#` that begins a word outside of quotes."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line.rstrip()


def split_commands(line: str) -> Iterator[str]:
    """Split a line into commands at `;` outside of quotes and brackets; `if ...; then` is one command."""
    if re.match(r"(el)?if\b", line):
        head, _, rest = line.partition("then")
        yield f"{head}then" if "then" in line else line
        if rest.strip():
            yield from split_commands(rest.strip("; "))
        return
    for command in re.split(r";(?![^()]*\))(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", line):
        yield from (word for word in re.split(r"^\s*(else|do)\s+", command) if word.strip())


def take(line: str, script: Script, variables: dict[str, list[str]]) -> None:
    """Add a line's assignments to the variables, and a command's flags to the script."""
    line = re.sub(r"^(export|local|declare(\s+-\w+)*)\s+", "", line)
    if match := re.match(r"(\w+)(\+?)=\((.*)\)\s*$", line):
        words = expanded_words(match[3], variables)
        variables[match[1]] = [*(variables.get(match[1], []) if match[2] else []), *words]
        return
    # `A=1 B=2 torchrun ...`: assignments before a command.
    while match := re.match(r"(\w+)(\+?)=", line):
        end = match.end() + len(first_word(line[match.end() :]))
        text = expanded(line[match.end() : end].strip("\"'"), variables)
        before = variables.get(match[1], [""])
        variables[match[1]] = [f"{' '.join(before)}{text}"] if match[2] else [text]
        line = line[end:].lstrip()
    if "--" in line or "$" in line:
        words = expanded_words(line, variables)
        flags = flags_of(words)
        if flags:
            script.words += words
            script.flags |= flags


def first_word(text: str) -> str:
    """Return the first word of a text; spaces inside of quotes, backticks and brackets after `$` end no word."""
    closing = {"(": ")", "{": "}"}
    inside: list[str] = []
    for at, letter in enumerate(text):
        if inside and letter == inside[-1]:
            inside.pop()
        elif inside and inside[-1] in "\"'`":
            continue
        elif letter in "\"'`":
            inside.append(letter)
        elif letter in closing and (inside or text[at - 1 : at] == "$"):
            inside.append(closing[letter])
        elif letter.isspace() and not inside:
            return text[:at]
    return text


def decided(condition: str, variables: dict[str, list[str]]) -> bool | None:
    """Evaluate a condition; None if a value is unknown."""
    if "||" in condition or "&&" in condition:
        sides = [decided(side.strip(), variables) for side in re.split(r"\|\||&&", condition)]
        together = any if "||" in condition else all
        return together(bool(side) for side in sides) if None not in sides else None
    if numbers := re.fullmatch(r"\(\(\s*(.+?)\s*(==|!=|>=|<=|>|<)\s*(.+?)\s*\)\)", condition):
        left, right = (expanded(f"$(({side}))", variables) for side in (numbers[1], numbers[3]))
        return compared(left, NUMERIC[numbers[2]], right)
    inner = re.fullmatch(r"\[{1,2}\s*(.*?)\s*\]{1,2}", condition)
    # As in `${NAME:-default}`, a variable without a value counts as empty.
    if inner and (asked := re.fullmatch(r"-([zn])\s+\"?\$(?:\{(\w+)\}|(\w+))\"?", inner[1])):
        return (asked[1] == "n") == bool("".join(variables.get(asked[2] or asked[3], [])))
    parts = expanded_words(inner[1], variables) if inner else []
    if len(parts) == 3 and not any("$" in word for word in parts):
        return compared(*parts)
    if len(parts) == 2 and parts[0] in ("-z", "-n") and "$" not in parts[1]:
        return (parts[0] == "-n") == bool(parts[1])
    return None


NUMERIC = {"==": "-eq", "!=": "-ne", ">": "-gt", ">=": "-ge", "<": "-lt", "<=": "-le"}
"""Signs inside of `((...))`, each with the word inside of `[...]`."""


def compared(left: str, sign: str, right: str) -> bool | None:
    """Compare two words of a condition; None if a word is no number or the sign is unknown."""
    if sign in ("==", "=", "-eq"):
        return left == right
    if sign in ("!=", "-ne"):
        return left != right
    if sign in NUMERIC.values() and left.isdigit() and right.isdigit():
        first, second = int(left), int(right)
        return {"-gt": first > second, "-ge": first >= second, "-lt": first < second, "-le": first <= second}[sign]
    return None


def expanded_words(text: str, variables: dict[str, list[str]]) -> list[str]:
    """Split a line into words with arrays and variables expanded; quoted words that hold flags are split, too."""
    found: list[str] = []
    for word in split_words(text):
        whole = re.fullmatch(r"\$\{?(\w+)(\[[@*]\])?\}?", word)
        if whole and whole[1] in variables:
            values = variables[whole[1]]
            found += [
                inner_word for value in values for inner_word in (split_words(value) if " " in value else [value])
            ]
        else:
            told = expanded(word, variables)
            found += split_words(told) if re.match(r"--[^=\s]+\s", told) else [told]
    return found


def split_words(text: str) -> list[str]:
    """Split into words as a shell does; a text with an unpaired quote is split at spaces."""
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def expanded(text: str, variables: dict[str, list[str]]) -> str:
    """Expand `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME:=default}`, `${1-default}` and `$((A * B))` in a text."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        # With a colon an empty variable has the default, too.
        if name in variables and (any(variables[name]) or not (match[2] or "").startswith(":")):
            return " ".join(variables[name])
        return match[3].strip("\"'") if match[2] is not None else match[0]

    def sum_of(match: re.Match[str]) -> str:
        # Inside `$((...))` a name is a variable without a dollar, and division is integer division.
        named = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(variables.get(name[0], ["0"])), match[1])
        return str(computed(named.replace("/", "//")))

    for _ in range(MOST_EXPANSIONS):
        new = re.sub(r"\$\{(\w+)(?:(:?[-=])([^${}]*))?\}|\$(\w+)", value, text)
        new = re.sub(r"\$\(\(([\w\s*+/()-]+)\)\)", sum_of, new)
        if new == text:
            break
        text = new
    return text


def flags_of(words: list[str]) -> dict[str, str]:
    """Parse words such as `--micro-batch-size 2 --swiglu --seq-length=4096 --recompute-modules core_attn moe`.

    A flag has one value, or several names in a row. A switch before the script's file gets the file as value.
    """
    flags: dict[str, str] = {}
    for at, word in enumerate(words):
        if not word.startswith("--") or len(word) == 2:
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            behind = list(takewhile(lambda each: not each.startswith("--"), words[at + 1 :]))
            names = list(takewhile(lambda each: re.fullmatch(r"[A-Za-z_]\w*", each), behind))
            value = " ".join(names or behind[:1])
        flags[name] = value
    return flags
