"""Hugging Face folders (config.json, safetensors, tokenizer.json) in and out, by family. Needs no transformers."""

from meshwright.convert.exporter import export_folder
from meshwright.convert.importer import Imported, import_folder

__all__ = ["Imported", "export_folder", "import_folder"]
