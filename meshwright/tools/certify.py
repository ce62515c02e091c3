"""`meshwright certify OUT`: reads a run, hashes it, and writes a signed certificate (certificate.py).

Everything that is hashed is read: each byte of the checkpoints and of the prepared data, config.yaml, the steps'
losses, norms and roots. A manifest's own digests are compared with the bytes, and never copied. check_certificate.py
reads all of that again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright.compute.model import Samples
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.initial import first_values
from meshwright.compute.parameters.shard import shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, load_config
from meshwright.config.schema import Layout
from meshwright.config.section import leaves_of
from meshwright.data.files import file_sha256, silent
from meshwright.output import terminal
from meshwright.ranks.environment import config_folder
from meshwright.ranks.errors import ConfigError, DamagedError, DataError
from meshwright.ranks.foreign import plain, plain_folder, read_json, read_text
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.call_trace import trace_calls
from meshwright.tools.certificate import (
    ANY,
    CLAIMS,
    OWN,
    Certificate,
    Certified,
    State,
    Traced,
    here,
    signed,
    write_certificate,
)
from meshwright.tools.diff import NUMBERS
from meshwright.tools.differing import Damage
from meshwright.tools.keys import make_key, read_key
from meshwright.training.checkpoint.merkle import ORDER, Tree, state_leaves, tensor_leaf, text_leaf
from meshwright.training.checkpoint.reader import Checkpoint, steps_in
from meshwright.training.checkpoint.shard import BadBlock
from meshwright.training.folder import CHECKPOINTS, CONFIG, IDENTITY, OF_TRACKERS, locked
from meshwright.training.follow import METRICS, read_history

FREE = ("logging.", "metrics.", "checkpoint.", "validation.", "check.", "restarts.", "timeout.", "data.source")
"""Fields that do not change a step's numbers; other paths of the data must have the certified data."""
OF_LAYOUTS = ("layout.", "memory.", "batch.micro", "threads")
"""Fields that do not change the numbers of a run with layout-free bits."""
DEFAULT_KEY = "certify_ed25519"
Say = Callable[[str], object]


@dataclass(frozen=True)
class Read:
    """The parts of a run that a certificate hashes, besides checkpoints."""

    out: Path
    config: Config
    text: str
    """config.yaml without comments: one names the schema's path, which differs between installations."""
    run: str
    """The run's identity."""
    data: str
    samples: Samples
    lines: Mapping[int, Mapping[str, Any]]
    """The steps' numbers by step."""

    @classmethod
    def of(cls, out: Path, words: Sequence[str] = ()) -> Read:
        """Read a run's folder, and each byte of the prepared data. `words`: fields of the config, such as data.source.

        Raises:
            ConfigError: The folder is no run's, or a word is no field.
            DataError: The data cannot be read, or are damaged.
        """
        plain_folder(out, OF_TRACKERS)
        if not (out / CONFIG).is_file():
            raise ConfigError.of("OUT", out, f"is no run's folder: it has no {CONFIG}", "the --out of a run")
        config = load_config(plain(out / CONFIG), words)
        folder = config.data.prepare(config, silent)
        contents = config.data.contents(folder)
        for name, wanted in contents.items() if isinstance(contents, dict) else ():
            if (folder / name).is_file() and file_sha256(folder / name) != wanted:
                raise DataError(
                    f"{folder / name} is damaged: its SHA-256 is not the one in the header; prepare it anew"
                )
        return cls(
            out, config, uncommented(out / CONFIG), str(read_json(out / IDENTITY).get("run")),
            config.data.fingerprint(folder), config.data.open(config, folder).train,
            {int(line["step"]): line for line in read_history(out / METRICS)},
        )  # fmt: skip

    def state(self, path: Path, *, replayed: bool = False) -> Tree:
        """Read all of a checkpoint of the run, or of a replay, which may have an identity of its own.

        Raises DamagedError, which names the file, the tensor and the bytes.
        """
        bad: list[BadBlock] = []
        checkpoint = Checkpoint(path, bad)
        wrote = checkpoint.manifest.origin.run
        if not replayed and wrote and wrote != self.run:
            raise DamagedError(f"{path} is of another run ({wrote}) than {self.out} ({self.run})")
        sample = self.samples.samples(checkpoint.manifest.progress.samples, 1)
        tree = Tree.of(state_leaves(checkpoint, self.data, self.config.seed, dict(sample)))
        if bad:
            more = f" (and {len(bad) - 1} blocks more)" if len(bad) > 1 else ""
            raise DamagedError(f"{Damage.of(bad[0])}{more}")
        recorded = checkpoint.manifest.roots.data
        order = dict(zip(tree.names, tree.leaves, strict=True))[ORDER]
        if recorded is not None and text_leaf(ORDER, recorded)[1] != order:
            raise DamagedError(f"{path}: {ORDER} after it, as recorded, is not the order of the data that were read")
        return tree

    def numbers(self, first: int, last: int) -> str:
        """Hash the losses, norms and roots of steps. Raises DataError if one is missing."""
        digest = hashlib.sha256()
        for step in range(first, last + 1):
            if step not in self.lines:
                raise DataError(f"{self.out / METRICS} has no step {step}")
            values = " ".join(repr(self.lines[step].get(name)) for name in NUMBERS)
            digest.update(f"{step} {values}\n".encode())
        return digest.hexdigest()


def uncommented(path: Path) -> str:
    """Return the text of a YAML file without lines of comment."""
    return "".join(line for line in read_text(path).splitlines(keepends=True) if not line.startswith("#"))


def changed_fields(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Return the fields with other values, by name, except the free ones."""
    both = [leaves_of(each) for each in (before, now)]
    names = [name for name in both[0] | both[1] if not name.startswith(tuple(free))]
    values = {name: (both[0].get(name), both[1].get(name)) for name in names}
    return {name: value for name, value in values.items() if value[0] != value[1]}


def free_fields(config: Config) -> tuple[str, ...]:
    """Return the beginnings of the fields that a check may change."""
    return FREE + OF_LAYOUTS if config.bits.layout_free else FREE


def first_weights(config: Config) -> Tree | None:
    """Draw the initial values again from the seed, a tensor at a time; None if the run began with given weights."""
    if config.weights is not None:
        return None
    alone = config.model_copy(update={"layout": Layout()})
    model = make_chain(alone, SerialKit(solo_mesh(torch.device("meta"))))
    drawn = ((name, spec) for name, spec in shard_specs(model).items() if spec.initial is not None)
    return Tree.of(tensor_leaf(name, first_values(name, spec, config.seed).contiguous()) for name, spec in drawn)


def first_step(out: Path, config: Config) -> int:
    """Return the first step after the last change of a field that changes numbers."""
    first = 1
    for path in sorted(out.glob("config-*.yaml"), key=lambda path: int(path.stem.partition("-")[2])):
        trees = [load_config(each).model_dump(mode="json", by_alias=True) for each in (path, out / CONFIG)]
        if changed_fields(trees[0], trees[1], free_fields(config)):
            first = int(path.stem.partition("-")[2]) + 1
    return first


def certify(out: Path, key: Path | None, say: Say, *, trace: bool = False) -> tuple[Certificate, tuple[Path, Path]]:
    """Read a run that nobody writes, and write its certificate and its card.

    Args:
        out: The run's folder.
        key: The private key; None: the user's own one, which is made if there is none.
        say: Called with a line for the user.
        trace: Also compute the first rows after the first certified checkpoint, and record each module call.

    Raises:
        ConfigError: Another process writes the run, the run has no checkpoint, the key cannot be read, or the rows
            cannot be traced.
        DamagedError: A checkpoint is damaged.
        DataError: The data or metrics.jsonl cannot be read.
    """
    if not (out / CONFIG).is_file():
        raise ConfigError.of("OUT", out, f"is no run's folder: it has no {CONFIG}", "the --out of a run")
    default_key = config_folder() / DEFAULT_KEY
    if key is None and not default_key.exists():
        say(f"made your key {default_key}; give others {make_key(default_key)}, by which they know you")
    private = read_key(key or default_key)
    with locked(out):
        read = Read.of(out)
        folders = steps_in(out / CHECKPOINTS)
        if not folders:
            valid = "checkpoint.every=N in the run file, N steps"
            raise ConfigError.of("OUT", out, "has no checkpoint, so there is no state to certify", valid)
        first = first_step(out, read.config)
        certified, before = list[Certified](), first - 1
        folders = [(step, path) for step, path in folders if step >= first - 1]
        for step, path in folders:
            tree = read.state(path)
            decided = json.dumps(Checkpoint(path).manifest.origin.resolved, sort_keys=True)
            state = State(tree.root, tree.marks)
            certified.append(Certified(step, state, decided, read.numbers(before + 1, step)))
            before = step
        weights, traced = first_weights(read.config), None
        if trace:
            begun, path = folders[0]
            traced = Traced(begun, trace_calls(read.config, read.samples, Checkpoint(path)))
        made = signed(
            {
                "date": datetime.now(UTC).date().isoformat(),
                "run": read.run,
                "layouts": ANY if read.config.bits.layout_free else OWN,
                "first": first,
                "last": before,
                "config": read.text,
                "config_sha256": hashlib.sha256(read.text.encode()).hexdigest(),
                "data": read.data,
                "first_weights": None if weights is None else State(weights.root, weights.marks),
                "checkpoints": tuple(certified),
                "here": here(),
                "trace": traced,
            },
            private,
        )
        facts = {"model": read.config.model.family, "layout": read.config.layout.summary}
        facts |= {"loss": read.lines[before]["loss"]} if before in read.lines else {}
        return made, write_certificate(made, out, facts)


def as_dict(made: Certificate) -> dict[str, Any]:
    """Return the signed content."""
    return made.body.tree


def render(made: Certificate) -> None:
    """Print the certified steps, and the key."""
    body, console = made.body, terminal.console()
    steps = ", ".join(str(each.step) for each in body.checkpoints)
    read = f"certified: steps {body.first} to {body.last}, the states of steps {steps}; every byte was read"
    console.print(read, soft_wrap=True)
    console.print(f"promise: {CLAIMS[body.layouts]}", soft_wrap=True)
    if body.layouts == OWN:
        console.print("for any layout: train with bits=layout-free", soft_wrap=True)
    if body.trace is not None:
        size = sum(map(len, body.trace.calls))
        told = f"trace: {len(body.trace.calls):,} calls after step {body.trace.step}, on one device; {size:,} bytes"
        console.print(told, soft_wrap=True)
    if body.first > 1:
        console.print(f"steps before {body.first} had another config, and are not certified", soft_wrap=True)
    console.print(f"signed: {made.signer}", soft_wrap=True)
