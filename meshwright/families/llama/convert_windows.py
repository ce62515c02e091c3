"""Windows of attention in config.json, and in our section.

| model_type                     | layers with a window of `sliding_window` tokens                                     |
|--------------------------------|-------------------------------------------------------------------------------------|
| mistral, mixtral, qwen3_moe    | all; qwen3_moe: if use_sliding_window                                               |
| qwen2, qwen3                   | if use_sliding_window: `layer_types`, else the layers from max_window_layers on     |
| qwen2_moe                      | if use_sliding_window: `layer_types`, else the even layers before max_window_layers |
"""

from __future__ import annotations

from meshwright.config.section import shown
from meshwright.families.llama.section import Llama
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.folder import Settings

SLIDING, FULL = "sliding_attention", "full_attention"
EVERY = ("mistral", "mixtral", "qwen3_moe")
"""The model_types with one kind of layers."""
SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""The model_types that read `use_sliding_window`, false by default."""
USUAL = {"mixtral": None}
"""The window of a folder without the key, by model_type, if it is not 4,096 tokens."""


def window_fields(settings: Settings) -> dict[str, object]:
    """Read our fields of windows. Raises CheckpointError for settings that the folder's class does not read."""
    values, kind = settings.values, settings.values["model_type"]
    if kind not in EVERY + SWITCHED:
        settings.only("use_sliding_window", None, False)
        others = [layer for layer in values.get("layer_types") or [] if layer != FULL]
        if others:
            raise settings.refused(f"layer_types has {shown(others[0])}, which a {kind} has not; valid: {FULL}")
        return {}
    layers, types = values.get("num_hidden_layers"), values.get("layer_types")
    if types is not None and (kind in EVERY or not isinstance(types, list) or len(types) != layers):
        given, valid = shown(types), "null" if kind in EVERY else f"a list of {shown(layers)} of {FULL}, {SLIDING}"
        raise settings.refused(f"layer_types={given} is not supported; valid: {valid}")
    for layer_type in types or ():
        if layer_type not in (FULL, SLIDING):
            raise settings.refused(
                f"layer_types has {shown(layer_type)}, which is not supported; valid: {FULL}, {SLIDING}"
            )
    if kind in SWITCHED:
        settings.only("use_sliding_window", False, True)
    slides = kind not in SWITCHED or values.get("use_sliding_window", False)
    window = values.get("sliding_window", USUAL.get(kind, 4096)) if slides else None
    if window is None:
        if types is not None and SLIDING in types:
            raise settings.refused(
                f"layer_types has {SLIDING}, and there is no window: sliding_window, use_sliding_window"
            )
        return {}
    if not isinstance(window, int) or window < 1:
        raise settings.refused(f"sliding_window={shown(window)} is no number of tokens; valid: null, or 1 or more")
    if kind in EVERY:
        return {"window": window}
    first = values.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise settings.refused(f"max_window_layers={shown(first)} is no number of layers")
    numbers = range(layers if isinstance(layers, int) else 0)
    windowed = [
        types[layer] == SLIDING if types is not None
        else layer < first and layer % 2 == 0 if kind == "qwen2_moe"
        else layer >= first
        for layer in numbers
    ]  # fmt: skip
    return pattern_fields(window, windowed)


def pattern_fields(window: int | None, windowed: list[bool]) -> dict[str, object]:
    """Return our fields of a window in some layers."""
    if window is None or not any(windowed):
        return {}
    return {"window": window, "window_layers": () if all(windowed) else shortest(windowed)}


def shortest(layers: list[bool]) -> tuple[bool, ...]:
    """Return the shortest pattern that is repeated over these layers."""
    sizes = range(1, len(layers) + 1)
    size = next(size for size in sizes if all(layers[i] == layers[i % size] for i in range(len(layers))))
    return tuple(layers[:size])


def window_settings(model: Llama, kind: str) -> dict[str, object]:
    """Return transformers' settings of a model's windows.

    Raises CheckpointError if the class has windows in all layers or in none.
    """
    windows = [model.window_of(layer) for layer in range(model.layers)]
    settings: dict[str, object] = {"sliding_window": model.window}
    if kind in EVERY:
        if None in windows and model.window is not None:
            rule = f"no class of transformers has {kind}'s layers with windows in some"
            raise CheckpointError(f"{rule}: model.window_layers={shown(model.window_layers)}; valid: []")
        return settings | ({"use_sliding_window": model.window is not None} if kind in SWITCHED else {})
    if kind not in SWITCHED:
        return {}
    types = [FULL if window is None else SLIDING for window in windows]
    # Older versions read no `layer_types`, and compute them from the first layer with a window.
    first = types.index(SLIDING) if SLIDING in types else model.layers
    return settings | {"use_sliding_window": SLIDING in types, "max_window_layers": first, "layer_types": types}
