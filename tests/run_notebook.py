"""Runs a notebook's cells from top to bottom in one namespace, as Jupyter does, without Jupyter.

    python -m tests.run_notebook docs/notebooks/NAME.ipynb [--write]     # --write: keep all prints and pictures

Cells are Python alone; a cell that begins with `%%writefile NAME` is written to a file. Figures of matplotlib.pyplot
that a cell leaves open are the cell's pictures.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WRITE = "%%writefile "


def pictures() -> list[str]:
    """Return the open figures as PNGs in base 64, and close the figures."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return []
    drawn = []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=70, bbox_inches="tight", metadata={"Software": None})
        drawn.append(base64.b64encode(file.getvalue()).decode())
    plt.close("all")
    return drawn


def run_cell(source: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cell's outputs in a notebook's form."""
    if source.startswith(WRITE):
        name, _, text = source.removeprefix(WRITE).partition("\n")
        Path(name.strip()).write_text(text + "\n")
        return []
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, f"cell {number}", "exec"), namespace)
    text = printed.getvalue().replace(f"{Path.cwd()}/", "")  # the folder's name differs in each run
    outputs: list[dict[str, Any]] = []
    if text:
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    return outputs + [
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": data}} for data in pictures()
    ]


def run(path: Path) -> dict[str, Any]:
    """Run the cells in the current folder; return the notebook with new outputs."""
    book: dict[str, Any] = json.loads(path.read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"] = number
        cell["outputs"] = run_cell("".join(cell["source"]), number, namespace)
    return book


def main() -> None:
    path = Path(sys.argv[1]).absolute()
    os.environ.setdefault("MPLBACKEND", "Agg")
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)  # Jupyter adds the notebook's folder as well
        book = run(path)
        os.chdir(path.parent)
    if "--write" in sys.argv:
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
