"""Programs in the styles that people write, right and with planted mistakes: `python -m tests.parity.styles`."""
