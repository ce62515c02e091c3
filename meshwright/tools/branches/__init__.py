"""Branches of a model, found by itself: what a sub-graph layout could cut, and what it would gain at most."""
