"""Functions of Python files give the fields that Python gives them, without being run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from meshwright.planner.foreign.literals import CALLED, fields_of_function


class Fields(dict[str, Any]):
    """An object with any fields, as a config of a program: a field that is read is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.setdefault(name, Fields())

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value


BODIES = (
    # Assignments.
    "c = g(a=1)\nc.t.b = 2\nc.t.b = c.t.b * 4\nc.a += 3",
    "n = 4\nn *= 2\nm: int = n % 3\nc = g(a=n, b=m, d=2 ** 4, e=-1.5, h=not n)",
    "a, b = 1, 2\nc = g(a=a, b=b)\nc.x, c.y = 3, 4",
    "a = b = 2\nc = g(a=a, b=b)\nc['d'] = 5\nc.t['e'] = 6",
    "c = g(a=1)\nsection = c.t\nsection.b = 5",
    "c = g(a=1)\nsetattr(c, 'b', 3)\nsetattr(c.t, 'd', getattr(c, 'a', 4))",
    "d = {'a': 1, 'b': 2}\nd['a'] = 5\nd.update(e=6)\nd |= {'h': 7}\nc = g(**d)",
    "d = dict(a=1)\nc = g(**{**d, 'b': 2})",
    "l = [1]\nl.append(2)\nl += [3] * 2\nl[0] = 7\nc = g(a=l, b=l[-1], d=len(l), e=max(l), h=[*l, 1])",
    # Branches and loops.
    "n = 8\nc = g(a=1)\nif n > 9:\n  c.a = 2\nelif 4 < n <= 8:\n  c.a = 3\nelse:\n  c.a = 4",
    "n = 'llama3'\nc = g(a=2 if n.startswith('llama') else 3)\nif 'ama' in n and n not in ('x',):\n  c.b = n.upper()",
    "n = 2\nmatch n:\n  case 1:\n    c = g(a=3)\n  case 2 | 3:\n    c = g(a=4)\n  case _:\n    c = g(a=5)",
    "c = g(a=1)\nfor key, value in {'x': 1, 'y': 2}.items():\n  setattr(c, key, value)\n  if key == 'y':\n    break",
    "c = g(a=1)\nwhile c.a < 50:\n  c.a *= 2\n  if c.a % 2:\n    continue",
    "c = g(a=[i * 2 for i in range(5) if i != 3], b={str: 1 for str in ['k']}, d=sum(i for i in [1, 2]))",
    "if (n := 5) > 3:\n  c = g(a=n)",
    "with nullcontext():\n  c = g(a=1)\ntry:\n  c.b = 2\nexcept ValueError:\n  c.b = 3\nfinally:\n  c.d = 4",
    # Texts, calls and the file's own names.
    "n = '8b'\nc = g(a=f'llama_{n}', b='x' + 'y' * 2, d='1_0'.replace('_', ''), e=int('4'), h=None or 3)",
    "c = g(a=SIZES['8b']['hidden'], b=TWICE, d=SIZES['8b'].get('none', 9))",
    "c = shared(3, more=4)\nchange(c)\nc.z = five()",
    "def inner():\n  return 4\nc = g(a=inner())",
)  # fmt: skip
FILE = """
SIZES = {'8b': dict(hidden=4096)}
TWICE = SIZES['8b']['hidden'] * 2

def five():
    return 5

def change(config):
    config.changed = True

def shared(layers, *, more=1):
    config = g(layers=layers)
    config.more = more
    return config

def f():
{body}
    return c
"""


def plain(value: Any) -> Any:
    """Return a value without the names of called functions."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key != CALLED}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("body", BODIES)
def test_a_function_sets_the_fields_that_python_sets(body: str) -> None:
    text = FILE.replace("{body}", "\n".join(f"    {line}" for line in body.splitlines()))
    names: dict[str, Any] = {"g": lambda **fields: Fields(fields), "nullcontext": nullcontext}
    exec(text, names)
    undecided: list[str] = []
    assert plain(fields_of_function(text, "f", undecided)) == plain(names["f"]())
    assert undecided == []


@pytest.mark.parametrize(
    "body",
    [
        "n = 9\nwhile True:\n  n *= n", "s = 'x'\nfor i in range(10**9):\n  s = f'{s}{s}'",
        "l = [1]\nwhile 1:\n  l.extend(l)", "s = 'a' * 9999\nwhile 1:\n  s = s.replace('a', s)",
        "l = [1]\nfor i in l:\n  l.append(i)", "d = {}\nwhile 1:\n  d = {'a': d, 'b': d}", "x = 9.0 ** 999",
        "n = 9 ** 9 ** 9", "s = '%s' * 10**9",
    ],
)  # fmt: skip
def test_a_file_cannot_ask_for_much_time_or_memory(body: str) -> None:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    assert fields_of_function(f"def f():\n    c = g(a=1)\n{lines}\n    return c\n", "f")["a"] == 1
