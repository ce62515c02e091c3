"""Writes a script with the engine of the change."""

from pathlib import Path

from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app

if __name__ == "__main__":
    words = ["submit", "quickstart", "layout.data=2", "layout.transport=torch", "device=cpu", "--on", "batch"]
    ran = CliRunner().invoke(
        app, [*words, "--nodes", "2", "--out", "/shared/out", "--set", "queue=long", "--to", "b.sh"]
    )
    assert ran.exit_code == 0, ran.output
    text = Path("b.sh").read_text()
    assert "#BATCH queue=long nodes=2" in text, text
    assert "--resume" in text, text
    print(Path(mw.__file__).parent)
