"""Finds the branches of a model that a sub-graph layout could cut, and bounds the speed-up."""
