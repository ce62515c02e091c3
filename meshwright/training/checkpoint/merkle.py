"""The SHA-256 Merkle tree of a state: one root for a checkpoint's tensors, equal under every layout.

The tree hashes as RFC 6962: a leaf is SHA-256(0x00, text), a node SHA-256(0x01, left, right), and the left half of n
leaves has the largest power of two below n. A tensor's text is its name, dtype, shape and bytes (row-major, little
endian), separated by zero bytes: `weight of blocks.0.norm.bias`, `float32`, `32`. In contrast to the root of a manifest
(parameters/root.py) nobody can construct another state with an equal root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compute.parameters.root import order_root
from meshwright.compute.parameters.shard import Box
from meshwright.training.checkpoint.reader import Checkpoint

MARK_DIGITS = 8
"""Hexadecimal digits of a leaf that a certificate keeps to name the tensor that differs."""
CARRIED = ("samples", "steps_taken", "loss_scale", "good_steps")
"""Fields of a manifest's progress that a resumed run continues from."""
ORDER = "the order of data"


@dataclass(frozen=True)
class Tree:
    """The leaves of a state, in the order of names."""

    names: tuple[str, ...]
    leaves: tuple[bytes, ...]

    @classmethod
    def of(cls, leaves: Iterable[tuple[str, bytes]]) -> Tree:
        """Sort the named leaves."""
        ordered = sorted(leaves)
        return cls(tuple(name for name, _ in ordered), tuple(leaf for _, leaf in ordered))

    @property
    def root(self) -> str:
        """The root, 64 hexadecimal digits."""
        return node(self.leaves).hex()

    @property
    def marks(self) -> str:
        """The first digits of each leaf."""
        return "".join(leaf.hex()[:MARK_DIGITS] for leaf in self.leaves)

    def unlike(self, marks: str) -> tuple[str, ...]:
        """Return the names of leaves with other marks; all names if the number of leaves differs."""
        wanted = [marks[at : at + MARK_DIGITS] for at in range(0, len(marks), MARK_DIGITS)]
        if len(wanted) != len(self.leaves):
            return self.names
        both = zip(self.names, self.leaves, wanted, strict=True)
        return tuple(name for name, leaf, mark in both if leaf.hex()[:MARK_DIGITS] != mark)


def node(leaves: Sequence[bytes]) -> bytes:
    """Return the root of leaves."""
    if len(leaves) < 2:
        return leaves[0] if leaves else hashlib.sha256().digest()
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + node(leaves[:half]) + node(leaves[half:])).digest()


def text_leaf(name: str, text: str) -> tuple[str, bytes]:
    """Return the leaf of a fact that is no tensor."""
    return name, hashlib.sha256(b"\0" + "\0".join((name, "text", "", text)).encode()).digest()


def tensor_leaf(name: str, values: Tensor) -> tuple[str, bytes]:
    """Return the leaf of a contiguous tensor on the host."""
    shape = ",".join(map(str, values.shape))
    head = "\0".join((name, str(values.dtype).removeprefix("torch."), shape, "")).encode()
    digest = hashlib.sha256(b"\0" + head)
    # A tensor of one element may have any stride, and torch then refuses to view the bytes.
    digest.update(values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data)
    return name, digest.digest()


def state_leaves(
    checkpoint: Checkpoint, data: str, seed: int, sample: dict[str, Tensor]
) -> Iterator[tuple[str, bytes]]:
    """Read all of a checkpoint, and yield its leaves: tensors, progress, order of data, files that are no shards.

    Args:
        checkpoint: Opened with a list for damaged blocks, or any DamagedError is raised by the first of them.
        data: The fingerprint of the prepared data.
        seed: The run's seed.
        sample: The first sample after the checkpoint, read from the data.
    """
    manifest = checkpoint.manifest
    for (parameter, state_name), runs in manifest.parts.items():
        whole = Box((0,) * len(runs[0].shape), runs[0].shape)
        yield tensor_leaf(f"{state_name} of {parameter}", checkpoint.read(parameter, state_name, whole))
    for damage in checkpoint.damage_besides():
        raise damage
    for field in CARRIED:
        yield text_leaf(f"{field} of the progress", repr(vars(manifest.progress)[field]))
    yield text_leaf(ORDER, order_root(data, seed, manifest.progress.samples, sample))
    for file in manifest.files:
        if file.header_bytes is None and not file.file.endswith(".safetensors"):
            yield text_leaf(f"the file {file.file}", file.sha256)
