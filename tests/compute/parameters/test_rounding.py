"""Stochastic rounding is unbiased and equal under every layout; moments and weights in bf16 train as in float32."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.compute.parameters import rounding as rounding_file
from meshwright.compute.parameters.bucket import Place
from meshwright.compute.parameters.rounding import Draw, global_index
from meshwright.compute.parameters.shard import Box
from meshwright.config import Config, parse_config, parse_run
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.states import InPlace
from meshwright.tools.verify.job import comparable
from meshwright.training.checkpoint import Checkpoint, pieces_of, restore
from meshwright.training.checkpoint.restore import progress_of
from meshwright.training.measured_run import resident_bytes
from meshwright.training.step import train_step
from tests.compute.bits.runs import GPT2, Ended, ended
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.planner.plan.checked import check as check_counts
from tests.planner.plan.counted import OFFLOADED, synced
from tests.training.checkpoint.states import held_by, open_writer
from tests.workers import run_ranks

CPU = torch.device("cpu")
Kind = tuple[str, str]
SHAPE = (6, 5, 8)
BOTH = {"states": "bf16", "masters": "bf16"}
HALF = {"level": "O2", "dtype": "bf16"}


def place_of(box: Box, shape: tuple[int, ...] = SHAPE, name: str = "w") -> Place:
    return Place(name, shape, box, 0, box.num_elements)


WHOLE = place_of(Box((0, 0, 0), SHAPE))


def rounded(values: Tensor, step: int = 0, name: str = "w", kind: str = "weight", seed: int = 1) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    place = place_of(Box((0,), (values.numel(),)), (values.numel(),), name)
    Draw(seed, step).round(out, values, kind, [place])
    return out


def test_the_mean_of_many_draws_is_the_number() -> None:
    """Within five standard errors of the mean, for numbers of any size and sign; each draw is one of two neighbours."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-20, 20).repeat(10)
    draws, total = 4000, torch.zeros(400, dtype=torch.float64)
    below = (values.view(torch.int32) & -(2**16)).view(torch.float32).double()
    above = ((values.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32).double()
    for step in range(draws):
        got = rounded(values, step).double()
        assert ((got == below) | (got == above)).all()
        total += (got - below) / (above - below)
    share = (values.double() - below) / (above - below)
    errors = (total / draws - share).abs() / ((share * (1 - share) / draws).sqrt() + 1e-4)
    assert float(errors.max()) < 5
    assert 0.5 < float(errors.square().mean()) < 1.5  # spread as independent draws are


def test_numbers_of_bf16_infinities_and_nan_stay() -> None:
    exact = torch.randn(100).bfloat16().float()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-133])
    for step in range(50):
        assert torch.equal(rounded(exact, step).float(), exact)
        assert torch.equal(rounded(special, step).float(), special)
    # The bits of NaN on a GPU, and a NaN with an upper half that alone would be an infinity.
    for bits in (0x7FFFFFFF, 0x7F800001, -1):
        assert rounded(torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)).isnan().all()


@pytest.mark.parametrize("other", [{"step": 1}, {"name": "v"}, {"kind": "exp_avg"}, {"seed": 2}])
def test_steps_names_kinds_and_seeds_draw_apart(other: dict[str, Any]) -> None:
    values = torch.full((40_000,), 1 + 2.0**-8)
    one, two = ((rounded(values, **how) == 1).double() for how in ({}, other))
    # Four in ten standard deviations of a product's mean; also between neighbours.
    for a, b in ((one, two), (one[1:], one[:-1]), (one[1:], two[:-1])):
        assert abs(float((a - 0.5).mul(b - 0.5).mean())) < 4 * 0.25 / math.sqrt(40_000)


@pytest.mark.parametrize(
    "box", [Box((2, 0, 0), (3, 5, 8)), Box((0, 1, 4), (6, 2, 4)), Box((5, 4, 7), (1, 1, 1)), Box((0, 0, 0), (0, 5, 8))]
)
def test_a_part_has_the_noise_of_the_whole(box: Box) -> None:
    draw = Draw(3, 4)
    whole = draw.noise("exp_avg", WHOLE, CPU).view(SHAPE)
    assert torch.equal(draw.noise("exp_avg", place_of(box), CPU).view(box.lengths), whole[box.slices])
    assert 0 <= int(whole.min()) < 3000 < 60_000 < int(whole.max()) < 2**16


def test_elements_beyond_what_32_bits_count_have_numbers() -> None:
    shape = (2**20, 2**13)
    index = global_index(shape, Box((2**19, 2**12), (2, 3)), CPU)
    wanted = [(row * 2**13 + 2**12 + column) % 2**32 for row in (2**19, 2**19 + 1) for column in range(3)]
    assert [number % 2**32 for number in index.tolist()] == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_draws_the_bits_of_a_cpu() -> None:
    gpu, values = torch.device("cuda", 0), torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).flatten()
    assert torch.equal(Draw(3, 4).noise("exp_avg", WHOLE, gpu).cpu(), Draw(3, 4).noise("exp_avg", WHOLE, CPU))
    one, two = (torch.empty(values.numel(), dtype=torch.bfloat16, device=device) for device in (CPU, gpu))
    for out in (one, two):
        Draw(3, 4).round(out, values.to(out.device), "weight", [WHOLE])
    assert torch.equal(one, two.cpu())


LAYOUTS = {
    "zero1": ("layout.data=2", "layout.data.sync=zero1"),
    "zero2 in microbatches": ("layout.data=3", "layout.data.sync=zero2", "batch.micro=2"),
    "zero3": ("layout.data=2", "layout.data.sync=zero3"),
    "stages": ("layout.pipeline.size=2",),
    "offload": ("layout.data=2", "memory.offload={to: host, bucket: 4096}"),
    "tensor": ("layout.tensor={kind: megatron, size: 2}",),
}


def run_bits(*words: str) -> Ended:
    bits = {"kind": "layout-free", "tensor": 2}
    optimizer = GPT2["optimizer"] | BOTH
    few = {"batch": {"global": 12, "micro": 2}, "steps": 2}
    return ended(parse_config(GPT2 | {"precision": HALF, "optimizer": optimizer, "bits": bits} | few, words))


def test_layouts_end_with_the_bits_of_one_device() -> None:
    alone = run_bits()
    assert {x.dtype for name, x in alone.tensors.items() if "norm" not in name} == {torch.bfloat16}
    for name, words in LAYOUTS.items():
        assert run_bits(*words).differing(alone) == [], name
    assert run_bits("seed=2").differing(alone) != []
    with patch.object(rounding_file, "PIECE", {"cpu": 64}):
        assert run_bits().differing(alone) == []


def config_of(name: str, states: str, masters: str, steps: int = 30, **changes: Any) -> Config:
    rate = {"adamw": 3e-3, "momentum": 0.1, "muon": 1e-2, "sgd": 0.3}[name]
    optimizer = {"name": name, "lr": rate, "states": states, "masters": masters}
    if name == "adamw":
        optimizer["betas"] = [0.9, 0.999]
    return config_for("allreduce", 1, precision=HALF, optimizer=optimizer, steps=steps, **changes)


def losses(mesh: Mesh, config: Config) -> list[float]:
    """Return the losses of steps over one batch, which makes losses fall by a lot."""
    parts = build(config, mesh)
    held = parts.optimizer.held
    assert isinstance(held, InPlace)
    same = [master is slot.parameter for slot, master in zip(held.slots, held.masters, strict=True)]
    assert all(same) == (config.optimizer.masters == "bf16")
    everyone = global_batch(config, 0)
    found = [train_step(parts, everyone, step).loss for step in range(config.steps)]
    wanted = torch.bfloat16 if config.optimizer.states == "bf16" else torch.float32
    kinds = {kind: x.dtype for index in range(len(held.slots)) for kind, x in held.tensors(index).items()}
    assert all(dtype == wanted for kind, dtype in kinds.items() if kind != "weight")
    return found


@pytest.mark.parametrize("name", ["adamw", "momentum", "muon", "sgd"])
def test_training_goes_as_with_float32(name: str) -> None:
    one = Grid((("data", 1),))
    states = "float32" if name == "sgd" else "bf16"
    ((wide,), (narrow,)) = (
        run_ranks(losses, one, config_of(name, *how)) for how in (("float32", "float32"), (states, "bf16"))
    )
    # The mean of six: under momentum the loss swings by 0.1 from step to step, and on each processor otherwise.
    wide_end, narrow_end = (fmean(found[-6:]) for found in (wide, narrow))
    assert wide_end < wide[0] - 1
    assert narrow[0] == wide[0]
    assert narrow_end == pytest.approx(wide_end, abs=0.03 * (wide[0] - wide_end))


def nearest(self: Draw, out: Tensor, values: Tensor, kind: str, places: Any) -> None:
    """Round to the nearest number instead."""
    out.copy_(values)


def fallen(mesh: Mesh, stochastic: bool) -> tuple[float, float]:
    """Return the means of a second moment and of the weights after 200 gradients of zero; both begin at one."""
    held = (parts := build(config_of("adamw", "bf16", "bf16"), mesh)).optimizer.held
    assert isinstance(held, InPlace)
    held.prepare()
    for index, slot in enumerate(held.slots):
        held.tensors(index)["exp_avg_sq"].fill_(1.0)
        slot.parameter.data.fill_(1.0)
    for slot in held.slots:
        assert slot.parameter.grad is not None
        slot.parameter.grad.zero_()
    with patch.object(Draw, "round", Draw.round if stochastic else nearest):
        for step in range(200):
            parts.optimizer.step(step)
    index = next(index for index, slot in enumerate(held.slots) if slot.rule.decays)
    stop = held.slots[index].places[-1].stop  # padding is not stepped
    second, weight = (float(held.tensors(index)[kind][:stop].double().mean()) for kind in ("exp_avg_sq", "weight"))
    return second, weight


def test_what_falls_by_less_than_half_of_a_last_bit_falls() -> None:
    """The second moment is multiplied by 0.999 in each step, which rounding to nearest undoes each time."""
    one = Grid((("data", 1),))
    ((second, weight),) = run_ranks(fallen, one, True)
    assert second == pytest.approx(0.999**200, rel=0.01)
    assert weight < 1 - 1e-3
    assert run_ranks(fallen, one, False) == [(1.0, 1.0)]


def test_memory_is_as_planned() -> None:
    half = {"precision": HALF}
    configs = [synced("zero1", optimizer=BOTH, **half), synced("allreduce", optimizer={"states": "bf16"}, **half)]
    configs.append(synced("allreduce", optimizer=BOTH, memory=OFFLOADED, layout={"data": {"size": 2}}, **half))
    check_counts(configs)


def held(mesh: Mesh, config: Config) -> dict[str, int]:
    parts = build(config, mesh)
    train_step(parts, global_batch(config, 0), 0)
    return resident_bytes(parts)


def test_a_run_holds_a_third_of_the_states() -> None:
    """12 bytes a weight become 4: no master, and two moments of 2. Norms, float32, have 8 and then 4."""
    one = Grid((("data", 1),))
    ((wide,), (moments,), (both,)) = (
        run_ranks(held, one, config_of("adamw", *how))
        for how in (("float32", "float32"), ("bf16", "float32"), ("bf16", "bf16"))
    )
    assert wide["weights"] == moments["weights"] == both["weights"]
    assert 2 * both["states"] < 1.01 * moments["states"]
    assert 3 * both["states"] == pytest.approx(wide["states"], rel=0.02)


def converted(mesh: Mesh, first: Config, second: Config, folder: Path) -> tuple[dict[Kind, Tensor], dict[Kind, Tensor]]:
    """Return the tensors of a run after some steps, and of a run of other formats that resumes the checkpoint."""
    parts = build(first, mesh)
    for step in range(3):
        train_step(parts, global_batch(first, step), step)
    writer = open_writer(mesh, first, folder)
    writer.save(progress_of(parts, 3, 0), pieces_of(parts))
    writer.wait()
    other = build(second, mesh)
    restore(other, Checkpoint(folder / "step-3"))
    assert other.optimizer.steps_taken == 3
    before, after = ({(kind, name): x.clone() for kind, name, *_, x in held_by(own)} for own in (parts, other))
    assert train_step(other, global_batch(second, 3), 3).applied
    return before, after


FORMATS = (("float32", "float32"), ("bf16", "bf16"))


@pytest.mark.parametrize("first, second", [FORMATS, FORMATS[::-1]], ids=["narrowed", "widened"])
def test_checkpoints_go_between_formats(
    first: tuple[str, str], second: tuple[str, str], tmp_path: Path
) -> None:  # fmt: skip
    """bf16 is widened without a loss; float32 is rounded to nearest, once."""
    configs = [config_of("adamw", *formats, steps=5) for formats in (first, second)]
    ((before, after),) = run_ranks(converted, Grid((("data", 1),)), *configs, tmp_path)
    assert before.keys() == after.keys()
    assert any(before[key].dtype != after[key].dtype for key in before)
    for key, x in before.items():
        assert torch.equal(x.to(after[key].dtype), after[key]), key


@pytest.mark.parametrize(
    "words, field",
    [
        (("optimizer.masters=bf16",), "optimizer.masters"),
        (("optimizer.masters=bf16", "precision=fp16"), "optimizer.masters"),
        (("optimizer.masters=bf16", "precision={level: O1, dtype: bf16}"), "optimizer.masters"),
        (("optimizer.states=bf16", "precision=float64"), "optimizer.states"),
        (("optimizer.states=bf16", "optimizer.name=sgd"), "optimizer.states"),
        (
            ("optimizer.masters=bf16", "optimizer.name=sgd", "precision=bf16", "memory.offload.to=host"),
            "memory.offload.to",
        ),
    ],
)
def test_what_has_no_bf16_is_refused(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run({}, words)
    assert [problem.field for problem in refused.value.problems] == [field]


def test_verify_compares_in_float64_and_refuses_what_is_drawn() -> None:
    config = config_of("adamw", "bf16", "bf16")
    optimizer = comparable(config, as_configured=False).optimizer
    assert (optimizer.states, optimizer.masters) == ("float32", "float32")
    with pytest.raises(ConfigError, match=r"optimizer\.states=bf16 is rounded at random"):
        comparable(config, as_configured=True)
