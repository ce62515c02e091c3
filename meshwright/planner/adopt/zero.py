"""DeepSpeed's engine for a recorded script: the ZeRO stage of its JSON by torch's own operations.

DeepSpeed asks a driver for devices and reads memory addresses, so it cannot run without values. Engine has its buffers,
collectives and streams: one flat 16-bit copy of the weights, a float32 share of them for the optimizer, buckets of
gradients that are summed in the backward pass, and for stage 3 weights that are gathered before each module.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py, partitioned_param_coordinator.py, config.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.ranks.errors import ConfigError
from meshwright.ranks.foreign import parse_json

dist = torch.distributed
VERSION = "0.19.8"
"""DeepSpeed's version that was read."""
KNOWN = frozenset([
    "zero_optimization", "bf16", "bfloat16", "fp16", "train_micro_batch_size_per_gpu", "train_batch_size",
    "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler", "activation_checkpointing",
    "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
])  # fmt: skip
"""Keys of DeepSpeed's JSON that change the record, or change no step."""
KNOWN_ZERO = frozenset([
    "stage", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "offload_optimizer", "offload_param",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_reuse_distance",
    "sub_group_size", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save", "stage3_max_live_parameters",
])  # fmt: skip


@dataclass(frozen=True)
class ZeroWords:
    """DeepSpeed's JSON, read. Sizes of buckets are elements."""

    stage: int
    dtype: torch.dtype
    accumulated: int
    micro: int
    clip: float
    bucket: int
    gather_bucket: int
    overlap: bool
    states_on_host: bool
    weights_on_host: bool
    prefetch: int
    persistent: int
    """Largest parameter that stage 3 keeps whole."""
    reuse: int
    """Elements of later modules within which stage 3 looks for a next use before it frees a parameter."""
    live: int
    """Elements of whole parameters up to which stage 3 gathers ahead."""
    group: int
    """Elements of parameters that stage 3 steps at once."""
    unread: tuple[str, ...]
    """Keys without an effect on the record."""

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ZeroWords:
        """Read DeepSpeed's JSON. Raises ConfigError for a stage that DeepSpeed has not, and for a section or a number
        of another form."""
        zero = section_of(tree, "zero_optimization")

        def integer(name: str, default: float, section: Mapping[str, Any] = zero) -> int:
            value = section.get(name, default)
            value = default if value in ("auto", None) else value
            # DeepSpeed takes 5e8 as well.
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if isinstance(value, bool) or not whole or value < 0:
                field = f"zero_optimization.{name}" if section is zero else name
                raise ConfigError.of(field, value, "is no whole number", f"{int(default)}, auto")
            return int(value)

        def on_host(name: str) -> bool:
            return bool(section_of(zero, name).get("device", "none") != "none")

        stage = integer("stage", 0)
        if stage not in range(4):
            raise ConfigError.of("zero_optimization.stage", stage, "is no stage of ZeRO", "0, 1, 2, 3")
        half = next((dtype for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16),
                                               ("fp16", torch.float16))
                     if section_of(tree, name).get("enabled") in (True, "auto")), torch.float32)  # fmt: skip
        unread = [f"zero_optimization.{name}" for name in zero if name not in KNOWN_ZERO]
        overlap, clip = zero.get("overlap_comm"), tree.get("gradient_clipping") or 0.0
        clip = 1.0 if clip == "auto" else clip
        if isinstance(clip, bool) or not isinstance(clip, int | float):
            raise ConfigError.of("gradient_clipping", clip, "is no number", "1.0, auto")
        return cls(
            stage, half, integer("gradient_accumulation_steps", 1, tree),
            integer("train_micro_batch_size_per_gpu", 1, tree), clip,
            integer("reduce_bucket_size", 5e8), integer("allgather_bucket_size", 5e8),
            stage == 3 if overlap in (None, "auto") else bool(overlap),
            on_host("offload_optimizer"), on_host("offload_param") and stage == 3,
            integer("stage3_prefetch_bucket_size", 5e7), integer("stage3_param_persistence_threshold", 1e5),
            integer("stage3_max_reuse_distance", 1e9), integer("stage3_max_live_parameters", 1e9),
            integer("sub_group_size", 1e9),
            (*(name for name in tree if name not in KNOWN), *unread),
        )  # fmt: skip


def section_of(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of DeepSpeed's JSON, empty if there is none. Raises ConfigError for a value without fields."""
    section = tree.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError.of(name, section, "is no section with fields", "{}")
    return section


def config_of(config: Any) -> Mapping[str, Any]:
    """Return DeepSpeed's JSON, from a dict or the path of a file."""
    if isinstance(config, Mapping):
        return config
    if config is None:
        raise ConfigError.of("deepspeed.initialize", None, "has no configuration", "config=, or args.deepspeed_config")
    with Path(config).open(encoding="utf-8") as file:
        tree = parse_json(file.read())
    return section_of({str(config): tree}, str(config))


def changed_configs(text: str) -> list[tuple[str, str]]:
    """Return changes of DeepSpeed's JSON that may make a step faster or smaller.

    Args:
        text: The file's text.

    Returns:
        (A title, the whole new text) of each change. The text keeps its indentation if json.dumps can write it.
    """
    tree = parse_json(text)
    words, zero = ZeroWords.of(tree), tree.get("zero_optimization") or {}
    indents: tuple[int | str, ...] = (2, 4, "\t", 1)
    indent = next((width for width in indents if json.dumps(tree, indent=width) == text.strip()), 2)
    found: list[tuple[str, str]] = []

    def change(title: str, fields: Mapping[str, Any], **zeros: Any) -> None:
        new = {name: value for name, value in (zero | zeros).items() if value is not None}
        made = {**tree, **({"zero_optimization": new} if zeros else {}), **fields}
        found.append((title, json.dumps(made, indent=indent) + "\n"))

    for stage in sorted({0, 1, 2, 3} - {words.stage}, reverse=True):
        only = {} if stage == 3 else {"offload_param": None}
        change(f"ZeRO stage {stage}", {}, stage=stage, **only, **({} if stage else {"offload_optimizer": None}))
    host = {"device": "cpu", "pin_memory": True}
    if words.stage:
        title = "states back on the device" if words.states_on_host else "offload optimizer states"
        change(title, {}, offload_optimizer=None if words.states_on_host else host)
    if words.stage == 3:
        title = "weights back on the device" if words.weights_on_host else "offload weights"
        change(title, {}, offload_param=None if words.weights_on_host else host)
    if words.stage in (1, 2) and not words.overlap:
        change("overlapped sums", {}, overlap_comm=True)
    if words.dtype == torch.float32 and "fp16" not in tree:
        change("bf16", {"bf16": {"enabled": True}})
    whole = tree.get("train_batch_size")
    times = {"train_batch_size": 2 * whole} if isinstance(whole, int) else {}
    if isinstance(tree.get("gradient_accumulation_steps"), int):
        change("accumulation x 2", {"gradient_accumulation_steps": 2 * words.accumulated, **times})
    if isinstance(tree.get("train_micro_batch_size_per_gpu"), int):
        change("micro-batch x 2", {"train_micro_batch_size_per_gpu": 2 * words.micro, **times})
    return found


class Engine(nn.Module):
    """DeepSpeed's engine around a model. Attributes of the model are attributes of the engine."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, words: ZeroWords, device: torch.device,
        mark: Callable[[Sequence[Tensor], str], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self.module = model.to(words.dtype)
        self.words, self.optimizer, self.device, self._mark = words, optimizer, device, mark
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.lr_scheduler: Any = None
        self.config: Mapping[str, Any] = {}
        self._micro = 0
        self._boundary: bool | None = None
        self._norm: Tensor | None = None
        on_gpu = device.type == "cuda"
        self._side: Any = torch.cuda.Stream() if on_gpu else None
        self._gather_side: Any = torch.cuda.Stream() if on_gpu else None
        self._buffers_of: list[Tensor] = []
        self._filled, self._turn = 0, 0
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._summed: Tensor | None = None
        self._shards, self._wholes = dict[nn.Parameter, Tensor](), dict[nn.Parameter, Tensor]()
        self.lay_out()
        model.to(device)
        for p in self._trained:
            p.register_post_accumulate_grad_hook(self.reduce)
        if words.stage == 3:
            self.follow_modules()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def lay_out(self) -> None:
        """Make the flat weights, their share in float32, and the optimizer of the share."""
        words, trained = self.words, self._trained
        parts = self.ranks if words.stage or words.dtype == torch.bfloat16 else 1
        total = sum(p.numel() for p in trained)
        self._share = -(-total // parts)
        if words.stage == 3:
            whole = [p for p in self.module.parameters() if p.numel() > 0]
            num_elements = sum(-(-p.numel() // self.ranks) for p in whole)
            device = torch.device("cpu") if words.weights_on_host else self.device
            self._flat = self.device_empty(num_elements, words.dtype).to(device)
            self._mark([self._flat], "weights")
            at = 0
            for p in whole:
                size = -(-p.numel() // self.ranks)
                self._shards[p] = self._flat.narrow(0, at, size)
                at += size
                self._wholes[p] = self.device_empty(size * self.ranks, words.dtype)
                p.data = self._wholes[p].narrow(0, 0, p.numel()).view(p.shape)
                self._mark([p.data], "gathered")
                if p.numel() > words.persistent:
                    p.data.untyped_storage().resize_(0)
        else:
            self._flat = self.device_empty(self._share * parts, words.dtype)
            self._mark([self._flat], "weights")
            at = 0
            for p in trained:
                p.data = self._flat.narrow(0, at, p.numel()).view(p.shape)
                at += p.numel()
        host = torch.device("cpu") if words.states_on_host else self.device
        size = self._share if words.stage < 3 else max(1, words.group // self.ranks)
        if words.stage or words.dtype != torch.float32:
            self.masters = [
                nn.Parameter(self.device_empty(min(size, self._share - at), torch.float32).to(host))
                for at in range(0, self._share, size)
            ]
            self._mark(self.masters, "states")
        else:
            self.masters = [nn.Parameter(self._flat)]
        first, *others = self.optimizer.param_groups
        first["params"] = list(self.masters)
        for group in others:  # all groups step one share
            group["params"] = []

    def device_empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor on the engine's device."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def answer(self, schedule: Any, tree: Mapping[str, Any]) -> None:
        """Take the schedule and the JSON, and make the methods by which scripts ask for them."""
        words, self.lr_scheduler, self.config = self.words, schedule, tree
        vars(self).update({
            "get_global_grad_norm": lambda: self._norm, "zero_optimization_stage": lambda: words.stage,
            "gradient_accumulation_steps": lambda: words.accumulated,
            "train_micro_batch_size_per_gpu": lambda: words.micro,
            "train_batch_size": lambda: words.micro * words.accumulated * self.ranks,
            "get_lr": lambda: [group["lr"] for group in self.optimizer.param_groups], "no_sync": nullcontext,
            "global_rank": self.rank, "world_size": self.ranks, "local_rank": self.device.index or 0,
        })  # fmt: skip

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def backward(self, loss: Tensor, **_: Any) -> Tensor:
        """Compute gradients, summed over ranks bucket by bucket as stage and accumulation say."""
        words = self.words
        if self.reduces:
            self._buffers_of = [
                self.device_empty(words.bucket, words.dtype) for _ in range(1 + (words.overlap and words.stage < 3))
            ]
        (loss / words.accumulated).backward()
        if self.reduces:
            self.send_bucket()
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            self._buffers_of = []
        self._micro += 1
        return loss

    @property
    def reduces(self) -> bool:
        """Whether the running microbatch sums its gradients: each one from stage 2 on, else the last of a step."""
        return self.words.stage >= 2 or self.is_gradient_accumulation_boundary()

    @torch.no_grad()
    def reduce(self, p: nn.Parameter) -> None:
        """Copy a gradient into the bucket, and send a full bucket."""
        if not self.reduces or p.grad is None:
            return
        if self._filled + p.numel() > self.words.bucket:
            self.send_bucket()
        if p.numel() <= self.words.bucket:
            self._buffers_of[self._turn].narrow(0, self._filled, p.numel()).copy_(p.grad.view(-1))
            self._filled += p.numel()
        else:  # a gradient larger than the bucket is summed alone
            self.send(p.grad.reshape(-1))
        p.grad = None

    def send_bucket(self) -> None:
        """Sum the filled part of the bucket over ranks."""
        if self._filled:
            self.send(self._buffers_of[self._turn].narrow(0, 0, self._filled))
            self._filled, self._turn = 0, (self._turn + 1) % len(self._buffers_of)

    @torch.no_grad()
    def send(self, bucket: Tensor) -> None:
        """Sum a flat tensor of gradients over ranks, and add this rank's share to the step's gradients."""
        words = self.words
        if self._summed is None:
            num_elements = self._share if words.stage else sum(p.numel() for p in self._trained)
            dtype = torch.float32 if not words.stage and words.dtype == torch.bfloat16 else words.dtype
            self._summed = self.device_empty(num_elements, dtype)
            if words.states_on_host:
                self._summed = self._summed.to("cpu")
            self._mark([self._summed], "gradients")
        side = self._side if words.overlap else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else nullcontext():
            bucket.div_(self.ranks)
            share = min(-(-bucket.numel() // (self.ranks if words.stage else 1)), self._summed.numel())
            if words.stage == 3:
                padded = self.device_empty(share * self.ranks, bucket.dtype)
                padded.narrow(0, 0, min(bucket.numel(), padded.numel())).copy_(bucket[: padded.numel()])
                shard = padded.narrow(0, self.rank * share, share)
                dist.reduce_scatter_tensor(shard, padded)
            else:
                dist.all_reduce(bucket)
                shard = bucket.narrow(0, 0, share)
            target = self._summed.narrow(0, 0, share)
            if words.states_on_host:
                shard = shard.to("cpu")
            target.copy_(shard) if not self._micro % words.accumulated else target.add_(shard)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the running microbatch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self._micro + 1) % self.words.accumulated == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say that the next backward pass is the last of its step, or is not."""
        self._boundary = is_boundary

    @torch.no_grad()
    def step(self, *_: Any, **__: Any) -> None:
        """Step the shares, and gather the weights; nothing before the last microbatch of a step."""
        words = self.words
        done = self._micro % words.accumulated == 0 if self._boundary is None else self._boundary
        summed = self._summed
        if not done or summed is None:
            return
        norms = torch.zeros((), device=self.device) if words.states_on_host else summed.float().norm()
        if self.ranks > 1:
            dist.all_reduce(norms)
        self._norm = norms
        at = 0
        for index, master in enumerate(self.masters):
            size = min(master.numel(), summed.numel() - at)
            gradient = summed.narrow(0, at, size).to(torch.float32, copy=True)
            at += size
            if index + 1 == len(self.masters):
                self._summed = summed = self.device_empty(0, words.dtype)
            if words.clip:
                gradient.mul_(1.0)  # by a factor of the norm, which has no value here
            master.grad = gradient
            del gradient
            self.optimizer.step()
            master.grad = None
        self._summed = None
        if self.masters[0].untyped_storage()._cdata == self._flat.untyped_storage()._cdata:
            return
        start = self.rank * self._share if words.stage < 3 and self._flat.numel() > self._share else 0
        shard = self._flat.narrow(0, start, min(self._share, self._flat.numel()))
        for offset, master in zip(range(0, self._share, self.masters[0].numel()), self.masters, strict=False):
            shard.narrow(0, offset, min(master.numel(), shard.numel() - offset)).copy_(master)
        self.publish(shard)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def publish(self, shard: Tensor) -> None:
        """Gather stepped weights: all of them in buckets, or stage 3's small ones that stay whole."""
        words = self.words
        if words.stage == 3:
            small = [p for p in self._shards if p.numel() <= words.persistent]
            for p in small:
                dist.all_gather_into_tensor(self._wholes[p], self._shards[p].to(self.device))
        elif self._flat.numel() > shard.numel():
            size = max(1, words.gather_bucket // self.ranks)
            for at in range(0, shard.numel(), size):
                slice_ = shard.narrow(0, at, min(size, shard.numel() - at))
                whole = self._flat.narrow(0, at * self.ranks, slice_.numel() * self.ranks)
                dist.all_gather_into_tensor(whole, slice_)

    def follow_modules(self) -> None:
        """Gather a module's parameters before the module computes, and free them afterwards, as stage 3 does."""
        self._own: dict[nn.Module, list[nn.Parameter]] = {
            m: [p for p in m.parameters(recurse=False) if p.numel() > self.words.persistent]
            for m in self.module.modules()
        }
        self._whole: dict[nn.Parameter, Any] = {}
        self._trace: list[nn.Module] = []
        self._known: list[nn.Module] = []
        self._ahead, self._wanted = 0, dict[nn.Parameter, int]()
        for module, parameters in self._own.items():
            if parameters:
                module.register_forward_pre_hook(lambda m, _: self.fetch(m))
                module.register_forward_hook(lambda m, *_: self.release(m))
                module.register_full_backward_pre_hook(lambda m, _: self.fetch(m))
                module.register_full_backward_hook(lambda m, *_: self.release(m))
        self.register_forward_pre_hook(self.restart)

    def restart(self, *_: Any) -> None:
        """Begin a pass: the modules of the longest pass so far are those to come."""
        self._known = self._trace if len(self._trace) > len(self._known) else self._known
        self._trace, self._ahead = [], 0
        self._wanted = {}

    @torch.no_grad()
    def fetch(self, module: nn.Module) -> None:
        """Gather a module's parameters and prefetch those of later modules; the module waits for its own."""
        self._trace.append(module)
        self.gather(self._own[module])
        self._ahead, asked = max(self._ahead, len(self._trace)), 0
        room = min(self.words.live - sum(p.numel() for p in self._whole), self.words.prefetch)
        while asked < room and self._ahead < len(self._known):
            for p in self._own[self._known[self._ahead]]:
                self._wanted[p] = self._ahead
                asked += p.numel() * (p not in self._whole)
                self.gather([p])
            self._ahead += 1
        for p in self._own[module]:
            if (event := self._whole[p]) is not None:
                torch.cuda.current_stream().wait_event(event)
                self._whole[p] = None

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Issue gathers of parameters that are not whole, on a stream of their own."""
        side = self._gather_side
        for p in parameters:
            if p in self._whole:
                continue
            whole = self._wholes[p]
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            with torch.cuda.stream(side) if side is not None else nullcontext():
                dist.all_gather_into_tensor(whole, self._shards[p].to(self.device))
            self._whole[p] = side.record_event() if side is not None else None

    @torch.no_grad()
    def release(self, module: nn.Module) -> None:
        """Free a module's parameters that no module uses soon."""
        position, passed = len(self._trace), 0
        freed = {p for p in self._own[module] if p in self._whole and self._wanted.get(p, -1) < position}
        for later in self._known[position:]:
            if passed >= self.words.reuse:
                break
            freed -= set(self._own[later])
            passed += sum(p.numel() for p in self._own[later])
        for p in freed:
            del self._whole[p]
            p.data.untyped_storage().resize_(0)


def initialize(
    options: Mapping[str, Any], device: torch.device, mark: Callable[[Sequence[Tensor], str], None],
    note: Callable[[str], None],
) -> tuple[Engine, Any, Any, Any]:  # fmt: skip
    """Return DeepSpeed's answer to `deepspeed.initialize`: engine, optimizer, loader and schedule.

    Args:
        options: The call's keywords.
        device: The device of the script.
        mark: Called with tensors and the part of memory that they belong to.
        note: Called with a sentence about a difference from DeepSpeed.
    """
    given = options.get("config") or options.get("config_params")
    tree = config_of(given or getattr(options.get("args"), "deepspeed_config", None))
    words, model = ZeroWords.of(tree), options["model"]
    note(f"DeepSpeed's engine does not run: torch's operations stand for its ZeRO stage {words.stage}")
    if words.unread:
        note(f"keys of DeepSpeed's JSON without an effect here: {', '.join(words.unread)}")
    if words.states_on_host:
        note("the optimizer steps on the host: the host's seconds are not counted, the copies are")
    optimizer = options.get("optimizer")
    parameters = list(options.get("model_parameters") or (p for p in model.parameters() if p.requires_grad))
    if optimizer is None:
        asked = section_of(tree, "optimizer")
        if "adam" not in str(asked.get("type", "Adam")).lower():
            note(f"DeepSpeed's optimizer {asked['type']}: torch's AdamW is recorded in its place")
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=device.type == "cuda" and not words.states_on_host)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    engine = Engine(model, optimizer, words, device, mark)
    schedule = options.get("lr_scheduler")
    if callable(schedule) and not hasattr(schedule, "step"):
        schedule = schedule(optimizer)
    if schedule is None and tree.get("scheduler"):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    engine.answer(schedule, tree)
    loader = None
    if (rows := options.get("training_data")) is not None:
        sampler: Any = torch.utils.data.DistributedSampler(rows) if engine.ranks > 1 else None
        loader = torch.utils.data.DataLoader(rows, words.micro, sampler=sampler, collate_fn=options.get("collate_fn"))
    return engine, optimizer, loader, schedule


class Distribution(importlib.metadata.Distribution):
    """DeepSpeed's entry among installed packages, for libraries that ask whether it is there."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def standing_modules(
    device: torch.device, mark: Callable[[Sequence[Tensor], str], None], note: Callable[[str], None]
) -> dict[str, ModuleType]:
    """Return modules in the place of DeepSpeed's, by name; arguments as of `initialize`."""

    def begin(args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None,
              training_data: Any = None, lr_scheduler: Any = None, **options: Any) -> Any:  # fmt: skip
        join()
        named = {"args": args, "model": model, "optimizer": optimizer, "model_parameters": model_parameters}
        more = {"training_data": training_data, "lr_scheduler": lr_scheduler}
        return initialize(named | more | options, device, mark, note)

    def join(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def add_arguments(parser: Any) -> Any:
        parser.add_argument("--deepspeed", action="store_true")
        parser.add_argument("--deepspeed_config", type=str)
        return parser

    class Whole(nullcontext[None]):
        """Stage 3's contexts `zero.Init` and `zero.GatheredParameters`: without values, all parameters are made."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    def checkpoint(function: Any, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    adam = type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {"__init__": lambda self, params, lr=1e-3, *_, **__: (
        torch.optim.AdamW.__init__(self, params, lr=lr))})  # fmt: skip
    nothing = lambda *_, **__: None  # noqa: E731
    schedules = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    modules: dict[str, dict[str, Any]] = {
        "deepspeed": {"initialize": begin, "init_distributed": join, "add_config_arguments": add_arguments,
             "DeepSpeedEngine": Engine, "__version__": VERSION, "__path__": []},
        "deepspeed.comm": {"init_distributed": join, **{name: getattr(dist, name) for name in (
            "get_rank", "get_world_size", "is_initialized", "barrier", "all_reduce", "broadcast", "all_gather")}},
        "deepspeed.zero": {"Init": Whole, "GatheredParameters": Whole}, "deepspeed.runtime": {"__path__": []},
        "deepspeed.runtime.engine": {"DeepSpeedEngine": Engine},
        "deepspeed.runtime.lr_schedules": {"VALID_LR_SCHEDULES": schedules},
        "deepspeed.runtime.zero": {"Init": Whole, "GatheredParameters": Whole}, "deepspeed.ops": {"__path__": []},
        "deepspeed.ops.adam": {"DeepSpeedCPUAdam": adam, "FusedAdam": adam},
        "deepspeed.checkpointing": {"checkpoint": checkpoint, "configure": nothing, "is_configured": lambda: True},
        "deepspeed.utils": {"logger": logging.getLogger("deepspeed"), "log_dist": nothing, "__path__": [],
                            "set_z3_leaf_modules": nothing},
        "deepspeed.accelerator": {"get_accelerator": lambda: SimpleNamespace(
            device_name=lambda index=None: device.type, current_device_name=lambda: str(device),
            empty_cache=nothing, set_device=nothing, communication_backend_name=lambda: "nccl")},
    }  # fmt: skip
    made = {name: ModuleType(name) for name in modules}
    for (name, module), contents in zip(made.items(), modules.values(), strict=True):
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        if (parent := name.rpartition(".")[0]) in made:
            vars(made[parent])[name.rpartition(".")[2]] = module
    return made


@contextmanager
def pretended_deepspeed(
    device: torch.device, mark: Callable[[Sequence[Tensor], str], None], note: Callable[[str], None]
) -> Iterator[None]:
    """Let `import deepspeed` give the engine of this file in a context, also without DeepSpeed on the machine."""
    found = importlib.metadata.Distribution.from_name

    def named(name: str) -> Any:
        return Distribution() if name == "deepspeed" else found(name)

    modules = standing_modules(device, mark, note)
    with patch.dict(sys.modules, modules), patch.object(importlib.metadata.Distribution, "from_name", named):
        yield
