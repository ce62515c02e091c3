"""A model's page on the Hugging Face Hub: the card of an exported run, and the upload of the folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.ranks.errors import CheckpointError, DataError
from meshwright.ranks.foreign import parse_json, read_named, read_text
from meshwright.training.checkpoint import Checkpoint
from meshwright.version import __version__

README, CERTIFIED = "README.md", ("certificate.json", "card.yaml")
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


def read_evaluations(file: Path) -> list[dict[str, Any]]:
    """Read the lines of `meshwright eval --json`. Raises DataError for other lines."""
    try:
        lines = [parse_json(line) for line in read_named(file).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    for line_number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not {"task", "data"} <= line.keys():
            raise DataError(f"{file}:{line_number} is no line of `meshwright eval --json`, which has task and data")
    return lines


def write_card(out: Path, checkpoint: Checkpoint, evaluations: Sequence[dict[str, Any]]) -> None:
    """Write README.md into an exported folder: the run's config, evaluations, and the run's certificate if there is
    one, whose files are copied.

    Args:
        out: The exported folder.
        checkpoint: The exported checkpoint.
        evaluations: Lines of `meshwright eval --json`.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData  # the import takes half a second

    run, config = checkpoint.folder.parent.parent, checkpoint.config
    name = run.name
    results = [
        EvalResult(
            task_type="text-generation", dataset_type="custom", dataset_name=str(line["data"]),
            metric_type=metric, metric_value=value, metric_name=f"{line['task']}: {metric.replace('_', ' ')}",
        )
        for line in evaluations for metric, value in line.items() if isinstance(value, float)
    ]  # fmt: skip
    data = ModelCardData(
        library_name="peft" if (out / "adapter_config.json").is_file() else "transformers",
        base_model=config.weights if config.weights and _HUB_NAME.fullmatch(config.weights) else None,
        model_name=name,
        tags=["meshwright", config.model.family],
        eval_results=results or None,
    )
    text = [
        f"# {name}",
        f"Step {checkpoint.manifest.progress.step} of a run of Meshwright {__version__}.",
        "## Config",
        f"```yaml\n{yaml.safe_dump(config.model_dump(mode='json', by_alias=True), sort_keys=False)}```",
    ]
    if evaluations:
        rows = [
            f"| {line['task']} | {line['data']} | {metric} | {value:.6g} |"
            for line in evaluations for metric, value in line.items() if isinstance(value, float)
        ]  # fmt: skip
        text += ["## Evaluation", "\n".join(["| task | data | measure | value |", "|---|---|---|--:|", *rows])]
    if all((run / file).is_file() for file in CERTIFIED):
        for file in CERTIFIED:
            (out / file).write_text(read_text(run / file), encoding="utf-8")
        how = f"`meshwright certify --check {CERTIFIED[0]} --step N` computes a step again and compares all bits."
        text += ["## Certificate", how, f"```yaml\n{read_text(run / CERTIFIED[1])}```"]
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n").save(out / README)


def upload(out: Path, name: str, *, private: bool = False) -> str:
    """Upload a folder to the Hub as a model, with the client's token; return the page's address.

    Raises CheckpointError if the Hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        client = HfApi()
        page = client.create_repo(name, private=private, exist_ok=True)
        client.upload_folder(repo_id=name, folder_path=out, commit_message=f"Upload by Meshwright {__version__}")
    except Exception as error:  # the library raises its client's errors as well
        why = str(error).strip().split("\n")[0]
        remedy = "`hf auth login` stores a token; the folder is complete and can be uploaded later"
        raise CheckpointError(f"{out} was not uploaded to {name}: {why}; {remedy}") from error
    return str(page)
