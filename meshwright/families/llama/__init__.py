"""Llama and the decoders made like it: their section, the model, rotary positions."""
