"""The run that a search is asked about, from a file or from a model's name, and the words that make its answer of it.

Only shapes matter to a plan: neither corpus nor tokenizer need be on this machine.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from meshwright.config import Config, dump_tree
from meshwright.config.load import DECIDED, ELSEWHERE, load_undecided, parse_run
from meshwright.data.files import ShowProgress
from meshwright.errors import ConfigError
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.space import CHOICES, is_fixed


@dataclass(frozen=True)
class NamedRun:
    """A run without a file: a model's name, tokens of a sequence (None: the model reads no text), samples a step."""

    model: str | None = None
    sequence: int | None = None
    batch: int | None = None

    @property
    def given(self) -> dict[str, object]:
        """The options that were given, by name."""
        options = {"--model": self.model, "--sequence": self.sequence, "--batch": self.batch}
        return {name: value for name, value in options.items() if value is not None}

    def config(self, words: Sequence[str], cluster: Cluster) -> Config:
        """In bf16 where the cluster's devices are GPUs, as large models are trained. Raises ConfigError."""
        if self.batch is None:
            raise ConfigError.of("--batch", "nothing", "is given: a plan is of a step", "samples a step, such as 512")
        data = {} if self.sequence is None else {"sequence": self.sequence}
        precision = "bf16" if cluster.device.kind == "cuda" else "float32"
        tree = {"model": self.model, "data": data, "batch": {"global": self.batch}, "precision": precision}
        return parse_run(tree, words, undecided=DECIDED, unread=ELSEWHERE)


def planned_run(run: Path | None, named: NamedRun, words: Sequence[str], cluster: Cluster) -> tuple[Config, list[str]]:
    """The run that is asked about, and the `key=value` words. Raises ConfigError where both or neither are given."""
    words = list(words)
    if named.given and run is not None and "=" in str(run):  # the first word stands where a run file would
        run, words = None, [str(run), *words]
    if run is not None and named.given:
        option, value = next(iter(named.given.items()))
        raise ConfigError.of(option, value, f"has no effect beside the run file {run}", "one of them")
    if run is None and named.model is None:
        raise ConfigError.of("run", "nothing", "is given", "RUN.yaml, or --model NAME --sequence N --batch N")
    if run is None:
        return named.config(words, cluster), words
    # What the run's data reads need not be here: only shapes matter to a plan.
    return load_undecided(run, words, elsewhere=True), words


def words_to_paste(best: Config, run: Config) -> str:
    """`layout.data.size=64 layout.data.sync=zero3 batch.micro=1`: the fields of the space in which a layout is another
    than the run's, as words behind a command."""
    fields = [choice.field for choice in CHOICES]
    before = dict(_leaves("", run.model_dump(mode="json", by_alias=True)))
    after = {name: value for name, value in _leaves("", dump_tree(best)) if is_fixed(name, fields)}
    words = []
    for name, value in after.items():
        if name not in before or before[name] != value:
            # YAML in one word, without the "..." that ends a plain scalar's document.
            flow = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("...")
            words.append(shlex.quote(f"{name}={flow.strip().replace(', ', ',')}"))
    return " ".join(words)


def _leaves(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, tree


@contextmanager
def stopped_by_signals(report: ShowProgress) -> Iterator[ShowProgress]:
    """While entered, Ctrl-C and SIGTERM are a KeyboardInterrupt, also where a shell that started this in the background
    had Ctrl-C ignored. One that comes where Python drops exceptions is raised by the next report."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    def tell(text: str, share: float | None) -> None:
        if asked:
            raise KeyboardInterrupt
        report(text, share)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield tell
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
