"""The line of a run's linears in FP8, said before any rank starts, or the refusal of FP8."""

from __future__ import annotations

import torch

from meshwright.compute.models.chain import make_chain
from meshwright.compute.tensor.fp8 import CAPABILITY, MULTIPLE, inner_layers, narrow
from meshwright.config import Config
from meshwright.ranks.errors import ConfigError
from meshwright.training.rank_model import build_kit
from meshwright.training.stage_costs import first_ranks

FIELD = "precision.products"


def fp8_note(config: Config) -> str:
    """Return a line of the linears in FP8 and of the spared ones.

    Raises:
        ConfigError: no linear has widths for FP8, or a GPU here has no FP8.
    """
    if config.device == "cuda" and torch.cuda.is_available():
        check_gpus([torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())])
    mesh = first_ranks(config)[0]
    chain, layers = make_chain(config, build_kit(config, mesh)), inner_layers(config.model.num_blocks)
    found = narrow(chain.blocks, config.model.num_blocks, mesh.device_type)
    numbers = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    others = [f"{name} [{inputs}, {outputs}]" for name, (inputs, outputs) in found.spared.items()]
    if not found.count:
        rule = f"finds widths of {', '.join(others) or 'no linear'} on a rank in {numbers}"
        raise ConfigError.of(FIELD, "fp8", rule, f"stored, or widths that are multiples of {MULTIPLE} on each rank")
    how = "" if config.device == "cuda" else ", by casts, as this device has none"
    spared = ", the head, look-ups, the first and the last layer" + (
        ", experts" if config.model.routing.num_experts else ""
    )
    widths = f" and, for their widths, {', '.join(others)}" if others else ""
    return f"{FIELD}=fp8: e4m3 in {found.count} linears of {numbers}{how}; in bf16 weight gradients{spared}{widths}"


def check_gpus(capabilities: list[tuple[int, int]]) -> None:
    """Check that GPUs multiply in FP8. Raises ConfigError if one does not."""
    if lacking := [each for each in capabilities if each < CAPABILITY]:
        (major, minor), least = lacking[0], ".".join(map(str, CAPABILITY))
        rule = f"needs GPUs of compute capability {least} (Ada, Hopper), and one here has {major}.{minor}"
        raise ConfigError.of(FIELD, "fp8", rule, "stored; or device=cpu, which casts")
