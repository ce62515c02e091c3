"""Small models of the library's model types: configurations, classes, and inputs by a forward's signature.

A type's sizes are read from a table, by field names of the configuration. The first of a few VARIANTS with a model that
gives an output is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.parity.batches import IGNORED_LABEL

# Compiles the patterns of all types once, so that ranks forked after this import share the compiled patterns.
get_checkpoint_conversion_mapping("llama")

VOCABULARY, LENGTH = 64, 12
GRID = (1, 4, 4)
"""Patches of an image by (time, height, width)."""
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "use_cache": False,
    "hidden_size": 32, "num_hidden_layers": 2, "hidden_size_per_layer_input": 8, "d_model": 32, "num_layers": 2,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4, "n_inner": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 8, "query_pre_attn_scalar": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 64,
    "intermediate_size": 64, "intermediate_size_mlp": 64, "ffn_hidden_size": 64, "dense_intermediate_size": 64,
    "shared_intermediate_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_state": 8,
    "ssm_state_size": 8, "mamba_n_groups": 1, "n_groups": 1, "mamba_dt_rank": 8,
    "depth": 2, "num_heads": 4, "n_embed": 32, "patch_size": 4, "image_size": 16, "pooling_kernel_size": 2,
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "out_hidden_size": 32,
    "projector_hidden_size": 32, "adapter_in_dim": 32, "adapter_out_dim": 32, "unpadded_vocab_size": VOCABULARY,
    "mamba_d_ssm": 64, "zero_expert_num": 2, "moe_hidden_size": 32, "num_dense_layers": 1, "share_expert_dim": 32,
    "num_sliding_attention_heads": 4, "pyramid_num_routed": [0, 4], "block_size": 4, "target_layer_ids": [0, 1],
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "embedding_rank": 16,
    "embedding_dim": 32, "num_code_groups": 3,
    "hidden_size_global": 32, "encoder_hash_byte_group_vocab": VOCABULARY, "base_channels": 32, "ffn_dim": 64,
    "dim_ff": 64, "dim_head": 8, "state_size": 8, "num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 32,
    "depthwise_separable_out_channel": 32, "pronunciation_embed_dim": 32, "pronunciation_vocab_size": VOCABULARY,
    "shape_embed_dim": 32, "shape_vocab_size": VOCABULARY, "output_channels": 32, "mlp_dim": 64, "adapter_rank": 8,
    "chunk_size": 16, "downsample_hidden_size": 32, "adapter_input_size": 32,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "shared_experts_intermediate_size": 32,
    "attention_types": [[["global", "local"], 1]], "default_language": "en_XX",
    "linear_num_heads": 4, "linear_head_dim": 8, "layer_group_size": 2, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [8, 24], "d_inner": 64,
    "dropout_rate": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
}  # fmt: skip
"""Small sizes by their names in configurations. A name that a configuration lacks, or refuses, is left out."""


UNSET: Mapping[str, Any] = {
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 64,
    "top_k_experts": 2,
    "hash_seed": 1,
    "vocabulary_map": {"<image>": VOCABULARY - 1},
}
"""Values of fields that are None in a configuration without arguments. A list has an entry for each layer."""
MISSING: Mapping[str, Any] = {"rope_theta": 1e4}
"""More values, for fields that a class reads but the class's configuration lacks."""
LARGEST = 150_000_000
"""The most elements of a model: a configuration that refuses several small sizes keeps the published sizes."""
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {}, {"layer_types": None}, {"num_key_value_heads": 4}, {"intermediate_size": 128},
    {"head_dim": 8}, {"head_dim": 16}, {"is_decoder": True}, {"clip_qkv": 8.0},
)  # fmt: skip
"""Other sizes, for models that need a relation between two sizes, such as equal numbers of key and query heads. None:
left to the configuration."""
KINDS = {"layer_types": 1, "mlp_layer_types": 1, "layers_block_type": 2}
"""Fields with a list of the layers' kinds, each with the number of layers of each kind in a small model: two, if layers
of a kind share weights."""
CONSTANTS: Mapping[str, Any] = {"use_cache": False, "num_patches": 4}
"""Arguments that are no samples, passed if a forward's signature has the name."""


def has(config: PretrainedConfig, name: str) -> bool:
    """Return True if a configuration has a field with one value for all layers."""
    try:
        return hasattr(config, name)
    except Exception:  # heterogeneous configurations refuse the question
        return False


def small_config(
    config_class: type[PretrainedConfig], more: Mapping[str, Any] | None = None, added: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """Make a configuration of a class with small sizes, including nested configurations. `more`: sizes with priority
    over the table's; `added`: fields that the configuration does not have.

    Raises:
        ValueError, TypeError and others: The class's own, if no choice of sizes satisfies the class.
    """
    default, source, more, added = config_class(), inspect.getsource(config_class), more or {}, added or {}
    code = find_spec(modeling_of(config_class))
    model_source = Path(str(code.origin)).read_text() if code else ""
    # A size may be only an argument that shapes other fields, or differ by layer.
    known = {*getattr(config_class, "__dataclass_fields__", ()), *added}
    given: dict[str, Any] = {name: x for name, x in {**SIZES, **more, **added}.items()
                             if name in known or has(default, name) or f'kwargs.pop("{name}"' in source}  # fmt: skip
    given |= {name: 0.0 for name, x in default.to_dict().items() if "drop" in name and isinstance(x, float)}
    given |= {name: x for name, x in UNSET.items() if has(default, name) and getattr(default, name) is None}
    if has(default, "max_position_embeddings") and default.max_position_embeddings == -1:
        given.pop("max_position_embeddings", None)  # positions without an end
    if "kv_lora_rank" in given or has(
        default, "kv_lora_rank"
    ):  # latent attention has separate head sizes, and a key for each head
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
        if "head_dim" not in more:
            given.pop("head_dim", None)
        if getattr(default, "qk_rope_head_dim", None) == 0:  # attention without positions
            given["qk_rope_head_dim"] = 0
    if has(default, "layer_types") and default.layer_types is None and '"conv"' in model_source:
        given["layer_types"] = ["conv", "full_attention"]
    if 'f"swa_{name}"' in source:  # sliding layers have sizes of their own
        given |= {f"swa_{name}": x for name, x in given.items()}
    kinds = {name: list(dict.fromkeys(getattr(default, name))) * times for name, times in KINDS.items()
             if name not in {*more, *config_class.attribute_map} and has(default, name)
             and isinstance(getattr(default, name), list)}  # fmt: skip
    if kinds and has(default, "num_hidden_layers"):
        layers = max(SIZES["num_hidden_layers"], *map(len, kinds.values()))
        given |= {"num_hidden_layers": layers}
        given |= {name: each + each[-1:] * (layers - len(each)) for name, each in kinds.items()}
    parts = {name: type(nested) for name in config_class.sub_configs
             if isinstance(nested := getattr(default, name, None), PretrainedConfig)
             and type(nested) not in (config_class, PretrainedConfig)}  # fmt: skip
    if has(default, "hidden_sizes") and isinstance(default.hidden_sizes, (list, tuple)):  # a width for each stage
        given["hidden_sizes"] = [SIZES["hidden_size"]] * len(default.hidden_sizes)
    given = {name: x for name, x in given.items() if x is not None}
    given |= {name: small_config(nested, more, added).to_dict() for name, nested in parts.items()}
    if has(default, "rope_parameters") and (positions := small_positions(default, model_source)):
        given["rope_parameters"] = positions
    while True:
        try:
            return config_class(**given)
        except Exception as error:
            said = str(error).partition("{")[0]  # without a configuration that the error quotes
            refused = sorted((name for name in given if name in said), key=lambda name: name in parts)
            if not refused:
                raise
            del given[refused[0]]


def small_positions(default: PretrainedConfig, model_source: str) -> dict[str, Any]:
    """Return rotary positions that fit the head, if the model cuts a head by sections or needs an entry for each kind
    of layer; else an empty mapping."""
    rope = default.rope_parameters or {}
    half = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
    sections = {"mrope_section": [half // 4, half // 4, half - half // 4 * 2]}
    if not rope and "rope_parameters[layer_type]" in model_source:
        return {layer: {"rope_type": "default", "rope_theta": 1e4} | sections for layer in set(default.layer_types)}
    return rope | sections if "mrope_section" in model_source and "rope_type" in rope else {}


def modeling_of(config_class: type[PretrainedConfig]) -> str:
    """Return the name of the module with a configuration's models, if the configuration has a separate module."""
    return config_class.__module__.replace(".configuration_", ".modeling_")


def class_of(config_class: type[PretrainedConfig]) -> type[PreTrainedModel]:
    """Return the model class of a configuration: the causal language model, else the first model of this configuration.

    Raises:
        LookupError: The library has no such class.
    """
    if config_class.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        causal: type[PreTrainedModel] = getattr(
            transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config_class.model_type]
        )
        # A composite type's causal language model may have the configuration of a part only.
        if causal.config_class not in config_class.sub_configs.values():
            return causal
    if find_spec(modeling_of(config_class)) is None:
        raise LookupError(f"{modeling_of(config_class)} is no module")
    module = importlib.import_module(modeling_of(config_class))
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)
    ]
    fits = [each for each in classes if each.config_class is config_class and "PreTrained" not in each.__name__]
    # A class for a part of a model may have "PreTrained" in the class name, too.
    fits = fits or [
        each for each in classes if each.config_class is config_class and inspect.isfunction(vars(each).get("forward"))
    ]
    if not fits:
        raise LookupError(f"no class of {module.__name__} has the configuration {config_class.__name__}")
    return min(fits, key=lambda each: (not each.__name__.endswith("Model"), len(each.__name__)))


def whole_of(config_class: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """Return the configuration class of the model that is tried for `config_class`.

    The result is `config_class` itself, or, if no model has this configuration, the first composite configuration with
    `config_class` as a part.

    Raises:
        LookupError: The library has no such class.
    """
    try:
        class_of(config_class)
    except LookupError:
        for name in CONFIG_MAPPING:
            composite = CONFIG_MAPPING[name]
            if composite.__module__ == config_class.__module__ and config_class in composite.sub_configs.values():
                return composite
        raise
    return config_class


def small_model(model_type: str, sizes: Mapping[str, Any] | None = None) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Make a model of a type, with weights other than zeros and ones; return the model and the names of its samples.
    `sizes`: sizes with priority over the table's.

    Raises:
        Exception: The error of the first variant, if no variant gives an output.
    """
    config_class, first, added = whole_of(CONFIG_MAPPING[model_type]), None, dict[str, Any]()
    variants = list(VARIANTS)
    while variants:
        more = {**(sizes or {}), **variants.pop(0)}
        try:
            config = small_config(config_class, more, added)
            model: PreTrainedModel = class_of(config_class)._from_config(config, attn_implementation="eager")
            if (size := sum(p.numel() for p in model.parameters())) > LARGEST:
                raise ValueError(f"{type(model).__name__} has {size} parameters with small sizes")
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim < 2:
                        p.add_(0.1 * torch.randn_like(p))
            return model, sample_names(model)
        except Exception as error:
            first = first or error
            # A field that the class reads but the configuration lacks.
            missing = str(error).partition("has no attribute '")[2].partition("'")[0]
            known = {**SIZES, **MISSING}
            if isinstance(error, AttributeError) and missing in known and missing not in added:
                added[missing] = known[missing]
                variants.insert(0, more)
    assert first is not None
    raise first


def sample_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of a model's samples: arguments without a default, else token ids, else embeddings.

    Raises:
        Exception: The model's error for token ids, if the model runs with none of these.
    """
    named = inspect.signature(model.forward).parameters
    required = [name for name, p in named.items()
                if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and name not in CONSTANTS]  # fmt: skip
    # An argument of a layer that the model only passes on.
    handed = ["t_cond"] if any("t_cond" in inspect.signature(m.forward).parameters for m in model.modules()) else []
    tokens = [["input_ids"], ["input_ids", "encoder_hidden_states"], ["input_ids", "decoder_input_ids"],
              ["inputs_embeds"], [model.main_input_name]]  # fmt: skip
    first: Exception | None = None
    for tried in [required] if required else tokens:
        names = (*tried, *handed)
        try:
            with torch.no_grad():
                terms_of(model, samples_of(model, names, torch.Generator().manual_seed(1)))
            return names
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def samples_of(
    model: PreTrainedModel, names: tuple[str, ...], generator: torch.Generator, rows: int = 4
) -> dict[str, Tensor]:
    """Draw random samples for arguments of a model's forward.

    Raises:
        LookupError: An argument's form is not known.
    """
    config = model.config
    try:
        text = config.get_text_config()
    except ValueError:  # several text configurations, such as an encoder's and a decoder's
        text = config.get_text_config(decoder=True)
    widths = ("hidden_size", "d_model", "n_embd", "embed_dim")
    width = next((getattr(text, name) for name in widths if has(text, name)), SIZES["hidden_size"])
    sizes = [next((getattr(config, name) for name in names if has(config, name)), default) for names, default in (
        (("num_channels", "in_channels", "in_chans"), 3), (("temporal_patch_size", "patch_temporal"), 1),
        (("patch_size",), 1), (("image_size",), 16))]  # fmt: skip
    channels, temporal, patch, image = (each[0] if isinstance(each, (list, tuple)) else each for each in sizes)
    patches = GRID[0] * GRID[1] * GRID[2]
    flat = channels * temporal * patch * patch

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made: dict[str, Tensor] = {}
    for name in names:
        if name in ("input_ids", "decoder_input_ids"):
            made[name] = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
        elif name == "grid_thw":
            made[name] = torch.tensor(GRID).repeat(rows, 1)
        elif name == "pixel_position_ids":
            made[name] = torch.cartesian_prod(torch.arange(GRID[1]), torch.arange(GRID[2])).repeat(rows, 1, 1)
        elif name in ("pixel_values", "hidden_states") and "grid_thw" in names:
            made[name] = normal(rows * patches, flat)
        elif name == "pixel_values" and "pixel_position_ids" in names:
            made[name] = normal(rows, patches, flat)
        elif name == "pixel_values":
            made[name] = normal(rows, channels, image, image)
        elif name == "t_cond":
            made[name] = normal(rows, 1, width)
        elif name == "context_hidden_states":
            made[name] = normal(rows, LENGTH, width * len(config.target_layer_ids))
        elif name in ("inputs_embeds", "noise_embeds", "encoder_hidden_states"):
            made[name] = normal(rows, LENGTH, width)
        else:
            raise LookupError(f"{type(model).__name__} reads {name}, whose form is not known")
    return made


def terms_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of each label; labels are the tokens, or `labels` if given. Without a head: the mean output of
    each position, weighted by random numbers, times 0 at positions without a label."""
    named = inspect.signature(model.forward).parameters
    constants = {name: x for name, x in CONSTANTS.items() if name in named}
    output = model(**{name: x for name, x in batch.items() if name != "labels"}, **constants)
    labels = batch.get("labels", batch.get("input_ids"))
    if hasattr(output, "logits") and labels is not None and output.logits.shape[:2] == labels.shape:
        logits: Tensor = output.logits[:, :-1].flatten(0, 1)
        # A table of ids may have one row more than the head has classes, for the token that begins a sequence.
        targets = labels[:, 1:].flatten().clamp(max=logits.shape[-1] - 1)
        return nn.functional.cross_entropy(logits, targets, reduction="none")
    hidden: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    weight = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(2)).to(hidden)
    if labels is not None and hidden.shape[:2] == labels.shape:
        return (hidden * weight).mean(-1)[:, 1:].flatten() * (labels[:, 1:].flatten() != IGNORED_LABEL)
    return (hidden * weight).mean(-1).flatten()
