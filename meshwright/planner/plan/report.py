"""Reports of a search: tables for a terminal, plain values for a script, a run file that `train` takes, a timeline."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, cast

from rich.table import Column, Table

from meshwright.compute.models.chain import chain_of
from meshwright.config import Config, dump_tree, run_text
from meshwright.config.registry import entries
from meshwright.config.yaml_text import yaml_text
from meshwright.output import terminal
from meshwright.output.drawing import require_matplotlib
from meshwright.output.outputs import new_path, refuse_existing
from meshwright.output.tables import print_table
from meshwright.planner.foreign.words import foreign_words
from meshwright.planner.plan.answer import (
    NO_DIFFERENCE,
    Training,
    alike_sentence,
    answer,
    is_difference,
    seconds_text,
    sureness,
    tight_sentence,
)
from meshwright.planner.plan.evaluator import RunnerUp
from meshwright.planner.plan.fp8 import width_sentence
from meshwright.planner.plan.logits import FIELD as LOGITS
from meshwright.planner.plan.memory import CONTEXT, bytes_text, missing, verdict
from meshwright.planner.plan.predict import Prediction
from meshwright.planner.plan.search import SearchResult, layout_text
from meshwright.planner.plan.software import OWN, OWN_SOFTWARE
from meshwright.planner.plan.space import CHOICES, is_fixed
from meshwright.planner.plan.timing import Timer
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.streams import PatientStream, say
from meshwright.strategies.pipeline.trace import write_trace
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PASSES, PHASES
from meshwright.training.pictures import draw_timelines

STOPPED = "stopped by Ctrl-C or SIGTERM: there may be faster ones among those that were not predicted"

NOT_LOOKED_AT = "not looked at (stopped)"

_WIDTH = 120
"""Columns of a table if the output is no terminal."""


@dataclass
class BestSoFar:
    """Prints a line on stderr for the first layout that fits, and for each faster one that a search finds."""

    _start: float = field(default_factory=time.monotonic)

    def __call__(self, best: Prediction) -> None:
        """`3 s: so far data 64 (zero2); micro 1: 7.09 s a step, 70.36 GB of 85.52 GB (fits).`"""
        seconds = time.monotonic() - self._start
        told = answer(best, layout_text(best.config), Training())
        # sys.stderr is read at each call: a progress bar replaces the stream by one that prints above the bar.
        say(f"{seconds:.0f} s: so far {told}", file=cast(TextIO, PatientStream(cast(TextIO, sys.stderr))), flush=True)


def checked_output(out: Path | None, page: Path | None, trace: Path | None) -> Path:
    """Return the run file to write, by default a new one.

    Raises:
        ConfigError: The run file or the page exists.
        PictureError: A trace is asked for without matplotlib.
    """
    refuse_existing("--out", out)
    refuse_existing("--page", page)
    if trace is not None:
        require_matplotlib("--trace")
    return out or new_path(Path("plan.yaml"))


def write_run(best: Prediction, path: Path) -> None:
    """Write the run with the predicted layout, `auto` fields decided.

    Raises:
        ConfigError: The file cannot be written.
    """
    head = (
        f"# {layout_text(best.config)}\n"
        f"# predicted on {best.config.layout.world_size} devices of {best.cluster.name}: {seconds_text(best.seconds)} "
        f"a step, {bytes_text(best.worst_memory)} of {bytes_text(best.cluster.device.memory_bytes)} "
        f"({verdict(best.fullest, best.cluster)})\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run_text(best.config, head), encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--out", path, f"cannot be written ({error.strerror})", "a path that can") from error


def write_timeline(best: Prediction, path: Path) -> Path:
    """Write the step's timeline for Perfetto and, next to it, as a PNG. Return the PNG's path."""
    write_trace(best.timeline, path)
    picture = path.with_suffix(".png")
    draw_timelines({layout_text(best.config): best.timeline}, picture)
    return picture


def as_dict(result: SearchResult) -> dict[str, Any]:
    """Return the search as plain values for a script. Units: seconds, bytes, floating-point operations a second a
    device."""
    best, job = result.predictions[0], result.job
    training = result.training
    runner_ups = [
        {
            "strategy": runner_up.strategy,
            "layout": layout_text(runner_up.config),
            "seconds": None if runner_up.prediction is None else runner_up.prediction.seconds,
            "memory": runner_up.memory.parts,
            "held": runner_up.memory.held if runner_up.prediction else None,
            "why": why(runner_up, best),
            "config": _decided(runner_up.config),
        }
        for runner_up in result.runner_ups
    ]
    return {
        "cluster": job.cluster.name,
        "devices": job.devices,
        "answer": answer(best, layout_text(best.config), result.training),
        "sure": sureness(job.cluster, best.config.model.hidden),
        "training_seconds": training.seconds(best),
        "dollars": training.dollars(best),
        "words": words_to_paste(best.config, job.run),
        "program": result.program and result.program.name,
        "facts": result.program and result.program.software.model_dump(mode="json"),
        "words_of_program": words_of(result),
        "from": result.foreign and account_of(result),
        "changes": {change.what: change.seconds for change in result.changes},
        "stopped": result.stopped,
        "left_share": result.left_share,
        "counts": asdict(result.counts),
        "layouts": [
            figures_of(prediction) | {"config": _decided(prediction.config)} for prediction in result.predictions
        ],
        "tight": [figures_of(prediction) | {"config": _decided(prediction.config)} for prediction in result.tight],
        "losers": runner_ups,
        "not_looked_at": list(result.not_reached),
        "absent": {tensor_kind: str(problem) for tensor_kind, problem in result.illegal.items()},
    }


def render(result: SearchResult) -> None:
    """Print the answer, the error and the changes that would alter the answer; then the fastest layouts and the other
    strategies."""
    console = terminal.console(width=None if sys.stdout.isatty() else _WIDTH)
    best = result.predictions[0]
    if result.foreign is not None:
        columns = account_of(result)
        assumed = [f"{name}: {each['is']} ({each['by']})" for name, each in columns["assumed"].items()]
        read, left_out = ([f"{name}: {value}" for name, value in columns[key].items()] for key in ("read", "left_out"))
        table = Table("read", "assumed", "left out", title="the file")
        for row in zip_longest(read, assumed, left_out, fillvalue=""):
            table.add_row(*row)
        print_table(console, table)
    for sentence in plan_sentences(result):
        console.print(sentence)
    console.print()
    print_table(console, _fastest(result))
    print_table(console, _memory(result))
    if result.runner_ups or result.not_reached:
        print_table(console, _runner_ups(result))
    for tensor_kind, problem in result.illegal.items():
        console.print(f"no legal layout of kind {tensor_kind}: {problem}")
    console.print(looked_at(result))
    if result.program and (theirs := words_of(result)):
        console.print(f"the first, in the words of {result.program.title}:")
        say(theirs)
    if words := words_to_paste(best.config, result.job.run):
        console.print("the first, in words behind any command on this run:")
        say(words)  # one line, to paste


def words_of(result: SearchResult) -> str | None:
    """Return the best layout as options of the program that was asked for; None if its options are not known."""
    form = None if result.foreign is None else result.foreign.form
    return foreign_words(result.program, result.predictions[0].config, form) if result.program else None


def account_of(result: SearchResult) -> dict[str, Any]:
    """Return the fields read from another program's file, assumed and left out, and the figures of the file's own
    layout."""
    assert result.foreign is not None
    account, written = result.foreign.account, result.written
    return {
        "read": account.read,
        "assumed": {name: {"is": value, "by": why} for name, (value, why) in account.assumed.items()},
        "left_out": account.left_out,
        "written": figures_of(written) if isinstance(written, Prediction) else {"error": written},
    }


def plan_sentences(result: SearchResult) -> list[str]:
    """Return the answer, the error, and the changes that would alter the answer, a sentence each."""
    job, best = result.job, result.predictions[0]
    said = [answer(best, layout_text(best.config), result.training)]
    if result.program is not None and result.program.name != OWN:
        said.append(f"As {result.program.title} runs it: {len(result.program.sources)} facts that are not ours.")
    if isinstance(result.written, Prediction):
        written = result.written
        said.append(f"As the file has it: {answer(written, layout_text(written.config), result.training)}")
    elif result.written is not None:
        said.append(f"As the file has it: no prediction: {result.written}")
    if result.stopped:
        said += [STOPPED, f"{result.left_share:.0%} of the families of layouts were not looked at."]
    if result.tight:
        said.append(tight_sentence(result.tight[0], best, layout_text(result.tight[0].config)))
    fastest = result.fastest
    if fastest.seconds < best.seconds:
        gain = 1 - fastest.seconds / best.seconds
        said.append(
            f"The first is the simplest; the fastest predicted, {layout_text(fastest.config)}, takes {gain:.1%} less."
        )
    if (alike := alike_sentence(result.predictions)) is not None:
        said.append(alike)
    said.append(sureness(job.cluster, best.config.model.hidden))
    for change in result.changes:
        share = change.seconds / best.seconds - 1
        # Below half a percent, a rounded figure would print +0 %.
        told = "as long" if abs(share) < 0.005 else f"{share:+.0%}"
        said.append(f"With {change.what}: {seconds_text(change.seconds)} ({told}).")
    if best.reference_seconds is not None:
        pass_text = (
            f"about {seconds_text(best.reference_seconds)} for each {best.config.batch.global_} pairs of the data"
        )
        said.append(f"Once, before the first step: {pass_text}, whose log-probabilities are the reference of the loss.")
    if best.config.precision.in_fp8:
        tokens = best.config.micro * chain_of(best.config).tokens_per_sample(best.config)
        software = OWN_SOFTWARE if result.program is None else result.program.software
        fused = software.fuses(best.config, job.cluster.device.kind)
        said.append(width_sentence(Timer(job.cluster, 1), tokens, fused=fused))
    if result.nearly_fits is not None:
        seconds, config, memory = result.nearly_fits
        more = bytes_text(memory.total - job.cluster.device.memory_bytes)
        about = f"{layout_text(config)} would fit, and take about {seconds_text(seconds)}"
        said.append(f"With {more} more a device: {about}.")
    return said


def looked_at(result: SearchResult) -> str:
    """Return the number of legal layouts, and the number discarded for each reason."""
    job, counts = result.job, result.counts
    nodes = result.predictions[0].config.layout.ranks_per_node
    return (
        f"{job.devices} devices of {job.cluster.name} ({nodes} of a node's {job.cluster.devices_per_node}), a step of "
        f"{job.run.batch.global_} samples. {counts.legal:,} legal layouts: {counts.too_full:,} too full with weights, "
        f"gradients and states alone, {counts.unfit:,} with all else; {counts.too_slow:,} too slow by their estimates, "
        f"{counts.dominated:,} recompute, offload or slice for nothing; {counts.predicted:,} predicted"
    )


def figures_of(prediction: Prediction) -> dict[str, Any]:
    """Return a layout's figures. Operations are the model's products; recomputation does not count."""
    config, family = prediction.config, chain_of(prediction.config)
    samples_per_second = config.batch.global_ / prediction.seconds
    # Recomputation is left out, as in the MFU of papers.
    flops = family.flops_per_sample(config) * samples_per_second / config.layout.world_size
    peak = prediction.cluster.device.peak_of(config.precision.dtype, tf32=config.precision.tf32)
    assert peak is not None, f"{config.precision.dtype} was predicted without a peak"
    return {
        "layout": layout_text(config),
        "seconds": prediction.seconds,
        "tokens_per_second": family.tokens_per_sample(config) * samples_per_second,
        "flops_per_device": flops,
        "peak_share": flops / peak,
        "idle_share": prediction.idle_share,
        "phases": prediction.phases,
        "reference_seconds": prediction.reference_seconds,
        "memory": prediction.fullest.parts,
        "held": prediction.fullest.held,
        "host_memory": prediction.fullest.host,
        "verdict": verdict(prediction.fullest, prediction.cluster),
    }


def _fastest(result: SearchResult) -> Table:
    table = Table(
        "", Column("layout", overflow="fold"), Column("step", justify="right"), Column("tokens/s", justify="right"),
        Column("of\npeak", justify="right"), Column("idle in\npipeline", justify="right"),
        Column("memory", justify="right"), "",
        title="The fastest that fit, and faster ones that are tight (predicted)",
    )  # fmt: skip
    for position, prediction in (*enumerate(result.predictions, 1), *(("", prediction) for prediction in result.tight)):
        figures, memory = figures_of(prediction), prediction.fullest
        table.add_row(
            str(position), figures["layout"], seconds_text(prediction.seconds), f"{figures['tokens_per_second']:,.0f}",
            f"{figures['peak_share']:.1%}",
            f"{prediction.idle_share:.1%}" if prediction.config.layout.pipeline.size > 1 else "-",
            bytes_text(memory.total), figures["verdict"],
        )  # fmt: skip
    return table


def _memory(result: SearchResult) -> Table:
    """Build the table of the fullest rank's memory by part: allocated and reserved as torch counts them, then the rest
    of the process."""
    shown = (*result.predictions, *result.tight)
    table = Table(
        "bytes of the fullest rank", *(Column(str(position), justify="right") for position in range(1, len(shown) + 1)),
        title="What the memory of these layouts is made of",
    )  # fmt: skip
    parts = [prediction.fullest.parts for prediction in shown]
    sums = {
        "cached": (
            "allocated (torch.cuda.max_memory_allocated)",
            [prediction.fullest.allocated for prediction in shown],
        ),
        "context": ("reserved (torch.cuda.max_memory_reserved)", [prediction.fullest.reserved for prediction in shown]),
    }
    # A sum follows its parts: torch's allocations, then the allocator's cache, then the rest of the process.
    order = [category for category in parts[0] if category not in ("cached", "context", "communicators")]
    for category in (*order, "cached", "context", "communicators"):
        if category in sums:
            name, sizes = sums[category]
            table.add_row(name, *map(bytes_text, sizes), style="bold")
        table.add_row(
            f"  {CONTEXT if category == 'context' else category}", *(bytes_text(each[category]) for each in parts)
        )
    table.add_row(
        "what its process holds", *(bytes_text(prediction.worst_memory) for prediction in shown), style="bold"
    )
    if any(prediction.fullest.host for prediction in shown):
        table.add_row("in host memory, beside it", *(bytes_text(prediction.fullest.host) for prediction in shown))
    return table


def _runner_ups(result: SearchResult) -> Table:
    table = Table(
        "strategy", Column("its best", overflow="fold"), Column("step", justify="right"),
        Column("why", overflow="fold"),
        title="The best of each other strategy, and why it loses",
    )  # fmt: skip
    for runner_up in result.runner_ups:
        seconds = "-" if runner_up.prediction is None else seconds_text(runner_up.prediction.seconds)
        named = strategy_text(runner_up.strategy)
        table.add_row(named, layout_text(runner_up.config), seconds, why(runner_up, result.predictions[0]))
    for strategy in result.not_reached:
        table.add_row(strategy_text(strategy), "-", "-", NOT_LOOKED_AT)
    return table


def strategy_text(strategy: str) -> str:
    """Return `zero3 (as FSDP)`: the strategy, with its common name."""
    sync = entries("syncs").get(strategy)
    return f"{strategy} (as {sync.like})" if sync is not None and sync.like else strategy


_PHASE_WORDS = {
    PASSES: "forward and backward", DATA_PARALLEL: "waits for gradients' sums", OPTIMIZER: "the optimizer's step",
}  # fmt: skip


def why(runner_up: RunnerUp, best: Prediction) -> str:
    """Return the reason why a strategy loses: `does not fit: ...`, with its largest part; or `1.30 x as long: most in
    forward and backward, ...`."""
    if runner_up.prediction is None:
        parts = runner_up.memory.parts
        # The largest part is named, since a change of it helps most.
        most = max(parts, key=lambda category: parts[category])
        alone = "" if runner_up.whole else " before it computes anything"
        if runner_up.memory.total <= best.cluster.device.memory_bytes:
            return f"does not fit: {missing(runner_up.memory, best.cluster)}"
        device = bytes_text(best.cluster.device.memory_bytes)
        needs = f"{bytes_text(runner_up.memory.total)} of {device}{alone}"
        return f"does not fit: {needs}, most for {most} ({bytes_text(parts[most])})"
    prediction = runner_up.prediction
    share = prediction.seconds / best.seconds
    told = f"{share:.2f} x as long"
    if verdict(prediction.fullest, prediction.cluster) != verdict(best.fullest, best.cluster):
        told = f"{verdict(prediction.fullest, prediction.cluster)} ({bytes_text(prediction.worst_memory)}); {told}"
    if not is_difference(share - 1, best.cluster):
        return f"{told}, {NO_DIFFERENCE}"
    # The reason is the phase whose seconds differ most between the two steps.
    later = {phase: prediction.phases.get(phase, 0.0) - best.phases.get(phase, 0.0) for phase in PHASES}
    phase = max(later, key=lambda name: later[name])
    stages = runner_up.config.layout.pipeline.size > 1
    activity = "forward and backward through stages" if stages and phase == PASSES else _PHASE_WORDS[phase]
    idle = f", idle {prediction.idle_share:.1%} of it" if stages else ""
    return f"{told}: most in {activity}, {seconds_text(later[phase])} more{idle}" if later[phase] > 0 else told


def _decided(config: Config) -> dict[str, Any]:
    """Return the sections that the planner decides."""
    tree = dump_tree(config)
    return {section: tree[section] for section in ("layout", "batch", "memory")}


def words_to_paste(best: Config, run: Config) -> str:
    """Return `layout.data.size=64 layout.data.sync=zero3 batch.micro=1`: each field that differs from the run, as words
    for a command line."""
    fields = [*(choice.field for choice in CHOICES), "layout.data.exchange", LOGITS]
    before = dict(_leaves("", run.model_dump(mode="json", by_alias=True)))
    after = {name: value for name, value in _leaves("", dump_tree(best)) if is_fixed(name, fields)}
    words = []
    for name, value in after.items():
        if name not in before or before[name] != value:
            # YAML in one word, without the "..." that ends a document of one scalar.
            flow = yaml_text(value, flow=True).removesuffix("\n").removesuffix("...")
            words.append(shlex.quote(f"{name}={flow.strip().replace(', ', ',')}"))
    return " ".join(words)


def _leaves(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, tree
