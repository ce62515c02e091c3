"""Programs in common styles, right and with planted mistakes: `python -m tests.parity.styles`."""
