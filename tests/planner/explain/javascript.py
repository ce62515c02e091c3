"""Run the pages' JavaScript by Node, or in a browser without a window."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

NODE = shutil.which("node")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser here: one of {', '.join(BROWSERS)} on the path")
needs_javascript = pytest.mark.skipif(
    NODE is None and BROWSER is None, reason=f"nothing runs JavaScript here: node, or one of {', '.join(BROWSERS)}"
)


def run_javascript(code: str, folder: Path) -> str:
    """Return the text in `answer` after the code. Node runs the code if installed, for Node starts sooner than a
    browser."""
    if NODE is None:
        page = folder / "code.html"
        tell = "document.getElementById('answer').textContent = answer"
        page.write_text(f"<meta charset=utf-8><pre id=answer></pre><script>{code}\n{tell}</script>", encoding="utf-8")
        found = re.search(r'<pre id="answer">(.*?)</pre>', browsed(page, folder), re.DOTALL)
        assert found, "the page has no answer"
        return unescape(found[1])
    script = folder / "code.js"
    script.write_text(f"{code}\nprocess.stdout.write(answer)", encoding="utf-8")
    ran = subprocess.run([NODE, script], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def browsed(page: Path, folder: Path, *options: str) -> str:
    """Return a page's document after the page's scripts, in a browser without a window."""
    assert BROWSER is not None, "the test asks for a browser"
    ran = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--virtual-time-budget=20000", f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom",
            page.resolve().as_uri(),
        ],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
