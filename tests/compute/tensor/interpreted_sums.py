"""Triton's kernels of column_sums.py, interpreted on a CPU: prints the differences from the references as JSON.

A separate program: Triton reads TRITON_INTERPRET on import.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.compute.tensor import column_sums

SHAPES = ((3, 5, 7), (2, 64, 96), (1, 1, 1), (5, 768), (2, 9, 1000), (300, 40), (0, 24), (3, 2049))
HEADS = ((2, 3, 5, 7), (1, 12, 64, 64), (3, 2, 70, 16), (0, 2, 3, 4))


def compare(kernel: Callable[[], tuple[Tensor, ...]], reference: tuple[Tensor, ...]) -> tuple[float, bool]:
    """Return a result's largest difference, relative to the result's largest element, and whether a second run has
    equal bits."""
    made, again = kernel(), kernel()
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in reference]
    gaps = [
        float((x.float() - y.float()).abs().max() / y.float().abs().max().clamp(min=1e-3))
        for x, y in zip(made, reference, strict=True)
        if x.numel()
    ]
    return max(gaps, default=0.0), all(map(torch.equal, made, again))


def main() -> None:
    found: dict[str, tuple[float, bool]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(1)
            dy, x, other = (3 * torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
            weight = torch.randn(shape[-1], generator=generator)
            for centred, more in itertools.product((True, False), (other, None)):
                norm = dy, x, weight, more, 1e-5, centred
                found[f"norm {dtype} {shape} {centred} {more is not None}"] = compare(
                    lambda norm=norm: column_sums.norm_backward_by_kernel(*norm),  # type: ignore[misc]
                    column_sums.norm_backward_reference(*norm),
                )
            for tanh in (True, False):
                gelu = dy, x, tanh
                found[f"gelu {dtype} {shape} {tanh}"] = compare(
                    lambda gelu=gelu: column_sums.gelu_backward_by_kernel(*gelu),  # type: ignore[misc]
                    column_sums.gelu_backward_reference(*gelu),
                )
        for b, a, t, e in HEADS:
            generator = torch.Generator().manual_seed(2)
            views = (
                torch.randn(size, generator=generator).to(dtype) for size in ((b, t, a, e), (b, a, t, e), (b, a, e, t))
            )
            one, two, three = views
            parts = [one.transpose(1, 2), two, three.transpose(2, 3)]
            found[f"heads {dtype} {(b, a, t, e)}"] = compare(
                lambda parts=parts: column_sums.join_heads_by_kernel(parts),  # type: ignore[misc]
                column_sums.join_heads_reference(parts),
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
