"""Tolerances for a layout's difference from one device, by precision.

The tolerances of a run are promised in README.md and equal for all runs of a precision. `meshwright parity`, which
knows neither model nor data, derives tolerances in each check (parity/reference.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Config


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed relative errors.

    `together`: Adam divides a gradient by its size. So an element with a gradient of pure rounding moves by the whole
    learning rate in either direction; a key's bias, with true gradient zero, is an example. In half precision a bias
    with initial value zero can then differ by a fifth between two correct programs.

    `states_early`: weights that differ by such a step flip the sign of some ReLU inputs and so change gradients. Later
    moments then do not show which program is correct.
    """

    loss: float
    norm: float
    """Error of a step's gradient norm."""
    gradient: float
    """Error of a parameter's gradient."""
    weight: float
    """Error of a parameter's weight before the first step and after the last."""
    together: bool = False
    """Whether the last weights of all parameters are compared as one tensor, and so the states of a kind."""
    state: float = 0.0
    """Error of the optimizer's states; 0: as for a weight."""

    @property
    def states_early(self) -> bool:
        """Whether states are compared after the first step, not the last."""
        return self.together

    @property
    def by_kind(self) -> dict[str, float]:
        """The tolerances by kind of comparison."""
        return {
            "initial": self.weight, "loss": self.loss, "norm": self.norm, "gradient": self.gradient,
            "weight": self.weight, "state": self.state or self.weight,
        }  # fmt: skip


TOGETHER = ("weight", "state")
"""The kinds that are compared for all parameters together in half precision."""

TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 1e-12, 1e-10),
    "float32": Tolerance(1e-5, 1e-5, 1e-5, 1e-4),
    # Half precision rounds at 2^-8 (bf16) and 2^-11 (fp16), and sums in another order round differently.
    "bf16": Tolerance(1e-2, 3e-2, 3e-2, 3e-2, together=True),
    "fp16": Tolerance(2e-3, 1e-2, 1e-2, 1e-2, together=True),
    # e4m3 rounds at 2^-4: an operand's mean error is at most 2^-4/√3; a product of two operands with independent errors
    # has 0.051. A layer's gradient passes through four such products, two forward and two backward: 0.10. Other layers
    # add less, since the residual stream is not rounded: 0.20 in total. Inputs with error 0.10 flip 0.10/π of a layer's
    # ReLUs, which adds √0.03 = 0.18 to the gradients: 0.27 together. A loss is a mean over tokens. The reference rounds
    # nothing to e4m3, so the bound covers the formula and the layout. Adam's second moment has squares.
    "fp8": Tolerance(2e-2, 1e-1, 3e-1, 3e-2, together=True, state=3e-1),
}


def tolerance_of(config: Config) -> Tolerance:
    """Return the tolerance for a run's precision."""
    return TOLERANCES["fp8" if config.precision.in_fp8 else config.precision.dtype]
