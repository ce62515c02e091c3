"""`meshwright verify --generate`: is the generator the model that was trained, to the bit?

A run with `bits: layout-free` takes some steps on one device, and its checkpoint generates tokens greedily in several
ways (tools/exact.py). Then training's forward pass computes the log-probability of each of these tokens under several
layouts. Each number is a float32, and all must be equal. Exported weights in transformers must choose the same tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.model import Batch
from meshwright.compute.models.chain import chain_of
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.config.rules import broken_rules
from meshwright.config.schema import Logging
from meshwright.config.section import with_field
from meshwright.data.files import ShowProgress as Report
from meshwright.data.files import silent
from meshwright.ranks.errors import ConfigError, LaunchError, MismatchError
from meshwright.ranks.launch import Rank, joined, run
from meshwright.ranks.launch.session import temporary_folder
from meshwright.tools.evaluate.load import load_model
from meshwright.tools.exact import Choose, Continued, ExactDecoder, few_threads, greedy, require_exact
from meshwright.training.checkpoint import Checkpoint, find_checkpoint, restore
from meshwright.training.convert.transfer import export_folder, families
from meshwright.training.decisions import in_steps, resolve, this_machine
from meshwright.training.job import train
from meshwright.training.parts import build
from meshwright.training.step import backward, publish, replica_batch

WORKER = "meshwright.tools.verify.generated:score_rank"
TOKENS = 1000
"""The default number of generated tokens."""

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "one device": {},
    "2 replicas, zero3": {"data": {"size": 2, "sync": "zero3"}},
    "1-D tensors of 2": {"tensor": {"kind": "megatron", "size": 2}},
    "2 stages": {"pipeline": {"size": 2}},
    "ring of 2": {"context": {"size": 2, "kind": "ring"}},
    "Ulysses of 2": {"context": {"size": 2, "kind": "ulysses"}},
    "sub-graphs of 2": {"tensor": {"kind": "subgraph", "size": 2}},
}
"""Layouts of training's forward pass, by name. The first is compared with all other ways."""

Rows = dict[int, list[int]]
"""Tokens of whole rows, by number of the row."""
Logs = dict[int, list[float]]
"""Log-probabilities of a row's new tokens, by number of the row."""


@dataclass(frozen=True)
class Way:
    """A way to compute the log-probabilities of the same tokens, compared with training on one device."""

    name: str
    tokens: int
    """Compared tokens."""
    differing: int
    """Tokens with another log-probability, or with another token."""
    largest: float
    """The largest difference, in nats; of transformers, of logits."""
    seconds: float | None = None
    """Seconds for all tokens; None: not timed."""
    demanded: bool = True
    """Whether equal bits are promised; else the row is for information."""

    @property
    def holds(self) -> bool:
        """Whether the row shows no broken promise."""
        return not (self.demanded and self.differing)


@dataclass(frozen=True)
class Generated:
    """Result of `verify_generated`."""

    tokens: int
    prompts: int
    steps: int
    grain: int
    """Rows that are generated together."""
    ways: tuple[Way, ...]
    notes: tuple[str, ...] = ()
    """Layouts and comparisons that are left out, with the reason."""

    @property
    def holds(self) -> bool:
        """Whether every promise holds."""
        return all(way.holds for way in self.ways)

    def check(self) -> None:
        """Raise MismatchError if generation differs from training."""
        failed = [way for way in self.ways if not way.holds]
        if failed:
            first = failed[0]
            raise MismatchError(
                f"generation is not training's forward pass: {first.name} differs in {first.differing:,} of "
                f"{first.tokens:,} tokens, by at most {first.largest:.2e}"
            )


def compare(name: str, logs: Logs, training: Logs, seconds: float | None = None, *, demanded: bool = True) -> Way:
    """Compare log-probabilities by bits. A missing token counts as different, by infinity."""
    differing, largest, count = 0, 0.0, 0
    for prompt_index, wanted in training.items():
        row_logs = logs.get(prompt_index, [])
        padded = [*row_logs, *[math.inf] * len(wanted)][: max(len(wanted), len(row_logs))]
        count += len(wanted)
        for log, expected in zip(padded, [*wanted, *[math.nan] * len(padded)], strict=False):
            differing += log.hex() != expected.hex()
            largest = max(largest, abs(log - expected)) if log == log and expected == expected else math.inf
    return Way(name, count, differing, largest, seconds, demanded)


def verify_generated(config: Config, *, steps: int, tokens: int = TOKENS, report: Report = silent) -> Generated:
    """Train `steps` steps on one device, generate `tokens` tokens in all ways, and compare.

    Args:
        config: The run; dropout is off.
        steps: Number of training steps before generation.
        tokens: Number of generated tokens, over several prompts from the run's data.
        report: Called with lines on the progress.

    Raises:
        ConfigError: The run's generation has no promise of bits (tools/exact.py), or the run cannot start here.
        LaunchError: The caller is itself a rank; or a job failed.
    """
    if joined():
        raise LaunchError("verify starts its own workers: run it outside of torchrun, srun and mpirun")
    require_exact(config, "verify --generate")
    data = config.data.prepare(config, report)
    run_layout, config = config.layout, on_one_device(in_steps(config, data).config, steps)
    with temporary_folder() as folder:
        report(f"one device, {steps} steps", None)
        train(config, folder / "run", resume=False)
        checkpoint = find_checkpoint(folder / "run")
        prompts = prompts_of(config, data, tokens)
        generators = Generators(config, checkpoint, prompts, tokens)
        report(f"{tokens:,} tokens with the cache, {config.bits.samples} rows at once", None)
        rows, batched = generators.first()
        layouts = {name: Layout.model_validate({**words, "transport": "torch"}) for name, words in LAYOUTS.items()}
        # Six layouts: a ring has kernels of runs of queries, and Ulysses is its second where there is none.
        del layouts["Ulysses of 2" if config.bits.attention == "runs" else "ring of 2"]
        if run_layout.world_size > 1:
            layouts["the run's layout"] = run_layout
        trained, notes = dict[str, Logs](), list[str]()
        for name, layout in layouts.items():
            report(f"training's forward pass: {name}", None)
            there = on_layout(config, layout)
            if isinstance(there, str):
                notes.append(f"{name}: {there}")
                continue
            trained[name] = training_logs(there, checkpoint, rows, prompts)
        (base, training), *others = trained.items()
        ways = [compare(f"training, {name}", logs, training) for name, logs in [(base, training), *others]]
        ways.append(compare("cache, batched", batched.logs, training, batched.seconds))
        for cached, alone in ((True, True), (False, False), (False, True)):
            name = f"{'cache' if cached else 'no cache'}, {'alone' if alone else 'batched'}"
            report(name, None)
            again = generators.again(rows, cached=cached, alone=alone)
            ways.append(compare(name, again.logs, training, again.seconds))
        report("usual generate, and transformers", None)
        with few_threads(config):
            usual = usual_logs(config, checkpoint, rows, prompts)
            ways.append(compare("usual generate", usual.logs, training, usual.seconds, demanded=False))
            outcome = transformers_way(generators, rows, folder)
        if isinstance(outcome, str):
            notes.append(f"transformers: {outcome}")
        else:
            ways.append(outcome)
    count = sum(len(row) - len(prompts[prompt_index]) for prompt_index, row in rows.items())
    return Generated(count, len(prompts), steps, config.bits.samples, tuple(ways), tuple(notes))


def on_one_device(config: Config, steps: int) -> Config:
    """Return the run on one device, of `steps` steps without dropout, with a checkpoint after the last one."""
    changes = {"model": config.model.model_copy(update={"dropout": 0.0}), "logging": Logging(level="error"),
               "steps": steps, "layout": Layout(transport="torch"),
               "checkpoint": config.checkpoint.model_copy(update={"every": steps})}  # fmt: skip
    config = with_field(config.model_copy(update=changes), "restarts.times", 0)
    config = with_field(config, "batch.micro", config.bits.samples)
    return with_field(config, "device", resolve(config, this_machine()).config.device)


def on_layout(config: Config, layout: Layout) -> Config | str:
    """Return the run of one device under a layout, with the smallest microbatches; a text if a rule refuses it."""
    micro = config.bits.samples * layout.tensor.rows.parts
    there = config.model_copy(update={"layout": layout, "batch": config.batch.model_copy(update={"micro": micro})})
    problems = broken_rules(there)
    return str(ConfigError(problems)) if problems else there


def prompts_of(config: Config, data: Path, tokens: int) -> Rows:
    """Return the beginnings of training samples, of different lengths, enough for `tokens` tokens."""
    length = chain_of(config).tokens_per_sample(config)
    samples = config.data.open(config, data).train
    prompts, left = dict[int, list[int]](), tokens
    while left > 0:
        prompt_index = len(prompts)
        size = 1 + (3 * prompt_index + 4) % max(1, length // 4)
        prompts[prompt_index] = samples.samples(prompt_index, 1)["tokens"][0, :size].tolist()
        left -= length - size
    return prompts


@dataclass(frozen=True)
class Timed:
    """Log-probabilities by row, and the seconds that they took."""

    logs: Logs
    seconds: float


class Generators:
    """Ways to generate from one checkpoint."""

    def __init__(self, config: Config, checkpoint: Path, prompts: Rows, tokens: int) -> None:
        """Keep the run, its checkpoint, the prompts by number, and the number of new tokens of all rows together."""
        self.config, self.checkpoint, self.prompts = config, Checkpoint(checkpoint), prompts
        self.device, self.left = torch.device(config.device), tokens
        self.grain = config.bits.samples

    def decoder(self, *, cached: bool) -> ExactDecoder:
        """Build a decoder with the checkpoint's weights."""
        return ExactDecoder(self.config, self.device, cached=cached).load(self.checkpoint)

    def first(self) -> tuple[Rows, Timed]:
        """Generate with the cache, a grain of rows at once; return whole rows, and the new tokens' numbers."""
        decoder = self.decoder(cached=True)
        rows, logs, left, start = dict[int, list[int]](), dict[int, list[float]](), self.left, time.perf_counter()
        wanted = {}
        for prompt_index, prompt in self.prompts.items():
            wanted[prompt_index] = min(left, decoder.length - len(prompt))
            left -= wanted[prompt_index]

        for numbers in self.grains():

            def choose(row_index: int, end: int, logits: Tensor, numbers: Sequence[int] = numbers) -> int | None:
                prompt_index = numbers[row_index]
                full = end - len(self.prompts[prompt_index]) >= wanted[prompt_index]
                return None if full else greedy(row_index, end, logits)

            for prompt_index, row in self.run(decoder, numbers, choose).items():
                rows[prompt_index], logs[prompt_index] = [*self.prompts[prompt_index], *row.tokens], row.logs
        return rows, Timed(logs, time.perf_counter() - start)

    def again(self, rows: Rows, *, cached: bool, alone: bool) -> Timed:
        """Generate greedily again. Another token than in `rows` ends the row, and so counts as a difference."""
        decoder, logs = self.decoder(cached=cached), dict[int, list[float]]()
        start = time.perf_counter()
        for grain in self.grains():
            for numbers in [[prompt_index] for prompt_index in grain] if alone else [grain]:

                def choose(row_index: int, end: int, logits: Tensor, grain: Sequence[int] = grain) -> int | None:
                    row = rows[grain[row_index]]
                    return row[end] if end < len(row) and row[end] == greedy(row_index, end, logits) else None

                for prompt_index, row in self.run(decoder, numbers, choose).items():
                    logs[prompt_index] = row.logs
        return Timed(logs, time.perf_counter() - start)

    def grains(self) -> list[list[int]]:
        """Return the numbers of the rows of each grain; row r is row r % grain of a grain, as in training."""
        every = [*self.prompts]
        return [every[start : start + self.grain] for start in range(0, len(every), self.grain)]

    def run(self, decoder: ExactDecoder, numbers: Sequence[int], choose: Choose) -> dict[int, Continued]:
        """Continue the prompts of some rows of one grain up to the end of the sequence."""
        found = decoder.continued(
            {prompt_index % self.grain: self.prompts[prompt_index] for prompt_index in numbers}, choose
        )
        return {prompt_index: found[prompt_index % self.grain] for prompt_index in numbers}


def batch_of(config: Config, rows: Rows, numbers: Sequence[int], prompts: Rows) -> Batch:
    """Return a training batch of rows [B, T], and as `places` the number of each label: row · T + position, or -1.

    As in training on texts every position has a label; `places` numbers the labels that are new tokens.
    """
    length = chain_of(config).tokens_per_sample(config)
    tokens, places = torch.zeros(len(numbers), length + 1, dtype=torch.long), torch.full((len(numbers), length), -1)
    for row_index, prompt_index in enumerate(numbers):
        row = rows.get(prompt_index)
        if row is None:
            continue  # the last batch may have rows of zeros
        tokens[row_index, : len(row)] = torch.tensor(row, dtype=torch.long)
        new = torch.arange(len(prompts[prompt_index]) - 1, len(row) - 1)
        places[row_index, new] = prompt_index * length + new
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "places": places}
    if "documents" in chain_of(config).sample_shapes(config):
        batch["documents"] = torch.zeros_like(places)
        batch["positions"] = torch.arange(length).expand_as(places).contiguous()
    return batch


def training_logs(config: Config, checkpoint: Path, rows: Rows, prompts: Rows) -> Logs:
    """Compute the log-probabilities of new tokens by training's forward pass on the config's ranks."""
    known = resolve(config, this_machine()).config
    given = {"rows": {str(prompt_index): row for prompt_index, row in rows.items()},
             "prompts": {str(prompt_index): row for prompt_index, row in prompts.items()}}  # fmt: skip
    length, found = chain_of(config).tokens_per_sample(config), dict[int, float]()
    for losses in run(WORKER, known.ranks(), config=known, checkpoint=checkpoint, given=given):
        for name, loss in losses.items():
            label_index = int(name)
            value = float.fromhex(loss)
            # Ranks that compute the same token must agree; NaN marks the token as different from everything.
            found[label_index] = value if found.get(label_index, value).hex() == value.hex() else math.nan
    return {
        prompt_index: [
            -found.get(prompt_index * length + at, math.nan)
            for at in range(len(prompts[prompt_index]) - 1, len(row) - 1)
        ]
        for prompt_index, row in rows.items()
    }


def score_rank(rank: Rank, config: Config, checkpoint: Path, given: dict[str, dict[str, list[int]]]) -> dict[str, str]:
    """Run training's forward and backward pass on rows; return this rank's losses, by place in all rows, in hex."""
    rows, prompts = ({int(index): row for index, row in given[name].items()} for name in ("rows", "prompts"))
    parts = build(config, rank.mesh)
    restore(parts, Checkpoint(checkpoint))
    # Heads with equal bits; a stage without a head has none.
    heads: list[Any] = [module for module in parts.model.modules() if hasattr(module, "observed")]
    size, losses = config.batch.global_, dict[str, str]()
    for first in range(0, len(rows), size):
        batch = batch_of(config, rows, range(first, first + size), prompts)
        share = replica_batch(parts, batch, 0).rows
        assert parts.portions is not None, "a run with equal bits has grains"
        grains = [grain for micro in parts.microbatches(share) for grain, _ in parts.portions.of(micro, ())]
        observed = [head.observe() for head in heads]
        del batch["places"]
        backward(parts, batch, 0)
        parts.strategy.finish()
        publish(parts)
        for labels, values in (pair for pairs in observed for pair in pairs):
            # A schedule may run microbatches in another order; grains are found by their labels.
            index = next(at for at, grain in enumerate(grains) if torch.equal(grain["labels"], labels))
            places = grains.pop(index)["places"]
            for label_index, loss in zip(places[places >= 0].tolist(), values[places >= 0].tolist(), strict=True):
                losses[str(label_index)] = loss.hex()
    return losses


@torch.inference_mode()
def usual_logs(config: Config, checkpoint: Path, rows: Rows, prompts: Rows) -> Timed:
    """Compute the log-probabilities of the same tokens as `meshwright generate` does, token by token with its cache."""
    loaded, logs, start = load_model(checkpoint, config.device, "tokens"), dict[int, list[float]](), time.perf_counter()
    for prompt_index, row in rows.items():
        cache, fresh, row_logs = KeyValueCache(), prompts[prompt_index], list[float]()
        for token in row[len(prompts[prompt_index]) :]:
            h = loaded.model.hidden(torch.tensor([fresh], device=loaded.device), cache)
            row_logs.append(float(loaded.head.logits(h[0, -1]).log_softmax(-1)[token]))
            fresh = [token]
        logs[prompt_index] = row_logs
    return Timed(logs, time.perf_counter() - start)


def transformers_way(generators: Generators, rows: Rows, folder: Path) -> Way | str:
    """Compare greedy tokens and logits with the exported weights in transformers, in float32; a text if impossible."""
    family = generators.config.model.family
    if find_spec("transformers") is None:
        return "is not installed: pip install 'meshwright[hf]'"
    if family not in families():
        return f"has no class for model.family={family}"
    from transformers import AutoModelForCausalLM

    export_folder(folder / "run", folder / "exported", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32).eval()
    decoder = generators.decoder(cached=True)
    differing, largest, count = 0, 0.0, 0
    for grain in generators.grains():
        with torch.no_grad():
            wanted = {prompt_index: theirs(torch.tensor([rows[prompt_index]])).logits[0] for prompt_index in grain}

        def choose(row_index: int, end: int, logits: Tensor) -> int | None:
            nonlocal differing, largest, count
            row, target = rows[grain[row_index]], wanted[grain[row_index]]  # noqa: B023  # called before the next grain
            if end >= len(row):
                return None
            row_logits, count = logits.cpu(), count + 1
            differing += int(row_logits.argmax()) != int(target[end - 1].argmax())
            largest = max(largest, float((row_logits - target[end - 1][: len(row_logits)]).abs().max()))
            return row[end]

        generators.run(decoder, grain, choose)
    return Way("transformers, float32: tokens, logits", count, differing, largest)
