"""Sub-graphs under equal bits."""

from __future__ import annotations


def subgraph(size: int, **how: str) -> tuple[str, ...]:
    words = (f"layout.tensor.{name}={value}" for name, value in how.items())
    return ("layout.tensor=subgraph", f"layout.tensor.size={size}", *words)


CORE, BLOCK, ONE = {"branch": "attention-core"}, {"branch": "block"}, {"common": "one"}
