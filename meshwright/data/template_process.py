"""A process that renders chat templates for its parent, within bounds of time, memory and length.

A template is an untrusted program. Jinja's sandbox protects Python's objects, but does not stop endless loops, texts of
100 GB, or lists that double. Some of these run in C, so a count of steps would not stop such a program. So the parent
sends requests to this process, and the kernel bounds the process: by a timer of processor time for each text, and by a
limit of address space. Processor time is not affected by other processes on a busy machine.

| a request (one line of JSON)                              | answers (a line of JSON each), or {"error": ...} |
|-----------------------------------------------------------|--------------------------------------------------|
| {"template": TEXT}, first                                 | {"names": [...], "constants": [...]}             |
| {"variables": {...}, "renders": [{"messages": ...}, ...]} | {"text": ...} for each render                    |

The parent runs this file by path. It imports Jinja, and nothing of this package.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any, NoReturn

PROCESSOR_SECONDS = 1.0
"""The limit for one text. An ordinary text takes a thousandth."""
MEMORY_BYTES = 2**30
LONGEST_TEXT = 2**24
"""The most characters of one text."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Reserved code points around the text of {% generation %}."""
DAY = date(2024, 7, 26)
"""The day of `strftime_now`: the current date would change the tokens every day. Published templates of Llama contain
this date."""


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    program: Any = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "template" in request:
            answer = within_bounds(partial(load, request["template"]))
            program = answer.pop("program", None)
            tell(answer)
        for render in request.get("renders", ()):
            tell(within_bounds(partial(write, program, request["variables"] | render)))


def tell(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def within_bounds(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work`. The kernel ends this process if the work takes too long.

    Returns:
        The answer; or `error`, with `bound` if the error is a bound of this process, not an error of the template.
    """
    from jinja2 import TemplateError

    # The signal's default ends the process, also inside of C.
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    try:
        return work()
    except MemoryError:
        return {"error": f"takes more than {MEMORY_BYTES >> 20} MiB of memory", "bound": True}
    except RecursionError:
        return {"error": f"calls itself more than {sys.getrecursionlimit()} levels deep", "bound": True}
    except OverflowError as error:
        return {"error": f"asks for more than a machine has: {error}", "bound": True}
    except TemplateError as error:
        return {"error": str(error)}
    # A template may raise any exception: IndexError, TypeError, ZeroDivisionError.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def load(text: str) -> dict[str, Any]:
    """Return the compiled template, its names, and the texts of comparisons, searches and splits."""
    from jinja2 import nodes

    environment = make_environment()
    # A template that tests for a clock has a default date without a clock.
    if "strftime_now" in text and "strftime_now is " not in text:
        environment.globals["strftime_now"] = DAY.strftime
    tree = environment.parse(text)
    names = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    constants: set[str] = set()
    for node in tree.find_all((nodes.Call, nodes.Filter, nodes.Compare, nodes.Test)):
        constants.update(inner.value for inner in node.find_all(nodes.Const) if isinstance(inner.value, str))
    names.update(inner.value for inner in tree.find_all(nodes.Const) if isinstance(inner.value, str))
    return {"program": environment.from_string(text), "names": sorted(names), "constants": sorted(constants)}


def write(program: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """The text of a template. Raises OverflowError if the text is longer than `LONGEST_TEXT`."""
    parts, length = [], 0
    for chunk in program.generate(**variables):
        length += len(chunk)
        if length > LONGEST_TEXT:
            raise OverflowError(f"more than {LONGEST_TEXT >> 20} million characters")
        parts.append(chunk)
    return {"text": "".join(parts)}


def make_environment() -> Any:
    """Return Jinja's sandbox with the names that transformers provides."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block {% generation %}, which puts marks around the text inside."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own form

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = raise_exception
    return environment


if __name__ == "__main__":
    main()
