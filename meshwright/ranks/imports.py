"""Import paths of our processes, without the folder in which a process is started.

| start                       | first entry of sys.path by Python's rule | here                                  |
|-----------------------------|------------------------------------------|---------------------------------------|
| `meshwright ...`            | the folder of the command                | unchanged                             |
| `python -m meshwright ...`  | the current folder                       | removed before our modules are imported |
| fork server, `-c` of ours   | the current folder                       | -P, or PYTHONSAFEPATH (environment.py)  |

So a folder with a file such as `random.py`, downloaded or not, has no effect.
"""

from __future__ import annotations

import sys


def python_words(*words: str) -> list[str]:
    """Return a command of this Python with `words`, for a process that imports nothing from the current folder (-P)."""
    return [sys.executable, "-P", *words]


def leave_current_folder(package: str) -> None:
    """Remove the current folder from sys.path if `python -m PACKAGE` has put the folder first.

    Called at the top of a package, before the package imports anything else. An entry that PYTHONPATH names stays: that
    folder was named by the user. Nothing is changed when another program imports the package.
    """
    # Python writes -m into sys.argv[0] until the named module has been found, and keeps the words of the command.
    named = any(word == package or word.startswith(f"{package}.") for word in sys.orig_argv)
    if sys.argv[:1] == ["-m"] and named and not sys.flags.safe_path:
        del sys.path[0]


def leave_unnamed_folder() -> None:
    """Remove the current folder from sys.path if `python -c` has put the folder first, as an empty text."""
    if sys.path[:1] == [""]:
        del sys.path[0]
