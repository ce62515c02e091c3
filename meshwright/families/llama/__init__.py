"""Llama and similar decoders: the section, the model, the import and export."""
