"""One GPU: real runs, a plain torch loop, and the planner's prediction.

    python -m benchmarks.one_gpu --all                                           every stage, the most important first
    python -m benchmarks.one_gpu --out FOLDER [--only STAGE ...] [--steps N]     on a machine with a GPU
    python -m benchmarks.one_gpu --predicted                                     anywhere: every run as predicted now
    python -m benchmarks.one_gpu --classes                                       anywhere: measured and planned kernels
    python -m benchmarks.one_gpu                                                 anywhere: benchmarks/one_gpu.json and
                                                                                 predictions made now

Each stage is a process, which writes FOLDER/STAGE.json, and at the end a line of FOLDER/stages.jsonl. With `--all`
FOLDER is out/one_gpu by default; a stage with a file there is not measured again.

ceilings: copies of memory, and square products of each dtype. late: a step as in `train`, three steps at a time, and a
compiled loop that reads three losses at once. PROBES (one_gpu_probes.py): NCCL, FP8, grouped products, CUDA graphs, a
checkpoint's copy; sums: Triton kernels of this package and compiled references. serial: one step of GPT-2 small in
bf16, in turns with the plain loop, eager and compiled. attention: documents in one row, by the varlen kernel, with a
mask, and as joined documents. profiles: a step by kernel; `profile NAME`: a step of a run by kernel. chunks: a step by
the size of a chunk of logits. A name of RUNS: some steps of the run file gpt2 with these words, the most that torch
allocated and reserved, and the device's memory in use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.head import SHAPES as HEADS
from benchmarks.head import measured as measured_heads
from benchmarks.kernel_classes import CLASSES, IDLE, class_table, measured_classes, planned_classes
from benchmarks.one_gpu_probes import PROBES, device_seconds
from benchmarks.packed_documents import WAYS, starts_of
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import Reference
from meshwright.compute.tensor import cross_entropy
from meshwright.config import Config, load_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.loop import Trainer
from meshwright.training.parts import build
from meshwright.training.step import train_step

SMALL = Reference(layers=12, hidden=768, heads=12, sequence=1024, batch=64, vocabulary=50304)
"""GPT-2 small, with 50,257 words padded to whole blocks of 64."""

OURS = f"model.base=gpt2-small model.tied=false batch.global={SMALL.batch}"
"""Words of a run of SMALL."""

QWEN = (
    "model.base=qwen2.5-0.5b model.layers=28 model.hidden=1536 model.heads=12 model.key_value_heads=2 "
    "model.head_width=128 model.feed_forward=8960 data.sequence=1024 batch.micro=16 batch.global=64"
)
"""Qwen2.5-1.5B."""

RUNS: dict[str, str] = {
    "small": "model.base=gpt2-small batch.micro=64 batch.global=256",
    "small, islands": "model.base=gpt2-small batch.micro=64 batch.global=256 compile=islands",
    "small, no islands": "model.base=gpt2-small batch.micro=64 batch.global=256 compile=none",
    "small, equal bits": "model.base=gpt2-small batch.micro=64 batch.global=256 bits=layout-free bits.samples=16",
    "small, recomputed": "model.base=gpt2-small batch.micro=64 batch.global=256 memory.recompute=auto",
    "small, TF32": "model.base=gpt2-small batch.micro=32 batch.global=128 precision=float32",
    "small, fp16": "model.base=gpt2-small batch.micro=64 batch.global=256 precision=fp16",
    "xl": "model.base=gpt2-xl batch.micro=16 batch.global=64",
    "xl, states on the host": "model.base=gpt2-xl batch.micro=16 batch.global=64 memory.offload.to=host "
    "optimizer.clip=null",
    "llama-3.2-1b": "model.base=llama-3.2-1b data.sequence=4096 batch.micro=2 batch.global=16",
    "qwen2.5-1.5b": QWEN,
    "qwen2.5-1.5b, fp8": f"{QWEN} precision.products=fp8",
    "llama-3.1-8b": "model.base=llama-3.1-8b data.sequence=4096 batch.micro=1 batch.global=32 optimizer.states=bf16 "
    "optimizer.masters=bf16 memory.offload.to=host",
    "llama-3.1-8b, sums in bf16": "model.base=llama-3.1-8b data.sequence=4096 batch.micro=1 batch.global=32 "
    "optimizer.states=bf16 optimizer.masters=bf16 memory.offload.to=host precision.accumulate=stored",
}
"""Words in addition to the run file gpt2, by name. A row of MEASURED has the words of the measured run."""
MEASURED = Path(__file__).with_suffix(".json")
"""Stages' files in one list, from one H100 and one H200 on 26 November 2026 with torch 2.11.0 for CUDA 13.0."""
CLUSTERS = {"NVIDIA H100 80GB HBM3": "dgx-h100", "NVIDIA H200": "dgx-h200"}
CALIBRATED = {"NVIDIA H100 80GB HBM3": Path(__file__).with_name("h100_calibrated.yaml")}
"""Written by `meshwright calibrate --quick --device cuda` after 21 s on another H100 of this type, on the same day."""
H100_HOST = Machine(cores=16, memory=2**37, gpus=1)
COMMON = "data.tokenizer=bytes device=cuda threads=8 optimizer.schedule.warmup=1"
"""Words of every run, before the run's words."""
UNCOUNTED_STEPS = 2
"""A run's first steps load kernels and compile layers."""
PATIENCE_SECONDS = 200
"""Seconds after which a stage is stopped."""


def ceilings() -> dict[str, float]:
    """Return bytes a second of a copy, read and written counted; flop/s of square products of random numbers."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    found = {"copy, bytes/s": 2 * source.nbytes / device_seconds(lambda: target.copy_(source))}
    for name, dtype, size in (
        ("bf16", torch.bfloat16, 8192), ("fp16", torch.float16, 8192), ("tf32", torch.float32, 8192),
        ("float32", torch.float32, 4096), ("float64", torch.float64, 4096),
    ):  # fmt: skip
        torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        found[f"{name}, flop/s"] = 2 * size**3 / device_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    return found


def tokens_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(50257, (SMALL.batch, SMALL.sequence + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def plain_step(compiled: bool, micro: int, *, wait: bool = True) -> Callable[[int], Any]:
    """Return the loop of a careful user: float32 weights, autocast to bf16, fused AdamW, clipped to 1.

    A step returns the loss: a number, or a tensor on the device without `wait`."""
    torch.manual_seed(0)
    model = PlainGPT(SMALL).cuda()
    whole = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(index: int) -> Any:
        tokens, labels = (x.pin_memory().to("cuda", non_blocking=True) for x in tokens_of(index))
        total = torch.zeros((), device="cuda")
        for first in range(0, SMALL.batch, micro):
            rows = slice(first, first + micro)
            with torch.autocast("cuda", torch.bfloat16):
                loss = whole(tokens[rows], labels[rows]) * (micro / SMALL.batch)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total) if wait else total

    return step


def our_step(micro: int, words: str) -> Callable[[int], float]:
    """Return a step of `meshwright train gpt2`, on the plain loop's tokens."""
    config = run_config(f"{OURS} batch.micro={micro} {words}")
    parts = build(config, solo_mesh(torch.device("cuda", 0), config.grid.names), Path())

    def step(index: int) -> float:
        tokens, labels = tokens_of(index)
        return train_step(parts, {"tokens": tokens, "labels": labels}, index).loss

    return step


def run_config(words: str) -> Config:
    return resolve(load_config("gpt2", [*COMMON.split(), *words.split()]), this_machine()).config


def serial(micro: int = 32, rounds: int = 8) -> dict[str, Any]:
    """Return seconds of each contender's steps, in turns; and losses, of equal tokens but different weights."""
    contenders = {
        "plain loop": lambda: plain_step(False, micro),
        "plain loop, compiled": lambda: plain_step(True, micro),
        "meshwright, no islands": lambda: our_step(micro, "compile=none"),
        "meshwright": lambda: our_step(micro, ""),
        "meshwright, islands": lambda: our_step(micro, "compile=islands"),
        "meshwright, O1": lambda: our_step(micro, "precision.level=O1 precision.dtype=bf16"),
    }
    steps, found = {}, {}
    for name, make in contenders.items():
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        steps[name] = make()
        loss = steps[name](0)
        found[name] = {
            "first_step_seconds": time.perf_counter() - began, "losses": [loss], "seconds": [],
            "allocated": torch.cuda.max_memory_allocated() - before,
        }  # fmt: skip
    for turn in range(1, rounds + 2):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            found[name]["losses"].append(step(turn))
            torch.cuda.synchronize()
            if turn > 1:
                found[name]["seconds"].append(time.perf_counter() - began)
    return {"micro": micro, "contenders": found}


def run(name: str, steps: int) -> dict[str, Any]:
    """Make one of RUNS; return seconds of each step, and the most bytes that torch allocated and reserved."""
    began = time.perf_counter()
    config = run_config(RUNS[name])
    parts = build(config, solo_mesh(torch.device("cuda", 0), config.grid.names), Path())
    torch.cuda.synchronize()
    found: dict[str, Any] = {"built_seconds": time.perf_counter() - began, "seconds": [], "losses": []}
    shape = (config.batch.global_, config.data.sequence)
    for index in range(steps + UNCOUNTED_STEPS):
        generator = torch.Generator().manual_seed(index)
        tokens, labels = (torch.randint(config.model.vocabulary, shape, generator=generator) for _ in range(2))
        began = time.perf_counter()
        found["losses"].append(train_step(parts, {"tokens": tokens, "labels": labels}, index).loss)
        torch.cuda.synchronize()
        found["seconds"].append(time.perf_counter() - began)
    free, total = torch.cuda.mem_get_info()
    return found | {
        "tokens": shape[0] * shape[1], "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(), "device_in_use": total - free,
    }  # fmt: skip


def attention() -> dict[str, Any]:
    """Return seconds and bytes of one layer's attention both ways, bf16, [2, 12, 8192, 64], by tokens a document."""
    found: dict[str, Any] = {}
    shape = (2, 12, 8192, 64)
    for length in (128, 1024, 8192):
        q, k, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        inputs, starts = [x.requires_grad_() for x in (q, k, v)], starts_of(8192, length).repeat(2, 1)
        for way, attend in WAYS.items():
            where = starts.cuda() if way == "mask of T x T" else starts

            def act(attend: Any = attend, where: Any = where, inputs: Any = inputs, gradient: Any = gradient) -> object:
                return torch.autograd.grad(attend(where, *inputs), inputs, gradient)

            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            seconds = device_seconds(act)
            found[f"{length}, {way}"] = {"seconds": seconds, "bytes": torch.cuda.max_memory_allocated() - before}
    return found


def kernels_of(act: Callable[[], object]) -> dict[str, Any]:
    """Return the device's seconds of a call by kernel, the longest first, and the call's wall seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    rows = [(row.key, row.count, row.self_device_time_total / 1e6) for row in profile.key_averages()]
    rows.sort(key=lambda row: -row[2])
    return {"wall_seconds": wall, "busy_seconds": sum(row[2] for row in rows), "kernels": rows[:40]}


def profiles() -> dict[str, Any]:
    """Return a step of 32 x 1024 tokens twice, by kernel: the compiled plain loop, Meshwright in bf16 and in TF32."""
    contenders = {
        "plain loop, compiled": None, "meshwright": "compile=blocks",
        "meshwright, kernels": "compile=kernels", "meshwright, islands": "compile=islands",
        "meshwright, no islands": "compile=none", "meshwright, TF32": "compile=blocks precision=float32",
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, words in contenders.items():
        step = plain_step(True, 32) if words is None else our_step(32, words)
        for index in range(2):
            step(index)
        found[name] = kernels_of(partial(step, 2)) | (
            {} if words is None else {"words": f"{OURS} batch.micro=32 {words}"}
        )
        del step
        torch.cuda.empty_cache()
    return found


PROFILED = ("xl", "llama-3.2-1b")
"""RUNS with a separate profile, each as `compile` islands, blocks and none."""


def profile_of(name: str) -> dict[str, Any]:
    """Return a step of a run by kernel, for each way of compiling."""
    found: dict[str, Any] = {}
    for way in ("islands", "blocks", "kernels", "none"):
        config = run_config(f"{RUNS[name]} compile={way}")
        parts = build(config, solo_mesh(torch.device("cuda", 0), config.grid.names), Path())
        shape = (config.batch.global_, config.data.sequence)
        batch = dict.fromkeys(("tokens", "labels"), torch.randint(config.model.vocabulary, shape))
        for index in range(UNCOUNTED_STEPS):
            train_step(parts, batch, index)
        told = kernels_of(partial(train_step, parts, batch, UNCOUNTED_STEPS))
        found[way] = told | {"words": f"{RUNS[name]} compile={way}"}
        del parts
        torch.cuda.empty_cache()
    return found


def chunks() -> dict[str, float]:
    """Return seconds of a step of 2 microbatches of 32 by the bytes of a chunk of logits (tensor/cross_entropy.py)."""
    found = {}
    step = our_step(32, "")
    for mebibytes in (1024, 64, 128, 256, 512, 2048, 1024):
        cross_entropy.CHUNK_BYTES["cuda"] = mebibytes * 2**20
        found[f"{mebibytes} MiB, after {len(found)} others"] = device_seconds(lambda: step(1), 5)
    return found


class Drawn:
    """The batches of `tokens_of` as a run's samples."""

    def samples(self, first: int, count: int) -> dict[str, torch.Tensor]:
        tokens, labels = tokens_of(first // SMALL.batch)
        rows = slice(first % SMALL.batch, first % SMALL.batch + count)
        return {"tokens": tokens[rows], "labels": labels[rows]}


def late_burst(micro: int, words: str) -> Callable[[int], None]:
    """Return steps of `train`: a step's numbers are read in the step after."""
    config = run_config(f"{OURS} batch.micro={micro} {words}")
    trainer = Trainer(build(config, solo_mesh(torch.device("cuda", 0), config.grid.names), Path()), Drawn())

    def burst(steps: int) -> None:
        for _ in range(steps):
            trainer.turn(None)

    return burst


def plain_burst(micro: int) -> Callable[[int], None]:
    """Return the compiled loop; losses are read after the burst."""
    step = plain_step(True, micro, wait=False)

    def burst(steps: int) -> None:
        losses = [step(index) for index in range(steps)]
        torch.stack(losses).tolist()

    return burst


def late(micro: int = 32, rounds: int = 6, steps: int = 3) -> dict[str, Any]:
    """Return seconds a step of bursts of three steps, in turns; no loss is read within a burst."""
    contenders: dict[str, Callable[[], Callable[[int], None]]] = {
        "plain loop, compiled": lambda: plain_burst(micro),
        "meshwright": lambda: late_burst(micro, ""),
        "meshwright, kernels": lambda: late_burst(micro, "compile=kernels"),
        "meshwright, islands": lambda: late_burst(micro, "compile=islands"),
        "meshwright, logits of 128 MiB": lambda: late_burst(micro, "memory.logits=128M"),
    }
    bursts = {name: make() for name, make in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in bursts}
    for turn in range(rounds + 1):
        for name, burst in bursts.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            burst(steps)
            torch.cuda.synchronize()
            if turn:
                seconds[name].append((time.perf_counter() - began) / steps)
    return {"micro": micro, "steps": steps, "seconds": seconds}


def head(name: str) -> dict[str, Any]:
    """Return figures of the head with the loss at a shape: ours, torch's, Liger's and quack's (benchmarks/head.py)."""
    return measured_heads("cuda", name, 6)


STAGES: dict[str, Callable[[], Any]] = {
    "ceilings": ceilings, "late": late, **PROBES, "serial": serial,
    **{f"head of {name}": partial(head, name) for name in HEADS["cuda"]}, "profiles": profiles,
    **{f"profile {name}": partial(profile_of, name) for name in PROFILED}, "chunks": chunks, "attention": attention,
}  # fmt: skip


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"


def measure(folder: Path, only: list[str], steps: int, *, again: bool = True) -> None:
    """Measure each stage and run in a process: a stage that fails, or fills the GPU, does not disturb the others.

    `again=False`: leave out a stage with a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in only or [*STAGES, *RUNS]:
        command = [sys.executable, "-m", "benchmarks.one_gpu", "--out", str(folder), "--here", name]
        if again is False and file_of(folder, name).exists():
            continue
        began = time.perf_counter()
        try:
            code = subprocess.run(
                [*command, "--steps", str(steps)], check=False, env=os.environ | {"OMP_NUM_THREADS": "8"},
                timeout=PATIENCE_SECONDS,
            ).returncode  # fmt: skip
            ended = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            code, ended = None, "stopped"
        print(f"{name}: {ended} after {time.perf_counter() - began:.0f} s", flush=True)
        if code == 0:
            with (folder / "stages.jsonl").open("a") as lines:
                lines.write(json.dumps(json.loads(file_of(folder, name).read_text())) + "\n")


def measure_here(folder: Path, name: str, steps: int) -> None:
    found = STAGES[name]() if name in STAGES else run(name, steps)
    told = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "name": name, "found": found}
    told |= {"words": RUNS[name]} if name in RUNS else {}
    file_of(folder, name).write_text(json.dumps(told, indent=1))


def show() -> None:
    """Print the runs of MEASURED with predictions, the plain loop's steps, attention by document, and kernels."""
    console = Console(width=140, highlight=False)
    table = Table("GPU", "run", title="One GPU, measured and predicted by data sheets")
    for head in (
        "ms",
        "predicted",
        "off",
        "calibrated",
        "off",
        "tokens/s",
        "GB allocated",
        "predicted",
        "GB of the device",
        "predicted",
    ):
        table.add_column(head, justify="right")
    planners = {name: Planner(load_cluster(cluster)) for name, cluster in CLUSTERS.items()}
    calibrated = {name: Planner(load_cluster(str(file))) for name, file in CALIBRATED.items()}
    errors = []
    for line in json.loads(MEASURED.read_text()):
        gpu, name, found = line["gpu"], line["name"], line["found"]
        if name == "serial":
            console.print(serial_table(gpu, found))
        elif name == "attention":
            console.print(attention_table(gpu, found))
        elif name == "profiles":
            console.print(profile_table(gpu, found))
        elif name == "late":
            console.print(late_table(gpu, found))
        elif name in RUNS:
            config = load_config("gpt2", [*COMMON.split(), *line["words"].split()])
            config = resolve(config, H100_HOST).config
            predicted = planners[gpu].predict(config)
            seconds = statistics.median(found["seconds"][UNCOUNTED_STEPS:])
            errors.append(predicted.seconds / seconds - 1)
            measured_rates = ("", "")
            if gpu in calibrated:
                by_rates = calibrated[gpu].predict(config).seconds
                measured_rates = (f"{by_rates * 1e3:.0f}", f"{by_rates / seconds - 1:+.1%}")
            memory = predicted.fullest
            table.add_row(
                gpu, name, f"{seconds * 1e3:.0f}", f"{predicted.seconds * 1e3:.0f}", f"{errors[-1]:+.1%}",
                *measured_rates,
                f"{found['tokens'] / seconds:,.0f}", f"{found['allocated'] / 1e9:.2f}", f"{memory.allocated / 1e9:.2f}",
                f"{found['device_in_use'] / 1e9:.2f}", f"{memory.total / 1e9:.2f}",
            )  # fmt: skip
        else:
            console.print(f"{gpu}, {name}: {found}")
    console.print(table)
    console.print(f"{len(errors)} runs: {statistics.fmean(map(abs, errors)):.1%} off on average")


def predict() -> None:
    """Print present predictions of all RUNS on an H100, measured or not."""
    table = Table("run", title="One H100, predicted by its data sheet")
    for head in ("ms", "tokens/s", "GB allocated", "GB of the device"):
        table.add_column(head, justify="right")
    planner = Planner(load_cluster("dgx-h100"))
    for name, words in RUNS.items():
        # Not resolved here: without Triton this machine compiles nothing.
        config = load_config("gpt2", [*COMMON.split(), *words.split()])
        made = planner.predict(config)
        tokens = config.batch.global_ * config.data.sequence
        table.add_row(
            name, f"{made.seconds * 1e3:.0f}", f"{tokens / made.seconds:,.0f}",
            f"{made.fullest.allocated / 1e9:.2f}", f"{made.fullest.total / 1e9:.2f}",
        )  # fmt: skip
    Console(width=140, highlight=False).print(table)


def serial_table(gpu: str, found: Mapping[str, Any]) -> Table:
    table = Table("contender", title=f"A step of GPT-2 small in bf16, 64 x 1024 tokens, on {gpu}, in turns")
    for head in ("ms", "of the plain loop's", "tokens/s", "GB at most", "first step, s", "loss of the third"):
        table.add_column(head, justify="right")
    contenders = found["contenders"]
    plain = statistics.median(contenders["plain loop"]["seconds"])
    for name, told in contenders.items():
        seconds = statistics.median(told["seconds"])
        table.add_row(
            name, f"{seconds * 1e3:.1f}", f"{seconds / plain:.2f}", f"{SMALL.batch * SMALL.sequence / seconds:,.0f}",
            f"{told['allocated'] / 1e9:.1f}", f"{told['first_step_seconds']:.1f}", f"{told['losses'][2]:.4f}",
        )  # fmt: skip
    return table


def late_table(gpu: str, found: Mapping[str, Any]) -> Table:
    table = Table("contender", title=f"A step of GPT-2 small within three, on {gpu}, in turns: no loss is waited for")
    for head in ("ms, median", "least", "of the first's median"):
        table.add_column(head, justify="right")
    first = statistics.median(next(iter(found["seconds"].values())))
    for name, seconds in found["seconds"].items():
        median = statistics.median(seconds)
        table.add_row(name, f"{median * 1e3:.1f}", f"{min(seconds) * 1e3:.1f}", f"{median / first:.2f}")
    return table


def attention_table(gpu: str, found: Mapping[str, Any]) -> Table:
    table = Table("tokens a document, way", title=f"Attention both ways of [2, 12, 8192, 64] in bf16 on {gpu}")
    for head in ("ms", "MB"):
        table.add_column(head, justify="right")
    for name, told in found.items():
        table.add_row(name, f"{told['seconds'] * 1e3:.2f}", f"{told['bytes'] / 1e6:.0f}")
    return table


KINDS: dict[str, tuple[str, ...]] = {
    "products": ("nvjet", "gemm", "splitKreduce"),
    "attention": ("sdpa", "fmha", "cudnn"),
    "norms' weights": ("GammaBeta",),
    "norms": ("layer_norm",),
    "GELU": ("Gelu", "gelu"),
    "islands, Inductor": ("triton",),
    "softmax": ("SoftMax", "MaxNan"),
    "row sums": ("sum_functor",),
    "sums into float32": ("unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>",),
    "other sums": ("Functor_add",),
    "products by element": ("MulFunctor", "BinaryFunctor"),
    "copies": ("copy", "Copy"),
    "AdamW": ("FusedOptimizer",),
}  # fmt: skip
"""Kinds of kernels, each by substrings of kernels' names; the first kind with a matching substring counts."""


def profile_table(gpu: str, found: Mapping[str, Any]) -> Table:
    table = Table("class of kernel, ms", *found, title=f"A step of 64 x 1024 tokens by class of kernel on {gpu}")
    classes = [measured_classes(told) for told in found.values()]
    for name in [*CLASSES, IDLE]:
        table.add_row(name, *(f"{each[name] * 1e3:.1f}" for each in classes))
    table.add_row("step", *(f"{told['wall_seconds'] * 1e3:.1f}" for told in found.values()))
    return table


def classes() -> None:
    """Print each measured profile of a Meshwright run with the planned kernels of the same run, class by class."""
    for line in json.loads(MEASURED.read_text()):
        if not line["name"].startswith("profile"):
            continue
        planner, pairs = Planner(load_cluster(CLUSTERS[line["gpu"]])), {}
        for told in (told for told in line["found"].values() if "words" in told):
            config = load_config("gpt2", [*COMMON.split(), *told["words"].split()])
            name = ", ".join(word for word in told["words"].split() if word.startswith(("compile", "precision")))
            pairs[name] = measured_classes(told), planned_classes(planner, resolve(config, H100_HOST).config)
        title = f"{line['name']} on {line['gpu']}; ! more than 1 ms and more than 10 % off"
        Console(width=140, highlight=False).print(class_table(title, pairs))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--all", action="store_true", help="every stage that has no file yet")
    parser.add_argument("--predicted", action="store_true", help="predictions of all runs alone")
    parser.add_argument("--classes", action="store_true", help="measured kernels beside planned ones, by class")
    parser.add_argument("--only", nargs="*", choices=[*STAGES, *RUNS], default=[])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--here", choices=[*STAGES, *RUNS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure_here(options.out, options.here, options.steps)
    elif options.predicted:
        predict()
    elif options.classes:
        classes()
    elif options.out or options.all:
        measure(options.out or Path("out/one_gpu"), options.only, options.steps, again=not options.all)
    else:
        show()


if __name__ == "__main__":
    main()
