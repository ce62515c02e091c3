"""The wheel: one step after another until the last, a stop request, or an error.

A step: backward passes of this replica's microbatches, one pulse, gradients finished, optimizer, parameters published.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.build import Parts
from meshwright.data.sampler import TokenBatches
from meshwright.data_parallel.strategy import Batch
from meshwright.launch.stop import StopRequest
from meshwright.models.gpt import flops_per_sequence
from meshwright.shard import seed_of
from meshwright.tensor.cross_entropy import IGNORED
from meshwright.train.metrics import (
    BusyClock,
    StepFacts,
    metrics_line,
    peak_flops,
    peak_memory_bytes,
    release_free_memory,
)
from meshwright.train.pulse import Beat, Pulse


@dataclass(frozen=True)
class Loaded:
    """A replica's rows of a step's batch, and how many tokens of the global batch count."""

    batch: Batch
    counted: int


class Trainer:
    """Turns the parts over a stream of batches. `step` counts finished steps, `samples` is the data cursor."""

    def __init__(self, parts: Parts, train: TokenBatches, *, step: int = 0, samples: int = 0) -> None:
        self.parts = parts
        self.train = train
        self.step = step
        self.samples = samples
        self._clock = BusyClock(parts.mesh.device)
        self._sent: dict[str, int] = {}
        config = parts.config
        self.flops = flops_per_sequence(config.model, config.data.sequence) * config.batch.global_
        self.peak = peak_flops(config.metrics.peak_flops, parts.mesh.device)
        batch = self._load(samples)
        mine = torch.tensor([_counted(batch)], dtype=torch.float64, device=parts.mesh.device)
        parts.mesh.comm("data").all_reduce(mine)
        self._next = Loaded(batch, int(mine))

    def turn(
        self, stop: StopRequest | None, observe: Callable[[], None] | None = None
    ) -> tuple[dict[str, object], bool]:
        """One step. Its metrics, and whether some rank has asked to stop.

        `observe` is called when the slots hold the whole gradient, before it is clipped and applied.
        """
        started = time.perf_counter()
        parts, loaded = self.parts, self._next
        scale = parts.optimizer.scaler.scale
        loss = self._backward(loaded, scale)
        self.samples += parts.config.batch.global_
        following = self._load(self.samples)
        parts.strategy.finish()
        pulse = Pulse.send(parts.mesh, self._beat(loss, following, stop))
        if observe is not None:
            observe()
        result = parts.optimizer.step(self.step)
        parts.strategy.publish()
        beats = pulse.read()
        replicas = [beats[rank].next_tokens for rank in parts.mesh.grid.group(parts.mesh.rank, "data")]
        self._next = Loaded(following, sum(replicas))
        self.step += 1
        self._empty_cache()
        seconds = time.perf_counter() - started
        facts = StepFacts(
            step=self.step,
            tokens=loaded.counted,
            step_seconds=seconds,
            learning_rate=result.learning_rate,
            grad_norm=result.gradient_norm,
            loss_scale=scale,
            applied=result.applied,
            flops=self.flops,
            peak_flops=self.peak,
        )
        return metrics_line(facts, beats, parts.mesh.grid.names), any(beat.stop for beat in beats)

    def _backward(self, loaded: Loaded, scale: float) -> float:
        parts, config = self.parts, self.parts.config
        inputs, labels = loaded.batch
        parts.model.train()
        total = torch.zeros((), dtype=torch.float64, device=parts.mesh.device)
        for index in range(config.num_microbatches):
            rows = slice(index * config.micro, (index + 1) * config.micro)
            label = f"{config.seed}/dropout/{self.samples}/{index}/{parts.mesh.index('data')}"
            torch.manual_seed(seed_of(label))
            final = index == config.num_microbatches - 1
            part = scale / max(1, loaded.counted)
            total += parts.strategy.backward(parts.language_model, (inputs[rows], labels[rows]), part, final=final)
        return float(total)

    def _load(self, samples: int) -> Batch:
        device = self.parts.mesh.device

        def load(first: int, count: int) -> Batch:
            inputs, labels = self.train.samples(samples + first, count)
            return inputs.to(device), labels.to(device)

        return self.parts.strategy.share(load, self.parts.config.replica_batch)

    def _beat(self, loss: float, following: Batch, stop: StopRequest | None) -> Beat:
        mesh = self.parts.mesh
        before, self._sent = self._sent, mesh.ledger.sent_bytes()
        return Beat(
            loss=loss,
            next_tokens=_counted(following),
            stop=stop is not None and stop.requested,
            busy_seconds=self._clock.lap(),
            peak_memory_bytes=peak_memory_bytes(mesh.device),
            sent_bytes=tuple(self._sent.get(axis, 0) - before.get(axis, 0) for axis in mesh.grid.names),
        )

    @torch.no_grad()
    def validate(self, batches: TokenBatches, num_batches: int) -> float:
        """The mean loss over the first `num_batches` global batches of a held-out split."""
        parts, config = self.parts, self.parts.config
        parts.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=parts.mesh.device)
        first = parts.mesh.index("data") * config.replica_batch
        for index in range(num_batches):
            inputs, labels = batches.validation_slice(index, config.batch.global_, first, config.replica_batch)
            for start in range(0, config.replica_batch, config.micro):
                rows = slice(start, start + config.micro)
                batch = inputs[rows].to(parts.mesh.device), labels[rows].to(parts.mesh.device)
                sums[0] += parts.language_model(*batch, 1.0)
                sums[1] += _counted(batch)
        parts.mesh.comm("data").all_reduce(sums)
        return float(sums[0] / sums[1])

    def _empty_cache(self) -> None:
        every = self.parts.config.memory.empty_cache_every
        if every and self.step % every == 0:
            release_free_memory(self.parts.mesh.device)


def _counted(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())
