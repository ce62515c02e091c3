"""Programs in people's styles, each right and with planted mistakes; `python -m benchmarks.parity_styles`."""
