"""Classes of transformers with Llama's layers, and layers of several kinds in config.json and in our section: windows,
and layers without rotary positions.

A `Kind` has the facts of one class; a converter names its classes in `kinds`, by model_type. The layers with a window
of `sliding_window` tokens:

| Windows.layers | layers with a window                                                                       |
|----------------|--------------------------------------------------------------------------------------------|
| all            | all; config.json has no `layer_types`                                                      |
| by-period      | `layer_types`, else all but every `period`-th                                              |
| from-first     | `layer_types`, else the layers from max_window_layers on                                   |
| even-before    | `layer_types`, else the even layers before max_window_layers                               |
| unrotated      | `layer_types`, else the layers without rotary positions                                    |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.config.section import shown
from meshwright.families.llama.section import Llama
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.rotary import rope_fields, rope_settings, ropes_by_type

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Windows:
    """Layers with a window in a class of transformers."""

    layers: Literal["all", "by-period", "from-first", "even-before", "unrotated"] = "all"
    """Rule of the table above."""
    switched: bool = False
    """Whether the class reads `use_sliding_window`, false by default."""
    usual: int | None = 4096
    """The window, in tokens, of a folder without `sliding_window`."""
    period: int = 0
    """Layers from one without a window to the next."""
    period_key: str = ""
    """The key that replaces `period`; empty: none."""
    base: float | None = None
    """The default rope_theta of layers with a window; None: all layers have the same rotary positions."""
    base_key: str = ""
    """The key that replaces `base` in folders without rotary positions by kind of layer; empty: none."""


@dataclass(frozen=True)
class ExpertNames:
    """Experts of a class of transformers."""

    module: str = "mlp"
    """The module of router and experts."""
    expand: tuple[str, ...] = ("gate_proj", "up_proj")
    """An expert's linears in our `expand`."""
    contract: tuple[str, ...] = ("down_proj",)
    """An expert's linears in our `contract`."""
    renormalised: bool = False
    """Whether the weights of a token's experts add up to 1, without a key of it."""
    shared: bool = False
    """Whether the class has an expert for every token, with a gate (Qwen2-MoE)."""


@dataclass(frozen=True)
class Kind:
    """The facts of a class of transformers with Llama's layers, by which its config.json is read and written."""

    architecture: str
    """The class's name, without its end ForCausalLM."""
    windows: Windows | None = None
    """Layers with a window; None: the class has none."""
    experts: ExpertNames | None = None
    """None: the class has no experts."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of our section with one value in this class."""
    biases: tuple[str, ...] = ()
    """Keys of config.json that give linears biases; a class ignores other keys of biases."""
    query_biases: bool = False
    """Whether queries, keys and values always have biases, without a key of it (Qwen2)."""
    base: float = 10000.0
    """The default rope_theta."""
    head_width: int | None = None
    """The default head_dim; None: hidden_size / num_attention_heads."""
    grouped: bool = True
    """Whether the default number of key-value heads is another than the number of heads."""
    tied: bool = False
    """Whether the head is tied by default."""


def layer_fields(settings: Settings, variant: Kind) -> dict[str, object]:
    """Read our fields of windows and rotary positions.

    Raises CheckpointError for settings that the class does not read, or that no layer of ours has.
    """
    values, windows = settings.values, variant.windows
    fields: dict[str, object] = {}
    rotary = [True] * _layers(settings)
    if windows is not None and windows.layers == "unrotated":
        rotary = _rotary(settings)
        if not any(rotary):
            raise settings.refused(f"no_rope_layers={shown(values['no_rope_layers'])} leaves no layer with positions")
        fields["rotary_layers"] = () if all(rotary) else shortest(rotary)
    else:
        settings.only("no_rope_layers", None)
    if windows is None:
        settings.only("use_sliding_window", None, False)
        others = [layer for layer in values.get("layer_types") or [] if layer != FULL]
        if others:
            raise settings.refused(
                f"layer_types has {shown(others[0])}, which a {values['model_type']} has not; valid: {FULL}"
            )
        return fields | {"rope": rope_fields(settings, variant.base)}
    if windows.switched:
        settings.only("use_sliding_window", False, True)
    slides = not windows.switched or values.get("use_sliding_window", False)
    window, types = values.get("sliding_window", windows.usual) if slides else None, _types(settings, windows)
    if windows.base is None:
        fields["rope"] = sliding = rope_fields(settings, variant.base)
    else:
        of_sliding = {"rope_type": "default", "rope_theta": values.get(windows.base_key, windows.base)}
        fields["rope"], sliding = ropes_by_type(settings, variant.base, of_sliding)
    if window is None:
        if types is not None and any(types):
            rule = f"layer_types has {SLIDING}, and there is no window"
            raise settings.refused(f"{rule}: sliding_window, use_sliding_window")
        return fields
    if not isinstance(window, int) or window < 1:
        raise settings.refused(f"sliding_window={shown(window)} is no number of tokens; valid: null, or 1 or more")
    windowed = _usual_types(settings, windows, rotary) if types is None else types
    if any(windowed):
        fields |= {"window": window, "window_layers": () if all(windowed) else shortest(windowed)}
        if sliding != fields["rope"]:
            fields["window_rope"] = sliding
    return fields


def _layers(settings: Settings) -> int:
    layers = settings.values.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers < 100_000:
        raise settings.refused(f"num_hidden_layers={shown(layers)} is no number of layers; valid: 1 or more")
    return layers


def _types(settings: Settings, windows: Windows) -> list[bool] | None:
    """Return whether each layer slides, by `layer_types`; None without the key."""
    types, layers = settings.values.get("layer_types"), _layers(settings)
    if types is None:
        return None
    if windows.layers == "all" or not isinstance(types, list) or len(types) != layers:
        valid = "null" if windows.layers == "all" else f"a list of {layers} of {FULL}, {SLIDING}"
        raise settings.refused(f"layer_types={shown(types)} is not supported; valid: {valid}")
    for layer_type in types:
        if layer_type not in (FULL, SLIDING):
            rule = f"layer_types has {shown(layer_type)}, which is not supported"
            raise settings.refused(f"{rule}; valid: {FULL}, {SLIDING}")
    return [layer_type == SLIDING for layer_type in types]


def _usual_types(settings: Settings, windows: Windows, rotary: list[bool]) -> list[bool]:
    """Return whether each layer slides in a folder without `layer_types`."""
    if windows.layers == "all":
        return [True] * len(rotary)
    if windows.layers == "unrotated":
        return [not turns for turns in rotary]
    if windows.layers == "by-period":
        every = settings.values.get(windows.period_key, windows.period)
        if not isinstance(every, int) or every < 1:
            raise settings.refused(f"{windows.period_key}={shown(every)} is no number of layers; valid: 1 or more")
        return [(layer + 1) % every != 0 for layer in range(len(rotary))]
    first = settings.values.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise settings.refused(f"max_window_layers={shown(first)} is no number of layers")
    if windows.layers == "even-before":
        return [layer < first and layer % 2 == 0 for layer in range(len(rotary))]
    return [layer >= first for layer in range(len(rotary))]


def _rotary(settings: Settings) -> list[bool]:
    """Return whether each layer has rotary positions in a class with layers without."""
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


def layer_settings(model: Llama, model_type: str, variant: Kind) -> dict[str, Any]:
    """Return transformers' settings of a model's kinds of layers.

    Raises CheckpointError if the class has windows in all layers or in none.
    """
    windows, each = variant.windows, [model.window_of(layer) for layer in range(model.layers)]
    if windows is None:
        return {}
    settings: dict[str, Any] = {"sliding_window": model.window}
    if windows.layers == "all":
        if None in each and model.window is not None:
            rule = f"no class of transformers has {model_type}'s layers with windows in some"
            raise CheckpointError(f"{rule}: model.window_layers={shown(model.window_layers)}; valid: []")
        return settings | ({"use_sliding_window": model.window is not None} if windows.switched else {})
    types = [FULL if window is None else SLIDING for window in each]
    if windows.layers == "by-period":  # these classes make a mask of the key, even if no layer has a window
        settings |= {"sliding_window": model.window or model.positions, "layer_types": types}
        if windows.base is None:
            return settings
        ropes = {FULL: model.rope, SLIDING: model.ropes[-1]}
        by_type = {name: rope_settings(rope)["rope_parameters"] for name, rope in ropes.items()}
        local = {windows.base_key: ropes[SLIDING].theta} if windows.base_key else {}
        return settings | {"rope_parameters": by_type} | local
    settings |= {"use_sliding_window": SLIDING in types, "layer_types": types}
    if windows.layers == "unrotated":
        return settings | {"no_rope_layers": [int(model.rotates(layer)) for layer in range(model.layers)]}
    # Older versions read no `layer_types`, and compute them from the first layer with a window.
    return settings | {"max_window_layers": types.index(SLIDING) if SLIDING in types else model.layers}
