"""Hugging Face folders (config.json, safetensors, tokenizer.json) in and out, by family. Needs no transformers."""

from meshwright.training.convert.transfer import (
    FORMS,
    Imported,
    export_folder,
    import_folder,
    read_folder,
    resting_token,
)

__all__ = ["FORMS", "Imported", "export_folder", "import_folder", "read_folder", "resting_token"]
