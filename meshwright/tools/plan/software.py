"""A run's software, as far as its seconds and its memory hang on it and neither config nor cluster say it.

Meshwright's own runs are the defaults. What other programs do is data: a preset of configs/software.yaml, which a
published run names in its paper's file (validation/papers). `recorder` and `on_device` turn the facts of a layer into
what records it; the others are read where a step's seconds and its optimizer's memory are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from meshwright.config import Config
from meshwright.config.load import read_yaml
from meshwright.configs import SOFTWARE
from meshwright.errors import ConfigError
from meshwright.on_device import AsOnDevice, Attention
from meshwright.optim.states import stepped_together
from meshwright.section import Section
from meshwright.tools.plan.cluster import Device
from meshwright.tools.plan.recorder import Recorder

Communication = Literal["sums", "gathers", "layers"]


class Software(Section):
    """`attention`: how queries, keys and values are attended (on_device.py); None: fused where the device has such a
    kernel, else torch's own steps. `overlapped`: what is sent while the device computes: the sums of gradients, under
    the last backward pass; sharded weights as they are gathered and stepped ones as they are published; what a layer
    sends between its own products."""

    attention: Attention | None = None
    heads: Literal["together", "apart"] = "together"
    """Whether one kernel works on all heads, or each head has its own."""
    gelu: Literal["fused", "steps"] = "fused"
    """A kernel of its own, which torch has of GPT-2's since 1.12, or eight."""
    fuses_dropout: bool = False
    """Whether dropout and the sum with the residual after it are one kernel."""
    optimizer: Literal["fused", "steps"] = "fused"
    """One kernel for many parameters, or STEPS_OF_ADAMW for each, as torch's AdamW stepped tensors before 2.0."""
    widening: Literal["parts", "whole"] = "parts"
    """Whether an optimizer on the device has float32 copies of some half-precision gradients at a time, or of all."""
    one_process: bool = False
    """Whether one process drives all devices of a node, as torch's DataParallel does: its threads go forward in turn
    under the interpreter's lock (backward passes have threads beneath it), and every step makes each replica's
    parameters anew. Else each device has a process."""
    imbalance: Annotated[float, Field(ge=1)] = 1.0
    """Rows of the busiest rank of an expert group in those that an even router would give it; the others wait for it.
    What a router does is known of a run, not of its config. A capacity makes it 1."""
    overlapped: frozenset[Communication] = frozenset(("sums", "gathers", "layers"))

    def on(self, device: Device) -> Software:
        """This software with the attention that it has on a device."""
        attention = self.attention or ("torch" if device.attention_efficiency is None else "fused")
        return self.model_copy(update={"attention": attention})

    def recorder(self) -> Recorder:
        """The recorder of a layer of this software's."""
        return Recorder(fuses_dropout=self.fuses_dropout)

    def on_device(self, kind: str) -> AsOnDevice:
        """A mode in which meta tensors do what this software's layers do on a kind of device."""
        return AsOnDevice(
            kind, self.attention or "torch", gelu_in_steps=self.gelu == "steps", heads_apart=self.heads == "apart"
        )

    def stepped_together(self, widened_bytes: Sequence[int]) -> Iterable[list[int]]:
        """The indices of slots whose gradients are widened at a time, given the bytes that each is widened to."""
        return [list(range(len(widened_bytes)))] if self.widening == "whole" else stepped_together(widened_bytes)

    def overlap(self, communication: Communication, share: float) -> float:
        """The part of a communication that goes on under computation, where links let `share` of it do so."""
        # What a program does not overlap no link can hide.
        return share if communication in self.overlapped else 0.0


STEPS_OF_ADAMW, STEPPED_BYTES = 9, 88
"""The kernels of an AdamW that goes step by step, and what they read and write of an element: decay 8 bytes, each
moment's decay and sum 8 + 12, root, bias correction and epsilon 8 each, the quotient 16."""

OWN_SOFTWARE = Software()


def load_software(name: str) -> Software:
    """A preset by its name. Raises ConfigError with the names where there is no such preset."""
    presets = read_yaml(SOFTWARE)
    if name not in presets:
        raise ConfigError.of("software", name, "is no program that we know the facts of", ", ".join(presets))
    return Software.model_validate(presets[name])


def software_of(config: Config, imbalance: float) -> Software:
    """Our own, with a run's imbalance of experts. Raises ConfigError where that is no factor or has no effect."""
    if imbalance == 1:
        return OWN_SOFTWARE
    if not imbalance > 1:
        raise ConfigError.of("--imbalance", imbalance, "is the busiest rank's share of an even one", "1 or more")
    if not config.model.num_experts:
        raise ConfigError.of("--imbalance", imbalance, "has no effect on a model without experts", "1")
    # A capacity cuts every expert's rows to the same number.
    if config.model.droppable_pairs:
        rule = "has no effect with model.experts.capacity, which gives all ranks as many rows"
        raise ConfigError.of("--imbalance", imbalance, rule, "1, or model.experts.capacity=null")
    return OWN_SOFTWARE.model_copy(update={"imbalance": imbalance})
