"""The runs on a fake GPU: every layout of the equality tests, with one rank of each kind of work.

Layouts that give a device the operations of another layout run with --long alone: another number of ranks, a kit's
further sizes under a second model, another dtype of equal width, and a second rank with the work of the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from meshwright.config import Config, parse_config
from tests.harness import resolved
from tests.oracle import context, data_parallel, pipeline, subgraph, tensor
from tests.rehearsal.step import Run

CUTS: dict[str, dict[str, Any]] = {
    "serial": {"kind": "none"}, "1-D": tensor.ONE_D[0], "1-D cut": tensor.SEQUENCE[0], "2-D": tensor.BLOCKS[1],
}  # fmt: skip
BESIDE_STAGES: tuple[dict[str, Any], ...] = (
    tensor.ONE_D[0],
    tensor.SEQUENCE[0],
    tensor.BLOCKS[1],
    subgraph.subgraph(2, "one"),
)
HALF = {"level": "O2", "dtype": "bf16"}
ALIKE = "alike"
"""The group that runs with --long alone."""


def layouts() -> dict[str, dict[str, Config]]:
    """Return configs by name, in groups; the last is `ALIKE`."""
    groups = {
        "data parallelism": dict(_data_parallelism()),
        "tensor kits": dict(_tensors()),
        "pipelines": dict(_pipelines()),
        "sub-graphs": dict(_subgraphs()),
        "contexts": dict(_contexts()),
        "precision and memory": dict(_precision_and_memory()),
    }
    every = {name: config for configs in groups.values() for name, config in configs.items()}
    largest = set({_without_size(name): name for name in every}.values())  # sizes grow
    second = {*_second_sizes(), *_second_schedules(), *_second_dtypes(), *_second_models(every), *_second_places(every)}
    shown = largest - second
    groups = {group: {name: c for name, c in cs.items() if name in shown} for group, cs in groups.items()}
    return groups | {ALIKE: {name: every[name] for name in every if name not in shown}}


def _without_size(name: str) -> str:
    """Return the name without the number of replicas, stages, or parts of 1-D or of a context."""
    return re.sub(r"(?<= x)\d$|(?<=megatron )\d|(?<= )\d$", "", name)


def _second_sizes() -> Iterator[str]:
    """Yield a kit's other sizes under a second model, and blocks of 3 x 3, which repeat the work of 2 x 2 once more."""
    for model, cut, data, _ in tensor.CASES:
        if (model in ("bert", "vit") and cut not in tensor.FEW) or cut.get("q") == 3:
            yield f"{model} {_words(cut)} x{data}"


def _second_schedules() -> Iterator[str]:
    """Yield schedules with replicas or kits: a task is equal under all schedules, except with split weight
    gradients."""
    yield from (f"{schedule} x2" for schedule in ("gpipe", "axonn"))
    yield from (f"1f1b {_words(cut)}" for cut in BESIDE_STAGES)


def _second_dtypes() -> Iterator[str]:
    """Yield dtypes that other groups cover. The kits' group runs O0. A loss scale is independent of the kit. O1's casts
    are in the linear layers; of the kits, only blocks multiply without these layers."""
    for name in CUTS:
        if name != "serial":
            yield from (f"{name} O0 float32", f"{name} O2 fp16")
    yield from ("1-D O1 bf16", "1-D cut O1 bf16")


def _second_models(every: Iterable[str]) -> Iterator[str]:
    """Yield two models that differ from GPT-2 and BERT in a table and in the places of norms. Both are shown in stages,
    the table under 1-D as well."""
    for name in every:
        if ("untied" in name or "megatron-bert" in name) and name not in (
            "untied",
            "megatron-bert",
            "untied megatron 2 x1",
        ):
            yield name


def _second_places(every: Iterable[str]) -> Iterator[str]:
    """Yield further places of a strategy. A bucket's sum is equal on sub-grids and without. An offloaded optimizer
    steps pieces of flat memory, independent of the model. A ring sends equal keys for a second model, and for a
    sequence that 1-D cuts between pairs."""
    yield from (name for name in every if name.endswith(" subgraph") and not name.startswith("zero1"))
    yield from ("offload transformer", "ring bert 3", "ulysses bert 3")
    yield from (f"{kind} {_words(context.CUT)}" for kind in context.KINDS)


def _words(cut: dict[str, Any]) -> str:
    return " ".join(map(str, cut.values()))


def _data_parallelism() -> Iterator[tuple[str, Config]]:
    for sync in data_parallel.SYNCS:
        for size in (1, 2, 4):
            yield f"{sync} x{size}", data_parallel.config_for(sync, size)


def _tensors() -> Iterator[tuple[str, Config]]:
    for model, cut, data, _ in tensor.CASES:
        yield f"{model} {_words(cut)} x{data}", tensor.config_for(model, cut, data)
    for cut in (tensor.ONE_D[2], tensor.BLOCKS[1]):  # 1-D has one rank a head of keys
        yield f"llama {_words(cut)}", tensor.config_for("llama", cut, precision=HALF)


def _pipelines() -> Iterator[tuple[str, Config]]:
    for schedule in pipeline.SCHEDULES:
        for stages in (2, 3, 4):
            yield f"{schedule} {stages}", pipeline.pipelined("gpt2", stages, schedule, pipeline.WHOLE)
        yield f"{schedule} x2", pipeline.pipelined("gpt2", 2, schedule, pipeline.WHOLE, 2)
    for name, placed in (("loop", pipeline.LOOP), ("v", pipeline.V)):
        yield f"chunks {name}", pipeline.pipelined("gpt2", 2, "message-driven", pipeline.WHOLE, placed=placed)
    for model in ("untied", "bert", "megatron-bert", "vit"):
        yield model, pipeline.pipelined(model, 2, "message-driven", pipeline.WHOLE)
    for cut in BESIDE_STAGES:
        for schedule in ("1f1b", "message-driven"):
            yield f"{schedule} {_words(cut)}", pipeline.pipelined("gpt2", 2, schedule, cut)


def _subgraphs() -> Iterator[tuple[str, Config]]:
    for case in subgraph.CASES:
        model, size, common, branch, data = case
        yield subgraph.label(case), tensor.config_for(model, subgraph.subgraph(size, common, branch), data)
    for sync in subgraph.SYNCS:
        config = tensor.config_for("gpt2", subgraph.subgraph(2, "all"), 2)
        yield f"{sync} subgraph", changed(config, {"layout": {"data": {"sync": sync}}})


def _contexts() -> Iterator[tuple[str, Config]]:
    for kind in context.KINDS:
        for model in ("gpt2", "untied", "bert", "megatron-bert"):
            for size in (2, 3):
                yield f"{kind} {model} {size}", context.config_for(model, {"size": size, "kind": kind})
        for cut in (context.ONE_D, context.CUT, context.BLOCKS):
            config = context.config_for("gpt2", {"size": 2, "kind": kind}, layout={"tensor": cut}, precision=HALF)
            yield f"{kind} {_words(cut)}", config


def _precision_and_memory() -> Iterator[tuple[str, Config]]:
    for name, cut in CUTS.items():
        for level, dtype in (("O0", "float32"), ("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")):
            yield f"{name} {level} {dtype}", tensor.config_for("gpt2", cut, precision={"level": level, "dtype": dtype})
    for recompute in ("selective", "auto", "offload"):
        yield f"recompute {recompute}", tensor.config_for("gpt2", CUTS["serial"], memory={"recompute": recompute})
    offload = {"offload": {"to": "host", "bucket": 4096, "chunk": 2}}
    for model in ("gpt2", "transformer", "t5"):
        yield f"offload {model}", tensor.config_for(model, CUTS["serial"], precision=HALF, memory=offload)
    rounded = {"name": "adamw", "states": "bf16", "masters": "bf16"}
    for name, memory in (("in place", {}), ("on the host", offload)):
        config = tensor.config_for("gpt2", CUTS["serial"], precision=HALF, memory=memory, optimizer=rounded)
        yield f"bf16 states {name}", config


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """Return the config with other values in some sections."""
    return parse_config(_merged(config.model_dump(mode="json", by_alias=True), changes))


def _merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return tree | {
        key: _merged(tree[key], value) if isinstance(value, dict) and isinstance(tree[key], dict) else value
        for key, value in changes.items()
    }


def ranks_of(config: Config, *, ends: bool) -> list[int]:
    """Return the first and the last rank if stages, a server or branches differ by rank, or `ends` are asked for; else
    the second rank, which is off the diagonal in a 2-D layout."""
    layout = config.layout
    data, branches = layout.data, "branch" in dict(layout.axes)
    rooted = data.size > 1 and (data.sync == "rooted" or data.sync.startswith("server"))
    if ends or rooted or branches or layout.pipeline.size > 1:
        return sorted({0, layout.world_size - 1})
    return [min(1, layout.world_size - 1)]


def runs_of(configs: dict[str, Config], steps: int = 1, *, ends: bool = True) -> list[Run]:
    """Return the runs of each config's ranks (`ranks_of`)."""
    trees = {
        name: resolved(config.model_copy(update={"device": "cuda"})).model_dump(mode="json", by_alias=True)
        for name, config in configs.items()
    }
    return [
        Run(name, rank, trees[name], steps) for name, config in configs.items() for rank in ranks_of(config, ends=ends)
    ]
