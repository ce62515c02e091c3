"""The meeting before anything is built: all ranks hold the same run, the same code, the same data. Or none trains.

Ranks that differ would not fail by themselves: a learning rate of another node's run file, or another corpus under the
same path, trains on in silence to a mixture of both. So every rank states its facts, and all compare.

    all-gather of a SHA-256 of the facts     the whole meeting where all agree, which is always but once
    all-gathers of length and text           who differs in what, the same sentence on every rank
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

import meshwright
from meshwright.config import Config
from meshwright.errors import LaunchError
from meshwright.ranks.agreement import all_texts, same_everywhere
from meshwright.ranks.mesh import Mesh
from meshwright.section import leaves_of

_HOST = "host"
"""The one fact that may differ."""

_MOST_SHOWN = 3
"""Differences of a rank in a sentence."""


def facts_of(config: Config, data: Path, **options: object) -> dict[str, str]:
    """The facts that must be the same on every rank, each under the name by which its owner would change it."""
    facts = {key: str(value) for key, value in leaves_of(config.model_dump(mode="json", by_alias=True)).items()}
    facts |= {f"--{name}": str(value) for name, value in options.items()}
    return facts | {
        "data": config.data.fingerprint(data)[:16],
        "the source code of meshwright": _source_digest(),
        "the version of torch": str(torch.__version__),
        "the version of Python": platform.python_version(),
    }


def _source_digest() -> str:
    """A hash of the names and contents of the package's files."""
    folder = Path(meshwright.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def meet(mesh: Mesh, facts: Mapping[str, str]) -> None:
    """Return where all ranks state the same facts; else LaunchError on all of them, naming the first who differs."""
    text = json.dumps(dict(facts), sort_keys=True)
    if same_everywhere(torch.tensor(list(text.encode()), dtype=torch.uint8, device=mesh.device), mesh.world):
        return
    stated = all_texts(json.dumps({**facts, _HOST: socket.gethostname()}), mesh.world, mesh.device)
    every = [json.loads(one) for one in stated]
    rank = next(rank for rank, theirs in enumerate(every) if _differences(theirs, every[0]))
    raise LaunchError(_sentence(rank, every[rank], every[0]))


def _differences(theirs: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    return [key for key in {**first, **theirs} if key != _HOST and theirs.get(key) != first.get(key)]


def _sentence(rank: int, theirs: Mapping[str, str], first: Mapping[str, str]) -> str:
    keys = _differences(theirs, first)
    shown = [f"{key} is {theirs.get(key, 'absent')}, not {first.get(key, 'absent')}" for key in keys[:_MOST_SHOWN]]
    more = f" (and {len(keys) - len(shown)} more)" if len(keys) > len(shown) else ""
    listed = "; ".join(shown)
    return f"rank {rank} on {theirs[_HOST]} differs from rank 0 on {first[_HOST]}: {listed}{more}; no step was made"
