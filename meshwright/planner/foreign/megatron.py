"""Jobs of Megatron-LM's arguments: a shell script, a line, a YAML file (its own, Primus'), a recipe of Megatron-Bridge.

All of these share the names of arguments, `--tensor-model-parallel-size` or `tensor_model_parallel_size`, in different
sections. So a field is found by the last part of its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from meshwright.config.load import model_names
from meshwright.planner.foreign import trainer, zero
from meshwright.planner.foreign.account import NOTHING, Account, fields_of
from meshwright.planner.foreign.job import (
    Asked,
    Degrees,
    ForeignJob,
    Tree,
    known_name,
    layers_of,
    model_of,
    read_model,
    run_of,
)
from meshwright.planner.foreign.literals import CALLED, named_function
from meshwright.planner.plan.expert_ranks import SENT_ONCE
from meshwright.planner.plan.recorder import Recomputed
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.foreign import parse_json

DEFAULT = "Megatron-LM's default"
HARMLESS = """
load *.load *-load *load-* dist-ckpt* *save* log-* *.logger.* *log_* *tensorboard* *wandb* *ckpt* *checkpoint* eval-*
*eval_* data-path data-cache* dataloader* *tokenizer* *vocab_file *merge_file *vocab-file *merge-file split *.split
seed *.seed *profile* *timing* *timers* *exit* *rerun* *env_vars* *validation.* *trust_remote_code *mock* *tiktoken*
*reset* *eod* *num-workers *num_workers *blend* work_group user_name exp_name workspace name *.name *framework*
*.config *sft* *manual*gc* *empty*memory* *check*nan* *check-for* nnodes nproc* node*rank master* rdzv*
*distributed*timeout* *nccl* *backend-nccl* local-rank lr lr-* *min-lr *.lr *lr_* *min_lr *decoupled* *adam*beta*
*adam*eps* *weight*decay* *clip*grad* *train*iters* *train*samples* *init*method* *norm*epsilon *rotary* *rope*
*position*embedding* *.scheduler.* *attention-softmax-in-fp32 *apply*layernorm*1p *calculate*per*token*
*make*vocab*divisible* *average_in_collective *aux*loss* *z-loss* *z_loss* moe-router-l* moe-router-d* moe-router-s*
moe-router-g* moe-router-n* moe-router-p* moe-router-e* *moe_router* *use-mcore-models *use_mcore_models
*group-query-attention *disable*bias*linear *add*bias*linear *add*qkv*bias *normalization *fp8*amax* *fp8*margin
*fp8*interval *gated_linear_unit *activation_func *share_embeddings* *persist_layer_norm *bias*fusion *softmax*fusion
*accumulation*fusion *rope*fusion *swiglu*fusion *pipeline_dtype *.() () *cuda_graph*steps *attention*dropout
*use-flash-attn *moe*grouped*gemm *qk*layernorm *permute*fusion *.provider* *load_weights *moe_permute_fusion
override* moe-loss-coeff train-tokens hysteresis *loss-scale* create-moe-param-group data-impl force_multi hostfile
*weighted-split* kill-switch* abort-on-unmet* max_restarts max-restarts tee *finetune *auto_continue_train *mscale*
train-mode max-padding-length stderr_sink_level *.stderr_sink_level *disable_last_saving *num-dataset-builder-threads
wait jobid kill-on-bad-exit cpus-per-task gpus-per* ntasks* container-* mpi cpu-bind membind export split_dataset*
max_epochs distributed-backend load_from_cache_file num_train_epochs dataset_num_proc compute_environment debug
downcast_bf16 main_* num_machines same_network use_cpu tpu_* gpu_ids *gradient_clipping logging_steps
*moe-eval-capacity* lr_warmup* model_author model_name *dataset *dataset[!.]* *dataset.[!p]* *dataset.p[!a]*
*dataset.pa[!c]* *query-key-layer-scaling extra-vocab-size mixed_precision.autocast_enabled mixed_precision.params_dtype
"""
"""Arguments that change neither seconds nor bytes of a step, or only in ways that a plan cannot express."""
GPT2_TOKENS, QWEN_TOKENS = 50257, 151643
VOCABULARIES = (
    ("gpt2", GPT2_TOKENS), ("llama2", 32000), ("llama3", 128256), ("deepseekv3", 129280), ("mixtral", 32000),
)  # fmt: skip
"""Parts of --tokenizer-type and --tokenizer-model without punctuation, each with the tokenizer's number of tokens. A
shipped model with a number before the first hyphen, such as gpt2-xl, has that part too."""
SIZES = ("num-layers", "hidden-size")
PREFIX = "megatron-lm-"
ALIASES = {
    "model-parallel-size": "tensor-model-parallel-size", "batch-size": "micro-batch-size", "topk": "moe-router-topk",
    "moe-expert-parallel-size": "expert-model-parallel-size", "qk-nope-head-dim": "qk-head-dim",
    "qk-rope-head-dim": "qk-pos-emb-head-dim", "num-mtp-predictor": "mtp-num-layers",
    "cpu-optimizer": "optimizer-cpu-offload", "moe-train-capacity-factor": "moe-expert-capacity-factor",
    f"{PREFIX}tp-degree": "tensor-model-parallel-size", f"{PREFIX}pp-degree": "pipeline-model-parallel-size",
    f"{PREFIX}num-micro-batches": "num-micro-batches", f"{PREFIX}sequence-parallelism": "sequence-parallel",
    f"{PREFIX}use-distributed-optimizer": "use-distributed-optimizer", "padded-vocab-size": "pad-vocab-size-to",
    f"{PREFIX}recompute-activations": "recompute-activations", "per-device-train-batch-size": "micro-batch-size",
    "num-processes": "started", "num-gpus": "nproc-per-node", "num-nodes": "nnodes", "tuner-type": "train-type",
    "num-key-value-heads": "num-query-groups",
}  # fmt: skip
"""Names of arguments in 2019, in Megatron-DeepSpeed, Pai-Megatron-Patch, ms-swift and Accelerate's megatron_lm_config,
each with Megatron-LM's."""
LAYOUT = "pipeline-model-parallel-layout"
MOST_PARTS = 10_000
"""Most characters of a written layout with all repeats: a file may ask for more than memory holds."""
CONTEXTS = (("p2p", "ring"), ("a2a", "ulysses"))
"""Megatron's --cp-comm-type, each with our context kind."""
SHARDS = (("no_shard", "allreduce"), ("optim_grads_params", "zero3"), ("optim_grads", "zero2"), ("optim", "zero1"))
"""Megatron-FSDP's --data-parallel-sharding-strategy, each with our sync."""


PRIMUS = {"bf16": True, "use-distributed-optimizer": True, "micro-batch-size": 2, "global-batch-size": 16}
SWIFT = {
    "bf16": True, "use-distributed-optimizer": True, "micro-batch-size": 1, "global-batch-size": 16,
    "expert-tensor-parallel-size": 1, "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True,
    "recompute-granularity": "selective", "cross-entropy-loss-fusion": True,
}  # fmt: skip


BRIDGE: Mapping[str, Mapping[str, Any]] = {
    "_pretrain_common": {"micro-batch-size": 2, "global-batch-size": 32, "seq-length": 4096},
    "_sft_common": {
        "micro-batch-size": 1, "global-batch-size": 128, "seq-length": 2048, "overlap-grad-reduce": False,
        "overlap-param-gather": False,
    },
}  # fmt: skip
"""Values of the functions that Megatron-Bridge's recipes begin with."""
DEFAULTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "primus": (PRIMUS, "Primus' default (configs/modules/megatron/pre_trainer.yaml)"),
    "swift": (SWIFT, "ms-swift's default (megatron/arguments/megatron_args.py)"),
    **{name: (values, f"Megatron-Bridge's {name} (recipes/common.py)") for name, values in BRIDGE.items()},
}
"""Values of programs that start Megatron-LM, with the source."""


class Arguments:
    """Megatron's arguments in an account, by flag. `defaults`: values of a program that starts Megatron-LM, and their
    source."""

    def __init__(self, tree: Mapping[str, Any], defaults: Mapping[str, Any], source: str = "") -> None:
        self._defaults, self._source = defaults, source
        # A flag without a value is true; `--no-...` is a separate name.
        self.account = Account({name: True if value == "" else value for name, value in tree.items()}, HARMLESS)
        self._full: dict[str, str] = {}
        self._again: dict[str, list[str]] = {}
        leaves = dict(fields_of(tree))
        for name, value in leaves.items():
            first = self._full.setdefault(name.rpartition(".")[2].replace("_", "-"), name)
            if name != first and value == leaves[first]:  # ddp.grad_reduce_in_fp32 and mixed_precision.grad_reduce_...
                self._again.setdefault(first, []).append(name)
        for alias, flag in ALIASES.items():
            if alias in self._full:
                self._full.setdefault(flag, self._full[alias])
        self.account.agree(self._full.get("optimizer", "optimizer"), "adam", "adamw")

    def get(self, flag: str, default: Any = None, why: str = "") -> Any:
        """Return a flag's value."""
        if flag in self._defaults:
            default, why = self._defaults[flag], self._source
        full = self._full.get(flag, flag)
        value = self.account.get(full, default=default, why=why)
        for same in self._again.get(full, ()):
            self.account.get(same)
        if isinstance(value, str) and re.fullmatch(r"\$\{?\d+\}?", value):
            valid = "a file with the line `bash SCRIPT ARGUMENTS` beside it"
            raise ConfigError.of(f"--{flag}", value, "is an argument of the script", valid)
        if isinstance(value, str) and "$" in value:
            raise ConfigError.of(
                f"--{flag}", value, "is a variable that the script does not set", f"{flag} as a number"
            )
        return value

    def told(self, flag: str) -> str:
        """Return a flag's text; empty without the flag, or if the script does not set the flag's variable."""
        text = str(self.account.get(self._full.get(flag, flag), default=""))
        return "" if "$" in text else text

    def number(self, flag: str, default: int = 1, why: str = "") -> int:
        """Return a flag's value as a whole number; the default without the flag."""
        value = self.get(flag, default, why)
        if not re.fullmatch(r"\d+", str(value)):
            raise ConfigError.of(f"--{flag}", value, "is no whole number", "a number in the file")
        return int(value)

    def word(self, flag: str, known: Sequence[tuple[Any, Any]], default: Any) -> Any:
        """Translate a flag's word to ours. Raises ConfigError as Account.word."""
        name = self._full.get(flag, flag)
        if flag in self._defaults and not self.account.says(name):
            default = dict(known).get(self.get(flag), default)
        return self.account.word(name, known=known, default=default)

    def hinted(self, flag: str) -> int:
        """Return a flag's value if this is a whole number, else 0: the script's environment may hold the number."""
        value = str(self.account.get(self._full.get(flag, flag), default=""))
        return int(value) if value.isdigit() else 0

    def agree(self, flag: str, *values: str) -> None:
        """Count a flag as read if the plan assumes its value, one of these."""
        self.account.agree(self._full.get(flag, flag), *values)

    def leave(self, flag: str) -> None:
        """List a flag as left out."""
        self.account.leave(self._full.get(flag, flag))

    def has(self, section: str) -> bool:
        """Return True if the file sets a field of a section."""
        return any(name.startswith(f"{section}.") for name in self._full.values())

    def on(self, flag: str, usual: bool = False) -> bool:
        """Return True if a switch is on; `usual` without the flag. The word after a switch may be the script's name."""
        name = self._full.get(flag, flag)
        word = str(self.account.get(name))
        if re.fullmatch(r"\$\{?[A-Za-z_]\w*\}?", word):  # further arguments, or none
            self.account.assume(word, "empty", "the script does not set the variable")
            self.account.read[name] = True
            return True
        value = self.get(flag, usual)
        return value if isinstance(value, bool) else str(value).lower() not in ("false", "0", "no")


def is_megatron(tree: Mapping[str, Any]) -> bool:
    """Return True if a file has one of Megatron's fields of sizes or parallel degrees."""
    last = {name.rpartition(".")[2].replace("_", "-") for name, _ in fields_of(tree)}
    return bool({"tensor-model-parallel-size", "pipeline-model-parallel-size", *SIZES} & last)


def read_recipe(path: Path, function: str | None, asked: Asked) -> ForeignJob:
    """Read the job of a function of a Megatron-Bridge recipe without running the recipe.

    Raises:
        ConfigError: As named_function; or the recipe trains adapters.
    """
    fields, undecided = named_function(path, function)
    base = str(fields.get(CALLED, "")).rpartition(".")[2]
    if base.startswith("_peft_common") or isinstance(fields.get("peft"), dict):
        raise ConfigError.of("peft", "given", "trains no whole weights", "a recipe without peft")
    if base in BRIDGE:
        fields.pop(f"{fields[CALLED]}()")
    mixed = fields.get("mixed_precision")
    if isinstance(mixed, dict) and mixed.get(CALLED, "MixedPrecisionConfig") != "MixedPrecisionConfig":
        # `fp16_mixed()` or `get_mixed_precision_config("fp16_mixed")`, with fields that are set later.
        told, called = mixed.pop("0", None), mixed.pop(CALLED)
        fields["mixed_precision"] = mixed | {"mixed_precision": told if isinstance(told, str) else called}
    job = read_arguments(path, asked, fields, bridge=base or "ConfigContainer")
    job.account.assume_neither(undecided)
    return job


def resolved(value: Any) -> Any:
    """Return a tree of Primus' YAML with `${NAME:default}` replaced by the default, since no environment is read."""
    if isinstance(value, Mapping):
        return {name: resolved(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [resolved(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"\$\{\w+:([^{}]*)\}", r"\1", value)
    return None if text == "null" else text


def read_arguments(
    path: Path, asked: Asked, tree: Mapping[str, Any], bridge: str = "", swift: bool = False,
    files: Mapping[str, str] | None = None,
) -> ForeignJob:  # fmt: skip
    """Read the job of Megatron's arguments.

    Args:
        path: The file, for errors.
        asked: The options.
        tree: The arguments by flag, or nested by section.
        bridge: The function of Megatron-Bridge with which a recipe begins; empty: no recipe. Missing arguments of a
            recipe have Megatron-Bridge's defaults: bf16, a distributed optimizer, overlap, and the values of BRIDGE.
        swift: True: missing arguments have ms-swift's defaults.
        files: Texts that the script writes, by file name; DeepSpeed's JSON may be one of these.

    Raises:
        ConfigError: The sizes are neither in the file nor an option, or an argument cannot be planned.
    """
    primus = "modules" in tree
    defaults, source = DEFAULTS.get("primus" if primus else "swift" if swift else bridge, ({}, ""))
    given = Arguments(resolved(tree) if primus else tree, defaults, source)
    account = given.account
    trainer.refuse_adapters({name.replace("-", "_"): value for name, value in tree.items()} if swift else {})
    given.agree("train-type", "full")
    given.agree("distributed-type", "megatron_lm")
    model = model_of(asked, account, told_model(given, tree), path)
    if isinstance(model, dict):
        complete(model, given, given.number("tensor-model-parallel-size"))
    inner = json_of(path, given, files or {})
    offload = zero.offload_of(inner)
    half = precision_of(given, bool(bridge))
    sync = zero.sync_of(inner, half) if given.on("deepspeed") else sync_of(given, bool(bridge))
    degrees, sent = degrees_of(given, asked.devices, model, sync, bool(bridge))
    stages = degrees.stages
    started = given.hinted("nnodes") * given.hinted("nproc-per-node") or given.hinted("started")
    if started and started != asked.devices:
        account.assume("devices", asked.devices, f"--devices; the script starts {started} processes")
    step = given.number("global-batch-size", 0)
    run = run_of(
        asked, account, degrees, model=model, sequence=tokens_of(given, swift),
        micro=given.number("micro-batch-size", 1, DEFAULT), global_=step or None, path=path, precision=half,
        recompute=recomputed(given, -(-layers_of(model) // (stages * degrees.chunks))),
        accumulation=given.number("num-micro-batches"),
        offload="host" if given.on("optimizer-cpu-offload") and offload == "none" else offload,
    )  # fmt: skip
    run |= stored(given, bridge)
    if written := partition_of(given, stages, degrees.chunks, layers_of(model)):
        run["layout"]["pipeline"]["partition"] = written
    given.agree("optimizer-offload-fraction", "1", "1.0")
    given.agree("fine-grained-activation-offloading", "false")
    if str(given.get("cuda-graph-impl", "none")).lower() == "none":
        given.get("cuda-graph-scope")
    else:
        given.leave("cuda-graph-impl")
    if stages == 1:
        given.agree("no-pipeline-parallel", "true")
    facts = (*facts_of(given, bool(bridge)), *zero.overlapped(inner), *sent, *degrees.expert_facts(asked.devices))
    account.merge(inner, "deepspeed.")
    program = "deepspeed" if given.on("deepspeed") else "megatron-core"
    return ForeignJob(program, run, account, facts, "arguments")


def degrees_of(
    given: Arguments, devices: int, model: str | Tree, sync: str, bridge: bool
) -> tuple[Degrees, tuple[str, ...]]:
    """Return the job's axes, and the software's facts on how rows are sent to experts.

    Args:
        given: The arguments.
        devices: The plan's devices.
        model: The section `model`, or a shipped model's name.
        sync: Our value of `layout.data.sync`.
        bridge: As in `read_arguments`.

    Raises:
        ConfigError: The axes do not divide the devices.
    """
    stages, tensor = given.number("pipeline-model-parallel-size"), given.number("tensor-model-parallel-size")
    heads = given.number("ds-sequence-parallel-size")
    degrees = Degrees(
        tensor=tensor, by_sequence=given.on("sequence-parallel") and tensor > 1, stages=stages,
        chunks=chunks_of(given, stages, model), context=max(heads, given.number("context-parallel-size")),
        context_kind="ulysses" if heads > 1 else given.word("cp-comm-type", CONTEXTS, "ring"),
        experts=given.number("expert-model-parallel-size"), sync=sync,
    )  # fmt: skip
    sent: tuple[str, ...] = ()
    mixed = model.get("experts") if isinstance(model, dict) else read_model(model).routing.num_experts
    if mixed or (degrees.experts > 1 and not isinstance(model, dict)):
        degrees = replace(degrees, expert_tensor=given.number("expert-tensor-parallel-size", tensor))
        sent = dispatched(given, bridge) if degrees.experts > 1 or isinstance(model, dict) else ()
    if given.on("use-distributed-optimizer") and (copies := given.number("num-distributed-optimizer-instances", 1)) > 1:
        parts = degrees.data(devices) // copies
        degrees = replace(degrees, shard=parts) if parts > 1 else replace(degrees, sync="allreduce")
    return degrees, sent


def json_of(path: Path, given: Arguments, files: Mapping[str, str]) -> Account:
    """Return the account of DeepSpeed's JSON, if the script writes the file or the file is here; else the flag
    --zero-stage as the JSON's field.

    Raises:
        ConfigError: Stage of flag and JSON differ.
    """
    if not given.on("deepspeed"):
        return zero.account_of({})
    stage = given.word("zero-stage", tuple((str(each), each) for each in range(4)), None)
    name = str(given.account.get("deepspeed-config", "deepspeed_config", default="")).rpartition("/")[2]
    fields: Any = {}
    if name in files:
        fields = parse_json(files[name])
    elif name and (path.parent / name).is_file():
        fields = zero.json_beside(path, name)
    else:
        given.leave("deepspeed-config")
    micro = str(given.get("micro-batch-size", 1))
    told = fields.get("zero_optimization", {}).get("stage")
    if stage is not None and told not in (None, stage):
        raise ConfigError.of("--zero-stage", stage, f"differs from the stage {told} of {name}", "one stage")
    usual = {"zero_optimization": {"stage": 1 if stage is None else stage}}
    account = zero.account_of(fields if told is not None else {**fields, **usual})
    account.agree("train_micro_batch_size_per_gpu", micro)
    account.get("gradient_accumulation_steps")  # Megatron-DeepSpeed takes the global batch
    zero.half_of(account)
    return account


def tokens_of(given: Arguments, swift: bool) -> Any:
    """Return the tokens of a sequence, or None. ms-swift packs samples to --max_length, or pads them."""
    told = given.get("seq-length") or given.get("encoder-seq-length")
    if told is None and swift and (told := given.get("max-length")) is not None and not given.on("packing"):
        given.account.assume("tokens of a sequence", told, "--max_length; without --packing samples are shorter")
    return told


def complete(model: Tree, given: Arguments, tensor: int) -> None:
    """Write into a section `model` the fields that no config.json has: activation, biases, experts, padding.

    Args:
        model: The section, made from the sizes.
        given: The arguments.
        tensor: Ranks that cut a layer; the padding of the vocabulary is a multiple of their number.
    """
    account = given.account
    if "activation" in model and not gated(given):
        model["activation"] = "relu2" if given.on("squared-relu") else "gelu"
        if not given.on("disable-bias-linear"):
            if "biases" in model:
                model["biases"] = ["query-key-value", "output", *(["feed-forward"] if not model.get("experts") else [])]
                if model.get("experts"):
                    account.assume("biases of experts", "none", "experts have no biases in a plan")
            else:
                account.assume("disable-bias-linear", True, "latent attention has no biases in a plan")
        if given.get("position-embedding-type", "learned_absolute") == "learned_absolute":
            account.assume("model.rope", "plain", "in place of a table of positions, and RMS norms for layer norms")
    elif "activation" not in model:
        positions = given.get("position-embedding-type", "learned_absolute")
        if positions != "learned_absolute":
            account.assume("model.positions", model["positions"], f"a table of positions, in place of {positions}")
    if "later_tokens" in model:
        model["later_tokens"] = given.number("mtp-num-layers", 0)
    if experts := model.get("experts"):
        experts["dense_layers"] = dense_layers(given, model["layers"])
        if experts.get("per_token") == 1:
            experts["renormalise"] = False  # one weight alone would be 1: Megatron takes the softmax before
        experts["shared"] = given.number("moe-shared-expert-intermediate-size", 0)
    model["dropout"] = float(given.get("hidden-dropout", 0.1, DEFAULT))
    padded = given.get("pad-vocab-size-to") is not None
    model["vocabulary_multiple"] = (1 if padded else given.number("make-vocab-size-divisible-by", 128)) * tensor


def told_model(given: Arguments, tree: Mapping[str, Any]) -> str | Tree | None:
    """Return the model's sizes, or the name of the Hugging Face model that a recipe takes."""
    called = str(dict(fields_of(tree)).get(f"model.{CALLED}", ""))
    if named := re.search(r"from_hf_pretrained\(\s*['\"]([^'\"]+)", called):
        given.account.read[f"model.{CALLED}"] = named[1]
        return named[1]
    if "Provider" in called and known_name(called) is not None:
        given.account.read[f"model.{CALLED}"] = called
        return called
    if any(given.get(flag) in NOTHING for flag in SIZES):
        # Primus names a file of sizes, ms-swift a model or a checkpoint of Megatron.
        told = str(given.account.get("load", "mcore_model", default=""))
        return given.get("model") or (told.removesuffix("-mcore") if told.endswith("-mcore") else None)
    return sizes_of(given)


def sizes_of(given: Arguments) -> Tree:
    """Return the sizes in the form of a Hugging Face config.json of a GPT-2, Llama, Mixtral or DeepSeek-V3."""
    hidden, heads = given.number("hidden-size"), given.number("num-attention-heads")
    positions = given.number("max-position-embeddings", given.number("seq-length", 0) or 1024)
    padded = given.number("pad-vocab-size-to", 0)
    vocabulary = padded or given.number("vocab-size", *vocabulary_of(given))
    untied = given.on("untie-embeddings-and-output-weights")
    tied = not (untied or given.get("share-embeddings-and-output-weights") is False)
    latent = given.on("multi-latent-attention")
    plain = not (gated(given) or given.on("squared-relu") or given.on("disable-bias-linear") or latent)
    plain = plain and given.get("num-query-groups") is None and not experts_of(given)
    if plain and given.number("ffn-hidden-size", 4 * hidden) == 4 * hidden:
        return {
            "model_type": "gpt2", "n_layer": given.number("num-layers"), "n_embd": hidden, "n_head": heads,
            "n_positions": positions, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        }  # fmt: skip
    usual, why = (
        (int(8 * hidden / 3 / 64) * 64, "8/3 of hidden, in 64s") if gated(given) else (4 * hidden, "4 x hidden")
    )
    inner = given.number("ffn-hidden-size", usual, f"{DEFAULT}: {why}")
    if latent:
        return latent_sizes(given, inner, positions, vocabulary, tied)
    sizes: Tree = {
        "model_type": "llama", "num_hidden_layers": given.number("num-layers"), "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": given.number("num-query-groups", heads),
        "intermediate_size": inner, "max_position_embeddings": positions, "vocab_size": vocabulary,
        "head_dim": given.number("kv-channels", hidden // heads), "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": tied,
    }  # fmt: skip
    if experts := experts_of(given):
        width = given.number("moe-ffn-hidden-size", inner)
        usual, why = (1, "Megatron-DeepSpeed's default") if given.on("deepspeed") else (2, DEFAULT)
        sizes |= {"model_type": "mixtral", "num_local_experts": experts,
                  "num_experts_per_tok": given.number("moe-router-topk", usual, why), "intermediate_size": width,
                  "sliding_window": None, "router_aux_loss_coef": 0.0}  # fmt: skip
    return sizes


def experts_of(given: Arguments) -> int:
    """Return the number of a layer's experts; 0: dense, which Megatron-DeepSpeed's scripts write as 1."""
    experts = given.number("num-experts", 0)
    return 0 if experts == 1 and given.on("deepspeed") else experts


def latent_sizes(given: Arguments, inner: int, positions: int, vocabulary: int, tied: bool) -> Tree:
    """Return the sizes of a model with latent attention in the form of DeepSeek-V3's config.json, which the key
    kv_lora_rank identifies.

    Args:
        given: The arguments.
        inner: Width of a dense feed-forward.
        positions: Most tokens of a sequence.
        vocabulary: Number of tokens.
        tied: True if the head has the embeddings' table.
    """
    sizes: Tree = {
        "num_hidden_layers": given.number("num-layers"), "hidden_size": given.number("hidden-size"),
        "num_attention_heads": given.number("num-attention-heads"),
        "q_lora_rank": given.number("q-lora-rank", 0) or None, "intermediate_size": inner, "rms_norm_eps": 1e-6,
        "kv_lora_rank": given.number("kv-lora-rank", 32, DEFAULT), "max_position_embeddings": positions,
        "qk_nope_head_dim": given.number("qk-head-dim", 128, DEFAULT), "vocab_size": vocabulary,
        "qk_rope_head_dim": given.number("qk-pos-emb-head-dim", 64, DEFAULT), "tie_word_embeddings": tied,
        "v_head_dim": given.number("v-head-dim", 128, DEFAULT), "first_k_dense_replace": 0,
    }  # fmt: skip
    given.get("kv-channels")  # of attention without latents
    if given.get("num-experts") is None:
        return sizes
    groups = given.number("moe-router-num-groups", 1)
    return sizes | {
        "n_routed_experts": given.number("num-experts"), "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": given.number("moe-router-topk", 2, DEFAULT), "routed_scaling_factor": 1.0,
        "moe_intermediate_size": given.number("moe-ffn-hidden-size", inner), "n_group": groups,
        "topk_group": given.number("moe-router-group-topk", groups),
    }  # fmt: skip


def dense_layers(given: Arguments, layers: int) -> int:
    """Return the number of layers before the first layer with experts, by --moe-layer-freq: 1, or a list of 0 and 1.

    Raises:
        ConfigError: A layer without experts follows a layer with experts.
    """
    written = str(given.get("moe-layer-freq", 1)).strip("'\" ")
    flag = "expert-interval" if given.on("deepspeed") else "moe-layer-freq"
    if given.on("deepspeed"):  # experts in every second layer, without the flag
        written = str(given.number(flag, 2, "Megatron-DeepSpeed's default"))
    every = int(written) if written.isdigit() else 0
    pattern = [int(layer % every == 0) for layer in range(layers)] if every else pattern_of(written)
    dense = pattern.index(1) if 1 in pattern else layers
    if len(pattern) != layers or 0 in pattern[dense:]:
        rule = f"is no list of 0s and then 1s for {layers} layers"
        raise ConfigError.of(f"--{flag}", written, rule, f"[0]*1+[1]*{layers - 1}" if flag == "moe-layer-freq" else "1")
    return dense


def pattern_of(text: str) -> list[int]:
    """Parse a sum of lists such as `([0]*3+[1]*58)`; at most MOST_PARTS numbers. Another text gives no numbers."""
    terms = [
        re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", term) for term in re.sub(r"[\s()]", "", text).split("+")
    ]
    found: list[int] = []
    for term in terms:
        if term is None:
            return []
        found += [int(digit) for digit in term[1].split(",")] * int(term[2] or 1)
        if len(found) > MOST_PARTS:
            return []
    return found


def gated(given: Arguments) -> bool:
    """Return True if feed-forwards are SwiGLU."""
    return given.on("swiglu") or given.get("gated-linear-unit") is True


def vocabulary_of(given: Arguments) -> tuple[int, str]:
    """Return (the number of tokens of the tokenizer that the arguments name, else of GPT-2's; the source)."""
    lacks = "the file has no --vocab-size"
    if (model := known_name(given.told("tokenizer-model"))) is not None:
        return read_model(model).vocabulary, f"of --tokenizer-model, as {model} has; {lacks}"
    for flag in ("patch-tokenizer-type", "tokenizer-type", "tokenizer-model"):
        told = re.sub(r"[-_.\s]", "", given.told(flag).lower())
        if "qwen" in told and (extra := given.number("extra-vocab-size", 0)):  # Pai-Megatron-Patch does not pad
            return QWEN_TOKENS + extra, f"of --{flag} and --extra-vocab-size; {lacks}"
        if tokens := next((tokens for word, tokens in VOCABULARIES if word in told), 0):
            return tokens, f"of --{flag}; {lacks}"
        families = {re.sub(r"\W", "", each.partition("-")[0]): each for each in reversed(model_names())}
        named = [word for word in sorted(families, key=len) if re.search(r"[a-z]{3}\d", word) and word in told]
        if named:
            return read_model(families[named[-1]]).vocabulary, f"of --{flag}, as {families[named[-1]]} has; {lacks}"
        if "qwen" in told:
            return QWEN_TOKENS, f"of --{flag}; {lacks}"
    return GPT2_TOKENS, f"GPT-2's; {lacks}"


def chunks_of(given: Arguments, stages: int, model: str | Tree) -> int:
    """Return the virtual stages of a rank, given as a number, as layers of each stage, or by a written layout."""
    if written := given.get(LAYOUT):
        return max(1, len(layout_of(written)) // stages)
    for flag in ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"):
        if given.get(flag) is not None:
            return given.number(flag)
    each = given.number("num-layers-per-virtual-pipeline-stage", 0)
    if not each or stages == 1:
        return 1
    layers = layers_of(model) + sum(counted_parts(given))
    if layers % (stages * each):
        rule = f"does not cut {layers} layers over {stages} stages evenly"
        raise ConfigError.of("--num-layers-per-virtual-pipeline-stage", each, rule, "a divisor of a stage's layers")
    return layers // stages // each


def partition_of(given: Arguments, stages: int, chunks: int, layers: int) -> list[int]:
    """Return the layers of each virtual stage; empty: one stage, or an even cut.

    All ranks have equal numbers of layers, and so have the chunks of a rank. Exceptions: numbers written for the first
    and the last rank, and an embedding or a loss that counts as a layer. Source: core/transformer/transformer_block.py,
    get_num_layers_to_build.

    Raises:
        ConfigError: The layers cannot be divided by this rule.
    """
    flags = {0: "decoder-first-pipeline-num-layers", stages - 1: "decoder-last-pipeline-num-layers"}
    ends = {rank: given.number(flag) for rank, flag in flags.items() if given.get(flag) not in NOTHING}
    if stages == 1:
        return []
    if written := given.get(LAYOUT):
        cut = [stage.count("t") for stage in layout_of(written)]
        if sum(cut) != layers or len(cut) % stages:
            rule = f"has {sum(cut)} layers in {len(cut)} parts, of a model of {layers} on {stages} stages"
            raise ConfigError.of(f"--{LAYOUT}", written, rule, "the model's layers in equal numbers of parts a stage")
        return cut
    counted = counted_parts(given)
    others = stages - len(ends)
    rest = layers + sum(counted) - sum(ends.values())
    each = rest // others if others else 0
    ranks = [ends.get(rank, each) for rank in range(stages)]
    cut = [held // chunks for held in ranks] * chunks
    cut[0], cut[-1] = cut[0] - counted[0], cut[-1] - counted[1]
    uneven = sum(ranks) != layers + sum(counted) or any(held % chunks for held in ranks)
    if uneven or min(cut) < 0 or (ends and any(counted)):
        if given.get("num-layers") in NOTHING and not ends:
            return []  # a model by name is cut by the program's recipe
        flag, held = next(
            ((flags[rank], held) for rank, held in ends.items()), ("pipeline-model-parallel-size", stages)
        )
        rule = f"leaves {rest} of {layers} layers to {others} stages of {chunks} chunks, unevenly"
        raise ConfigError.of(f"--{flag}", held, rule, "layers that divide as Megatron divides them")
    return cut if ends or any(counted) else []


def counted_parts(given: Arguments) -> list[int]:
    """Return the layers that embedding and loss count as in the division of layers, 0 or 1 each. DeepSpeed counts the
    classes of layers that --pp-partition-method names; the loss has the embedding's class."""
    if given.on("deepspeed") and "type:transformer" in (method := str(given.get("pp-partition-method", ""))).lower():
        return [int("embedding" in method.lower())] * 2
    given.leave("pp-partition-method")
    return [int(given.on(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")]


PART_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Letters of a written layout, by the names that recipes have."""


def layout_of(written: Any) -> list[list[str]]:
    """Parse --pipeline-model-parallel-layout: the parts of each virtual stage, in the model's order. A recipe may have
    a list of lists of names (embedding, decoder, mtp, loss).

    E is the embedding, t a layer, m a layer of later tokens, L the loss; `|` ends a stage, `x*3` and `(t|)*3` repeat,
    commas are spaces: core/transformer/pipeline_parallel_layer_layout.py.
    """
    text = str(written)
    if isinstance(written, list):
        text = "|".join("".join(PART_LETTERS.get(str(each), "?") for each in stage) for stage in written)
    flat = text.replace(",", "").replace(" ", "").strip("'\"")
    repeat = re.compile(r"(?:\(([^()]*)\)|([Etm]))\*(\d{1,4})(?!\d)")
    while (found := repeat.search(flat)) and len(flat) <= MOST_PARTS:
        pattern = found[2] or found[1]
        times = min(int(found[3]), MOST_PARTS // max(1, len(pattern)) + 1)
        flat = flat[: found.start()] + pattern * times + flat[found.end() :]
    if len(flat) > MOST_PARTS or not re.fullmatch(r"E[tm|]*L", flat):
        raise ConfigError.of(
            "--pipeline-model-parallel-layout", text, "is no layout", "E, t, m, L, | and repeats: Et|t*3|tL"
        )
    return [list(stage) for stage in flat.split("|")]


def sync_of(given: Arguments, bridge: bool) -> str:
    """Return our `layout.data.sync`: Megatron-FSDP's strategy, the distributed optimizer, or all-reduce."""
    strategy = given.word("data-parallel-sharding-strategy", SHARDS, "zero3")
    if given.on("use-megatron-fsdp") or given.on("use-torch-fsdp2"):
        return str(strategy)
    if bridge and given.get("use-distributed-optimizer") is None:
        given.account.assume("ddp.use_distributed_optimizer", True, "Megatron-Bridge's default")
        return "zero1"
    return "zero1" if given.on("use-distributed-optimizer") else "allreduce"


def recomputed(given: Arguments, layers: int) -> Any:
    """Return our `memory.recompute`: full recomputation in groups of layers, or recomputation of attention.

    Args:
        given: The arguments.
        layers: Layers of a virtual stage: `block` of as many layers is full recomputation, of fewer is left out.

    Scripts of before 2022, and of Megatron-DeepSpeed, have --checkpoint-activations or --activations-checkpoint-method.
    """
    if given.on("checkpoint-activations") or given.word("activations-checkpoint-method", METHODS, False):
        return given.number("activations-checkpoint-num-layers", given.number("checkpoint-num-layers", 1))
    if whole_layers(given):
        if given.word("recompute-method", METHODS, True):
            return given.number("recompute-num-layers", 1)
        if given.number("recompute-num-layers", layers) < layers:
            given.leave("recompute-num-layers")
        return 1
    return "selective" if ATTENTION in modules_of(given) else "none"


METHODS = (("uniform", True), ("block", False))
"""Megatron's methods of full recomputation; True: groups of layers, False: some layers, of which all are taken."""


def whole_layers(given: Arguments) -> bool | None:
    """Return whether layers are computed again whole, or parts of layers; None without --recompute-granularity."""
    told: bool | None = given.word("recompute-granularity", (("full", True), ("selective", False)), None)
    return told


def modules_of(given: Arguments) -> list[str]:
    """Return the modules that selective recomputation computes again; none under another granularity."""
    whole = whole_layers(given)
    if whole or (whole is None and not given.on("recompute-activations")):
        return []
    told = given.get("recompute-modules", ATTENTION)
    return [str(each) for each in told] if isinstance(told, list) else str(told).replace(",", " ").split()


ATTENTION = "core_attn"
"""Megatron's word, in --recompute-modules, for the module that selective recomputation recomputes by default."""
PARTS: tuple[Recomputed, ...] = get_args(Recomputed)
"""Modules whose results alone are not kept, which the fact `recomputed` has."""


def precision_of(given: Arguments, bridge: bool) -> str:
    """Return bf16, fp16, or float32 without either flag."""
    if (word := str(given.get("mixed-precision", ""))) in ("no", "fp16", "bf16"):  # Accelerate's
        return "float32" if word == "no" else word
    if given.on("bf16") or given.on("fp16"):
        return "bf16" if given.on("bf16") else "fp16"
    return ("fp16" if "fp16" in word else "bf16") if bridge else "float32"


def stored(given: Arguments, bridge: str) -> Tree:
    """Return the run's fields for gradients and optimizer states in other formats than Megatron-LM's float32.

    Args:
        given: The arguments.
        bridge: As in `read_arguments`.

    Raises:
        ConfigError: A format of the states has no counterpart here.
    """
    fields: Tree = {}
    wide = given.get("grad-reduce-in-fp32", True)
    recipe = str(given.get("mixed-precision", "bf16_mixed" if bridge in BRIDGE else ""))
    if bridge and (recipe or given.has("mixed_precision")):
        # The format replaces the field of ddp (Megatron-Bridge's training/mixed_precision.py, setup).
        usual = "fp16" not in recipe and "grad_reduce" not in recipe
        wide = given.account.get("mixed_precision.grad_reduce_in_fp32", default=usual)
    if given.on("grad-reduce-in-bf16") or str(wide).lower() == "false":
        fields["precision"] = {"level": "O2", "dtype": precision_of(given, bool(bridge)), "accumulate": "stored"}
    aware = given.on("use-precision-aware-optimizer")
    states = {given.word(flag, FORMATS, "float32") for flag in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    if aware and states == {"bf16"}:
        fields["optimizer"] = {"name": "adamw", "states": "bf16"}
    elif aware and states != {"float32"}:
        given.leave("exp-avg-dtype")
        given.leave("exp-avg-sq-dtype")
    for flag in ("main-grads-dtype", "main-params-dtype"):
        # With sums in half precision the main gradients are the same numbers.
        words = (*FLOAT32, "torch.bfloat16") if "grads" in flag and fields.get("precision") else FLOAT32
        if str(given.get(flag, "fp32")).lower() not in words:
            given.leave(flag)
    return fields


FLOAT32 = ("fp32", "float32", "torch.float32")
FORMATS = (*((word, "float32") for word in FLOAT32), ("bf16", "bf16"), ("bfloat16", "bf16"), ("torch.bfloat16", "bf16"))
"""Megatron's words for the format of a moment, each with ours."""


def facts_of(given: Arguments, bridge: bool) -> tuple[str, ...]:
    """Return the software's facts that the arguments change: attention, FP8, results that are computed again, layers in
    host memory, communication under computation."""
    facts = []
    backend = given.get("attention-backend", "auto")
    if given.get("transformer-impl", "transformer_engine") == "local" or backend == "local":
        # Transformer Engine's own attention does not read these flags.
        wide = given.on("attention-softmax-in-fp32") or given.on("apply-query-key-layer-scaling")
        apart = "wide-steps" if wide else "steps"
        facts.append(f"attention={apart if given.on('no-masked-softmax-fusion') else 'fused-softmax'}")
    elif backend == "unfused":
        facts.append("attention=fused-softmax")
    recipe = f"{given.get('mixed-precision', '')} {given.get('fp8-recipe', '')}".lower()
    if "fp4" in recipe or (bridge and not re.search("bf16|fp16|fp8", recipe)):
        given.leave("mixed-precision")
    if given.get("fp8-format") or given.get("fp8") or "fp8" in recipe:
        facts.append("products=mxfp8" if "mxfp8" in recipe or "fp8_mx" in recipe else "products=fp8")
        alone = given.get("fp8-param-gather")
        if alone is None and bridge:
            alone = "subchannel" not in recipe
            given.account.assume("fp8_param_gather", alone, "Megatron-Bridge's recipes (training/mixed_precision.py)")
        facts.append(f"low_weights={'alone' if alone and str(alone).lower() != 'false' else 'copies'}")
    modules = modules_of(given)
    if parts := [each for each in modules if each in PARTS]:
        facts.append(f"recomputed={','.join(parts)}")
    if set(modules) - {ATTENTION, *PARTS}:
        given.leave("recompute-modules")
    if layers := given.number("cpu-offloading-num-layers", 0):
        facts.append(f"host_layers={layers}")
        if given.on("cpu-offloading-weights"):
            given.leave("cpu-offloading-weights")
    # comm_overlap, if set, replaces the fields of ddp (Megatron-Bridge's training/comm_overlap.py, setup).
    section = "comm_overlap." if bridge and given.has("comm_overlap") else ""
    under = []
    for flag, name in OVERLAPS:
        usual = bridge and name in ("sums", "gathers")
        on = given.on(flag, usual)
        if usual and section:
            on = given.account.flag(section + flag.replace("-", "_"), default=True)
        under += [name] if on else []
    if given.on("deepspeed"):  # its JSON says overlap_comm
        return tuple(facts)
    return (*facts, f"overlapped={','.join(under) or '[]'}")


def dispatched(given: Arguments, bridge: bool) -> tuple[str, ...]:
    """Return the software's facts on how rows are sent to experts and multiplied. Without grouped products the experts
    share a stream with all other kernels. Raises ConfigError for an unknown dispatcher."""
    told = given.word("moe-flex-dispatcher-backend", BACKENDS, None)
    if given.on("moe-enable-deepep") or given.on("use-turbo-deepep"):
        told = "deepep"
    if given.on("deepspeed"):
        return ("dispatch=alltoall", ONE_STREAM)
    dispatcher = given.word("moe-token-dispatcher-type", KINDS, "flex" if told else None)
    if given.get("apply-flex-dispatcher-backend()") and told:  # Megatron-Bridge's training/flex_dispatcher_backend.py
        dispatcher = "flex"
    if dispatcher is None:
        dispatcher, why = ("alltoall", "Megatron-Bridge's providers") if bridge else ("allgather", DEFAULT)
        given.account.assume("moe-token-dispatcher-type", dispatcher, why)
    if not given.on("moe-permute-fusion"):
        given.account.assume("moe-permute-fusion", True, "each permutation of rows is one kernel in a plan")
    dispatcher = (told or "deepep") if dispatcher == "flex" else dispatcher
    names = ("moe-flex-dispatcher-num-sms", f"moe-{dispatcher}-num-sms")
    sms = next((given.number(name) for name in names if given.get(name) not in NOTHING), None)
    told_sms = [f"dispatch_sms={sms}"] if sms and dispatcher in SENT_ONCE else []
    return (f"dispatch={dispatcher}", *told_sms, *(() if bridge or given.on("moe-grouped-gemm") else (ONE_STREAM,)))


ONE_STREAM = "streams_bytes=[0, 0]"


KINDS = (("alltoall", "alltoall"), ("alltoall_seq", "alltoall"), ("allgather", "allgather"), ("flex", "flex"))
"""Megatron's --moe-token-dispatcher-type, each with our value of the fact `dispatch`."""
BACKENDS = (("deepep", "deepep"), ("hybridep", "hybridep"))
"""The kernels of Megatron's dispatcher `flex`."""
OVERLAPS = (
    ("overlap-grad-reduce", "sums"), ("overlap-param-gather", "gathers"), ("tp-comm-overlap", "layers"),
    ("overlap-moe-expert-parallel-comm", "experts"),
)  # fmt: skip
