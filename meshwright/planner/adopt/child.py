"""The process that runs a script: `python -m meshwright.planner.adopt.child ORDER.json`.

torch's functions are replaced in this process alone, which ends with its parent. The facts, or the script's error, are
written to the order's folder; the script's own output is the process's output.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from meshwright.planner.adopt.accelerator import Gpu
from meshwright.planner.adopt.adopted import read_session, write
from meshwright.planner.adopt.session import Order, Session
from meshwright.ranks.foreign import read_json
from meshwright.ranks.launch.tether import die_with_parent

FAILED = "failed.json"


def error_of(error: BaseException, script: Path) -> dict[str, Any]:
    """Return an exception with the script's innermost line, and the traceback from the script on."""
    frames = traceback.extract_tb(error.__traceback__)
    script_frames = [n for n, frame in enumerate(frames) if Path(frame.filename).parent == script.resolve().parent]
    last = frames[script_frames[-1]] if script_frames else None
    lines = traceback.format_list(frames[script_frames[0] :]) if script_frames else []
    return {
        "where": f"{Path(last.filename).name}:{last.lineno}" if last is not None else script.name,
        "line": last.line if last is not None else "",
        "kind": type(error).__name__,
        "text": str(error),
        "traceback": "".join(lines),
    }


def main() -> None:
    """Run the script of an order."""
    order = read_json(Path(sys.argv[1]))
    die_with_parent(order.pop("parent"))
    folder = Path(order.pop("folder"))
    gpu = Gpu(**{**order.pop("gpu"), "capability": tuple(order["capability"])})
    order.pop("capability")
    asked = Order(Path(order.pop("script")), tuple(order.pop("words")), gpu, **order)
    session = Session(asked)
    failed: dict[str, Any] | None = None
    try:
        session.follow()
    except Exception as error:
        failed = error_of(error, asked.script)
    except SystemExit as ended:
        text = f"the script ended with {ended.code}"
        failed = {"where": asked.script.name, "line": "", "kind": "SystemExit", "text": text, "traceback": ""}
    if session.facts is not None:
        write(read_session(session), folder)
    elif failed is None:
        failed = {"kind": "", "text": "", "where": asked.script.name, "line": "", "traceback": ""}
    if failed is not None and session.facts is None:
        failed["notes"] = [[note.kind, note.where, note.text] for note in session.notes.notes]
        failed["models"], failed["optimizers"] = len(session.models), len(session.sites)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).write_text(json.dumps(failed))
        sys.exit(3)


if __name__ == "__main__":
    main()
