"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# The same examples each time, and no deadline: a busy machine is not a mistake.
settings.register_profile("meshwright", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("meshwright")
