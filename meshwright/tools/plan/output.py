"""What `meshwright plan` leaves: a run file that `train` takes, and the timeline of its step.

Layouts, memory and rates in words.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from meshwright.config import Config, dump_config
from meshwright.errors import ConfigError
from meshwright.pipeline.trace import write_trace
from meshwright.tools.plan.predict import Memory, Prediction
from meshwright.train.timeline import draw_timelines


def parts_text(memory: Memory) -> str:
    """`weights 1.20 GB, gradients 1.20 GB, ...`: the parts that there are."""
    return ", ".join(f"{part} {held / 1e9:.2f} GB" for part, held in asdict(memory).items() if held)


def layout_text(config: Config) -> str:
    """`megatron, cut by sequence: data 4 (zero1), pipe 2 (1f1b), tensor 2; micro 4, recompute auto, offload host`."""
    memory, limit = config.memory, config.layout.pipeline.limit
    words = [f"micro {config.micro}"]
    words += [f"limit {limit}"] * (limit != "auto")
    words += [f"recompute {memory.recompute}"] * (memory.recompute != "none")
    words += [f"offload {memory.offload.to}"] * (memory.offload.to != "none")
    kind = config.layout.tensor.words
    return f"{f'{kind}: ' if kind else ''}{config.layout.summary}; {', '.join(words)}"


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `4.56 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def rate_text(flops: float) -> str:
    """`41.2 T`: floating-point operations a second."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= size:
            return f"{flops / size:.1f} {unit}"
    return f"{flops / 1e6:.1f} M"


def check_new(path: Path) -> None:
    """Raises ConfigError where a file is there already: what somebody has planned, or written, is not replaced."""
    if path.exists():
        raise ConfigError.of("--out", path, "is there already", "another file, or remove it")


def write_run(made: Prediction, path: Path) -> None:
    """The run with the layout, its decisions taken as they were predicted. Raises ConfigError where it cannot be."""
    head = (
        f"# {layout_text(made.config)}\n"
        f"# predicted on {made.config.layout.world_size} devices of {made.cluster.name}: {seconds_text(made.seconds)} "
        f"a step, {made.worst_memory / 1e9:.2f} GB of {made.cluster.device.memory / 1e9:.2f}\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + dump_config(made.config), encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--out", path, f"cannot be written ({error.strerror})", "a path that can") from error


def write_timeline(made: Prediction, path: Path) -> Path:
    """For Perfetto, and beside it as a picture, whose path it gives."""
    write_trace(made.timeline, path)
    picture = path.with_suffix(".png")
    draw_timelines({layout_text(made.config): made.timeline}, picture)
    return picture
