"""A run's precision: the dtypes of stored parameters, and the GPU kernels of products and attention."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.compute.parameters.shard import shard_specs
from meshwright.ranks.environment import use_cublas_workspace

if TYPE_CHECKING:
    from meshwright.config import Config

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

FLASH_ATTENTION = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""By major compute capability: torch's name of the FlashAttention for these GPUs, and the package that contains it."""


def store(config: Config, model: nn.Module) -> None:
    """Cast each parameter of a model to the dtype that the config stores."""
    specs = shard_specs(model)
    dtype = DTYPES[config.precision.dtype]
    level = config.precision.level
    for name, parameter in model.named_parameters():
        stores_half = level == "O2" and specs[name].role.stored == "run"
        if level == "O0" or stores_half:
            parameter.data = parameter.data.to(dtype)


def choose_kernels(config: Config, device: torch.device) -> None:
    """Choose the GPU kernels of float32 products and of attention. Other devices have no choice."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if config.precision.tf32 else "ieee"
        if config.bits.layout_free:
            repeat_kernels()
        else:
            use_flash_attention(device)


def repeat_kernels() -> None:
    """Make this process's GPU kernels deterministic (`bits: layout-free`).

    torch raises RuntimeError with the name of the operation if an operation has no deterministic kernel. Attention is
    FlashAttention 2, with a backward pass that is deterministic on request; in float32 it is torch's plain products.
    Memory-efficient attention adds gradients of keys in any order. cuDNN's choice of kernel depends on the version.
    """
    # cuBLAS is deterministic with a fixed workspace. The variable is read at a stream's first product, so set it first.
    use_cublas_workspace(":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is never read
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def use_flash_attention(device: torch.device) -> None:
    """Activate the FlashAttention written for this GPU if installed; else torch's FlashAttention 2 runs."""
    name, package = FLASH_ATTENTION.get(torch.cuda.get_device_capability(device)[0], ("", ""))
    parents = [package.rpartition(".")[0] or package, package]  # find_spec of a submodule imports the package
    if package and torch.__version__ >= "2.13" and all(find_spec(module) is not None for module in parents):
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(name)
