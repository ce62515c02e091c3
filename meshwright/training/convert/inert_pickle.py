"""Pickles as inert values: a reader of opcodes that imports and calls nothing.

torch writes the table of a distributed checkpoint, and the header of each tensor, as pickles. Python's unpickler
imports the named classes and calls them, so a stranger's file could run code. Here a name becomes a `Name`, and an
object becomes a `Made` with the name and the arguments. Every other opcode than those of plain data is refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

MOST_OPCODES = 50_000_000
"""The most opcodes that are read: a table of a million tensors has about 40 million."""

_CONSTANTS = frozenset(
    ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BININT", "BININT1",
     "BININT2", "LONG1", "LONG4", "BINFLOAT")
)  # fmt: skip


@dataclass(frozen=True)
class Name:
    """A class or function named by a pickle, such as `torch.float32`."""

    text: str


@dataclass(eq=False)
class Made:
    """An object of a pickle: the name of the class or function, the arguments, and the state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def fields(self) -> dict[str, Any]:
        """Return the state by field; empty if the state is no dictionary."""
        return self.state if isinstance(self.state, dict) else {}


def inert(pickled: bytes) -> Any:
    """Return the value of a pickle, with `Name` and `Made` for classes and objects.

    Args:
        pickled: The bytes of one pickle.

    Raises:
        ValueError: The bytes are no pickle, hold an opcode that plain data do not need, or more than MOST_OPCODES.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if count > MOST_OPCODES:
                raise ValueError(f"has more than {MOST_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                (value,) = stack
                return value
            apply_opcode(opcode.name, argument, stack, marks, memo)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no pickle of plain data: {error!r}") from error
    raise ValueError("ends before its last opcode")


def apply_opcode(opcode: str, argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    """Change the stack by one opcode, as `pickletools` describes the opcode."""
    after: list[Any] = []
    if opcode in ("TUPLE", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET"):
        start = marks.pop()
        after = stack[start:]
        del stack[start:]
    match opcode:
        case "PROTO" | "FRAME":
            pass
        case "MARK":
            marks.append(len(stack))
        case _ if opcode in _CONSTANTS:
            stack.append(argument)
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
        case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_SET" | "EMPTY_TUPLE":
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}[opcode]())
        case "TUPLE" | "FROZENSET":
            stack.append(tuple(after))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            length = int(opcode[-1])
            stack[-length:] = [tuple(stack[-length:])]
        case "APPEND" | "SETITEM":
            length = {"APPEND": 1, "SETITEM": 2}[opcode]
            after = stack[-length:]
            del stack[-length:]
            extend(stack[-1], after)
        case "APPENDS" | "SETITEMS" | "ADDITEMS":
            extend(stack[-1], after)
        case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
            memo[len(memo) if opcode == "MEMOIZE" else argument] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL":
            stack.append(Name(argument.replace(" ", ".")))
        case "STACK_GLOBAL":
            module, name = stack[-2:]
            stack[-2:] = [Name(f"{module}.{name}")]
        case "REDUCE" | "NEWOBJ":
            made, arguments = stack[-2:]
            stack[-2:] = [Made(made.text, (*arguments,))]
        case "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Made):
                stack[-1].state = state
        case "BINPERSID":
            stack.append(Made("persistent", (stack.pop(),)))
        case _:
            raise ValueError(f"has the opcode {opcode}, which plain data do not need")


def extend(container: Any, values: list[Any]) -> None:
    """Add values to a list or a set, or keys and values to a dictionary; objects keep none."""
    if isinstance(container, dict):
        container.update(zip(values[::2], values[1::2], strict=True))
    elif isinstance(container, list):
        container.extend(values)
    elif isinstance(container, set):
        container.update(values)
