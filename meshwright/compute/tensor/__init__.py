"""Kits: every cut that changes an activation's local shape inside a block enters a model through a kit."""
