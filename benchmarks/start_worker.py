"""The rank of benchmarks/start.py. Like the entry of a real run, the fork server imports this module once for all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from meshwright.training import worker as training
from meshwright.training.loop import Trainer


def worker(rank: Any, out: Path, **arguments: Any) -> None:
    """Train, and write the seconds at which the first step begins and ends, and the processor seconds before it."""
    turn = Trainer.turn

    def timed(self: Trainer, *words: Any) -> Any:
        begins = {"processor": time.process_time(), "begins": time.time()}
        result = turn(self, *words)
        Path(out, f"start-{rank.mesh.rank}.json").write_text(json.dumps(begins | {"ends": time.time()}))
        return result

    with patch.object(Trainer, "turn", timed):
        training.train_rank(rank, out=out, **arguments)
