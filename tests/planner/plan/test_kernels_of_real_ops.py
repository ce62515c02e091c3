"""A recording on meta tensors has the operators of real tensors, kernel by kernel.

The flops of a program are compared with the family's own count of products, and with torch's FlopCounterMode.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshwright.compute.model import Chunk, Hidden
from meshwright.compute.models.chain import chain_of
from meshwright.compute.parameters.bucket import make_buckets
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.parameters.shard import shard_specs, use_gradients
from meshwright.compute.tensor import cross_entropy
from meshwright.compute.tensor.linear import autocasts_of
from meshwright.config import Config, parse_config
from meshwright.families.gpt.section import Gpt2
from meshwright.planner.plan.recorder import Kernel, Program, Recorder
from meshwright.planner.plan.recordings import Recording, Recordings
from meshwright.planner.plan.software import Software
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import LedgerTransport
from meshwright.strategies.pipeline.stage import Stage
from meshwright.strategies.pipeline.task import TaskKind
from meshwright.training.on_device import AsOnDevice
from meshwright.training.rank_model import build_kit, build_model, empty_batch
from tests.workers import run_ranks

NOTHING = range(0)
CHUNKS = (Chunk(NOTHING, True, False), Chunk(range(1), False, False), Chunk(NOTHING, False, True))
"""Embeddings, a layer, head and loss."""

GPT2: dict[str, object] = {
    "layers": 2, "hidden": 64, "heads": 4, "positions": 32, "vocabulary": 9000, "vocabulary_multiple": 128,
    "dropout": 0.0, "tied": False,
}  # fmt: skip

MODELS: dict[str, dict[str, object]] = {
    "llama": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "feed_forward": 128,
              "positions": 32, "vocabulary": 9000, "vocabulary_multiple": 128, "head_norms": True},
    "vit": {"family": "vit", "image": 32, "patch": 8, "classes": 10, "layers": 2, "hidden": 64, "heads": 4},
    "resnext": {"family": "resnext", "image": 32, "classes": 10, "stage_blocks": [1], "hidden": 32, "paths": 8,
                "path_width": 4, "stem": "small"},
}  # fmt: skip
"""Without dropout."""

SIZE_ONE: dict[str, dict[str, object]] = {
    "none": {"kind": "none"},
    "megatron": {"kind": "megatron", "size": 1},
    "megatron by sequence": {"kind": "megatron", "size": 1, "sequence_parallel": True},
    "tesseract": {"kind": "tesseract", "q": 1, "d": 1},
    "subgraph": {"kind": "subgraph", "size": 1, "common": "all", "branch": "block"},
    "cSub": {"kind": "subgraph", "size": 1, "common": "one", "branch": "attention-core"},
}


AUTOCAST = {"level": "O1", "dtype": "bf16"}
FLOAT32 = {"level": "O0", "dtype": "float32"}


def config_for(
    tensor: dict[str, object], model: dict[str, object] | None = None, precision: dict[str, str] = FLOAT32
) -> Config:
    """Return a run with two sequences of 32 tokens in one microbatch."""
    return parse_config({
        "model": model or GPT2,
        "data": {"source": "digits"} if model and "image" in model else {"sequence": 32},
        "batch": {"global": 2, "micro": 2},
        "layout": {"tensor": tensor},
        "memory": {"summa": "gather"},
        "precision": precision,
        "device": "cpu",
    })  # fmt: skip


def recordings_of(config: Config) -> list[Recording]:
    """Return the recordings of embeddings, a layer, head and loss."""
    known, recorded = Recordings("cpu", Software(attention="fused")), list[Recording]()
    for chunk in CHUNKS:
        recorded.append(known.of(config, chunk, recorded[-1].outgoing if recorded else ()))
    return recorded


FEW_BYTES = 128
"""Kernels that touch less are not compared: a plan cannot count labels."""


def kernels_of(program: Program) -> Counter[Kernel]:
    """Count the runs of each kernel that touches more than FEW_BYTES."""
    counts: Counter[Kernel] = Counter()
    for event in program.events:
        if isinstance(event, Kernel) and event.touched_bytes > FEW_BYTES:
            counts[event._replace(times=1)] += event.times
    return counts


@dataclass(frozen=True)
class Ran:
    """A link's tasks on real tensors, and torch's count of products, without attention's."""

    kernels: dict[TaskKind, Counter[Kernel]]
    flops: float
    kept_bytes: int


def added_product(_: torch.Size, first: torch.Size, second: torch.Size, **__: object) -> int:
    """Return the flops of addmm_, which torch does not count, from the tensors' shapes."""
    return 2 * first[0] * first[1] * second[1]


def run_for_real(config: Config) -> list[Ran]:
    """Record the parts one after another on real tensors. A lone rank's messages to the rank itself are skipped as in a
    plan, which has shapes and no numbers."""
    mesh = Mesh(Grid(config.layout.axes), 0, torch.device("cpu"), LedgerTransport())
    ran: list[Ran] = []
    incoming: Hidden = ()
    for chunk in CHUNKS:
        kit, recorder = build_kit(config, mesh), Recorder()
        model = build_model(config, kit, mesh, chunk)
        buckets = list(make_buckets(model.named_parameters(), shard_specs(model), mesh, 2**30))
        memory = Gradients({x: view for bucket in buckets for x, view in bucket.views.items()})
        use_gradients(model, memory)
        stage = Stage(model, memory, autocasts=autocasts_of(config, mesh))
        scales = dict.fromkeys(model.labels, 1.0)
        batch = empty_batch(config, kit, model, mesh.device)
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product}) as counter:
            with recorder.program(mesh.ledger) as made:
                outgoing = stage.forward(0, incoming, batch, scales)
            forward = made()
            kernels = {TaskKind.FORWARD: kernels_of(forward)}
            gradients = () if chunk.last else tuple(torch.ones_like(x) for x in outgoing)
            with recorder.program(mesh.ledger) as made:
                stage.backward(0, gradients, defers=False)
            kernels[TaskKind.BACKWARD] = kernels_of(made())
        counted = counter.get_flop_counts().get("Global", {})  # no entry if nothing multiplies
        flops = sum(flops for op, flops in counted.items() if "attention" not in str(op))
        ran.append(Ran(kernels, flops, forward.kept_bytes))
        incoming = outgoing
    return ran


def run_all(mesh: Mesh, configs: list[Config]) -> list[list[Ran]]:
    """Run all configs on a separate rank: this process must not run a backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        # Skipped messages leave memory unchanged. With such numbers labels may have no share, and products more.
        patch.setattr(cross_entropy, "some", lambda rows: False)
        return [run_for_real(config) for config in configs]


def run_elsewhere(configs: list[Config]) -> list[list[Ran]]:
    [ran] = run_ranks(run_all, Grid((("data", 1), ("pipe", 1))), configs)
    return ran


@pytest.fixture(scope="module")
def ran() -> dict[str, list[Ran]]:
    """Return the runs of every kit alone, on real tensors."""
    return dict(zip(SIZE_ONE, run_elsewhere([config_for(tensor) for tensor in SIZE_ONE.values()]), strict=True))


AUTOCAST_CASES: dict[str, Config] = {
    **{kit: config_for(tensor, precision=AUTOCAST) for kit, tensor in SIZE_ONE.items()},
    **{
        f"{name}, {kit}": config_for(SIZE_ONE[kit], model, AUTOCAST)
        for name, model in MODELS.items()
        for kit in ("none", "megatron", "tesseract")
    },
}
"""Every kit, and every family in the kits with layers of the kit's own."""


@pytest.fixture(scope="module")
def autocast() -> dict[str, list[Ran]]:
    return dict(zip(AUTOCAST_CASES, run_elsewhere(list(AUTOCAST_CASES.values())), strict=True))


@pytest.mark.parametrize("case", AUTOCAST_CASES)
def test_autocast_is_planned_as_torch_casts(case: str, autocast: dict[str, list[Ran]]) -> None:
    """O1: each kernel's dtype, the copies of weights in bf16, and the bytes that the graph keeps."""
    dtypes = set()
    for chunk, planned, real in zip(CHUNKS, recordings_of(AUTOCAST_CASES[case]), autocast[case], strict=True):
        for kind, [program] in planned.programs.items():
            counts, done = kernels_of(program), real.kernels[kind]
            dtypes |= {kernel.dtype for kernel in counts if kernel.kind in ("product", "attention")}
            if "resnext" in case:  # a device copies images into rows; a plan has this shape already
                counts, done = (
                    Counter({k: n for k, n in all_.items() if k.kind == "product"}) for all_ in (counts, done)
                )
            assert not done - counts, f"{chunk}, {kind}: not planned"
            assert not counts - done, f"{chunk}, {kind}: planned, but not done"
        assert planned.programs[TaskKind.FORWARD][0].kept_bytes == real.kept_bytes
    assert dtypes == {"bf16"}


@pytest.mark.parametrize("kit", SIZE_ONE)
def test_planned_kernels_are_those_of_real_tensors(kit: str, ran: dict[str, list[Ran]]) -> None:
    for chunk, planned, real in zip(CHUNKS, recordings_of(config_for(SIZE_ONE[kit])), ran[kit], strict=True):
        for kind, [program] in planned.programs.items():
            counts = kernels_of(program)
            assert not real.kernels[kind] - counts, f"{chunk}, {kind}: not planned"
            assert not counts - real.kernels[kind], f"{chunk}, {kind}: planned, but not done"


@pytest.mark.parametrize("kit", SIZE_ONE)
def test_flops_of_products_are_what_torch_counts(kit: str, ran: dict[str, list[Ran]]) -> None:
    for planned, real in zip(recordings_of(config_for(SIZE_ONE[kit])), ran[kit], strict=True):
        counted = sum(flops_of(program, "product") for [program] in planned.programs.values())
        assert counted == real.flops


def test_flops_of_a_step_are_six_times_the_products_of_the_family() -> None:
    """Attention differs: the fused backward pass computes the scores once more, and leaves out the masked half."""
    config = config_for(SIZE_ONE["none"])
    assert isinstance(config.model, Gpt2)
    rows, sequence = config.micro, config.data.sequence
    begin, layer, end = (sum(program.flops for [program] in link.programs.values()) for link in recordings_of(config))
    product = 2 * rows * sequence**2 * config.model.hidden
    recorded = begin + config.model.layers * (layer + (6 - 7 / 2) * product) + end
    assert recorded == rows * chain_of(config).flops_per_sample(config)


def test_only_a_causal_attention_leaves_out_half() -> None:
    x = torch.empty(1, 2, 8, 4, device="meta", requires_grad=True)
    flops = []
    for causal in (False, True):
        recorder = Recorder()
        with AsOnDevice("cuda", "fused"), recorder.program(Ledger()) as made:
            F.scaled_dot_product_attention(x, x, x, is_causal=causal).sum().backward()
        flops.append(flops_of(made(), "attention"))
    assert flops == [7 * 2 * x.numel() * 8, 7 * x.numel() * 8]


def test_a_product_has_the_side_of_one_matrix() -> None:
    config = config_for(SIZE_ONE["none"])
    assert isinstance(config.model, Gpt2)
    tokens, hidden = config.micro * config.data.sequence, config.model.hidden
    widths = {"queries, keys, values": 3 * hidden, "output": hidden, "feed-forward": 4 * hidden}
    _, layer, _ = recordings_of(config)
    products = [kernel for kernel in kernels_of(layer.programs[TaskKind.FORWARD][0]) if kernel.kind == "product"]
    expected = {round((tokens * hidden * width) ** (1 / 3), 6) for width in widths.values()}
    assert {round(kernel.side, 6) for kernel in products} == expected


def test_a_look_up_touches_its_rows_and_not_the_table() -> None:
    config = config_for(SIZE_ONE["none"])
    assert isinstance(config.model, Gpt2)
    begin, _, _ = recordings_of(config)
    rows, table = config.micro * config.data.sequence, config.model.padded_vocabulary
    most = max(kernel.touched_bytes for kernel in kernels_of(begin.programs[TaskKind.FORWARD][0]))
    assert rows * config.model.hidden * 4 <= most < table * config.model.hidden * 4


def flops_of(program: Program, kind: str) -> float:
    return sum(count * kernel.flops for kernel, count in kernels_of(program).items() if kernel.kind == kind)
