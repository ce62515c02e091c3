"""Configs and cases of sub-graphs."""

from __future__ import annotations

from typing import Any

SYNCS = ("ring", "zero1", "rooted", "server-gradient", "server-loss")

Case = tuple[str, int, str, str, int]
"""Model, sub-grids, common, branch, replicas."""

CASES: list[Case] = [
    ("gpt2", 2, "all", "attention", 1),
    ("gpt2", 2, "one", "block", 2),
    ("gpt2", 4, "all", "attention-core", 2),
    ("untied", 2, "one", "attention-core", 1),
    ("untied", 4, "all", "block", 1),
    ("bert", 2, "all", "block", 1),
    ("bert", 4, "one", "attention", 1),
    ("vit", 2, "all", "attention-core", 1),
    ("vit", 4, "one", "attention-core", 1),
]
"""Each pair of values of sub-grids, common, and branch or model; two, four and eight ranks."""


def subgraph(size: int, common: str, branch: str = "attention") -> dict[str, Any]:
    return {"kind": "subgraph", "size": size, "common": common, "branch": branch}


def label(case: Case) -> str:
    model, size, common, branch, data = case
    return f"{model}-{size}-{common}-{branch}-x{data}"
