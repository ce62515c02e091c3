"""What `meshwright plan` leaves: a run file that `train` takes, and the timeline of its step."""

from __future__ import annotations

from pathlib import Path

from meshwright.config import dump_config
from meshwright.errors import ConfigError
from meshwright.pipeline.trace import write_trace
from meshwright.plan.predict import Prediction
from meshwright.plan.text import layout_text, seconds_text
from meshwright.report.timeline import draw_timelines


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
