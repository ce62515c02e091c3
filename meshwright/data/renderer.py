"""Renders texts of a chat template in a separate process (template_process.py), with bounds set by the kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from meshwright.data import template_process
from meshwright.ranks.errors import DataError

Render = Mapping[str, Any]
"""The variables of one text: messages, tools, add_generation_prompt."""


@dataclass(frozen=True)
class Refusal:
    """A refusal to render a text: an error raised by the template's author, or a mistake in the template."""

    why: str


class Renderer:
    """A template in a process that starts with the first text, and ends with this object.

    Threads share the process, one text at a time. A forked process starts a separate one.
    """

    def __init__(self, text: str, where: str) -> None:
        """Make the renderer. `text`: the template's text; `where`: the template's file, for errors."""
        self._text, self._where, self._lock = text, where, Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._names, self._constants = 0, frozenset[str](), frozenset[str]()

    def mentions(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names that the template uses as a variable, a key or a text.

        Raises:
            DataError: the template cannot be loaded.
        """
        with self._lock:
            self._start()
            return self._names.intersection(names)

    @property
    def constants(self) -> frozenset[str]:
        """The texts that the template compares with, searches for or splits by.

        Raises:
            DataError: the template cannot be loaded.
        """
        with self._lock:
            self._start()
            return self._constants

    def render(self, variables: Mapping[str, Any], renders: Sequence[Render]) -> list[str | Refusal]:
        """Return the text of each render. `variables`: the values for all renders.

        Raises:
            DataError: the text is no template, or exceeds the bounds of time, memory or depth.
        """
        with self._lock:
            process = self._start()
            answers: list[str | Refusal] = []
            self._send(process, {"variables": dict(variables), "renders": list(renders)})
            for _ in renders:
                answer = self._answer(process)
                answers.append(answer["text"] if "text" in answer else Refusal(answer["error"]))
            return answers

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the process with the template loaded.

        Raises:
            DataError: the template cannot be loaded.
        """
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        # Neither the current folder nor this one is in the path of modules; Jinja's folder is.
        spec = find_spec("jinja2")
        if spec is None or spec.origin is None:
            raise DataError(f"{self._where}: rendering a chat template needs jinja2: pip install jinja2")
        folder = str(Path(spec.origin).parent.parent)
        run = f"runpy.run_path({template_process.__file__!r}, {{}}, '__main__')"
        code = f"import runpy, sys; sys.path.append({folder!r}); {run}"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._process, self._owner = process, os.getpid()
        weakref.finalize(self, _end, process, self._owner)
        self._send(process, {"template": self._text})
        answer = self._answer(process)
        if "error" in answer:
            self._process = None
            _end(process, self._owner)
            raise DataError(f"{self._where}: is no chat template: {answer['error']}")
        self._names, self._constants = frozenset(answer["names"]), frozenset(answer["constants"])
        return process

    def _send(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # reading the answer reports the reason
            return

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Read the next answer.

        Raises:
            DataError: a bound is reached.
        """
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            if answer.get("bound"):
                raise DataError(self._bound(answer["error"]))
            return answer
        self._process = None
        assert process.stderr is not None
        told = process.stderr.read().decode(errors="replace").strip().splitlines()
        _end(process, self._owner)
        code = process.returncode
        if code == -signal.SIGPROF:
            raise DataError(self._bound(f"takes more than {template_process.PROCESSOR_SECONDS:g} s of processor time"))
        if code is not None and code < 0:
            raise DataError(self._bound(f"ended its process by signal {-code}"))
        raise DataError(f"{self._where}: its process ended with code {code}: {told[-1] if told else 'it says nothing'}")

    def _bound(self, error: str) -> str:
        return f"{self._where}: the template {error}, which no text of a dialogue needs"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the pipes, which ends the process. Only the owner does this, not a forked process."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # the rest is for a process that has ended
                continue
    if os.getpid() == owner:
        process.wait()
