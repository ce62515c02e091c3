"""Kits: what changes the local shape of an activation inside a block enters a model through one of these."""
