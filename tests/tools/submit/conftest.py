from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.submit.asked import RUN


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "My run.yaml"
    path.write_text(RUN)
    return path
