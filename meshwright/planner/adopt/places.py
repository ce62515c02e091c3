"""Places of tensors without memory, and the notes on facts that a run without values cannot know.

All tensors of a recorded script that would be on the GPU, and all that are computed from parameters, are on torch's
meta device. The script believes each to be at a place: the accelerator, the host's memory, or torch's own meta device.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

Place = Literal["cuda", "cpu", "meta"]

PROCESS, THREAD = "multiprocessing.Process.start", "threading.Thread.start"
OWN = Path(__file__).parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
NoteKind = Literal["value", "shape", "data", "network", "process", "kernel", "device", "program"]


@dataclass(frozen=True)
class Note:
    """A fact that was not seen, with the assumption in its place."""

    kind: NoteKind
    where: str
    """`train.py:41`, or the library's file if no line of the script is on the stack."""
    text: str


class Notes:
    """The notes of a run, each place and text once. `folder`: the script's folder."""

    def __init__(self, script: Path) -> None:
        self._script, self._folder = script.resolve(), script.resolve().parent
        self.notes: dict[Note, int] = {}
        """The number of times of each note."""

    def add(self, subject: NoteKind, text: str) -> None:
        note = Note(subject, self.where(), text)
        self.notes[note] = self.notes.get(note, 0) + 1

    def where(self) -> str:
        """Return the line of the script that is running: the innermost frame of the script, then of the folder."""
        frame: FrameType | None = sys._getframe(1)
        outer = inner = None
        while frame is not None:
            file = frame.f_code.co_filename
            if file == str(self._script):
                return f"{self._script.name}:{frame.f_lineno}"
            if outer is None and "site-packages" not in file and Path(file).parent == self._folder:
                outer = f"{Path(file).name}:{frame.f_lineno}"
            if inner is None and "site-packages" in file and "/torch/" not in file:
                inner = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return outer or inner or self._script.name

    def started(self, event: str, values: tuple[Any, ...]) -> None:
        """Note processes and threads that the script starts, as an audit hook: nothing in them is followed."""
        if event not in STARTS:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            inside = file.parent == OWN or file.is_relative_to(STANDARD_LIBRARY)
            if not inside or "site-packages" in file.parts:
                break
            if event == "os.fork" and "multiprocessing" in file.parts:
                return  # Process.start was noted
            frame = frame.f_back
        if frame is not None and Path(frame.f_code.co_filename).parent == self._folder:
            self.add("process", f"{STARTS[event]} is started: its operations are not counted")


STARTS = {
    "subprocess.Popen": "a process", "os.system": "a process", "os.fork": "a process", "os.posix_spawn": "a process",
    "os.exec": "another program", PROCESS: "a process", THREAD: "a thread",
}  # fmt: skip
"""Python's audit events of processes, and two of ours."""


@dataclass
class Places:
    """The believed place of each storage on the meta device; `home` unless marked. `index`: the accelerator's index."""

    index: int = 0
    home: Place = "cuda"
    """The place of unmarked tensors: of the device on which the script computes."""
    _marked: dict[int, tuple[Place, weakref.ref[object]]] = field(default_factory=dict)
    asked: Place | None = None
    """The place that the running call names; None: a new tensor is where the call's tensors are."""

    def of(self, x: Tensor) -> Place:
        """Return the believed place. A tensor with values is in host memory."""
        if not x.is_meta:
            return "cpu"
        known = self._marked.get(x.untyped_storage()._cdata)
        return self.home if known is None else known[0]

    def mark(self, x: Tensor, device_type: Place) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        if device_type == self.home:
            self._marked.pop(address, None)
            return

        def gone(_: object) -> None:
            self._marked.pop(address, None)

        self._marked[address] = device_type, weakref.ref(storage, gone)

    def device(self, x: Tensor) -> torch.device:
        device_type = self.of(x)
        return torch.device("cuda", self.index) if device_type == "cuda" else torch.device(device_type)

    @contextmanager
    def placing(self, device_type: Place) -> Iterator[None]:
        """Place new tensors on `device_type` in a context."""
        before, self.asked = self.asked, device_type
        try:
            yield
        finally:
            self.asked = before
