"""A run's software changes a prediction by the software's facts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.compute.tensor.section import Megatron
from meshwright.config import Config, parse_config
from meshwright.config.layout import DataParallel
from meshwright.config.section import with_field
from meshwright.configs import shipped
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.memory import Memory, verdict
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.search import search
from meshwright.planner.plan.software import (
    OWN_SOFTWARE,
    Communication,
    Software,
    load_program,
)
from meshwright.ranks.errors import ConfigError
from meshwright.training.on_device import Attention
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PASSES
from tests.planner.plan.clusters import NODES

EVERY: frozenset[Communication] = frozenset(("sums", "gathers", "layers"))


def run(**layout: object) -> Config:
    return parse_config({
        "model": {"layers": 4, "hidden": 256, "heads": 4, "positions": 128, "vocabulary": 512},
        "data": {"sequence": 128},
        "batch": {"global": 32, "micro": 4},
        "layout": layout,
    })  # fmt: skip


def ours(**facts: Any) -> Software:
    """Return Meshwright's software with some facts changed."""
    return OWN_SOFTWARE.model_copy(update=facts)


def predicted(config: Config, software: Software = OWN_SOFTWARE) -> Prediction:
    return Planner(NODES, software).predict(config)


def test_sums_wait_for_the_backward_pass() -> None:
    config = run(data={"size": 4})
    under, after = predicted(config), predicted(config, ours(overlapped=EVERY - {"sums"}))
    assert after.phases[DATA_PARALLEL] > under.phases[DATA_PARALLEL]
    assert after.phases[PASSES] == pytest.approx(under.phases[PASSES], rel=1e-12)
    assert after.memory == under.memory


@pytest.mark.parametrize("communication, layout", [
    ("gathers", {"data": {"size": 4, "sync": "zero3"}}),
    ("layers", {"tensor": {"kind": "megatron", "size": 2}}),
])  # fmt: skip
def test_what_is_not_overlapped_takes_longer(communication: Communication, layout: dict[str, object]) -> None:
    config = run(**layout)
    own, apart = predicted(config), predicted(config, ours(overlapped=EVERY - {communication}))
    assert apart.phases[PASSES] > own.phases[PASSES]
    assert apart.traffic == own.traffic


def test_an_optimizer_in_steps_takes_longer_and_nothing_else_does() -> None:
    own, steps = predicted(run()), predicted(run(), ours(optimizer="steps"))
    assert steps.phases[OPTIMIZER] > own.phases[OPTIMIZER]
    assert steps.phases[PASSES] == pytest.approx(own.phases[PASSES], rel=1e-12)


def test_one_process_issues_the_forward_kernels_of_all_devices_in_turn() -> None:
    """One process's host needs twice the time for the forward passes of two devices; backward passes run in threads."""
    device = NODES.device.model_copy(update={"launch_seconds": 1e-7, "issue_seconds": 1e-3})
    hosts = NODES.model_copy(update={"device": device})
    software = ours(one_process=True)
    forward, backward = {}, {}
    for name, one in {"each": OWN_SOFTWARE, "one": software}.items():
        tasks = Planner(hosts, one).predict(run(data={"size": 2, "sync": "server-gradient"})).timeline.tasks
        forward[name] = sum(span.seconds for span in tasks if span.category == "forward")
        backward[name] = sum(span.seconds for span in tasks if span.category == "backward")
    assert forward["one"] == pytest.approx(2 * forward["each"], rel=0.02)
    assert backward["one"] == pytest.approx(backward["each"], rel=1e-12)
    assert predicted(run(), software).seconds == pytest.approx(predicted(run()).seconds, rel=1e-12)


def test_heads_that_are_kernels_of_their_own_issue_as_many() -> None:
    """Separate and joint kernels of heads have equal products; a slow host issues each head's kernels."""
    device = NODES.device.model_copy(update={"issue_seconds": 1e-3, "launch_seconds": 1e-7})
    hosts = NODES.model_copy(update={"device": device})
    together, apart = (
        Planner(hosts, ours(attention="steps", heads=heads)).predict(run()) for heads in ("together", "apart")
    )
    assert apart.flops == together.flops
    assert apart.phases[PASSES] > 1.3 * together.phases[PASSES]


def test_heads_of_their_own_have_biases_of_their_own() -> None:
    """T5's positions are a bias a head."""
    config = parse_config({"model": "t5-tiny", "data": {"kind": "spans", "sequence": 32}, "batch": {"global": 2}})
    together, apart = (
        Planner(NODES, ours(attention="steps", heads=heads)).predict(config) for heads in ("together", "apart")
    )
    assert apart.flops == together.flops


def test_gradients_that_are_widened_at_once_take_memory_and_no_time() -> None:
    """A float16 model's float32 gradients: 4 bytes a parameter, more than a part of 256 MiB and a microbatch take."""
    config = parse_config({
        "model": {"layers": 2, "hidden": 4096, "heads": 8, "positions": 128, "vocabulary": 512},
        "data": {"sequence": 128},
        "batch": {"global": 1, "micro": 1},
        "precision": {"level": "O2", "dtype": "fp16", "accumulate": "stored"},
    })  # fmt: skip
    parts, whole = predicted(config), predicted(config, ours(widening="whole"))
    assert parts.memory[0].temporaries < 2**29
    num_parameters = parts.memory[0].gradients / 2
    assert whole.memory[0].temporaries + whole.memory[0].activations == pytest.approx(4 * num_parameters, rel=0.01)
    assert whole.seconds == parts.seconds


def test_programs_are_presets() -> None:
    """Presets have the facts named by the papers of validation; an unknown name is refused with all valid names."""
    assert load_program("axonn").software == Software(
        widening="whole", attention="fused-softmax", fuses_dropout=True, overlapped=EVERY - {"sums"}
    )
    assert load_program("megatron-lm-2019").software == Software(attention="steps", overlapped=frozenset())
    assert load_program("meshwright").software == OWN_SOFTWARE
    with pytest.raises(ConfigError, match=r"--software=megatron is no program .* valid: automodel, .*torchtitan-eager"):
        load_program("megatron")


@pytest.mark.parametrize("name", shipped("software"))
def test_every_fact_of_a_preset_has_a_source(name: str) -> None:
    program = load_program(name)
    assert program.title
    assert set(program.sources) == {fact for fact in program.sources if len(program.sources[fact]) > 10}
    for field, values in program.layouts.items():
        assert values, field
        assert field.startswith(("layout.", "memory.")), field


def test_a_fact_is_laid_over_a_preset() -> None:
    program = load_program("deepspeed", ["attention=fused", "overlapped=sums,gathers", "gradients=summed"])
    assert (program.software.attention, program.software.gradients) == ("fused", "summed")
    assert program.software.overlapped == {"sums", "gathers"}
    assert program.software.messages == "split"
    assert program.sources["attention"] == "--fact"
    with pytest.raises(ConfigError, match=r"--fact=attention is no fact and value"):
        load_program("deepspeed", ["attention"])
    with pytest.raises(ConfigError, match=r"attention=none at all is neither fused"):
        load_program("deepspeed", ["attention=none at all"])
    with pytest.raises(ConfigError, match=r"atention=fused is an unknown key \(did you mean attention\?\)"):
        load_program("deepspeed", ["atention=fused"])


def test_tight_begins_where_a_programs_rows_have_held_more_than_was_predicted() -> None:
    """BLOOM's row that ran out of 81,251 MiB is predicted to hold 66.4 GiB: no fit for DeepSpeed's runs."""
    memory = Memory(round(66.4 * 2**30), 0, 0, 0, 0, 0)
    assert verdict(memory, GPUS) == "fits"
    assert verdict(memory, load_program("deepspeed").on(GPUS)) == "tight"
    assert load_program().on(GPUS) is GPUS


GPUS = load_cluster("dgx-a100")


def on_gpus(config: Config, **facts: object) -> Prediction:
    return Planner(GPUS, Software.model_validate(facts)).predict(config)


def llama(micro: int = 4, **layout: object) -> Config:
    return parse_config({
        "model": {"family": "llama", "layers": 4, "hidden": 1024, "heads": 8, "feed_forward": 2816, "vocabulary": 8192,
                  "positions": 1024},
        "data": {"sequence": 1024},
        "batch": {"global": 32, "micro": micro},
        "precision": "bf16",
        "layout": layout,
    })  # fmt: skip


def test_element_kernels_in_a_row_are_one() -> None:
    """Joined element kernels have less traffic, the same products and the same messages."""
    apart, fused = on_gpus(llama()), on_gpus(llama(), fuses_elements=True)
    assert fused.flops == apart.flops
    assert fused.phases[PASSES] < 0.95 * apart.phases[PASSES]
    assert fused.traffic == apart.traffic


def test_norms_take_longer_in_steps_than_in_kernels_and_than_in_tuned_ones() -> None:
    steps, own, fast = (on_gpus(llama(), norms=norms).phases[PASSES] for norms in ("steps", "torch", "fast"))
    assert fast < own < steps


def test_attention_of_an_older_generation_takes_longer() -> None:
    first, second = (on_gpus(llama(), attention_kernel=kernel) for kernel in ("flash-1", "flash-2"))
    assert first.phases[PASSES] > second.phases[PASSES]
    assert second.seconds == on_gpus(llama()).seconds


def test_split_messages_are_shorter_and_gathered() -> None:
    """Two tensor ranks on each of two stages, with a node a stage: half is sent between nodes, the gather stays
    inside."""
    layout = {"tensor": {"kind": "megatron", "size": 8}, "pipeline": {"size": 2, "schedule": "1f1b"}}
    whole, split = on_gpus(llama(**layout)), on_gpus(llama(**layout), messages="split")
    assert split.phases[PASSES] < whole.phases[PASSES]
    by_sequence = {**layout, "tensor": {"kind": "megatron", "size": 8, "sequence_parallel": True}}
    assert on_gpus(llama(**by_sequence), messages="split").seconds == on_gpus(llama(**by_sequence)).seconds


def test_broadcasts_of_each_ranks_slices_stand_behind_each_other() -> None:
    """On 16 GPUs each of 16 broadcasts pays the latencies of a ring; within a node broadcasts are nearly as fast as
    gathers."""
    layout = {"data": {"size": 16, "sync": "zero1"}}
    gathered, sent = (
        on_gpus(llama(2, **layout), overlapped=(), publishes=how).seconds for how in ("gathers", "broadcasts")
    )
    assert sent > gathered
    inside = {"data": {"size": 16, "sync": "zero1", "shard": 8}}
    near, far = (on_gpus(llama(2, **inside), overlapped=(), publishes=how).seconds for how in ("gathers", "broadcasts"))
    assert near < far < near + (sent - gathered)


def test_half_gradients_beside_float32_sums_take_two_bytes_a_parameter() -> None:
    summed, both = on_gpus(llama()), on_gpus(llama(), gradients="both")
    assert both.memory[0].gradients == pytest.approx(1.5 * summed.memory[0].gradients, rel=1e-4)
    assert both.seconds == summed.seconds


def test_buffers_are_held_all_the_time() -> None:
    own, more = on_gpus(llama()), on_gpus(llama(), buffers_bytes=10**9)
    assert more.memory[0].temporaries - own.memory[0].temporaries == 10**9


@pytest.mark.parametrize("sync", ["allreduce", "zero3"])
def test_slices_that_are_copied_take_kernels_beside_gathers_and_sums(sync: str) -> None:
    config = with_field(llama(), "layout.data", DataParallel(size=8, sync=sync))
    config = with_field(config, "batch.global_", 8 * config.batch.global_)
    views, copies = on_gpus(config), on_gpus(config, slices="copies")
    assert copies.memory == views.memory
    assert (copies.seconds > views.seconds) == (sync == "zero3")


@pytest.mark.parametrize("sync", ["allreduce", "zero2", "zero3"])
def test_float32_slices_replace_half_precision_weights_and_gradients(sync: str) -> None:
    """FSDP casts float32 slices for each gather: the optimizer's masters are the only copy of the weights."""
    config = with_field(llama(32), "layout.data", DataParallel(size=8, sync=sync))
    config = with_field(config, "batch.global_", 8 * config.batch.global_)
    run, cast = on_gpus(config), on_gpus(config, slice_dtype="float32")
    (own,), (new,) = run.memory, cast.memory
    # Norms have float32 weights and gradients in both.
    assert new.weights < own.weights / 1000 if sync == "zero3" else new.weights == own.weights
    assert new.gradients == pytest.approx(own.gradients * (1 if sync == "allreduce" else 2), rel=1e-3)
    assert new.states == own.states
    assert (cast.seconds == run.seconds) == (sync == "allreduce")


@pytest.mark.parametrize(
    "change", [{"optimizer.masters": "bf16"}, {"optimizer.states": "bf16", "optimizer.masters": "bf16"}]
)
def test_slices_without_float32_masters_keep_the_runs_dtype(change: dict[str, str]) -> None:
    config = with_field(llama(), "layout.data", DataParallel(size=8, sync="zero3"))
    config = with_field(config, "batch.global_", 8 * config.batch.global_)
    for name, value in change.items():
        config = with_field(config, name, value)
    assert on_gpus(config, slice_dtype="float32").memory == on_gpus(config).memory


@pytest.mark.parametrize("sync", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("dtype", ["run", "float32"])
def test_whole_gradients_are_held_until_a_step_sums_them_once(sync: str, dtype: str) -> None:
    """As under no_sync of torch's FSDP: gradients of half-precision weights are whole, in this dtype, and sent once."""
    config = with_field(llama(), "layout.data", DataParallel(size=8, sync=sync))
    config = with_field(config, "batch.global_", 8 * config.batch.global_)
    often, once = (on_gpus(config, sums=sums, slice_dtype=dtype) for sums in ("microbatch", "step"))
    assert config.num_microbatches > 1
    if sync == "zero1":
        assert (often.memory, often.seconds) == (once.memory, once.seconds)
        return
    (each,), (late,) = often.memory, once.memory
    assert (late.weights, late.states) == (each.weights, each.states)
    replicas = on_gpus(
        with_field(with_field(config, "layout.data.sync", "allreduce"), "precision.accumulate", "stored")
    )
    whole = replicas.memory[0].gradients
    assert late.temporaries >= whole, "until the sum"
    assert once.seconds < often.seconds
    sent = [
        sum(entry.sent_bytes for (_, verb), entry in each.traffic[0].items() if verb == "reduce_scatter")
        for each in (often, once)
    ]
    assert sent[0] == pytest.approx(2 * config.num_microbatches * sent[1], rel=0.01), "also half as wide"
    single = with_field(config, "batch.micro", config.replica_batch)
    assert on_gpus(single, sums="step", slice_dtype=dtype) == on_gpus(single, slice_dtype=dtype)


@pytest.mark.parametrize("sync", ["zero2", "zero3"])
def test_torchs_pipelines_sum_gradients_once_a_step(sync: str) -> None:
    """In the dtype of the sums, and only with several stages."""
    one = with_field(with_field(llama(), "model.layers", 24), "layout.data", DataParallel(size=4, sync=sync))
    one = with_field(one, "batch.global_", 4 * one.batch.global_)
    two = with_field(with_field(one, "layout.pipeline.size", 2), "layout.pipeline.schedule", "1f1b")
    assert on_gpus(one, sums="stages") == on_gpus(one)
    often, once = on_gpus(two), on_gpus(two, sums="stages")
    assert once.seconds < often.seconds
    weights = on_gpus(with_field(two, "layout.data.sync", "allreduce")).memory[0].weights
    grown = once.memory[0].temporaries - often.memory[0].temporaries
    assert 0 < grown <= 2 * weights * 1.01, "float32, less the buckets that pass in both"
    assert on_gpus(two, sums="step").memory[0].temporaries < once.memory[0].temporaries, "bf16"


def test_a_published_run_fits_only_if_gradients_are_summed_in_every_microbatch() -> None:
    """NeMo AutoModel's recipe of Llama 3.1 70B on 64 H100 must not wait with sums, or memory runs out (its
    custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml, the comment at defer_fsdp_grad_sync)."""
    config = parse_config({
        "model": "llama-3.1-70b", "data": {"sequence": 8192}, "batch": {"global": 128, "micro": 1},
        "precision": {"level": "O2", "dtype": "bf16", "accumulate": "stored"}, "memory": {"recompute": 1},
        "layout": {"data": {"size": 32, "sync": "zero3"}, "context": {"size": 2, "kind": "ring"}, "ranks_per_node": 8},
    })  # fmt: skip
    program, cluster = load_program("automodel").software, load_cluster("dgx-h100")
    often, once = (
        Planner(cluster, program.model_copy(update={"sums": sums})).predict(config) for sums in ("microbatch", "step")
    )
    assert (often.fits, once.fits) == (True, False)
    assert once.worst_memory > often.worst_memory + 1.8 * 70e9


def test_wide_gradients_are_float32_in_a_step_of_one_microbatch_too() -> None:
    one, several = llama(32), llama()
    assert (one.widens_gradients, several.widens_gradients) == (False, True)
    own, wide = on_gpus(one), on_gpus(one, gradients="wide")
    assert wide.memory[0].gradients == 2 * own.memory[0].gradients
    assert on_gpus(several, gradients="wide").memory[0].gradients == on_gpus(several).memory[0].gradients


def test_workspaces_of_products_hang_on_the_gpus_generation() -> None:
    """Workspaces are counted as tensors, also in the replayed process."""
    facts = Software.model_validate({"workspaces_bytes": [10**9, 3 * 10**9]})
    for name, size in (("dgx-a100", 10**9), ("dgx-h100", 3 * 10**9), ("gb200-nvl72", 3 * 10**9)):
        cluster = load_cluster(name)
        own, more = (Planner(cluster, software).predict(llama()).memory[0] for software in (Software(), facts))
        assert more.allocated - own.allocated == size
        assert more.reserved - own.reserved == pytest.approx(size, rel=0.01)
    streams = Software.model_validate({"streams_bytes": [10**9, 3 * 10**9]})
    dense, experts = llama(), with_field(llama(), "model.experts", ExpertsSection(count=4))
    for config, size in ((dense, 0), (experts, 10**9)):  # on A100
        own, more = (Planner(GPUS, software).predict(config).memory[0] for software in (Software(), streams))
        assert more.allocated - own.allocated == size
        assert more.reserved - own.reserved == pytest.approx(size, rel=0.01)


def test_products_beside_messages_have_a_workspace() -> None:
    """Only among ranks that cut a layer by sequence, and only if the software's communication in layers overlaps."""
    whole, cut = (
        with_field(llama(), "layout.tensor", Megatron(kind="megatron", size=2, sequence_parallel=by_sequence))
        for by_sequence in (False, True)
    )
    under = EVERY - {"layers"}
    for config, overlapped, size in ((llama(), EVERY, 0), (whole, EVERY, 0), (cut, EVERY, 10**9), (cut, under, 0)):
        plain, more = (
            Planner(GPUS, Software(overlapped=overlapped, layers_bytes=sizes)).predict(config).memory[0]
            for sizes in ((0, 0), (10**9, 3 * 10**9))
        )
        assert more.allocated - plain.allocated == size


@pytest.mark.parametrize("attention, size", [("fused-softmax", 5), ("steps", 5), ("wide-steps", 7)])
def test_attention_in_steps_keeps_bytes_of_each_score(attention: Attention, size: int) -> None:
    """With dropout in half precision: the softmax in the scores' dtype, a mask of bytes, the dropout's product. Masks
    of scores are views of one element here."""
    query, key, value = (
        torch.empty(2, 4, 64, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    recorder = Software().recorder()
    with Software(attention=attention).on_device("cuda"), recorder:
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
    scores, operands = 2 * 4 * 64 * 64, 2 * value.numel()
    assert attended.shape == query.shape
    assert scores * size <= recorder.live <= scores * size + 2 * operands


@pytest.mark.parametrize("grouped", [True, False])
def test_a_generation_of_fused_attention_repeats_no_key(grouped: bool) -> None:
    """8 heads of queries, 2 of keys: the backward pass keeps 2 heads, or 8."""
    kept: list[int] = []
    query, key, value = (
        torch.empty(1, heads, 64, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    )
    software = Software(attention="fused", attention_kernel="flash-2" if grouped else None)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x)
    with hooks, software.on_device("cuda"):
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert attended.shape == query.shape
    assert kept.count(2 * 64 * 16) == (2 if grouped else 0)
    attended.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_stages_that_a_program_cuts_evenly_are_even_where_they_can_be() -> None:
    """With a large head the counted work is not even."""
    for layers, even in ((8, (2, 2, 2, 2)), (9, None)):
        config = with_field(llama(pipeline={"size": 4, "schedule": "1f1b"}), "model.layers", layers)
        config = with_field(config, "model.vocabulary", 131072)
        own, theirs = (on_gpus(config, stages=how).config.layout.pipeline.partition for how in ("work", "even"))
        assert theirs == (even or own)
        assert own != (2, 2, 2, 2)


def test_a_layout_is_tight_by_its_strategys_own_rows() -> None:
    """A layout with 1 % of memory to spare is tight if the strategy's rows have held 6 % more, and fits if 0.1 %
    more."""
    shares = (("tensor", 0.06), ("data", 0.001))
    cut = on_gpus(llama(tensor={"kind": "megatron", "size": 2}), unpredicted=shares).memory[0]
    whole, staged = (
        on_gpus(llama(**layout), unpredicted=shares).memory[0] for layout in ({}, {"pipeline": {"size": 2}})
    )
    assert (cut.unpredicted, whole.unpredicted, staged.unpredicted) == (0.06, 0.001, None)
    for memory, verdicts in ((cut, "tight"), (whole, "fits")):
        device = GPUS.device.model_copy(update={"memory_bytes": round(memory.total * 1.01)})
        assert verdict(memory, GPUS.model_copy(update={"device": device})) == verdicts
    known = load_program("megatron-core")
    assert known.memory is not None
    assert dict(known.software.unpredicted) == known.memory.by


def test_whole_logits_take_memory() -> None:
    """Float32 logits of 16 Ki tokens and 128 Ki classes take 8 GiB, slices 256 MiB."""
    config = parse_config({
        "model": {"family": "llama", "layers": 1, "hidden": 512, "heads": 4, "feed_forward": 1024,
                  "vocabulary": 131072, "positions": 2048},
        "data": {"sequence": 2048}, "batch": {"global": 8, "micro": 8}, "precision": "bf16",
    })  # fmt: skip
    slices, whole = on_gpus(config), on_gpus(config, logits="whole")
    assert whole.worst_memory - slices.worst_memory > 7 * 2**30


def test_products_in_fp8_are_faster_and_need_a_peak() -> None:
    hopper = load_cluster("dgx-h100")
    big = with_field(llama(), "model.hidden", 4096)
    half, low = (
        Planner(hopper, Software.model_validate({"products": name})).predict(big) for name in ("stored", "fp8")
    )
    assert low.flops == half.flops
    assert low.phases[PASSES] < half.phases[PASSES]
    with pytest.raises(ConfigError, match="fp8 is no dtype of which dgx-a100 says how fast it multiplies"):
        on_gpus(llama(), products="fp8")


def test_a_program_looks_at_no_layout_that_it_does_not_know() -> None:
    config, program = llama(), load_program("deepspeed-trainer")
    found = search(config, GPUS, 8, 3, program=program)
    assert found.program is program
    assert {one.config.layout.data.sync for one in found.predicted} <= {"allreduce", "zero1", "zero2", "zero3"}
    assert all(one.config.layout.tensor.kind == "none" for one in found.predicted)
    assert all(one.config.layout.pipeline.size == 1 for one in found.predicted)


def test_a_search_that_ends_has_looked_at_every_family() -> None:
    assert search(run(), NODES, 2, 1).left_share == 0
