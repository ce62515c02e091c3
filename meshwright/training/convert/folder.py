"""A reader of Hugging Face folders: config.json, and tensors from one safetensors file or several with an index.

Folders are untrusted: settings that our models cannot compute are refused by name, and pickles are never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.compute.models.section import Transformer
from meshwright.compute.precision import DTYPES
from meshwright.config.messages import problems_of
from meshwright.config.section import shown
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.foreign import open_plain, plain, read_json

AnyTransformer = TypeVar("AnyTransformer", bound=Transformer)

_FILE = re.compile(r"\w[\w.-]{0,99}")
"""A file name without separators, which cannot point outside the folder."""
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
_POINTER = b"version https://git-lfs"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def folder_of(source: str) -> Path:
    """Return the folder at a path, or download a model by name from the Hugging Face Hub, with the client's cache.

    Raises CheckpointError if the download fails.
    """
    path = Path(source).expanduser()
    # A local folder has priority over a model of the same name on the Hub.
    if path.is_dir() or not _HUB_NAME.fullmatch(source):
        return path
    from huggingface_hub import snapshot_download  # the import takes 0.5 s, which a local folder does not need

    try:
        # The patterns leave pickles out.
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the library raises its client's errors as well
        why = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{source} is no folder here, and the Hub does not give it: {why}") from error


class Settings:
    """The settings of a JSON file of a folder, such as config.json."""

    def __init__(self, path: Path, values: dict[str, Any] | None = None) -> None:
        """Take the file's content from `values`, or read the file (None). Raises CheckpointError if the file is missing
        or holds no JSON object."""
        self.path = path
        if values is not None:
            self.values = values
            return
        try:
            settings = read_json(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            lacks = f"{path.parent} is no Hugging Face folder: it has no {path.name}"
            if (path.parent / ".metadata").is_file():
                remedy = f"copy the model's {path.name} and tokenizer.json into the folder"
                lacks = f"{path.parent} is a distributed checkpoint of torch, without {path.name}: {remedy}"
            raise CheckpointError(lacks) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{path} holds no settings")
        self.values = settings

    def refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}")

    def only(self, key: str, *valid: object) -> None:
        """Raise CheckpointError unless the key has one of the valid values; a missing key means the first."""
        value = self.values.get(key, valid[0])
        if value not in valid:
            raise self.refused(f"{key}={shown(value)} is not supported; valid: {', '.join(map(shown, valid))}")

    def one_number(self, keys: Sequence[str], default: float) -> float:
        """Return the common value of several keys, since our model has one number for all. Raises CheckpointError if
        the values differ."""
        values = {key: self.values.get(key, default) for key in keys}
        for key, value in values.items():
            if not isinstance(value, int | float):
                raise self.refused(f"{key}={shown(value)} is not a number")
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{key}={value}" for key, value in values.items())
            raise self.refused(f"{listed} differ, and ours is one number: make them equal in the file")
        return values[keys[0]]

    def section(self, section_type: type[AnyTransformer], names: Mapping[str, str], **fields: object) -> AnyTransformer:
        """Build a model section from the settings. Raises CheckpointError.

        Args:
            section_type: the section's class.
            names: keys by field; a missing key leaves the field's default. The key of `inner` must equal the section's
                property, 4 x hidden.
            fields: further fields.
        """
        read = {field: self.values[key] for field, key in names.items() if key in self.values and field != "inner"}
        try:
            model = section_type.model_validate(read | fields, strict=True)  # JSON has types: "2" is no number
        except ValidationError as error:
            first = problems_of(error, [], section_type)[0]
            raise self.refused(str(replace(first, field=names.get(first.field, first.field)))) from error
        if "inner" in names:
            heads, hidden = names["heads"], names["hidden"]
            if model.hidden % model.heads:
                raise self.refused(f"{heads}={model.heads} does not divide {hidden}={model.hidden}")
            inner = self.values.get(names["inner"])
            if inner not in (None, model.inner):
                ours = f"ours is 4 x {hidden} = {model.inner}"
                raise self.refused(f"{names['inner']}={inner} is not supported: {ours}")
        return model


@dataclass(frozen=True)
class Place:
    """A stored tensor: the file, or the folder of several files, and a function that reads the tensor."""

    path: Path
    read: Callable[[], Tensor]


class Source:
    """The tensors of a folder, by full name (Family.full_name)."""

    def __init__(self, folder: Path, places: Mapping[str, Place]) -> None:
        self.folder, self._places = folder, places
        self.names = frozenset(places)

    @classmethod
    def of_safetensors(cls, folder: Path, full_name: Callable[[str], str], single: str = SINGLE) -> Source:
        """Find the folder's tensors. Raises CheckpointError if there is no safetensors file, or the index is wrong.

        `single`: the name of the file with all tensors.
        """
        if (folder / single).is_file():  # a single file has priority over an index, as in transformers
            files = _names_in(folder / single)
        elif (folder / INDEX).is_file():
            files = _indexed(folder)
        elif pickles := sorted(file.name for file in folder.glob("pytorch_model*.bin")):
            # A folder of pickles needs another remedy than an empty folder.
            remedy = "convert it to safetensors first, with transformers' save_pretrained in a place you trust"
            raise CheckpointError(f"{folder} holds only {pickles[0]}, a pickle, which could run any code: {remedy}")
        else:
            raise CheckpointError(f"{folder} holds neither {single} nor {INDEX}")
        places = {full_name(stored): Place(path, partial(read_tensor, path, stored)) for stored, path in files.items()}
        # If a tensor had an old and a new name, chance would decide which one is read.
        if len(places) != len(files):
            raise CheckpointError(f"{folder} holds a tensor twice, under an old and a new name")
        return cls(folder, places)

    def read(self, name: str) -> Tensor:
        """Read a tensor by its full name."""
        if name not in self._places:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self._places[name].read()

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor by its full name. Raises CheckpointError for another shape, a dtype that is not one of weights,
        or values that are not finite."""
        tensor = self.read(name)
        if tuple(tensor.shape) != shape:
            was, wanted = list(tensor.shape), list(shape)
            raise CheckpointError(f"{self.folder}: {name} is {was}, and config.json makes it {wanted}")
        if tensor.dtype not in DTYPES.values():
            valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            stored = f"is stored as {tensor.dtype}, which holds no weights"
            raise CheckpointError(f"{self.folder}: {name} {stored}; valid: {valid}")
        return self.checked(name, tensor)

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor. Raises CheckpointError if some values are not finite."""
        # A single NaN would make every later loss NaN, without a trace of the file and tensor.
        # One pass finds both extremes, and a NaN is both. Bad numbers are counted only if an extreme is not finite.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            wrong = int((~tensor.isfinite()).sum())
            numbers = "1 number that is" if wrong == 1 else f"{wrong:,} numbers that are"
            where = f"{self._places[name].path if name in self._places else self.folder}: {name}"
            raise CheckpointError(f"{where} holds {numbers} not finite: it was damaged, or diverged")
        return tensor


def read_tensor(path: Path, stored: str) -> Tensor:
    """Read a tensor of a safetensors file. Raises CheckpointError."""
    try:
        with safe_open(plain(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {stored} cannot be read: {error}") from error
    return tensor


def _indexed(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    try:
        listed = read_json(path)["weight_map"]
        files = {name: shown(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from error
    names: dict[str, set[str]] = {}
    for file in sorted(set(files.values())):
        # The index is untrusted: a name with a separator could point to any file of this machine.
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, and {INDEX} lists it")
        # One read a file, not one a tensor.
        names[file] = set(_names_in(folder / file))
    for name, file in files.items():
        if name not in names[file]:
            raise CheckpointError(f"{folder / file} does not hold {name}, as {INDEX} says")
    return {name: folder / file for name, file in files.items()}


def _names_in(path: Path) -> dict[str, Path]:
    try:
        with safe_open(plain(path), framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except (OSError, SafetensorError) as error:
        with open_plain(path) as file:
            # A clone without git-lfs has pointers of about 100 bytes in place of weights.
            if file.read(len(_POINTER)) == _POINTER:
                raise CheckpointError(
                    f"{path} is git-lfs's pointer to the weights: fetch them with git lfs pull"
                ) from error
        raise CheckpointError(f"{path} is no readable safetensors file: {error}; fetch it again") from error
