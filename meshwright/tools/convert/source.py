"""The tensors of a Hugging Face folder: one safetensors file, or several and their index. Never a pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.section import shown

_FILE = re.compile(r"\w[\w.-]{0,99}")
"""A name without separators: nothing outside of the folder can be meant."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Source:
    """The files of the tensors, by full name."""

    def __init__(self, folder: Path, full_name: Callable[[str], str]) -> None:
        """Raises CheckpointError where the folder holds no safetensors, or its index does not fit."""
        self.folder = folder
        files = _indexed(folder) if (folder / INDEX).is_file() else _single(folder)
        self._places = {full_name(stored): (path, stored) for stored, path in files.items()}
        if len(self._places) != len(files):
            raise CheckpointError(f"{folder} holds a tensor twice, under an old and a new name")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._places[name][0]

    def read(self, name: str) -> Tensor:
        """A tensor by its full name."""
        if name not in self._places:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        path, stored = self._places[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {stored} cannot be read: {error}") from error
        return tensor


def _single(folder: Path) -> dict[str, Path]:
    path = folder / SINGLE
    if path.is_file():
        return _names_in(path)
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        remedy = "convert it to safetensors first, with transformers' save_pretrained in a place you trust"
        raise CheckpointError(f"{folder} holds only {pickles[0]}, a pickle, which could run any code: {remedy}")
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _indexed(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: shown(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from error
    names: dict[str, set[str]] = {}
    for file in sorted(set(files.values())):
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, and {INDEX} lists it")
        names[file] = set(_names_in(folder / file))
    for name, file in files.items():
        if name not in names[file]:
            raise CheckpointError(f"{folder / file} does not hold {name}, as {INDEX} says")
    return {name: folder / file for name, file in files.items()}


def _names_in(path: Path) -> dict[str, Path]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error
