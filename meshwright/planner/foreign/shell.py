"""Flags of a launch script, read without running the script.

TP=${TP:-8}                         a variable, its default if the environment sets none
ARGS=(--num-layers 32 "--fp8-format hybrid")        an array; a quoted word may hold a flag and its value
ARGS+=(--swiglu)                    appended
ALL="${ARGS[@]} --bf16"             an array inside of a text
#SBATCH --nodes=4                   SLURM_NNODES and others, as Slurm sets them
cat > ds.json <<EOF                 a file that the script writes
if [[ ... ]]; then ... fi           if known values do not decide: both branches are read, and the condition is listed
case $SIZE in 8B) N=32;; esac       a known word's arm
torchrun pretrain.py ${ARGS[@]}     the command
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile

from meshwright.planner.foreign.literals import computed

MOST_EXPANSIONS = 50
"""Rounds of expansion: variables may name each other."""


@dataclass
class Script:
    """Flags, words and unknown conditions of a script.

    Attributes:
        flags: Values by flag of the command with the most flags, without the dashes; "" for a flag without a value. The
            last occurrence counts.
        words: All words of this command, expanded.
        undecided: Conditions that known values do not decide, of lines that change variables or flags; both branches
            were read.
        unmatched: Unknown words of `case` with arms that change variables or flags; no arm was read.
        files: Texts that the script writes by here-documents, by file name.
    """

    flags: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def starts(self, program: str) -> bool:
        """Return True if one of the command's words is a program's name."""
        return program in self.words


def read_script(text: str) -> Script:
    """Read a shell script, or a line of flags. Variables without a value keep the text `$NAME`."""
    script, variables, skipping = Script(), slurm_variables(text), list[bool | None]()
    unknown: list[str] = []
    words: list[str] = []
    text, bodies = without_documents(text)
    for command in statements(text):
        line = command
        if chosen := re.match(r"case\s+(\S+)\s+in\b\s*", line):
            words.append(expanded(chosen[1].strip("\"'"), variables))
            skipping.append(True)
            unknown.append("")
            line = line[chosen.end() :]
        if words and (arm := re.match(r"\(?([^()]*)\)\s*", line)):
            # An unknown word, such as `$1`, takes no arm; after the first arm no other is taken.
            patterns = [each.strip(" \"'") for each in arm[1].split("|")]
            taken = "$" not in words[-1] and any(fnmatchcase(words[-1], each) for each in patterns)
            skipping[-1], line = not taken, line[arm.end() :]
            words[-1] = "$" if taken else words[-1]
        if words and line == "esac":
            words.pop()
            skipping.pop()
            unknown.pop()
        elif condition := re.match(r"(?:el)?if\s+(.*?);?\s*(?:then)?$", line):
            if line.startswith("elif"):
                before = skipping.pop() if skipping else None
                # A branch after a taken one is skipped; a branch after an undecided one is read.
                skipping.append(True if before is False else None)
                if before is None and unknown:
                    unknown[-1] = unknown[-1] or condition[1]
                continue
            truth = decided(condition[1].rstrip("; ").removesuffix("then").strip(), variables)
            unknown.append(condition[1] if truth is None else "")
            skipping.append(None if truth is None else not truth)
        elif line == "else":
            if skipping and skipping[-1] is not None:
                skipping[-1] = not skipping[-1]
        elif line == "fi":
            if skipping:
                skipping.pop()
                unknown.pop()
        elif words and re.search(r"\$.", words[-1]) and not any(skipping[:-1]):
            if words[-1] not in script.unmatched and take(line, Script(), dict(variables)):
                script.unmatched.append(words[-1])
        elif not any(skipping) and take(line, script, variables):
            script.undecided += [each for each in unknown if each and each not in script.undecided]
    script.files = {
        expanded(name.strip("\"'"), variables).rpartition("/")[2]: expanded(body, variables) for name, body in bodies
    }
    return script


SLURM = (
    ("nodes", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")), ("ntasks-per-node", ("SLURM_NTASKS_PER_NODE",)),
    ("gpus-per-node", ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")), ("cpus-per-task", ("SLURM_CPUS_PER_TASK",)),
    ("ntasks", ("SLURM_NTASKS",)),
)  # fmt: skip
"""Options of sbatch, each with the variables that Slurm sets."""


def slurm_variables(text: str) -> dict[str, list[str]]:
    """Return the variables that Slurm sets by the script's `#SBATCH` lines."""
    found: dict[str, list[str]] = {}
    for option, names in SLURM:
        for value in re.findall(rf"(?m)^#SBATCH\s+--{option}[=\s]\s*(?:\w+:)*(\d+)", text):
            found |= {name: [value] for name in names}
    return found


DOCUMENT = re.compile(r"(?ms)^([^#\n]*?)<<-?[ \t]*(['\"]?)(\w+)\2([^\n]*)\n(.*?)^\s*\3[ \t]*$")
"""A command with a here-document: the text before, the quote, the last line, the text after, the document."""


def without_documents(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a script's text without here-documents, and pairs (file, document) of those written into a file."""
    found = []
    for before, _, _, after, body in DOCUMENT.findall(text):
        if target := re.search(r"(?:>|\btee)\s*([^\s>&|]+)", f"{before} {after}"):
            found.append((target[1], body))
    return DOCUMENT.sub("", text), found


def statements(text: str) -> Iterator[str]:
    """Yield a script's lines without comments; continued lines, arrays and quoted texts of several lines are joined."""
    held = ""
    for line in text.splitlines():
        words, quote, depth = open_at_end(f"{held} {line}".strip())
        continued = words.endswith("\\") and quote != "'"
        if quote or depth or continued:
            held = words.removesuffix("\\").rstrip() if continued else words
        else:
            held = ""
            yield from (command.strip() for command in split_commands(words) if command.strip())
    for line in held.splitlines():
        yield from (command.strip() for command in split_commands(line))


def open_at_end(line: str) -> tuple[str, str, int]:
    """Return the state at a line's end: (the line without a `#` that begins a word outside of quotes, the open quote,
    the number of open brackets outside of quotes)."""
    quote, depth, escaped = "", 0, False
    for at, letter in enumerate(line):
        if escaped:
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip(), "", max(depth, 0)
        else:
            depth += (letter == "(") - (letter == ")")
    return line.rstrip(), quote, max(depth, 0)


def split_commands(line: str) -> Iterator[str]:
    """Split a line into commands at `;` outside of quotes and brackets; `if ...; then` is one command."""
    if ";;" in line:
        for arm in line.split(";;"):
            yield from split_commands(arm.strip())
        return
    if re.match(r"(el)?if\b", line):
        head, _, rest = line.partition("then")
        yield f"{head}then" if "then" in line else line
        if rest.strip():
            yield from split_commands(rest.strip("; "))
        return
    for command in re.split(r";(?![^()]*\))(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", line):
        yield from (word for word in re.split(r"^\s*(else|do)\s+", command) if word.strip())


def take(line: str, script: Script, variables: dict[str, list[str]]) -> bool:
    """Add a line's assignments to the variables, and a command's flags to the script; return True for a change."""
    changed = False
    line = re.sub(r"^(export|local|declare(\s+-\w+)*)\s+", "", line)
    if match := re.match(r"(\w+)(\+?)=\((.*)\)\s*$", line):
        words = expanded_words(match[3], variables)
        variables[match[1]] = [*(variables.get(match[1], []) if match[2] else []), *words]
        return True
    # `A=1 B=2 torchrun ...`: assignments before a command.
    while match := re.match(r"(\w+)(\+?)=", line):
        end = match.end() + len(first_word(line[match.end() :]))
        text = expanded(line[match.end() : end].strip("\"'"), variables)
        before = variables.get(match[1], [""])
        variables[match[1]] = [f"{' '.join(before)}{text}"] if match[2] else [text]
        line, changed = line[end:].lstrip(), True
    if "--" in line or "$" in line:
        words = expanded_words(line, variables)
        flags = flags_of(words)
        if flags and words[0].startswith("--"):  # a line of flags, or after a comment between flags
            script.words, script.flags = script.words + words, script.flags | flags
            return True
        if flags and len(flags) >= len(script.flags) and words[0] not in ("echo", "printf"):
            script.words, script.flags = words, flags
            return True
    return changed


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
    for before, word in pairwise(["", *split_words(text)]):
        whole = re.fullmatch(r"\$\{?(\w+)(\[[@*]\])?\}?", word)
        if whole and whole[1] in variables:
            values = variables[whole[1]]
            found += [
                inner_word for value in values for inner_word in (split_words(value) if " " in value else [value])
            ]
        else:
            told = expanded(word, variables)
            # A quoted word may hold a flag and its value; `bash -c` runs its word.
            found += split_words(told) if re.match(r"--[^=\s]+\s", told) or before == "-c" else [told]
    return found


def split_words(text: str) -> list[str]:
    """Split into words as a shell does; a text with an unpaired quote is split at spaces. A command in backticks or
    `$(...)` is a part of one word."""
    commands: list[str] = []

    def hidden(match: re.Match[str]) -> str:
        commands.append(match[0])
        return f"\0{len(commands) - 1}\0"

    plain = re.sub(COMMAND, hidden, text)
    try:
        words = shlex.split(plain, comments=False)
    except ValueError:
        words = plain.split()
    return [re.sub(r"\0(\d+)\0", lambda found: commands[int(found[1])], word) for word in words]


COMMAND = r"`[^`]*`|\$\((?!\()(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
"""A command whose output is a part of a word."""


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
        new = re.sub(r"\$\{(\w+)(?:\[[@*]\]|(:?[-=])([^${}]*))?\}|\$(\w+)", value, text)
        new = re.sub(r"\$\(\(([\w\s*+/()-]+)\)\)", sum_of, new)
        if new == text:
            break
        text = new
    return text


def flags_of(words: list[str]) -> dict[str, str]:
    """Parse words such as `--micro-batch-size 2 --swiglu --seq-length=4096 --recompute-modules core_attn moe`.

    A flag has one value, or several names or whole numbers in a row. A switch before the script's file gets the file as
    value.
    """
    flags: dict[str, str] = {}
    for at, word in enumerate(words):
        if not word.startswith("--") or len(word) == 2:
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            behind = list(takewhile(lambda each: not each.startswith("--"), words[at + 1 :]))
            row = re.compile(r"\d[\d_]*" if behind[:1] and behind[0][:1].isdigit() else r"[A-Za-z_]\w*")
            value = " ".join(list(takewhile(row.fullmatch, behind)) or behind[:1])
        flags[name] = value
    return flags
