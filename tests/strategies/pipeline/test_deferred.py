"""Weight gradients as deferred work: the same gradients and messages, and each parameter announced once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compute.model import counts_of, scales_of, to_device
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.strategy import Synchroniser
from meshwright.training.parts import Parts
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.tensor import BLOCKS, MODELS, ONE_D, SEQUENCE, config_for
from tests.workers import run_ranks

KITS: dict[str, tuple[dict[str, Any], str]] = {
    "serial": ({"kind": "none"}, "auto"),
    "1-D": (ONE_D[0], "auto"),
    "1-D cut": (SEQUENCE[0], "auto"),
    "2-D gather": (BLOCKS[1], "gather"),
    "2-D stream": (BLOCKS[1], "stream"),
}


@dataclass(frozen=True)
class Left:
    """Gradients by parameter, the announcements of each in the last microbatch, bytes sent by axes and verb."""

    gradients: dict[str, Tensor]
    announced: Counter[str]
    traffic: Counter[tuple[str, str]]
    num_works: int = 0


class Run:
    """A model with a strategy that counts announcements."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.parts: Parts = build(config, mesh)
        strategy = self.parts.strategy
        assert isinstance(strategy, Synchroniser)
        self.strategy = strategy
        self.names = {parameter: name for name, parameter in self.parts.model.named_parameters()}
        self.announced: Counter[str] = Counter()
        self.final = False
        filled = strategy.filled

        def counting(parameter: nn.Parameter) -> None:
            self.announced[self.names[parameter]] += self.final
            filled(parameter)

        strategy.gradients.on_gradient = counting
        everyone = to_device(BATCHES[config.model.family](config, 0), mesh.device)
        self.scales = scales_of(self.parts.model.labels, counts_of(everyone, self.parts.model.labels), 1.0)
        self.batches = self.parts.microbatches(everyone)

    def step(self, num_microbatches: int, *, defers: bool) -> Left:
        """Run a forward and backward pass of each microbatch. `defers`: the weights' gradients at the very end."""
        self.announced.clear()
        before = self._traffic()
        works = []
        for index in range(num_microbatches):
            self.final = index == num_microbatches - 1
            self.strategy.expect(self.final)
            with self.parts.pipeline.stages[0].autocast():
                (loss,) = self.parts.model(self.batches[index], self.scales)
            if defers:
                with self.strategy.gradients.deferred() as collected:
                    loss.backward()
                works.append(collected)
            else:
                loss.backward()
        with torch.no_grad():
            for index, collected in enumerate(works):
                for work in collected:
                    work(index == num_microbatches - 1)
        announced = Counter(self.announced)
        traffic = self._traffic()
        traffic.subtract(before)
        self.strategy.finish()
        gradients = {
            place.name: slot.parameter.grad[place.start : place.stop].clone()
            for slot in self.strategy.slots
            for place in slot.places
        }
        self.strategy.publish()
        self.parts.kit.kept.clear()
        return Left(gradients, announced, traffic, sum(map(len, works)))

    def _traffic(self) -> Counter[tuple[str, str]]:
        return Counter({key: entry.sent_bytes for key, entry in self.parts.mesh.ledger.traffic.items()})


Pair = tuple[Left, Left]


def both_ways(mesh: Mesh, configs: dict[str, Config]) -> dict[tuple[str, int], Pair]:
    """Return the results of each config and number of microbatches: at once, deferred."""
    results = {}
    for name, config in configs.items():
        run = Run(config, mesh)
        for number in (1, 2):
            at_once = run.step(number, defers=False)
            results[name, number] = at_once, run.step(number, defers=True)
    return results


def check(results: dict[tuple[str, int], Pair], tolerance: float) -> None:
    """Assert the same bits with one microbatch. With two, or a table shared by look-up and head, the order of the sum
    differs."""
    for (name, number), (at_once, deferred) in results.items():
        assert deferred.num_works >= len(deferred.gradients) / 2 * number, f"{name}: little was deferred"
        for parameter, wanted in at_once.gradients.items():
            mine = deferred.gradients[parameter]
            if number == 1 and parameter != "tokens.weight":
                assert torch.equal(mine, wanted), f"{name}, {parameter}"
            assert (mine - wanted).norm() <= tolerance * wanted.norm(), f"{name}, {parameter}"
            assert at_once.announced[parameter] == deferred.announced[parameter] == 1, f"{name}, {parameter}"
        assert deferred.traffic == at_once.traffic, name


@pytest.mark.few(3)
@pytest.mark.parametrize("kit", KITS)
def test_later_is_the_same(kit: str) -> None:
    tensor, summa = KITS[kit]
    # Blocks refuse experts. Over half of the parameters of a delta net are vectors, which are not deferred.
    kept = {model: section for model, section in MODELS.items() if section["family"] != "qwen3-next"}
    models = [model for model, section in kept.items() if "experts" not in section or tensor["kind"] != "tesseract"]
    configs = {model: config_for(model, tensor, memory={"summa": summa}) for model in models}
    first = next(iter(configs.values()))
    for results in run_ranks(both_ways, Grid(first.layout.axes), configs, token_axes=first.layout.token_axes):
        check(results, 1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_later_is_the_same_in_half_precision(level: str, dtype: str) -> None:
    """O1: works compute in autocast's dtype, though autocast is off by then. O2: a sum is rounded after the last
    product."""
    precision = {"level": level, "dtype": dtype}
    configs = {model: config_for(model, {"kind": "none"}, precision=precision) for model in ("gpt2", "vit")}
    (results,) = run_ranks(both_ways, Grid((("data", 1),)), configs)
    check(results, 1e-6 if level == "O1" else 1e-2)
