"""Runs drawn over all layouts that equal bits promise."""

from __future__ import annotations

from typing import Any

from meshwright.config import Config
from meshwright.config.load import parse_run
from meshwright.ranks.errors import ConfigError
from tests.fuzz.axes import Case, tree_of
from tests.fuzz.draw import Drawing

PLAIN: Case = {
    "data": 1, "sync": None, "shard": None, "bucket": None, "stages": 1, "chunks": None, "placement": None,
    "schedule": None, "limit": None, "partition": None, "order": None, "microbatches": 1, "recompute": "none",
    "offload": None,
}  # fmt: skip
"""One device: each axis that bits do not depend on, with the value that cuts nothing."""

FIXED: Case = {
    "tensor": "none", "context": None, "common": None, "branch": None, "summa": None, "head": None, "loss": None,
}  # fmt: skip

PRECISIONS = ("float32", "O1-bf16", "O2-bf16", "O2-fp16")


def tree(case: Case) -> dict[str, Any]:
    """Return the run file of a case, with dropout and in three steps."""
    written = tree_of(case)
    if "head_norms" not in written["model"]:
        written["model"]["dropout"] = 0.1
    del written["layout"]["transport"]
    return written | {"bits": {"kind": "layout-free", "samples": 1}, "steps": 3}


class LayoutFree(Drawing):
    """Draws cases that the mode allows."""

    def _refused(self, case: Case) -> Config | list[str]:
        found = super()._refused(case)
        if not isinstance(found, Config):
            return found
        try:
            return parse_run(tree(case))
        except ConfigError as error:
            return [problem.field for problem in error.problems]
