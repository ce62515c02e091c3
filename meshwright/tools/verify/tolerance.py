"""Tolerances of a layout's difference from one device, by precision. `meshwright parity`, which knows nothing of the
model or the data, derives its own from each check (parity/reference.py); a run's are the promise of README.md, and the
same for every run of a precision."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Config


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors allowed: of a loss, of a step's gradient norm, of a parameter's gradient, of its weight
    before the first step and after the last, and of the optimizer's states (0: as of a weight).

    `together`: the last weights of all parameters are one tensor, and so are the states of a kind. Adam divides a
    gradient by its own size, so that an element whose gradient is nothing but rounding (a key's bias has none at all)
    moves by the whole rate, either way; in half precision a bias that began with zeros can then be off by a fifth in
    two right programs.

    `states_early`: states are compared after the first step, not the last. Weights that differ by such a step flip a
    ReLU here and there, whose unit then has another gradient: later moments tell nothing of who is right.
    """

    loss: float
    norm: float
    gradient: float
    weight: float
    together: bool = False
    state: float = 0.0

    @property
    def states_early(self) -> bool:
        return self.together

    @property
    def by_kind(self) -> dict[str, float]:
        """By the kinds of comparisons."""
        return {
            "initial": self.weight, "loss": self.loss, "norm": self.norm, "gradient": self.gradient,
            "weight": self.weight, "state": self.state or self.weight,
        }  # fmt: skip


TOGETHER = ("weight", "state")
"""The kinds of which half precision promises all parameters together."""

TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 1e-12, 1e-10),
    "float32": Tolerance(1e-5, 1e-5, 1e-5, 1e-4),
    # Half precision rounds at 2^-8 (bf16) and 2^-11 (fp16), and sums in another order round differently.
    "bf16": Tolerance(1e-2, 3e-2, 3e-2, 3e-2, together=True),
    "fp16": Tolerance(2e-3, 1e-2, 1e-2, 1e-2, together=True),
    # e4m3 rounds at 2^-4: by 2^-4/√3 in the mean at most, an operand; by 0.051 a product of two, whose errors are
    # independent. A layer's gradient has four such products on its way, two forward and two back: 0.10. Other layers'
    # add less, since the residual stream is not rounded: 0.20. Inputs that are off by 0.10 flip 0.10/π of a layer's
    # ReLUs, whose gradients are then off by √0.03, 0.18: 0.27 of both. A loss is a mean over tokens. The reference
    # rounds nothing to e4m3, so the bound is of the formula and of the layout. Adam's second moment has squares.
    "fp8": Tolerance(2e-2, 1e-1, 3e-1, 3e-2, together=True, state=3e-1),
}


def tolerance_of(config: Config) -> Tolerance:
    """The tolerance of a run's precision."""
    return TOLERANCES["fp8" if config.precision.in_fp8 else config.precision.dtype]
