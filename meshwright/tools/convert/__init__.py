"""Hugging Face folders (config.json, safetensors, tokenizer.json) in and out, by family. Needs no transformers."""

from meshwright.tools.convert.transfer import Imported, export_folder, import_folder

__all__ = ["Imported", "export_folder", "import_folder"]
