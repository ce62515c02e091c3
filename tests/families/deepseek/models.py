"""Shapes of small DeepSeek models."""

from __future__ import annotations

YARN = {"kind": "yarn", "factor": 4.0, "original": 16, "fast": 4.0, "slow": 0.25, "theta": 500.0}

ROUTED = {
    "count": 8, "per_token": 3, "width": 12, "shared": 24, "scores": "sigmoid", "scale": 1.7, "dense_layers": 1,
    "bias_rate": 0.01,
}  # fmt: skip
