"""Resuming a run from its newest checkpoint, or an older one, with the values that the run had decided then."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from meshwright.compute.bits.section import ALONE
from meshwright.config import Config, run_text
from meshwright.config.rules import broken_rules
from meshwright.config.section import field_of, leaves_of, with_field
from meshwright.ranks.agreement import all_rows, text_of_root
from meshwright.ranks.errors import CheckpointError, ConfigError, DamagedError, Problem
from meshwright.ranks.foreign import read_text
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import Mesh
from meshwright.training.checkpoint.manifest import TOKENIZER_FILE
from meshwright.training.checkpoint.reader import BASE, FIRST, Checkpoint, newest_step, newest_whole, steps_in
from meshwright.training.checkpoint.restore import misfit_of, stateless_of
from meshwright.training.decisions import FIELDS, Resolved, as_before, resolve_layout
from meshwright.training.folder import CHECKPOINTS, CONFIG, IDENTITY, begin, identity_of, write_identity, write_whole

_DECISIVE = ("seed", "model.", "data.", "batch.global")
"""Fields that must not change in a resumed run, unless --accept-changes is given."""
_FREE = ("model.dropout", "model.frozen", "model.adapter.dropout", "model.adapter.from")
_OF_THE_SOURCE = (
    "data.source",
    "data.split",
    "data.column",
    "data.mixture",
    "data.target",
    "data.languages",
    "data.tokenizer",
    "data.validation",
    "data.begin",
    "data.end",
)
"""Fields of the tokens' source: free to change if the prepared tokens are equal."""


def go_on(out: Path, config: Config, data: str, step: int | None, *, accept_changes: bool) -> list[str]:
    """Prepare the folder for a resumed run, from the newest checkpoint or the checkpoint of `step`.

    Args:
        data: the fingerprint of the prepared data.

    Returns:
        Notes to print.

    Raises:
        ConfigError: the config differs in fields that a run must keep.
        CheckpointError: the checkpoint is damaged or another run's.
    """
    folder = out / CHECKPOINTS
    known = [str(step) for step, _ in steps_in(folder)]
    if step is not None and str(step) not in known:
        rule = f"is no checkpoint in {folder}"
        raise ConfigError.of("--resume-from", step, rule, ", ".join(known) or "none is there")
    run, checkpoint = _newest(out, step)
    if checkpoint is None:
        begin(out, config)
        return []
    notes = _differences(checkpoint, config, data, accept_changes=accept_changes)
    for newer, later in steps_in(folder):
        if newer > checkpoint.manifest.progress.step:
            # Renamed, so that a restart does not resume from this checkpoint. Not removed: a person may still want it.
            aside = later.with_name(f"set-aside-{later.name}")
            later.rename(aside)
            notes.append(f"{later.name} is set aside as {aside}")
    write_identity(out, run, config.steps)
    # A config.yaml with other content is kept under the last step of that config.
    path, text, until = out / CONFIG, run_text(config), checkpoint.manifest.progress.step
    earlier = out / f"config-{until}.yaml"
    said = read_text(path) if path.is_file() else text
    # Comments are ignored: one holds the schema's path, which differs between installations.
    old, new = ([line for line in each.splitlines() if not line.startswith("#")] for each in (said, text))
    if old != new and not earlier.exists():
        path.rename(earlier)
        notes.append(f"config.yaml is new, the one until step {until} is {earlier.name}")
    write_whole(out, CONFIG, text)
    return notes


def checkpoint_of_run(out: Path) -> tuple[str, int | None]:
    """Return the run's identity and the step to resume from; 0 for a new run that starts from weights, None for other
    new runs. Raises as `go_on`."""
    run, checkpoint = _newest(out, None)
    return run, None if checkpoint is None else checkpoint.manifest.progress.step


def decided_before(config: Config, out: Path) -> Config:
    """Return the config with the decided values of the checkpoint to resume from; unchanged without a checkpoint."""
    checkpoint = _newest(out, None)[1]
    if checkpoint is None:
        return config
    origin = checkpoint.manifest.origin
    return as_before(config, origin.config, origin.resolved)


def with_earlier_bits(config: Config, out: Path) -> Config:
    """Return a resumed run's config with the checkpoint's numbers of `bits` in place of numbers decided for `auto`.

    An older version of Meshwright may have decided other numbers, and the run must go on with its bits. Raises
    ConfigError for a layout that the checkpoint's numbers do not allow.
    """
    checkpoint = _newest(out, None)[1] if config.bits.layout_free else None
    if checkpoint is None or not checkpoint.config.bits.layout_free:
        return config
    for name in ALONE.keys() - config.bits.model_fields_set:
        config = with_field(config, f"bits.{name}", getattr(checkpoint.config.bits, name))
    if problems := broken_rules(config):
        raise ConfigError(problems)
    return config


def with_offer(error: DamagedError, folder: Path, step: int) -> DamagedError:
    """Add the newest undamaged checkpoint before `step` to an error's text."""
    older = newest_whole(folder, before=step)
    offer = "no older one is whole: begin a new run in another folder"
    if older is not None:
        offer = (
            f"the newest whole one is {older.name}: --resume-from {older.name.removeprefix('step-')} goes on from it"
        )
    return DamagedError(f"{error}; {offer}")


def _newest(out: Path, step: int | None) -> tuple[str, Checkpoint | None]:
    """Return the run's identity, and the newest checkpoint or the checkpoint of `step`.

    A folder without an identity takes the checkpoint's. A checkpoint that names no run (an import, or version 0.1.0)
    is accepted in any folder.
    """
    folder = out / CHECKPOINTS
    path = newest_step(folder) if step is None else folder / f"step-{step}"
    run = identity_of(out)
    if path is None:
        return run, None
    try:
        checkpoint = Checkpoint(path)
        checkpoint.file(TOKENIZER_FILE)
        if path.name != f"step-{checkpoint.manifest.progress.step}":
            raise DamagedError(f"{path} holds the checkpoint of step {checkpoint.manifest.progress.step}: name it so")
    except DamagedError as error:
        raise with_offer(error, folder, int(path.name.removeprefix("step-"))) from error
    wrote = checkpoint.manifest.origin.run
    if wrote and (out / IDENTITY).is_file() and wrote != run:
        raise CheckpointError(
            f"{path} is of another run ({wrote}) than {out} ({run}): move it aside to go on with this run, or "
            f"{out / IDENTITY} to go on with that one"
        )
    return wrote or run, checkpoint


def _differences(checkpoint: Checkpoint, config: Config, data: str, *, accept_changes: bool) -> list[str]:
    """Describe fields that differ between a checkpoint and the run. Raises ConfigError for a field that must not."""
    folder, origin, progress = checkpoint.folder, checkpoint.manifest.origin, checkpoint.manifest.progress
    before, wanted = (leaves_of(each.model_dump(mode="json", by_alias=True)) for each in (checkpoint.config, config))
    changed = [key for key in wanted | before if before.get(key) != wanted.get(key)]
    if not origin.run and progress.samples == 0:  # an import fixes the model only
        changed = [key for key in changed if key.startswith("model.")]
    # By the fingerprint of tokens: a moved folder passes, an edited text does not.
    same_data = origin.data == data
    decisive = [
        key
        for key in changed
        if key.startswith(_DECISIVE) and key not in _FREE and not (same_data and key.startswith(_OF_THE_SOURCE))
    ]
    if "model.frozen" in changed and (name := stateless_of(config, checkpoint)):
        rule = (
            f"trains {name}, of which {folder} has no states: zeros would make its first steps several times too long"
        )
        instead = "patterns that match it; or a new run from its weights (meshwright convert export, weights=FOLDER)"
        raise ConfigError.of("model.frozen", json.dumps(wanted["model.frozen"]), rule, instead)
    reshaping = [key for key in decisive if key.startswith("model.")]
    misfit = misfit_of(config, checkpoint) if reshaping else ""
    refused = []
    shown = {
        key: [json.dumps(leaves[key]) if key in leaves else "absent" for leaves in (before, wanted)] for key in changed
    }
    for key in decisive:
        was, now = shown[key]
        rule, valid = f"is {was} in {folder}", "that, or --accept-changes"
        if misfit and key in reshaping:
            rule, valid = f"{rule}, whose weights do not fit: {misfit}", "that, or a new run in another --out"
        refused.append(Problem(key, now, rule, valid))
    notes = [f"{key}: {was} until step {progress.step}, now {now}" for key, (was, now) in shown.items()]
    if origin.data and not same_data:
        rule = f"holds other tokens or samples than those that {folder} was trained on"
        refused.append(Problem("data.source", config.data.source, rule, "the same data, or --accept-changes"))
        notes.append(f"data.source={config.data.source} {rule}")
    if refused and (misfit or not accept_changes):
        raise ConfigError([problem for problem in refused if problem.field in reshaping or not accept_changes])
    if origin.torch not in ("unknown", str(torch.__version__)):
        notes.append(f"{folder.name} was written with torch {origin.torch}, this is {torch.__version__}")
    return notes


def base_of(config: Config, out: Path, mesh: Mesh) -> dict[str, str]:
    """Return the root of the frozen weights in the checkpoint of step 0, if a run's later checkpoints have adapters
    alone; else nothing."""
    if config.model.adapter is None or config.weights is None:
        return {}
    root = Checkpoint(out / CHECKPOINTS / FIRST).frozen_root if mesh.rank == 0 else ""
    return {BASE: text_of_root(root, mesh.world)}


def resolve_together(mesh: Mesh, settings: Config, asked: Config, out: Path, *, resume: bool) -> Resolved:
    """Resolve the config inside another launcher: rank 0 decides for all ranks, by the least memory of any rank."""
    if mesh.device_type == "cuda":
        memory = torch.cuda.mem_get_info(mesh.device)[0]
    else:
        memory = Machine.here().rank_bytes(settings.layout.world_size)
    least = int(all_rows(torch.tensor([memory]), mesh.world).min())
    resolved = Resolved(settings)
    if mesh.rank == 0:
        before = decided_before(asked, out) if resume else asked
        for field in FIELDS:
            settings = with_field(settings, field, field_of(before, field))
        resolved = resolve_layout(settings, Machine(cores=1, memory=least, shared=False))
    text = json.dumps([resolved.config.model_dump(mode="json", by_alias=True), resolved.notes])
    tree = json.loads(text_of_root(text, mesh.world))
    return Resolved(Config.model_validate(tree[0]), tuple(tree[1]))
