"""Flags of a launch script, read without running the script.

TP=${TP:-8}                         a variable, its default if the environment sets none
ARGS=(--num-layers 32 "--fp8-format hybrid")        an array; a quoted word may hold a flag and its value
ALL="${ARGS[@]} --bf16"             an array inside of a text
N=${SIZE%B} D=$((NODES * 8))        a part of a text, whole numbers
#SBATCH --nodes=4                   SLURM_NNODES and others, as Slurm sets them
cat > ds.json <<EOF                 a file that the script writes
if [[ ... ]]; then ... fi           if known values do not decide: both branches are read, and the condition is listed
[ $FP8 = 1 ] && ARGS+=(--bf16)      the same
case $SIZE in 8B) N=32;; esac       a known word's arm
for i in 1 2; do ... done           each round; of a condition that values do not decide, one round
name() { ... }                      read where it is called
torchrun pretrain.py ${ARGS[@]}     the command with the most flags

source FILE, bash FILE, sbatch FILE a script beside this one is read, too
sed s/STAGE/1/ T.json > ds.json     a file made of a file beside the script

No command is run. `$(...)` of a few commands (expansion.py) has a value, of others its own text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from pathlib import Path, PurePosixPath

from meshwright.planner.foreign.bash import (
    Arithmetic,
    Body,
    Branches,
    Cases,
    Each,
    Function,
    Group,
    Joined,
    Loop,
    Negated,
    Node,
    Piped,
    Simple,
    Test,
    parsed,
    words_of,
)
from meshwright.planner.foreign.expansion import ASSIGNMENT, Condition, Value, Variables
from meshwright.ranks.foreign import read_text

MOST_ROUNDS = 500
"""Rounds of all loops, and all calls, of a script."""

MOST_CALLS = 16
"""Calls of functions, scripts and texts of `eval`, each inside of another."""

MOST_BYTES = 2**20
"""Bytes of a file beside the script."""


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
        files: Texts that the script writes, by file name.
    """

    flags: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def starts(self, program: str) -> bool:
        """Return True if one of the command's words is a program's name."""
        return program in self.words


def read_script(text: str, folder: Path | None = None) -> Script:
    """Read a shell script, or a line of flags. Variables without a value keep the text `$NAME`.

    Args:
        text: The script.
        folder: The script's folder, with files that the script may name.

    Raises:
        RecursionError: The script's brackets, commands or calls are nested deeper than Python's stack.
    """
    shell = _Shell(Script(), slurm_variables(text), folder)
    shell.run(parsed(text))
    return shell.script


SLURM = (
    ("nodes", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")), ("ntasks-per-node", ("SLURM_NTASKS_PER_NODE",)),
    ("gpus-per-node", ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")), ("cpus-per-task", ("SLURM_CPUS_PER_TASK",)),
    ("ntasks", ("SLURM_NTASKS",)),
)  # fmt: skip
"""Options of sbatch, each with the variables that Slurm sets."""


def slurm_variables(text: str) -> dict[str, Value]:
    """Return the variables that Slurm sets by the script's `#SBATCH` lines."""
    found: dict[str, Value] = {}
    for option, names in SLURM:
        for value in re.findall(rf"(?m)^#SBATCH\s+--{option}[=\s]\s*(?:\w+:)*(\d+)", text):
            found |= dict.fromkeys(names, value)
    return found


SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_PROGRAM = re.compile(
    r"(?:^|/)(?:llamafactory-cli|lmf|axolotl|trl|automodel|torchrun|accelerate|deepspeed|python[\d.]*)$"
)
ARGUMENTS = (".yaml", ".yml", ".json")
"""Endings of a program's files of arguments: a command with such a file needs no flags."""
_STARTERS = ("bash", "sh", "sbatch", "srun", "exec", "nohup")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")


class _Leave(Exception):
    """`break` or `continue`; `ends`: the loop ends."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends


class _Shell(Variables):
    """The state of a script while it is read. `conditions`: unknown conditions of the branch that is read; `given`:
    variables of one command."""

    def __init__(self, script: Script, variables: dict[str, Value], folder: Path | None) -> None:
        super().__init__(variables)
        self.script, self.folder = script, folder
        self.functions: dict[str, Body] = {}
        self.conditions: list[str] = []
        self.given: dict[str, Value] = {}
        self.rounds = self.calls = self.loops = self.changes = 0

    def run(self, body: Body) -> bool | None:
        """Read commands; return the last one's status: True for success, None if unknown."""
        status: bool | None = True
        for node in body:
            status = self.status(node)
        return status

    def status(self, node: Node) -> bool | None:
        """Read a command; return its status as `run`."""
        if isinstance(node, Simple):
            return self.simple(node)
        if isinstance(node, Branches | Cases):
            return self.branches(node) if isinstance(node, Branches) else self.cases(node)
        if isinstance(node, Joined):
            first = self.status(node.left)
            if first is None:
                self.under(node.text, (node.right,))
                return None
            return self.status(node.right) if first is (node.sign == "&&") else first
        if isinstance(node, Each | Loop):
            return self.each(node) if isinstance(node, Each) else self.loop(node)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
            return True
        if isinstance(node, Test):
            return Condition(self, node.words, double=True).truth()
        if isinstance(node, Arithmetic):
            value = self.integer(node.text)
            return None if value is None else value != 0
        return self.grouped(node)

    def grouped(self, node: Negated | Piped | Group) -> bool | None:
        """Read a command made of others, as `status`."""
        if isinstance(node, Negated):
            status = self.status(node.command)
            return None if status is None else not status
        body = node.parts if isinstance(node, Piped) else node.body
        before = dict(self.values)
        status = self.run(body)
        if isinstance(node, Piped):
            last = body[-1]
            if isinstance(last, Simple):
                self.write(last.words[1:] if last.words[:1] == ("tee",) else last.targets, body)
            status = None
        if isinstance(node, Piped) or node.is_apart:
            self.values = before
        return status

    def under(self, condition: str, body: Body) -> None:
        """Read commands that an unknown condition decides on."""
        self.conditions.append(condition)
        try:
            self.run(body)
        finally:
            self.conditions.pop()

    def branches(self, node: Branches) -> bool | None:
        taken: bool | None = False  # whether a branch before was taken
        unknown = ""
        for text, condition, body in node.choices:
            truth = self.run(condition) if taken is not True else False
            if truth is None:
                taken, unknown = None, unknown or text
            if truth is not False:
                self.under(unknown, body) if taken is None else self.run(body)
                taken = True if truth else taken
            if taken is True:
                return None
        if taken is None:
            self.under(unknown, node.otherwise)
        else:
            self.run(node.otherwise)
        return None

    def cases(self, node: Cases) -> bool | None:
        word = self.text(node.word)
        if "$" in word:  # an unknown word, such as `$1`, takes no arm
            if word not in self.script.unmatched and any(self.alters(body) for _, body in node.arms):
                self.script.unmatched.append(word)
            return None
        for patterns, body in node.arms:
            if any(fnmatchcase(word, self.pattern(each)) for each in patterns):
                return self.run(body)
        return True

    def alters(self, body: Body) -> bool:
        """Return True if commands would change variables or flags."""
        tried = _Shell(Script(), dict(self.values), self.folder)
        tried.functions, tried.rounds, tried.calls = self.functions, self.rounds, self.calls
        tried.run(body)
        return tried.changes > 0

    def each(self, node: Each) -> bool | None:
        for word in self.words(node.words):
            self.assign(node.name, word)
            if self.ends_round(node.body):
                break
        return None

    def loop(self, node: Loop) -> bool | None:
        before = -1
        # After a round that changes nothing, all later rounds are equal.
        while self.changes > before and (truth := self.run(node.condition)) is not None:
            before = self.changes
            if truth is node.is_until or self.ends_round(node.body):
                return None
        if self.changes > before:
            self.conditions.append(node.text)
            self.ends_round(node.body)
            self.conditions.pop()
        return None

    def ends_round(self, body: Body) -> bool:
        """Read a loop's body; return whether the loop ends."""
        self.rounds += 1
        self.loops += 1
        try:
            self.run(body)
        except _Leave as leave:
            return leave.ends
        finally:
            self.loops -= 1
        return self.rounds >= MOST_ROUNDS

    def simple(self, node: Simple) -> bool | None:
        words = list(node.words)
        edited = node.words[-1:] if node.words[:1] == ("sed",) and "-i" in node.words else ()
        self.write(node.targets or edited, (node,))
        before = dict(self.values)
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            self.assigned(match)
            words.pop(0)
        if not words:
            return True
        # `A=1 command`: the command has the variable, and the line's other words and the lines behind have not.
        self.given = {key: value for key, value in self.values.items() if before.get(key) != value}
        if self.given:
            self.values = before
        name, behind = self.text(words[0]), words[1:]
        if name in _DECLARES:
            for word in behind:
                if match := ASSIGNMENT.fullmatch(word):
                    self.assigned(match)
            return True
        if name in ("[", "test"):
            return Condition(self, behind[: len(behind) - (name == "[")], double=False).truth()
        if name in self.functions:
            return self.call(name, self.words(behind))
        if name in ("break", "continue") and self.loops and not self.conditions:
            raise _Leave(ends=name == "break")
        return self.built_in(name, behind)

    def built_in(self, name: str, words: Sequence[str]) -> bool | None:
        """Read a command that bash has, or any other program's, as `status`."""
        fields = self.words(words)
        if name in ("true", ":", "false", "echo"):
            return name != "false"
        if name == "eval":
            return self.inside(parsed(" ".join(fields)))
        if name == "let":
            for text in fields:
                self.integer(text)
        elif name == "unset":
            for each in fields:
                self.values.pop(each, None)
        elif name == "set" and "--" in words:
            self.place(fields[fields.index("--") + 1 :])
        elif name in ("source", "."):
            return self.inside(parsed(self.beside(" ".join(fields[:1])) or ""))
        elif name not in ("printf", "set"):
            self.start([name, *fields])
            self.command([name, *fields], words)
        return None

    def start(self, words: Sequence[str]) -> None:
        """Read a script beside this one that a command starts, with its arguments."""
        index = next((index for index, word in enumerate(words) if word.endswith(SCRIPTS)), None)
        if index is None or (index > 0 and words[0] not in _STARTERS):
            return
        text, before = self.beside(words[index]), dict(self.values)
        if text is not None:
            flags = flags_of([*words])
            self.values |= {name: flags[option] for option, names in SLURM if option in flags for name in names}
            self.values |= slurm_variables(text)
            self.place(words[index + 1 :])
            self.inside(parsed(text))
            self.values = before

    def inside(self, body: Body) -> bool | None:
        """Read the commands of a function or of `eval`, as `run`."""
        if self.calls >= MOST_CALLS or self.rounds >= MOST_ROUNDS:
            return None
        self.calls += 1
        self.rounds += 1
        before = {key: self.values.get(key) for key in self.given}
        self.values |= self.given
        self.given = {}
        try:
            return self.run(body)
        finally:
            self.calls -= 1
            for key, value in before.items():
                self.values.pop(key, None)
                self.values |= {} if value is None else {key: value}

    def call(self, name: str, arguments: Sequence[str]) -> bool | None:
        """Read a function's body with arguments."""
        before = self.placed()
        self.place(arguments)
        try:
            return self.inside(self.functions[name])
        finally:
            for key in self.placed():
                del self.values[key]
            self.values |= before

    def placed(self) -> dict[str, Value]:
        """Return the positional parameters."""
        return {key: value for key, value in self.values.items() if key.isdigit() or key in ("@", "#")}

    def place(self, arguments: Sequence[str]) -> None:
        """Set the positional parameters."""
        self.values |= {str(index + 1): each for index, each in enumerate(arguments)}
        self.values |= {"@": {str(index): each for index, each in enumerate(arguments)}, "#": str(len(arguments))}

    def command(self, words: list[str], raw: Sequence[str]) -> None:
        """Take a command's flags, if it has as many as the commands before."""
        for before, word in pairwise(raw):
            if before == "-c":  # `bash -c` runs its word
                words += self.words(words_of(self.text(word)))
        if "--" in words and flags_of(words[words.index("--") + 1 :]):
            # A launcher's flags are before its program's; axolotl's are before its launcher's.
            cut = words.index("--")
            words = words[:cut] if "axolotl" in words else words[cut + 1 :]
        words = [each for word in words for each in (word.split() if re.match(r"--[^=\s]+\s", word) else [word])]
        flags = flags_of(words)
        if not flags and not (any(map(_PROGRAM.search, words)) and any(each.endswith(ARGUMENTS) for each in words)):
            return
        if words[0].startswith("--"):  # a line of flags, or after a comment between flags
            self.script.words, self.script.flags = self.script.words + words, self.script.flags | flags
        elif len(flags) >= len(self.script.flags):
            self.script.words, self.script.flags = words, flags
        else:
            return
        self.changed()

    def write(self, targets: Sequence[str], commands: Body) -> None:
        """Keep the files that commands in a pipe write, if the text is known."""
        text = self.printed(commands) if targets else None
        if text is not None:
            self.script.files |= {self.text(target).rpartition("/")[2]: text for target in targets}

    def beside(self, name: str) -> str | None:
        """Return the text of a file that the script has written, or of its folder; None if there is none."""
        path, last = PurePosixPath(name), name.rpartition("/")[2]
        if last in self.script.files or self.folder is None:
            return self.script.files.get(last)
        # A path below a folder without a known name, such as `pwd`, is looked up by its last part.
        inner = path if not (path.is_absolute() or ".." in path.parts or "$" in name or "`" in name) else last
        for file in (self.folder / inner, self.folder / last) if last else ():
            try:
                if file.stat().st_size <= MOST_BYTES:
                    return read_text(file)
            except (OSError, UnicodeDecodeError):
                continue
        return None

    def changed(self) -> None:
        """Note that variables or flags have changed, under the unknown conditions."""
        self.changes += 1
        self.script.undecided += [each for each in self.conditions if each not in self.script.undecided]


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
