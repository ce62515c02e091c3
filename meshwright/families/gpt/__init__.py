"""GPT-2, the family of runs without `model.family`."""
