"""The check, before anything is built, that all ranks have equal config, code and data; otherwise no rank trains.

Ranks with unequal learning rates, or unequal corpora under one path, would not fail but silently train a mixture. So
all ranks compare facts:

    all-gather of a hash of the facts        the only collective if all ranks agree
    all-gathers of length and text           else: the same error on every rank, naming rank and facts

On several hosts the ranks also check that all see the same run folder. A host with a separate folder would write
shards of checkpoints there.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.config import Config
from meshwright.config.registry import entries
from meshwright.config.section import leaves_of
from meshwright.ranks.agreement import all_texts, same_everywhere, text_of_root
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.mesh import Mesh
from meshwright.version import PACKAGE

_HOST = "host"
"""The one fact that may differ."""

_PATIENCE_SECONDS = 10.0
"""Time for a network file system to show a new file."""
_LOOK_SECONDS = 0.05

_MOST_SHOWN = 3
"""The most differences of a rank that an error names."""


def facts_of(config: Config, data: Path, **options: object) -> dict[str, str]:
    """Collect the facts that must be equal on every rank, by the config key, option or component to change."""
    facts = {key: str(value) for key, value in leaves_of(config.model_dump(mode="json", by_alias=True)).items()}
    facts |= {f"--{name}": str(value) for name, value in options.items()}
    # The code is identified by file names and contents: two checkouts may have one version number.
    package, digest = PACKAGE, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return facts | {
        "data": config.data.fingerprint(data)[:16],
        "the source code of meshwright": digest.hexdigest()[:16],
        "the version of torch": str(torch.__version__),
        "the version of Python": platform.python_version(),
        "the metrics of other packages": ", ".join(sorted(entries("metrics"))),  # rows of two lengths would hang
    }


def meet(mesh: Mesh, facts: Mapping[str, str]) -> None:
    """Raise LaunchError on all ranks unless all facts are equal; the error names the first rank unlike rank 0."""
    text = json.dumps(dict(facts), sort_keys=True)
    if same_everywhere(torch.tensor(list(text.encode()), dtype=torch.uint8), mesh.world):
        return
    stated = all_texts(json.dumps({**facts, _HOST: socket.gethostname()}), mesh.world)
    every = [json.loads(encoded) for encoded in stated]
    first = every[0]
    differing = (
        (rank, theirs, keys) for rank, theirs in enumerate(every)
        if (keys := [key for key in {**first, **theirs} if key != _HOST and theirs.get(key) != first.get(key)])
    )  # fmt: skip
    rank, theirs, keys = next(differing)
    shown = [f"{key} is {theirs.get(key, 'absent')}, not {first.get(key, 'absent')}" for key in keys[:_MOST_SHOWN]]
    more = f" (and {len(keys) - len(shown)} more)" if len(keys) > len(shown) else ""
    who = f"rank {rank} on {theirs[_HOST]} differs from rank 0 on {first[_HOST]}"
    raise LaunchError(f"{who}: {'; '.join(shown)}{more}; no step was made")


def ranks_without(mesh: Mesh, folder: Path) -> list[str]:
    """List ranks, with hosts, that do not see a file written by rank 0 to the folder; the list is equal on all ranks.

    The file's name is new each time: a network file system may remember for seconds that a name was absent.
    """
    token = folder / f".seen-by-all-{secrets.token_hex(8)}"
    if mesh.rank == 0:
        token.touch()
    token = folder / text_of_root(token.name, mesh.world)
    end = time.monotonic() + min(_PATIENCE_SECONDS, mesh.timeout.wait / 2)
    while not (seen := token.exists()) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    blind = all_texts("" if seen else f"rank {mesh.rank} on {socket.gethostname()}", mesh.world)
    if mesh.rank == 0:
        token.unlink()
    return [name for name in blind if name]


def placement_notes(mesh: Mesh) -> list[str]:
    """Warn if consecutive ranks are spread over hosts in turn, as `srun -m cyclic` does; an empty list otherwise."""
    hosts = all_texts(socket.gethostname(), mesh.world)
    blocks = [host for host, before in zip(hosts, ["", *hosts], strict=False) if host != before]
    if len(blocks) == len(set(hosts)):
        return []
    shown = ", ".join(f"{rank} on {host}" for rank, host in enumerate(hosts[:_MOST_SHOWN]))
    more = ", ..." if len(hosts) > _MOST_SHOWN else ""
    rule = "the layout's inner axes talk over the network; place ranks in blocks (srun -m block, mpirun --map-by slot)"
    return [f"warning: neighbouring ranks are on different hosts ({shown}{more}): {rule}"]
