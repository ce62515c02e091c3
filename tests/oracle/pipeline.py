"""Configs of stages, schedules and chunks, and the serial reference of a model."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.config import Config, parse_config
from tests.oracle.run import run
from tests.oracle.tensor import config_for

SCHEDULES = ("gpipe", "1f1b", "axonn", "message-driven")

WHOLE = {"kind": "none"}

LAYERS = {"gpt2": 4, "untied": 4, "bert": 3, "megatron-bert": 3, "vit": 3}

LOOP, LOOP_OF_THREE, V = {"chunks": 2}, {"chunks": 3}, {"chunks": 2, "placement": "v"}


def pipelined(
    model: str,
    stages: int,
    schedule: str,
    tensor: dict[str, Any],
    data: int = 1,
    placed: dict[str, Any] | None = None,
    **changes: Any,
) -> Config:
    """Return a run of four microbatches a replica. `placed`: chunks and placement."""
    config = config_for(model, tensor, data, **({"steps": 3, "batch": {"global": 24, "micro": 6 // data}} | changes))
    layout = config.layout.model_dump() | {"pipeline": {"size": stages, "schedule": schedule} | (placed or {})}
    tree = config.model_dump(mode="json", by_alias=True) | {"layout": layout}
    tree["model"]["layers"] = LAYERS[model]
    return Config.model_validate(tree)


@cache
def serial(model: str, **changes: Any) -> Any:
    return run(pipelined(model, 1, "gpipe", WHOLE, **changes))[0]


CHUNKED: list[tuple[int, str, dict[str, Any]]] = [
    (2, "1f1b", LOOP),
    (2, "1f1b", LOOP_OF_THREE),
    (3, "1f1b", LOOP),
    (2, "message-driven", LOOP_OF_THREE),
    (3, "message-driven", LOOP),
    (2, "message-driven", V),
    (3, "message-driven", V),
    (2, "message-driven", V | {"chunks": 3}),
    (2, "gpipe", V),
]


def laid_out(config: Config, **changes: dict[str, Any]) -> Config:
    """Return the config with other settings of axes, each under the axis's name: pipeline, data, context."""
    tree = config.model_dump(mode="json", by_alias=True)
    for axis, settings in changes.items():
        tree["layout"][axis] |= settings
    return parse_config(tree)
