"""What a worker runs: a function by name and its arguments, written to the launch folder as JSON (no pickle)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.environment import Environment
from meshwright.errors import LaunchError
from meshwright.launch.stop import StopRequest

Entry = Callable[..., object]
"""Called as entry(environment, stop, **arguments); what it returns is ignored."""

_FILE = "job.json"


@dataclass(frozen=True)
class Job:
    """`entry` is `package.module:function`; `arguments` are its keyword arguments and must survive JSON.

    `status`: the folder where the ranks leave where they are. None: the launch folder, which goes with the launcher.
    """

    entry: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: str | None = None

    def resolve(self) -> Entry:
        """Import the entry function. Raises LaunchError where the name leads nowhere."""
        module_name, _, name = self.entry.partition(":")
        if not module_name or not name:
            raise LaunchError(f"entry {self.entry} is not of the form package.module:function")
        try:
            entry: Entry = vars(importlib.import_module(module_name))[name]
        except (ModuleNotFoundError, KeyError) as error:
            raise LaunchError(f"entry {self.entry} does not exist: {error}") from error
        return entry

    def run(self, environment: Environment, stop: StopRequest) -> None:
        """Call the entry function."""
        self.resolve()(environment, stop, **self.arguments)

    def write(self, folder: Path) -> None:
        """Leave the job in a launch folder, for its workers."""
        tree = {"entry": self.entry, "arguments": dict(self.arguments), "status": self.status}
        (folder / _FILE).write_text(json.dumps(tree))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The job that the launcher left in `folder`."""
        return cls(**json.loads((folder / _FILE).read_text()))
