"""Hugging Face's folders as transformers saves them: random models, import and export, and refused settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert import export_folder, import_folder


def saved(kind: Any, settings: Any, folder: Path, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    """Return a random model of a class of transformers, and save the model."""
    torch.manual_seed(4)
    model = kind(settings).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # biases and norms too
    model.save_pretrained(folder, **how)
    return model


def check_round_trip(folder: Path, dtype: torch.dtype, *copies: str) -> None:
    """Assert that `folder / "hf"` is exported with the same bits, without the `copies` of other tensors."""
    import_folder(folder / "hf", folder / "run" / "checkpoints" / "step-0")
    export_folder(folder / "run", folder / "back")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() - set(copies) == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype == dtype
        assert torch.equal(tensor, before[name]), name
    tokenizers = [folder / name / "tokenizer.json" for name in ("hf", "back")]
    assert tokenizers[0].exists() == tokenizers[1].exists()
    if tokenizers[0].exists():
        assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def check_refused(folder: Path, change: dict[str, object], message: str) -> None:
    """Assert that changed settings of `folder / "hf"` are refused with a message, and that no folder is left."""
    path = folder / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        import_folder(folder / "hf", folder / "step-0")
    assert not (folder / "step-0").exists()
