"""Layers of several kinds in config.json, and in our section: windows, and layers without rotary positions.

| model_type                     | layers with a window of `sliding_window` tokens                                     |
|--------------------------------|-------------------------------------------------------------------------------------|
| mistral, mixtral, phi3         | all                                                                                 |
| qwen3_moe                      | all, if use_sliding_window                                                          |
| qwen2, qwen3                   | if use_sliding_window: `layer_types`, else the layers from max_window_layers on     |
| qwen2_moe                      | if use_sliding_window: `layer_types`, else the even layers before max_window_layers |
| smollm3                        | if use_sliding_window: `layer_types`, else the layers without rotary positions      |
| olmo3                          | `layer_types`, else all but every fourth; these have rotary positions of their own  |
| gemma2, gpt_oss                | `layer_types`, else the even layers                                                 |
| gemma3_text                    | `layer_types`, else all but every sixth (sliding_window_pattern); as olmo3          |
"""

from __future__ import annotations

from typing import Any

from meshwright.config.section import shown
from meshwright.families.llama.section import Llama
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.rotary import rope_settings, ropes_by_type

SLIDING, FULL = "sliding_attention", "full_attention"
EVERY = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""The model_types with one kind of layers."""
TYPED = {"olmo3": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""The model_types with layers of two kinds, and the number of layers from one without a window to the next."""
TURNED = {"olmo3": 500000.0, "gemma3_text": 10000.0}
"""The model_types with rotary positions by kind of layer, and the base of the layers with a window in folders without
these sections."""
SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
"""The model_types that read `use_sliding_window`, false by default."""
USUAL = {"mixtral": None, "smollm3": None, "phi3": None}
"""The window of a folder without the key, by model_type, if it is not 4,096 tokens."""


def layer_fields(settings: Settings) -> dict[str, object]:
    """Read our fields of windows and rotary layers. Raises CheckpointError for settings that the class does not read,
    or that no layer of ours has."""
    values, kind = settings.values, settings.values["model_type"]
    fields: dict[str, object] = {}
    rotary = [True] * _layers(settings)
    if kind == "smollm3":
        rotary = _rotary(settings)
        if not any(rotary):
            raise settings.refused(f"no_rope_layers={shown(values['no_rope_layers'])} leaves no layer with positions")
        fields["rotary_layers"] = () if all(rotary) else shortest(rotary)
    else:
        settings.only("no_rope_layers", None)
    if kind not in (*EVERY, *SWITCHED, *TYPED):
        settings.only("use_sliding_window", None, False)
        others = [layer for layer in values.get("layer_types") or [] if layer != FULL]
        if others:
            raise settings.refused(f"layer_types has {shown(others[0])}, which a {kind} has not; valid: {FULL}")
        return fields
    if kind in SWITCHED:
        settings.only("use_sliding_window", False, True)
    slides = kind not in SWITCHED or values.get("use_sliding_window", False)
    window, types = values.get("sliding_window", USUAL.get(kind, 4096)) if slides else None, _types(settings, kind)
    if kind in TURNED:
        theta = values.get("rope_local_base_freq", TURNED[kind]) if kind == "gemma3_text" else TURNED[kind]
        full, sliding = ropes_by_type(settings, {"rope_type": "default", "rope_theta": theta})
        fields["rope"] = full
    if window is None:
        if types is not None and any(types):
            rule = f"layer_types has {SLIDING}, and there is no window"
            raise settings.refused(f"{rule}: sliding_window, use_sliding_window")
        return fields
    if not isinstance(window, int) or window < 1:
        raise settings.refused(f"sliding_window={shown(window)} is no number of tokens; valid: null, or 1 or more")
    windowed = _usual_types(settings, kind, rotary) if types is None else types
    if any(windowed):
        fields |= {"window": window, "window_layers": () if all(windowed) else shortest(windowed)}
        if kind in TURNED and full != sliding:
            fields["window_rope"] = sliding
    return fields


def _layers(settings: Settings) -> int:
    layers = settings.values.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers < 100_000:
        raise settings.refused(f"num_hidden_layers={shown(layers)} is no number of layers; valid: 1 or more")
    return layers


def _types(settings: Settings, kind: str) -> list[bool] | None:
    """Return whether each layer slides, by `layer_types`; None without the key."""
    types, layers = settings.values.get("layer_types"), _layers(settings)
    if types is None:
        return None
    if kind in EVERY or not isinstance(types, list) or len(types) != layers:
        valid = "null" if kind in EVERY else f"a list of {layers} of {FULL}, {SLIDING}"
        raise settings.refused(f"layer_types={shown(types)} is not supported; valid: {valid}")
    for layer_type in types:
        if layer_type not in (FULL, SLIDING):
            rule = f"layer_types has {shown(layer_type)}, which is not supported"
            raise settings.refused(f"{rule}; valid: {FULL}, {SLIDING}")
    return [layer_type == SLIDING for layer_type in types]


def _usual_types(settings: Settings, kind: str, rotary: list[bool]) -> list[bool]:
    """Return whether each layer slides in a folder without `layer_types`."""
    if kind in EVERY:
        return [True] * len(rotary)
    if kind == "smollm3":
        return [not turns for turns in rotary]
    if kind in TYPED:
        every = settings.values.get("sliding_window_pattern", TYPED[kind]) if kind == "gemma3_text" else TYPED[kind]
        if not isinstance(every, int) or every < 1:
            raise settings.refused(f"sliding_window_pattern={shown(every)} is no number of layers; valid: 1 or more")
        return [(layer + 1) % every != 0 for layer in range(len(rotary))]
    first = settings.values.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise settings.refused(f"max_window_layers={shown(first)} is no number of layers")
    if kind == "qwen2_moe":
        return [layer < first and layer % 2 == 0 for layer in range(len(rotary))]
    return [layer >= first for layer in range(len(rotary))]


def _rotary(settings: Settings) -> list[bool]:
    """Return whether each layer of a SmolLM3 has rotary positions."""
    given, layers = settings.values.get("no_rope_layers"), _layers(settings)
    if given is None:
        every = settings.values.get("no_rope_layer_interval", 4)
        if not isinstance(every, int) or every < 1:
            raise settings.refused(f"no_rope_layer_interval={shown(every)} is no number of layers; valid: 1 or more")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(flag not in (0, 1) for flag in given):
        raise settings.refused(f"no_rope_layers={shown(given)} is not supported; valid: null, or {layers} of 0 and 1")
    return [bool(flag) for flag in given]


def shortest(layers: list[bool]) -> tuple[bool, ...]:
    """Return the shortest pattern that is repeated over these layers."""
    sizes = range(1, len(layers) + 1)
    size = next(size for size in sizes if all(layers[i] == layers[i % size] for i in range(len(layers))))
    return tuple(layers[:size])


def layer_settings(model: Llama, kind: str) -> dict[str, Any]:
    """Return transformers' settings of a model's kinds of layers.

    Raises CheckpointError if the class has windows in all layers or in none.
    """
    windows = [model.window_of(layer) for layer in range(model.layers)]
    settings: dict[str, Any] = {"sliding_window": model.window}
    if kind == "smollm3":
        settings["no_rope_layers"] = [int(model.rotates(layer)) for layer in range(model.layers)]
    if kind in EVERY:
        if None in windows and model.window is not None:
            rule = f"no class of transformers has {kind}'s layers with windows in some"
            raise CheckpointError(f"{rule}: model.window_layers={shown(model.window_layers)}; valid: []")
        return settings | ({"use_sliding_window": model.window is not None} if kind in SWITCHED else {})
    types = [FULL if window is None else SLIDING for window in windows]
    if kind in TYPED:  # these classes make a mask of the key, even if no layer has a window
        settings["sliding_window"] = model.window or model.positions
    if kind in TYPED and kind not in TURNED:
        return settings | {"layer_types": types}
    if kind in TYPED:
        ropes = {FULL: model.rope, SLIDING: model.ropes[-1]}
        by_type = {name: rope_settings(rope)["rope_parameters"] for name, rope in ropes.items()}
        local = {"rope_local_base_freq": ropes[SLIDING].theta} if kind == "gemma3_text" else {}
        return settings | {"layer_types": types, "rope_parameters": by_type} | local
    if kind not in SWITCHED:
        return {}
    settings |= {"use_sliding_window": SLIDING in types, "layer_types": types}
    # Older versions read no `layer_types`, and compute them from the first layer with a window.
    if kind != "smollm3":
        settings["max_window_layers"] = types.index(SLIDING) if SLIDING in types else model.layers
    return settings
