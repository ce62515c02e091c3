"""Conversion of Hugging Face folders to checkpoints and back.

An import writes a checkpoint of step 0, without optimizer state. A run with `model: {from: FOLDER}` imports the folder
as the first checkpoint, which any layout can load.

An export writes a Hugging Face folder: config.json, safetensors, and the family's further files. Import and export
write the new folder whole or not at all, and never over another folder.

Tensors are converted one by one into files of at most SHARD_BYTES (or one larger tensor); no more is ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshwright.compute.parameters.initial import first_values
from meshwright.compute.parameters.root import root_text
from meshwright.compute.parameters.shard import Box
from meshwright.compute.precision import DTYPES
from meshwright.config import Config
from meshwright.config.kinds import data_for
from meshwright.config.registry import entries, load_entry
from meshwright.config.schema import Model, Precision
from meshwright.config.section import shown
from meshwright.data.chat import ChatTemplate, closing_token
from meshwright.data.files import ShowProgress, folder_lock, silent, staged_folder
from meshwright.data.marks import MODEL, UNASKED
from meshwright.data.marks_section import NO_BEGIN, AskedMarks
from meshwright.data.published import FILES, with_template
from meshwright.data.tokenizer import load_tokenizer
from meshwright.output.outputs import free_path
from meshwright.ranks.errors import CheckpointError, DataError, PluginError
from meshwright.ranks.foreign import open_plain, parse_json, plain, read_text
from meshwright.training.checkpoint import Checkpoint, find_checkpoint
from meshwright.training.checkpoint.manifest import (
    TOKENIZER_FILE,
    Manifest,
    Origin,
    Progress,
    Roots,
    StoredFile,
    StoredRun,
    stored_file,
)
from meshwright.training.checkpoint.shard import Stored, write_shard
from meshwright.training.convert.adapters import Merge, first_adapters, write_adapter
from meshwright.training.convert.dcp import tensors_of
from meshwright.training.convert.family import Family, TensorPair, as_text
from meshwright.training.convert.folder import INDEX, SINGLE, Settings, Source, folder_of
from meshwright.training.convert.settings_out import DTYPE_KEYS, TokenizerOut, settings_texts


def families() -> dict[str, Family]:
    """Return the registered families by `model.family`. Raises PluginError if a plug-in's entry is named wrongly."""
    known: dict[str, Family] = {name: family() for name, family in entries("convert").items()}
    for name, family in known.items():
        if family.name != name:
            raise PluginError(f"the entry {name} of meshwright.convert converts model.family={family.name}: name it so")
    return known


def family_of(settings: Settings, wanted: str | None = None) -> Family:
    """Find the family of a config.json. `wanted`: return this family, which must read the file's model_type; None: the
    family that the file names.

    Raises:
        CheckpointError: there is no such family; the error lists the valid names.
    """
    every = families().values()
    known = list(dict.fromkeys(model_type for family in every for model_type in family.model_types))
    # OpenAI's GPT-2 folders have no model_type; a key that only one family writes identifies it.
    untyped = (family.model_types[0] for family in every if family.told_by in settings.values)
    model_type = settings.values.get("model_type", next(untyped, None))
    named = settings.values.get("architectures") or [""]
    suitable = [family for family in every if model_type in family.model_types]
    if model_type is None:
        raise settings.refused(f"lacks model_type, the name of its architecture; valid: {', '.join(known)}")
    if not suitable:
        raise settings.refused(f"model_type={model_type} is not supported; valid: {', '.join(known)}")
    if wanted is not None:
        for family in suitable:
            if family.name == wanted:
                return family
        names = ", ".join(family.name for family in suitable)
        raise settings.refused(f"model_type={model_type} is no model.family={wanted}; valid: {names}")
    ends = str(named[0]) if isinstance(named, list) else ""
    # Families with an equal model_type (BERT's tasks) differ by the class's name; the first is pretraining.
    of_class = (family for family in suitable if family.architecture and ends.endswith(family.architecture))
    return next(of_class, suitable[0])


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` at the end. Raises CheckpointError if `out` already holds files."""
    try:
        # The lock prevents a mix of two conversions' files; staging leaves no half-written folder after a kill.
        with folder_lock(out.absolute(), silent):
            if out.exists() and (out.is_file() or any(out.iterdir())):
                raise CheckpointError(f"{out} exists; give another folder, such as {free_path(out)}")
            with staged_folder(out.absolute()) as folder:
                yield folder
    except (OSError, SafetensorError) as error:  # no right to write, a full disk
        raise CheckpointError(f"{out} could not be written: {error}") from error


SHARD_BYTES = 2**31
FORMS = ("transformers", "dcp", "torchtitan")
"""Forms of exported weights: safetensors; torch's distributed checkpoint with the names of transformers' classes in
memory; the same with torchtitan's names."""
_WRITERS = {form: f"meshwright.training.convert.dcp_out:write_{form}" for form in FORMS[1:]}
"""torch's package takes half a second to import."""


@dataclass(frozen=True)
class Imported:
    """The result of an import. `parameters`: the number of parameters; `has_tokenizer`: whether the folder had a
    tokenizer.json."""

    model: Model
    parameters: int
    reads_text: bool
    has_tokenizer: bool


@dataclass(frozen=True)
class Found:
    """A folder's model, as the section's fields, and the tokenizer.json if there is one."""

    model: dict[str, object]
    tokenizer: Path | None


def read_folder(source: str, wanted: str | None = None) -> Found:
    """Read the model of a Hugging Face folder, given by path or by name on the Hub.

    `wanted`: read the folder as this family, which may add another head to the trunk. Raises CheckpointError as
    `import_folder`.
    """
    folder = folder_of(source)
    settings = Settings(folder / "config.json")
    family = family_of(settings, wanted)
    model = family.read(settings, tensors_of(folder, family, settings).names)
    tokenizer = folder / TOKENIZER_FILE
    return Found(model.model_dump(mode="json"), tokenizer if family.reads_text and tokenizer.is_file() else None)


def resting_token(source: str) -> int | None:
    """Return a folder's padding token, if transformers' class of the model computes no gradient for the token's row of
    the embedding (`Embedding(padding_idx=...)`); else None. Raises CheckpointError as `read_folder`."""
    settings = Settings(folder_of(source) / "config.json")
    token = settings.values.get("pad_token_id")
    return token if isinstance(token, int) and family_of(settings).rests_padding else None


def import_folder(
    source: Path,
    out: Path,
    report: ShowProgress = silent,
    shard_bytes: int = SHARD_BYTES,
    wanted: Model | None = None,
    seed: int = 1,
    beside: Path | None = None,
) -> Imported:
    """Write the checkpoint `out` from a Hugging Face folder, with the weights in the stored dtype.

    The weights may be a distributed checkpoint of torch (convert/dcp.py).

    Args:
        report: called with the progress.
        shard_bytes: the largest size of a file.
        wanted: the run's model, which may differ in padding and dropout, or add a task's head; None: the folder's.
        seed: of the initial values of an added head.
        beside: the folder of config.json and the tokenizer's files; None: `source`.

    Raises:
        CheckpointError: the folder is incomplete, of another architecture, or holds only a pickle; the tokenizer has
            more tokens than the table has rows; or `out` exists.
        DataError: the folder's tokenizer cannot be used.
    """
    files = beside or source
    settings = Settings(files / "config.json")
    family = family_of(settings, None if wanted is None else wanted.family)
    stored = tensors_of(source, family, settings)
    model = family.read(settings, stored.names)
    if wanted is not None:
        _refuse_other(source, model, wanted, stored.names)
        model = wanted
    pairs = _pairs(settings, family, model, stored.names)
    _check_names(stored, family, pairs, family.copies(model))
    has_tokenizer = family.reads_text and tokenizer_fits(files / TOKENIZER_FILE, model)
    with new_folder(out) as folder:
        for name in (*((TOKENIZER_FILE,) if has_tokenizer else ()), *FILES):
            if (files / name).is_file():
                with open_plain(files / name) as file:
                    (folder / name).write_bytes(file.read())

        def read() -> Iterator[tuple[str, Tensor]]:
            for index, pair in enumerate(pairs):
                report("weights", index / len(pairs))
                if pair.drawn is not None:
                    yield pair.name, first_values(pair.name, pair.drawn, seed)
                    continue
                theirs = [stored.weight(name, shape) for name, shape in pair.theirs.items()]
                if pair.part is not None:
                    dim, start, stop = pair.part
                    theirs = [theirs[0].narrow(dim, start, stop - start)]
                rows = pair.to_ours(*theirs).reshape(pair.shape[0] - pair.padding, *pair.shape[1:])
                if pair.padding:  # zeros suffice: the softmax masks padding rows, and no look-up reads these rows
                    rows = torch.cat([rows, rows.new_zeros(pair.padding, *pair.shape[1:])])
                yield pair.name, rows.contiguous()

        adapters = first_adapters(family, model, seed, stored)
        _write(folder, chain(in_shards(read(), shard_bytes), in_shards(adapters, shard_bytes)), model)
    return Imported(model, sum(prod(pair.shape) for pair in pairs), family.reads_text, has_tokenizer)


def tokenizer_fits(file: Path, model: Model) -> bool:
    """Return whether there is a tokenizer.json. Raises CheckpointError if it has more tokens than the model's table."""
    if not file.is_file():
        return False
    size = load_tokenizer(plain(file), UNASKED).vocabulary_size
    if size > model.num_tokens:
        has = f"has {size:,} tokens, and config.json's table {model.num_tokens:,}"
        raise CheckpointError(f"{file} {has}: it is another model's")
    return True


_OF_TRAINING = ("balance", "balance_over", "router_z", "capacity")
"""Fields of experts that affect only training, not the meaning of a weight."""
_FREE = ("dropout", "frozen", "adapter", "vocabulary_multiple", "positions", "later_weight")
"""Fields that may differ between a run and the folder of weights; positions only without a table of positions."""
_HEAD_FIELDS = ("classes", "choices")
"""Fields that may differ in a task's run if the folder has no head of that task."""


def _refuse_other(source: Path, model: Model, wanted: Model, stored: Set[str]) -> None:
    """Raise CheckpointError if the run's model would compute another function of the folder's weights."""
    tabled = [field.removeprefix("model.") for field, _ in model.tables]
    theirs, ours = model.model_dump(), wanted.model_dump()
    for fields in (theirs, ours):
        if isinstance(experts := fields.get("experts"), dict):
            # The folder decides whether routers have biases, and the run decides the biases' rate.
            fixed = {field: value for field, value in experts.items() if field not in _OF_TRAINING}
            fields["experts"] = fixed | {"bias_rate": experts.get("bias_rate") is not None}
    # A head that the folder lacks is initialised at random, so the run chooses the head's size.
    if not any(name.startswith("classifier.") for name in stored):
        theirs |= {field: ours[field] for field in _HEAD_FIELDS if field in theirs}
    for field in theirs | ours:
        if theirs.get(field) != ours.get(field) and (field not in _FREE or field in tabled):
            there = f"{source}'s weights are of model.{field}={shown(theirs.get(field))}"
            raise CheckpointError(f"{there}, and the run has {shown(ours.get(field))}")


def in_shards(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors into shards of at most `most_bytes` bytes; a larger tensor is a shard of its own.

    The caller must clear each shard before requesting the next; otherwise both are in memory.
    """
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if shard and filled + tensor.nbytes > most_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
    if shard:
        yield shard


def _pairs(settings: Settings, family: Family, model: Model, stored: Set[str]) -> list[TensorPair]:
    """Return the pairs of all parameters. Heads that the folder may lack, and does lack, are marked to be drawn.

    Raises CheckpointError if the folder could not hold a model with these settings.
    """
    if model.num_blocks > len(stored):  # before blocks are built: a forged number of layers would take all memory
        has = f"the folder holds {len(stored)} tensors"
        raise settings.refused(f"makes a model of {model.num_blocks} layers, and {has}")
    try:
        pairs = family.pairs(model)
    except RuntimeError as error:  # torch: more elements than an int64 counts
        raise settings.refused(f"its sizes cannot be those of a model: {error}") from error
    # A head that is stored in part is not drawn: `_check_names` refuses the folder.
    drawn = {
        pair.name
        for pair in pairs
        if pair.name.partition(".")[0] in family.may_lack and not stored & pair.theirs.keys()
    }
    specs = family.specs(model) if drawn else {}  # builds the model a second time
    return [replace(pair, theirs={}, drawn=specs[pair.name]) if pair.name in drawn else pair for pair in pairs]


def _check_names(stored: Source, family: Family, pairs: list[TensorPair], copies: dict[str, str]) -> None:
    """Raise CheckpointError unless the folder holds every tensor of the pairs and no unknown tensor."""
    wanted = {name for pair in pairs for name in pair.theirs}
    # An unknown tensor that is ignored could be a bias that changes every output.
    extra = {name for name in stored.names - wanted if not family.passed_over.fullmatch(name)}
    for name in copies.keys() & extra:
        if not torch.equal(stored.read(name), stored.read(copies[name])):
            raise CheckpointError(f"{stored.folder}: {name} is not {copies[name]}, of which it must be a copy")
    extra -= copies.keys()
    has_more = f"has a tensor that {family.title} has not:"
    for what, names in (("has no tensor", wanted - stored.names), (has_more, extra)):
        if names:
            rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{stored.folder} {what} {min(names)}{rest}")


def _write(folder: Path, shards: Iterator[dict[str, Tensor]], model: Model) -> None:
    """Write a checkpoint of step 0. The checkpoint's config describes only the weights; data and training are
    placeholders that a fine-tuning run replaces."""
    files: list[StoredFile] = []
    runs: list[StoredRun] = []
    hashes: list[int] = []
    for group, tensors in enumerate(shards):
        parts = [
            Stored(f"weight/{name}", f"weight of {name}", tensor.shape, Box((0,) * tensor.dim(), tensor.shape), tensor)
            for name, tensor in tensors.items()
        ]
        for name, entry in zip(tensors, parts, strict=True):
            dtype, box = str(entry.tensor.dtype).removeprefix("torch."), entry.box
            fields = (entry.shape, box.offsets, box.lengths, dtype, entry.key, group, 0, box.num_elements)
            runs.append(StoredRun(name, "weight", *fields))
        file, root = write_shard(folder / f"rank-{group}.safetensors", parts)
        # The hashes' sum equals the root of these weights that a run with any layout computes (parameters/root.py).
        hashes.append(root)
        files.append(file)
        tensors.clear()  # frees the shard before the next is read
    # O0 in float32 holds every stored dtype except float64 without loss.
    double = all(run.dtype == "float64" for run in runs)
    precision = Precision(level="O0", dtype="float64" if double else "float32")
    data = data_for(model, **({"sequence": model.longest} if model.longest else {}))
    config = Config(model=model, data=data, precision=precision)
    beside = [folder / name for name in (TOKENIZER_FILE, *FILES) if (folder / name).is_file()]
    dump = config.model_dump(mode="json", by_alias=True)
    stored = (*files, *(stored_file(file) for file in beside))
    groups, roots = tuple((group,) for group in range(len(files))), Roots(root_text(hashes))
    Manifest(Progress(), Origin(dump), stored, groups, tuple(runs), roots).write(folder)


def export_folder(
    path: Path,
    out: Path,
    report: ShowProgress = silent,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    *,
    merged: bool = False,
    form: str = FORMS[0],
) -> Path:
    """Write the Hugging Face folder `out` from a step folder or a run's newest checkpoint; return the step folder.

    Of a run with adapters, write peft's folder of the adapters alone, in the stored dtype if `dtype` is None.

    `dtype`: of the weights, as in `precision`; None: the published dtype, else the run's. Padding and optimizer states
    are left out. `merged`: write whole weights, with adapters added to them. `form`: of the weights, one of FORMS.

    Raises:
        CheckpointError: transformers has no such model, or peft no such adapter.
        DataError: the tokenizer is damaged.
    """
    checkpoint = Checkpoint(find_checkpoint(path))
    model = checkpoint.config.model
    known = families()
    if model.family not in known:
        why = f"is a {model.family}, which has no form of Hugging Face's; valid: {', '.join(known)}"
        raise CheckpointError(f"{checkpoint.folder} {why}")
    family = known[model.family]
    if model.adapter is None and merged:
        raise CheckpointError(f"{checkpoint.folder} has no adapters to merge: leave --merged out")
    if form != FORMS[0] and model.adapter is not None and not merged:
        raise CheckpointError(f"{checkpoint.folder} has adapters, and --form {form} writes whole weights: add --merged")
    if model.adapter is not None and not merged:
        with new_folder(out) as folder:
            base, chosen = checkpoint.config.weights, None if dtype is None else DTYPES[dtype]
            write_adapter(folder, checkpoint, family, model, base, chosen)
        return checkpoint.folder
    _write_whole(checkpoint, family, out, report, shard_bytes, dtype, form)
    return checkpoint.folder


def _write_whole(
    checkpoint: Checkpoint,
    family: Family,
    out: Path,
    report: ShowProgress,
    shard_bytes: int,
    dtype: str | None,
    form: str,
) -> None:
    """Write the folder of whole weights; arguments as in `export_folder`."""
    model = checkpoint.config.model
    pairs, merge = family.pairs(model), Merge(checkpoint, model)
    found = {name: checkpoint.file(name) for name in FILES}
    published = {name: read_text(file) for name, file in found.items() if file is not None}
    original = Settings(checkpoint.folder / MODEL) if MODEL in published else None
    template: ChatTemplate | None = None
    # The template's file may be missing on this machine: the export goes on without it, and the command says so.
    with suppress(DataError):
        template = checkpoint.config.data.chat_template(checkpoint.folder)
    if template is not None:
        published = with_template(published, template.text)
    wanted = DTYPES[dtype] if dtype is not None else _dtype_of(checkpoint, original, pairs[0].name)
    file, data, tokenizer = checkpoint.file(TOKENIZER_FILE), checkpoint.config.data, None
    if file is not None:
        read_tokenizer = load_tokenizer(file, AskedMarks() if data.begins else NO_BEGIN)
        closing = None if template is None else closing_token(template, read_tokenizer)
        text = read_text(file)
        tokenizer = TokenizerOut(text, read_tokenizer, () if closing is None else (closing,))
    texts = settings_texts(
        family, model, published, tokenizer, str(wanted).removeprefix("torch."),
        original is None or family_of(original).name == family.name, {name for pair in pairs for name in pair.theirs},
    )  # fmt: skip

    def dtype_of(pair: TensorPair) -> torch.dtype:
        return torch.promote_types(wanted, torch.float32) if pair.single else wanted

    def read() -> Iterator[tuple[str, Tensor]]:
        parts: dict[str, list[Tensor]] = {}  # slices of a Hugging Face tensor that is several tensors here
        for index, pair in enumerate(pairs):
            report("weights", index / len(pairs))
            for name, tensor in _exported(checkpoint, pair, merge).items():
                out = tensor.to(dtype_of(pair))
                if pair.part is None:
                    yield name, out
                    continue
                dim, _, stop = pair.part
                parts.setdefault(name, []).append(out)
                if stop == pair.theirs[name][dim]:
                    yield name, torch.cat(parts.pop(name), dim)

    with new_folder(out) as folder:
        if form == FORMS[0]:
            _write_safetensors(folder, in_shards(read(), shard_bytes))
        else:
            shapes = {name: (shape, dtype_of(pair)) for pair in pairs for name, shape in pair.theirs.items()}
            settings = Settings(out / MODEL, parse_json(texts[MODEL]))
            load_entry(_WRITERS[form])(folder, settings, shapes, read(), family.copies(model))
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def _dtype_of(checkpoint: Checkpoint, original: Settings | None, parameter: str) -> torch.dtype:
    """Return the dtype in the published settings; else the stored weights' dtype if the step is 0; else the run's."""
    named = [] if original is None else [original.values.get(key) for key in DTYPE_KEYS]
    for dtype in DTYPES.values():
        if str(dtype).removeprefix("torch.") in named:
            return dtype
    # The config of an import (step 0) has a placeholder for the precision.
    if not checkpoint.manifest.progress.step:
        stored: torch.dtype = vars(torch)[checkpoint.dtype_of(parameter)]
        return stored
    return DTYPES[checkpoint.config.precision.dtype]


def _write_safetensors(folder: Path, shards: Iterator[dict[str, Tensor]]) -> None:
    """Write model.safetensors, or, for several shards, numbered files and an index."""
    held: list[list[str]] = []
    total = 0
    for shard_index, tensors in enumerate(shards):
        # The final names contain the number of files, which is known at the end.
        save_file(tensors, folder / f"part-{shard_index}", metadata={"format": "pt"})
        held.append(list(tensors))
        total += sum(tensor.nbytes for tensor in tensors.values())
        tensors.clear()  # frees the shard before the next is read
    if len(held) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weights: dict[str, str] = {}
    for shard_index, names in enumerate(held):
        file = f"model-{shard_index + 1:05}-of-{len(held):05}.safetensors"
        (folder / f"part-{shard_index}").rename(folder / file)
        weights |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / INDEX).write_text(as_text(index), encoding="utf-8")


def _exported(checkpoint: Checkpoint, pair: TensorPair, merge: Merge) -> dict[str, Tensor]:
    """Read a pair's tensors from a checkpoint, by Hugging Face's names and shapes, without padding rows, with adapters
    added."""
    shape, rows = checkpoint.shapes.get(pair.name), (pair.shape[0] - pair.padding, *pair.shape[1:])
    if shape not in (pair.shape, rows):  # version 0.1.0 did not pad positions
        raise CheckpointError(f"{checkpoint.folder}: {pair.name} is {shape}, and its config makes it {pair.shape}")
    box = Box((0,) * len(rows), rows)
    parts = pair.to_theirs(merge.merged(pair.name, checkpoint.read(pair.name, "weight", box)))
    named = zip(pair.theirs.items(), parts, strict=True)
    return {
        name: (tensor if pair.part is not None else tensor.reshape(shape)).contiguous()
        for (name, shape), tensor in named
    }
