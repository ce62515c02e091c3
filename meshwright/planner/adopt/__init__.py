"""A script of anybody, run for one step on tensors without memory: facts, plan, page, check."""
