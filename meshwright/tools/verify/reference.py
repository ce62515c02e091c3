"""A run on one device in plain torch: the reference for every layout in `verify`, also for a layout of a single rank.

The model files are the run's own; no other code of the package computes here (a test checks the imports). Layers are
torch's functions on whole tensors, and gradients are autograd's. The optimizer is torch's on whole parameters, and a
step uses all rows of the global batch. So even a mistake in all layouts (in buckets, the norm, the learning rate, the
package's cross entropy) is detected. O1 is torch.autocast; O2 casts float32 weights in each pass, and sums gradients of
microbatches in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.context.context import Context
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import IGNORED, SAMPLES, Batch
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.shard import Initial
from meshwright.config import Config
from meshwright.config.registry import load_entry
from meshwright.config.schema import ScheduleSection
from meshwright.tools.verify.reference_kit import Experts, Layer, ReferenceKit

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


class MaskedSequences(Context):
    """Attention over whole sequences, with documents separated by a T x T mask. Layouts never build such a mask."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        mask, causal, length = spec.mask, spec.causal, query.shape[2]
        if spec.documents is not None or spec.window is not None or (causal and not spec.plain):
            starts = query.new_zeros(1, length) if spec.documents is None else spec.documents.to(query.device)
            near = query.new_ones(length, length, dtype=torch.bool).tril().triu(1 - (spec.window or length))
            mask, causal = (starts[:, :, None] == starts[:, None, :]).unsqueeze(1) & near, False
        if spec.plain:
            return F.scaled_dot_product_attention(
                query, key, value, mask, spec.dropout, causal, scale=spec.scale, enable_gqa=len(query[0]) != len(key[0])
            )
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if mask is not None:
            scores = (
                torch.where(mask, scores, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
            )
        if spec.sinks is not None:  # one more column of scores, without a value
            scores = torch.cat([scores, spec.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32))
        return F.dropout(weights, spec.dropout)[..., : key.shape[2]].to(value.dtype) @ value


class Reference:
    """A run on one device: the model, torch's optimizer over whole parameters, torch's loss scaler."""

    def __init__(self, config: Config, device: torch.device) -> None:
        precision, chosen, self.config, self.device = config.precision, config.optimizer, config, device
        self.level, self.dtype = precision.level, _DTYPES[precision.dtype]
        self.model = make_chain(config, ReferenceKit())
        self.model.attend_in(MaskedSequences())
        self.model.to(device, self.dtype if self.level == "O0" else torch.float32)
        self.parameters = dict(self.model.named_parameters())
        self.gradients: dict[str, Tensor] = {}  # each parameter's .grad; autograd accumulates here
        self.narrow: set[str] = set()  # parameters that O2 casts to half precision
        self.nudged: dict[str, nn.Parameter] = {}  # parameters that move by the signs of gradients
        groups: dict[tuple[bool, bool], dict[str, Any]] = {}  # by (has weight decay, is a hidden layer's matrix)
        for name, parameter in self.parameters.items():
            path, attribute = name.rsplit(".", 1)
            layer = self.model.get_submodule(path)
            assert isinstance(layer, Layer), f"{name} is no layer's of the reference kit"
            values = initial_values(f"{config.seed}/{name}", tuple(parameter.shape), layer.initial)
            nudged = layer.nudged and attribute == "bias"
            if self.level == "O2" and not layer.wide and not nudged:
                self.narrow.add(name)
                values = values.to(self.dtype)
            parameter.data.copy_(values if attribute == "weight" else torch.zeros_like(values))
            parameter.requires_grad_(not config.model.is_frozen(name))
            if not parameter.requires_grad:
                continue
            parameter.grad = self.gradients[name] = torch.zeros_like(parameter)
            if nudged:
                self.nudged[name] = parameter
            else:
                decays, hidden = attribute == "weight" and layer.decays, attribute == "weight" and layer.hidden
                group = {"params": [], "weight_decay": chosen.weight_decay * decays, "hidden": hidden}
                groups.setdefault((decays, hidden), group)["params"].append(parameter)
        make, arguments = load_entry(chosen.update.reference), chosen.update.arguments(chosen)
        self.optimizer: torch.optim.Optimizer = make(list(groups.values()), lr=chosen.lr, **arguments)
        scale, half = precision.loss_scale, self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, scale.initial, growth_interval=scale.interval, enabled=half)

    def backward(self, batch: Batch) -> float:
        """Return the mean loss over all counted tokens of a global batch, and add the gradient to `gradients`."""
        total = 0.0
        scales = {name: 1 / max(1, int((batch[name] != IGNORED).sum())) for name in self.model.labels}
        scales[SAMPLES] = 1 / self.config.batch.global_
        if self.config.model.routing.counts_first:  # a balance over the batch needs the counts of all rows
            with torch.no_grad():
                for rows in self._microbatches(batch):
                    self._loss(rows, scales)
            for module in (each for each in self.model.modules() if isinstance(each, Experts)):
                module.balance_by_counts(scales[SAMPLES])
        for rows in self._microbatches(batch):
            self.scaler.scale(loss := self._loss(rows, scales)).backward()
            total += float(loss.detach())
        self.scaler.unscale_(self.optimizer)
        for name in self.nudged:
            self.gradients[name] /= self.scaler.get_scale()
        return total

    def _microbatches(self, batch: Batch) -> Iterator[Batch]:
        """Yield a global batch in microbatches of the run's size."""
        for start in range(0, self.config.batch.global_, self.config.micro):
            rows = slice(start, start + self.config.micro)
            yield self.model.prepared({name: x[rows].to(self.device) for name, x in batch.items()})

    def _loss(self, rows: Batch, scales: dict[str, float]) -> Tensor:
        weights = {name: self.parameters[name].to(self.dtype) for name in self.narrow}  # in the graph
        with torch.autocast(self.device.type, self.dtype, enabled=self.level == "O1"):
            (loss,) = torch.func.functional_call(self.model, weights, (rows, scales))
        return cast(Tensor, loss)

    def update(self, step: int, norm: float) -> None:
        """Make step `step` (from 0), clipped by the global gradient norm `norm`; none if a gradient overflowed."""
        settings = self.config.optimizer
        if settings.clip:
            stepped = [self.parameters[name] for name in self.gradients if name not in self.nudged]
            nn.utils.clip_grads_with_norm_(stepped, settings.clip, torch.tensor(norm, dtype=torch.float64))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * rate_share(settings.schedule, step, self.config.steps)
        self.scaler.step(self.optimizer)
        for name, parameter in self.nudged.items() if math.isfinite(norm) else ():
            parameter.data.sub_(self.gradients[name].sign(), alpha=self.config.model.routing.bias_rate)
        self.scaler.update()
        for gradient in self.gradients.values():
            gradient.zero_()


def initial_values(label: str, shape: tuple[int, ...], initial: Initial) -> Tensor:
    """Draw a whole parameter's initial values in blocks of whole rows, about 2^20 elements each; a block's generator is
    seeded by a hash of "seed/name/block". Ranks draw equal blocks and cut out a part. `label`: "seed/name"."""
    if initial.std == 0:
        return torch.full(shape, initial.mean)
    rows, blocks = max(1, 2**20 // math.prod(shape[1:])), []
    for index, start in enumerate(range(0, shape[0], rows)):
        digest = blake2b(f"{label}/{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        blocks.append(initial.draw(torch.empty(min(rows, shape[0] - start), *shape[1:]), generator))
    return torch.cat(blocks)


def rate_share(schedule: ScheduleSection, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`, as a share of the peak rate."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.decay == "inverse-sqrt":
        return max(schedule.floor, math.sqrt(max(1, schedule.warmup) / (step + 1)))
    stable = int(schedule.stable * (rest := max(1, steps - schedule.warmup)))
    done = min(1.0, max(0, step - schedule.warmup - stable) / (rest - stable))
    waves = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return schedule.floor + (1 - schedule.floor) * (waves | {"sqrt": 1 - math.sqrt(done)})[schedule.decay]
