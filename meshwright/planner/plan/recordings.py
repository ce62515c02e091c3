"""Recordings: the programs of a model's parts, each run once on meta tensors by the real kits and the real stage.

The parts are the embeddings, groups of layers, and the head (model.py). Equal layers are recorded once, so a model of a
hundred layers costs as few recordings as one of two. A part's programs depend on the microbatch's place in the step:
the first microbatch gathers weights for all, the last completes the gradients.

The cost of k layers that are recomputed together is k - 1 times the difference between groups of two and of one, plus
the cost of a group of one: the last layer of a group is not recomputed to its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.compute.bits.section import ALONE
from meshwright.compute.model import EMBEDDINGS, SAMPLES, Chunk, Costs, links
from meshwright.compute.models.chain import chain_of, first_trained, make_chain, parameters_of, split_name
from meshwright.compute.parameters.bucket import Bucket, make_buckets
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.parameters.shard import check_patterns, shard_specs, use_gradients
from meshwright.compute.tensor.fp8 import inner_layers
from meshwright.compute.tensor.head import TableHead
from meshwright.compute.tensor.islands import islands_of
from meshwright.compute.tensor.linear import autocasts_of
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config
from meshwright.config.layout import DataParallel, PipelineSection
from meshwright.config.registry import entries, load_entry
from meshwright.config.schema import BatchSection
from meshwright.config.section import with_field
from meshwright.planner.plan.memory import Parameter
from meshwright.planner.plan.recorder import DISTINCT, KernelKind, Program, Recorder
from meshwright.planner.plan.remembered import remembered
from meshwright.planner.plan.saved import SavedTensors
from meshwright.planner.plan.software import OWN_SOFTWARE, Software
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import TensorMeta
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.strategies.memory.activations import run_by_policy
from meshwright.strategies.memory.section import EVERY, KEEPS_ALL, Group
from meshwright.strategies.pipeline.stage import Stage
from meshwright.strategies.pipeline.stages import rule_of
from meshwright.strategies.pipeline.task import TaskKind
from meshwright.training.decisions import compiled_on
from meshwright.training.on_device import AsOnDevice
from meshwright.training.rank_model import build_kit, build_model, empty_batch

if TYPE_CHECKING:
    from meshwright.planner.plan.kept import KeptRecordings

Forms = tuple[TensorMeta, ...]

_ALL = 2**60
# A recording's bucket holds every parameter, since only the views for linears' gradients matter.


@dataclass(frozen=True)
class Recording:
    """The recorded part of a chain."""

    programs: dict[TaskKind, tuple[Program, ...]]
    """The programs of each task, by the microbatch's place in the step (`place`)."""
    parameters: tuple[Parameter, ...]
    outgoing: Forms
    """Shapes and dtypes of the output for the next part."""
    output_bytes: int
    """Bytes of the output freed after its last reader."""
    holds_input: bool
    """Whether the backward pass reads the part's input itself."""
    kept_input_bytes: int
    """Bytes of the input that W reads; B frees the rest."""
    kept_gradient_bytes: int
    """Bytes of the received gradient that W reads; B frees the rest."""
    leaving: dict[TaskKind, tuple[frozenset[int], ...]]
    """By task and place, storages freed with the task's output: F's for the next part, B's for the one before."""

    def moved(self, layers: int) -> Recording:
        """Return this part `layers` layers further on."""
        if layers == 0:
            return self
        moved = []
        for parameter in self.parameters:
            layer, inner = split_name(parameter.name)
            name = parameter.name if layer is None else f"blocks.{layer + layers}.{inner}"
            moved.append(replace(parameter, name=name))
        return replace(self, parameters=tuple(moved))  # programs are shared: equal layers send and hold the same


@dataclass(frozen=True)
class Outline:
    """A model's parts, independent of the layout."""

    alike: tuple[int, ...]
    """For each layer the first equal layer of the model."""
    order: dict[str, int]
    """The index of each parameter in the whole model, by name."""
    parameters: Costs
    """The number of parameters of each part."""
    first_trained: int = EMBEDDINGS
    """The first part with a trained parameter (models/chain.py)."""


def bytes_of(forms: Iterable[TensorMeta]) -> int:
    """Return the sum of the bytes of tensors with these shapes and dtypes."""
    return sum(form.size_bytes for form in forms)


SYNC = "layout.data.sync"


def check(config: Config) -> None:
    """Refuse a config that cannot be predicted. Raises ConfigError."""
    check_recorded(config)
    if unplanned := config.layout.data.strategy.unplanned:
        planned = ", ".join(name for name, entry in entries("syncs").items() if not entry.unplanned)
        raise ConfigError.of(SYNC, config.layout.data.sync, f"{unplanned}: it cannot be planned", planned)
    if config.layout.pipeline.partition == "measured":
        rule = "is known when the run begins: it cannot be planned"
        raise ConfigError.of("layout.pipeline.partition", "measured", rule, "auto, or layers a stage")


def check_recorded(config: Config) -> None:
    """Refuse a config that cannot be recorded on meta tensors. Raises ConfigError."""
    if config.layout.pipeline.head == "spread":
        rule = "lets all stages wait for each other in every microbatch, which no plan and no clock counts"
        raise ConfigError.of("layout.pipeline.head", "spread", rule, "last")


@dataclass
class Recordings:
    """Records parts of a model, and caches the recordings.

    A recording depends on the kind and the capability of a device, and on the software's facts about a layer
    (software.py). Sent bytes and parameters are equal for all devices and software.
    """

    kind: str = "cpu"
    software: Software = OWN_SOFTWARE
    capability: tuple[int, int] | None = None
    """A GPU's compute capability."""
    recorded: list[Recording] = field(default_factory=list)
    """All recordings made so far."""
    kept: KeptRecordings | None = None
    """Recordings of earlier runs; None: no recording is kept on disk."""

    @remembered("model", "data", "loss", "precision.products")
    def outline(self, config: Config) -> Outline:
        # Whole parameters, so that the outline is the same under every layout.
        kit, costs = SerialKit(solo_mesh(torch.device("meta"))), chain_of(config).products(config)
        model = make_chain(config, kit)
        learns = first_trained(config, kit)
        parts: dict[int, list[Hashable]] = {
            layer: [cost, learns < layer, config.model.layer_form(layer)] for layer, cost in enumerate(costs.layers)
        }
        order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
        for name, parameter in model.named_parameters():
            layer, inner = split_name(name)
            if layer is not None:
                parts[layer].append((inner, tuple(parameter.shape), parameter.requires_grad))
        if config.precision.in_fp8:
            for layer, facts in parts.items():
                facts.append(layer in inner_layers(len(parts)))
        for layer, facts in parts.items():
            facts.append(layer < self.software.host_layers)
        firsts: dict[Hashable, int] = {}
        alike = [firsts.setdefault(tuple(facts), layer) for layer, facts in parts.items()]
        check_patterns(config.model.frozen, shard_specs(model))
        specs = [shard_specs(make_chain(config, kit, link)) for link in links(config.model.num_blocks)]
        return Outline(tuple(alike), order, parameters_of(*specs), learns)

    def of(self, config: Config, chunk: Chunk, incoming: Forms) -> Recording:
        """Return the recording of the embeddings, the head, or a group of layers (recomputed together if the policy
        does).

        Args:
            config: The run.
            chunk: The part.
            incoming: Shapes and dtypes of the part's input.
        """
        further = 0
        if chunk.layers:
            alike = self.outline(config).alike
            first, count = alike[chunk.layers[0]], len(chunk.layers)
            if {first} == {alike[layer] for layer in (*chunk.layers, *range(first, first + count))}:
                # Programs of equal layers are shared; only the parameters' names differ.
                further = chunk.layers[0] - first
                chunk = replace(chunk, layers=range(first, first + count))
        learns = self.outline(config).first_trained < chunk.parts[0]
        recording = self._record(as_recorded(config, chunk), chunk, incoming, rule_of(config).splits, learns)
        return recording.moved(further)

    def parameters(self, config: Config, chunk: Chunk) -> tuple[Parameter, ...]:
        """Return a part's parameters, without facts found by a recording: the part is built, and does not run."""
        config = as_recorded(config, chunk).model_copy(update={"seed": 0})
        grid, recorder = Grid(config.layout.axes, config.copies), self.software.recorder(fuses=False, layers=False)
        mesh = self.software.mesh(
            grid, config.layout.token_axes, device_type=self.kind, capability=self.capability, recorder=recorder
        )
        return parameters_in(build_model(config, build_kit(config, mesh), mesh, chunk))

    @remembered(
        "model", "data", "loss", "bits", "precision", "compile", "batch", "memory.recompute", "memory.summa",
        "memory.logits", "layout.data", "layout.context", "layout.tensor", "layout.order",
    )  # fmt: skip
    def _record(self, config: Config, chunk: Chunk, incoming: Forms, splits: bool, learns: bool) -> Recording:
        # The number of stages changes no part, and meta tensors have no values: one recording serves all stages and
        # seeds.
        config = with_field(config.model_copy(update={"seed": 0}), "layout.pipeline", _ONE_STAGE)
        software = self.software
        # Products of the embeddings and the head keep the run's format, as in Transformer Engine.
        key, whose = (
            "",
            (self.kind, software, self.capability, config.model, config.data, config.bits, config.precision),
        )
        if self.kept is not None:
            layout, memory = config.layout, config.memory
            cut = layout.data, layout.context, layout.tensor, layout.order
            fields = config.compile, config.batch, memory.recompute, memory.summa, memory.logits
            key = sha256(repr((cut, fields, chunk, incoming, splits, learns)).encode()).hexdigest()
            if (known := self.kept.find(whose, key)) is not None:
                return known
        layers, on_device = bool(chunk.layers), software.on_device(self.kind)
        recorder = software.recorder(fuses=layers and software.fuses(config, self.kind), layers=layers)
        compiles = compiled_on(config, self.kind) if software.compiles else "none"
        config = config.model_copy(update={"compile": compiles})
        mesh = partial(software.mesh, device_type=self.kind, capability=self.capability, recorder=recorder)
        self.recorded.append(_record(config, recorder, on_device, chunk, incoming, mesh, splits, learns))
        if self.kept is not None:
            self.kept.keep(whose, key, self.recorded[-1])
        return self.recorded[-1]


def as_recorded(config: Config, chunk: Chunk) -> Config:
    """Return the config of a part's recording: few microbatches, replicas only if forward passes wait for each other,
    and one of the groups of ranks that share a microbatch's rows as replicas do."""
    layout, policy, data = config.layout, config.memory.policy, config.layout.data
    count = min(config.num_microbatches, DISTINCT if layout.tensor.by_size else 2)
    # Received rows are kept only by groups that the policy runs.
    exchange, recompute = data.exchange if policy.by_groups else "blocking", config.memory.recompute
    if policy.by_groups and (policy.make, policy.keeps_inputs) == (EVERY.make, EVERY.keeps_inputs):
        recompute = max(1, len(chunk.layers))  # a part is one group, of any size
    if not data.strategy.unplanned:
        data = _ONE_REPLICA.model_copy(update={"size": data.expert, "expert": data.expert, "exchange": exchange})
    # Parts are not planned: on several ranks, a layout-free run is recorded in the usual mode.
    alone = layout.model_copy(update={"data": data, "pipeline": _ONE_STAGE}).world_size == 1
    # The head may have layers behind the last one (DeepSeek-V3). Without experts their ranks are replicas.
    routed = chunk.last or any(map(config.model.has_experts, chunk.layers))
    if not (routed or data.strategy.unplanned):
        data = data.model_copy(update={"size": 1, "expert": 1})
    as_layer = len(chunk.layers) > 0 or config.model.branches_in_ends
    tensor, shares = layout.tensor.replica if as_layer else layout.tensor.replica_of_ends
    if config.micro % shares:
        tensor, shares = layout.tensor, 1  # a sample of several rows is shared
    if not chunk.layers:  # embeddings and head are not recomputed
        recompute = KEEPS_ALL
    layout = layout.model_copy(update={"data": data, "pipeline": _ONE_STAGE, "tensor": tensor})
    if layout.order != "auto":  # of an order, only a layer's axes matter: these name groups
        usual = tuple(name for name, _ in layout.layer_axes)
        order = tuple(name for name, _ in layout.axes if name in usual)
        layout = layout.model_copy(update={"order": "auto" if order == usual else order})
    micro = config.micro // shares
    batch = _BATCH.model_copy(update={"global_": count * micro * data.size, "micro": micro})
    logits = config.memory.logits if chunk.has_head else "auto"
    summa = config.memory.summa if "memory.summa" in tensor.gives_effect_to else "auto"
    memory = config.memory.model_copy(update={"recompute": recompute, "logits": logits, "summa": summa})
    bits = config.bits.model_copy(update={"kind": config.bits.kind if alone else "usual", **ALONE})
    return config.model_copy(update={"layout": layout, "batch": batch, "memory": memory, "bits": bits})


_ONE_REPLICA, _ONE_STAGE, _BATCH = DataParallel(), PipelineSection(), BatchSection()


def parameters_in(model: nn.Module) -> tuple[Parameter, ...]:
    """Return a part's parameters in the order of registration."""
    specs = shard_specs(model)
    return tuple(
        Parameter(name, tuple(parameter.shape), parameter.dtype, specs[name])
        for name, parameter in model.named_parameters()
    )


def _record(
    config: Config, recorder: Recorder, on_device: AsOnDevice, chunk: Chunk, incoming: Forms,
    mesh_of: Callable[[Grid, tuple[str, ...]], Mesh], splits: bool, learns: bool,
) -> Recording:  # fmt: skip
    """Run a part's tasks for each place of a microbatch, on one replica and stage. compose.py adds the messages of
    stages and replicas."""
    layout, policy = config.layout, config.memory.policy
    mesh = mesh_of(Grid(layout.axes, config.copies), layout.token_axes)
    kit, sync = build_kit(config, mesh), layout.data.strategy
    model = build_model(config, kit, mesh, chunk)
    run_by_policy(config, mesh, model, [Group(chunk.layers, wrapped=policy.by_groups)])
    for block in model.blocks.values() if config.in_graphs else ():  # each block is one graph
        block.register_forward_pre_hook(lambda *_: recorder.cut())
    if config.compile != "none":
        # Passes over rows of logits: a GPU's reached 0.46 of the memory's pace (an H200), a core takes exponentials.
        kernel_kind: KernelKind | None = "norm" if on_device.device_type == "cuda" else None
        islands = islands_of(partial(recorder.as_one, kernel_kind))
        for head in (module for module in model.modules() if isinstance(module, TableHead)):
            head.use_islands(islands)
    parameters = model.named_parameters(), shard_specs(model)
    buckets = list(make_buckets(*parameters, mesh, _ALL, widens=config.widens_gradients))
    names = {parameter: name for name, parameter in model.named_parameters()}
    with_b: set[str] = set()
    in_host = len(chunk.layers) > 0 and chunk.layers[-1] < recorder.host_layers
    saved = SavedTensors(recorder, model, in_host=in_host)

    def announced(parameter: nn.Parameter) -> None:
        if gradients.defers:  # W is deferred, so B computed this gradient, as for a norm
            with_b.add(names[parameter])

    gradients = Gradients({x: view for bucket in buckets for x, view in bucket.views.items()}, announced)
    use_gradients(model, gradients)
    strategy = load_entry(sync.synchroniser)([], mesh, load_entry(sync.policy)())
    strategy.expect(False)  # no bucket is sent: sums of gradients are separate programs (buckets.py)
    run, leads = strategy.forward if chunk.last else None, layout.tensor.rows.leads
    stage = Stage(model, gradients, run=run, learns=learns, autocasts=autocasts_of(config, mesh))
    programs: dict[TaskKind, list[Program]] = {TaskKind.FORWARD: [], TaskKind.BACKWARD: []}
    leaving: dict[TaskKind, list[frozenset[int]]] = {TaskKind.FORWARD: [], TaskKind.BACKWARD: []}
    scales, count = dict.fromkeys((*model.labels, SAMPLES), 1.0), min(config.num_microbatches, DISTINCT)
    # Programs by place in the step. The last differs if it frees gathered weights; the first writes gradients, others
    # add.
    places = tuple(range(count)) if count == 1 or layout.tensor.by_size else (0, 1, 1)
    for index in range(places[-1] + 1):
        batch = empty_batch(config, kit, model, mesh.device)
        given = tuple(torch.empty(form.shape, dtype=form.dtype, device="meta") for form in incoming)
        saved.begin()
        with on_device, saved.hooks, recorder.program(mesh.ledger) as recorded:
            outgoing = stage.forward(index, given, batch, scales)
            saved.leave()
        programs[TaskKind.FORWARD].append(replace(recorded(), leads=leads))
        forms = () if chunk.last else tuple(TensorMeta(tuple(x.shape), x.dtype) for x in outgoing)
        reads_again = policy.by_groups and policy.keeps_inputs and len(chunk.layers) > 0
        holds_input = reads_again or any(x.untyped_storage()._cdata in saved.offsets for x in given)
        alive = recorder.live
        del outgoing  # freed now: storages for the reader that autograd does not keep
        output_bytes = alive - recorder.live
        leaving[TaskKind.FORWARD].append(frozenset(storage_id for storage_id, _ in recorder.taken_memory()))
        coming = tuple(torch.empty(form.shape, dtype=form.dtype, device="meta") for form in forms)
        with on_device, recorder.program(mesh.ledger) as recorded:
            saved.come()
            returned = stage.backward(index, coming, defers=splits)
            saved.fetch()
        programs[TaskKind.BACKWARD].append(replace(recorded(), leads=leads))
        watched = [[weakref.ref(x.untyped_storage()) for x in tensors] for tensors in (given, coming)]
        del returned, coming, given  # weak references still alive belong to pending weight gradients
        leaving[TaskKind.BACKWARD].append(frozenset(storage_id for storage_id, _ in recorder.taken_memory()))
        kept_input, kept_gradient = (sum(x.nbytes() for ref in refs if (x := ref()) is not None) for refs in watched)
        if splits:
            with recorder.program(mesh.ledger) as recorded:
                stage.weights(index, final=index == places[-1])
            programs.setdefault(TaskKind.WEIGHT, []).append(replace(recorded(), leads=leads))
    by_kind = {task_kind: tuple(each[index] for index in places) for task_kind, each in programs.items()}
    left = {task_kind: tuple(each[index] for index in places) for task_kind, each in leaving.items()}
    held = _with_facts(model, chunk, buckets, saved.offsets, with_b)
    return Recording(by_kind, held, forms, output_bytes, holds_input, kept_input, kept_gradient, left)


def _with_facts(
    model: nn.Module, chunk: Chunk, buckets: Sequence[Bucket], saved: Mapping[int, set[int]], with_b: set[str]
) -> tuple[Parameter, ...]:
    """Return a part's parameters, with the facts found by the recording.

    Args:
        model: The part.
        chunk: The part's place in the chain.
        buckets: The recording's buckets.
        saved: Offsets of tensors kept by autograd, by storage.
        with_b: Names of parameters with gradients computed by B.
    """
    read = {
        span.name
        for bucket in buckets
        for span in bucket.places
        if any(span.start <= at < span.stop for at in saved.get(bucket.values.untyped_storage()._cdata, ()))
    }
    return tuple(
        replace(each, comes_with_b=each.name in with_b, read_back=bool(chunk.layers) or each.name in read)
        for each in parameters_in(model)
    )
