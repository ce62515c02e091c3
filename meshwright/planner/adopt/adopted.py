"""The facts of an adopted script: modules, memory, collectives, and notes on everything that was not seen.

`adopted.json` is for people and other programs, `program.json` is the step in the order of issue, for the planner. The
form of both files is in docs/adopt.md.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.planner.adopt.places import Note
from meshwright.planner.adopt.recorder import Collective, Copy, Entry, Sync
from meshwright.planner.adopt.session import Session, StepFacts
from meshwright.planner.plan.allocator import CachingAllocator
from meshwright.planner.plan.recorder import Kernel
from meshwright.ranks.fake_world import RECEIVE, Sending
from meshwright.ranks.foreign import read_json
from meshwright.ranks.ledger import VERBS

FORM = "meshwright adopted 1"
PARTS = ("weights", "buffers", "gradients", "states", "buckets", "gathered", "activations", "temporaries", "other")
"""Parts of memory. buckets: sums of gradients; gathered: whole weights of a shard; other: allocated before the step."""


@dataclass
class ModuleFacts:
    """A module's own operations, without the operations of modules inside."""

    path: str
    kind: str
    calls: int = 0
    kernels: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    recomputed_flops: float = 0.0
    touched_bytes: int = 0
    kept_bytes: int = 0
    """Bytes allocated in the forward pass and alive when the backward pass begins."""
    sent_bytes: int = 0


@dataclass
class CollectiveFacts:
    """Equal collectives of a step."""

    verb: str
    ranks: tuple[int, ...]
    phase: str
    calls: int = 0
    payload_bytes: int = 0
    """The sum over all calls."""
    sent_bytes: int = 0
    """Bytes that this rank sends in all calls, by the ledger's table."""
    under_flops: float = 0.0
    """Floating-point operations that need neither end before the begin nor begin after the wait."""
    modules: list[str] = field(default_factory=list)
    """Paths of modules that call it, at most MOST_PATHS."""


MOST_PATHS = 4


@dataclass
class MemoryFacts:
    """Bytes of the fullest moment of the step, by part; and both peaks."""

    parts: dict[str, int]
    allocated: int
    reserved: int
    """Bytes that torch's caching allocator holds, by the planner's model of the allocator."""
    host: int
    """Bytes in host memory without the loader's batches."""


@dataclass
class Adopted:
    """All facts of a script's step on one rank."""

    script: str
    words: tuple[str, ...]
    ranks: int
    rank: int
    device: str
    """cuda or cpu: the place of the model."""
    step: int
    microbatches: int
    inputs: list[tuple[str, tuple[int, ...], str]]
    parameters: int
    """Elements of all parameters, of the whole model if they are cut."""
    trained: int
    optimizers: list[str]
    tf32: bool
    """Whether float32 products may run in TF32."""
    modules: list[ModuleFacts]
    paths: list[str]
    """Paths of modules by number, for program.json."""
    collectives: list[CollectiveFacts]
    memory: MemoryFacts
    unseen: list[tuple[Note, int]]
    sites: list[dict[str, Any]]
    """Lines that made optimizers, with the optimizer's class and the model's names there."""
    repeated: list[str]
    """Classes of modules that a list of the model repeats: its layers."""
    configs: list[str]
    """Paths of DeepSpeed's JSON that the script read."""
    entries: list[Entry]
    changes: list[tuple[int, int]]

    @property
    def flops(self) -> float:
        return sum(m.forward_flops + m.backward_flops + m.recomputed_flops for m in self.modules)

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.collectives)


def read_session(session: Session) -> Adopted:
    """Return the facts of a session with a recorded step."""
    facts, order = session.facts, session.order
    assert facts is not None, "no step was recorded"
    parameters = {id(p): p for model in session.models for p in model.parameters()}.values()
    sizes = [p.shape.numel() for p in parameters]
    trained = [size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad]
    raw = {id(m) for model in session.models for m in model.modules()}
    return Adopted(
        order.script.name, order.words, order.ranks, order.rank, "cpu" if session.recorder.on_host else "cuda",
        facts.steps, facts.passes, facts.inputs, sum(sizes), sum(trained), [site.kind for site in session.sites],
        torch.get_float32_matmul_precision() != "highest",
        modules_of(session, facts), list(session.names().values()), collectives_of(session, facts),
        memory_of(facts, session.recorder.host.peak),
        list(session.notes.notes.items()),
        [{"line": s.line, "kind": s.kind, "models": [n for n, i in s.names.items() if i in raw]}
         for s in session.sites],
        repeated_classes(session), session.configs, facts.entries, facts.changes,
    )  # fmt: skip


def repeated_classes(session: Session) -> list[str]:
    """Return classes of layers: of modules in the longest lists of the models."""
    lists = [m for model in session.models for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    lists = [m for m in lists if len(m) > 1 and len({type(x) for x in m}) == 1 and any(True for _ in m[0].parameters())]
    most = max((len(m) for m in lists), default=0)
    # FSDP2 makes a class of each class that it cuts: FSDPModule, then the class itself.
    kinds = (type(m[0]) for m in lists if len(m) == most)
    bases = (
        layer_class.__bases__[1] if layer_class.__bases__[0].__name__ == "FSDPModule" else layer_class
        for layer_class in kinds
    )
    return list(dict.fromkeys(layer_class.__name__ for layer_class in bases))


def modules_of(session: Session, facts: StepFacts) -> list[ModuleFacts]:
    """Return each module's operations in the step, in the order of first calls."""
    paths, kinds = session.names(), session.recorder.modules
    rows = {n: ModuleFacts(paths[n], type(module).__name__) for n, module in enumerate(kinds)}
    rows[-1] = ModuleFacts("", "(outside of modules)")
    for entry in facts.entries:
        row, event = rows[entry.module], entry.event
        if isinstance(event, Kernel):
            row.kernels += event.times
            row.touched_bytes += event.touched_bytes
            flops = event.flops * event.times
            if entry.phase == "backward":
                row.backward_flops += flops
            elif entry.phase == "recompute":
                row.recomputed_flops += flops
            else:
                row.forward_flops += flops
        elif isinstance(event, Collective):
            row.sent_bytes += sent_by(event.sending, session.order.rank)
    for storage_id, (phase, module, size) in facts.saved_storages.items():
        if phase == "forward" and storage_id not in facts.parts:
            rows[module].kept_bytes += size
    return [row for row in rows.values() if row.kernels or row.sent_bytes or row.kept_bytes]


def sent_by(sending: Sending, rank: int) -> int:
    """Return the bytes that this rank sends, by the ledger's table."""
    if sending.verb == RECEIVE:
        return 0
    return VERBS[sending.verb].sent_bytes(sending.payload_bytes, len(sending.ranks), sending.root == rank)


def collectives_of(session: Session, facts: StepFacts) -> list[CollectiveFacts]:
    """Return the collectives of a step, equal ones together, with the computation between begin and wait."""
    paths, rows = session.names(), dict[tuple[Any, ...], CollectiveFacts]()
    hidden = hidden_flops(facts.entries)
    for entry in facts.entries:
        if not isinstance(entry.event, Collective):
            continue
        sending = entry.event.sending
        key = sending.verb, sending.ranks, entry.phase
        row = rows.setdefault(key, CollectiveFacts(*key))
        row.calls += 1
        row.payload_bytes += sending.payload_bytes
        row.sent_bytes += sent_by(sending, session.order.rank)
        row.under_flops += hidden.get(entry.event.number, 0.0)
        path = paths.get(entry.module, "")
        if path not in row.modules and len(row.modules) < MOST_PATHS:
            row.modules.append(path)
    return list(rows.values())


def hidden_flops(entries: Sequence[Entry]) -> dict[int, float]:
    """Return, by collective, the operations of the main stream that need not end before the begin nor begin after the
    wait.

    Streams order these by events: FSDP2 issues the gather of the next layer behind the kernels of the running one, on
    a stream that awaits an event before these kernels, and the main stream awaits an event behind the gather.
    """
    total = host = 0.0
    # Operations of the main stream that a stream, a group's lane or an event has behind it.
    streams, groups, events, begun = dict[int, float](), dict[tuple[int, ...], float](), dict[int, float](), {}
    under: dict[int, float] = {}
    waiting: dict[int, tuple[set[int], set[int]]] = {}
    for entry in entries:
        event, stream = entry.event, entry.stream
        behind = total if stream == 0 else max(host, streams.get(stream, 0.0))
        if isinstance(event, Collective):
            ranks = event.sending.ranks
            begun[event.number] = groups[ranks] = max(behind, groups.get(ranks, 0.0))
            waiting[event.number] = set(), set()
        elif isinstance(event, Sync):
            if event.kind == "record":
                events[event.number] = behind
            elif event.kind == "host":
                host = total
            else:
                known = begun if event.kind == "wait" else events
                streams[stream] = max(behind, known.get(event.number, 0.0))
            for collective, (reached, marked) in list(waiting.items()):
                if event.kind == "wait" and event.number == collective:
                    reached.add(stream)
                elif event.kind == "record" and stream in reached:
                    marked.add(event.number)
                elif event.kind == "await" and event.number in marked:
                    reached.add(stream)
                if 0 in reached:
                    under[collective] = total - begun[collective]
                    del waiting[collective]
        elif isinstance(event, Kernel) and stream == 0:
            total += event.flops * event.times
    return under | {collective: total - begun[collective] for collective in waiting}


def memory_of(facts: StepFacts, host: int) -> MemoryFacts:
    """Return the memory of the step's fullest moment by part, and the peaks of the step."""
    sizes: dict[int, int] = {}
    allocator, blocks, peak = CachingAllocator(), dict[int, Any](), 0
    at_peak = dict(sizes)
    for index, (storage_id, change) in enumerate(facts.changes):
        if change > 0:
            blocks[storage_id] = allocator.allocate(change)
        else:
            allocator.free(blocks.pop(storage_id))
        sizes[storage_id] = sizes.get(storage_id, 0) + change
        if not sizes[storage_id]:
            del sizes[storage_id]
        if index + 1 == facts.peak_at:
            at_peak, peak = dict(sizes), sum(sizes.values())
    parts = dict.fromkeys(PARTS, 0)
    inside = {storage_id for storage_id, _ in facts.changes[facts.begun :]}
    for storage_id, size in at_peak.items():
        phase = facts.born.get(storage_id, ("other", -1))[0]
        born = "other" if storage_id not in inside else "activations" if phase == "forward" else "temporaries"
        parts[facts.parts.get(storage_id, born)] += size
    return MemoryFacts(parts, peak, allocator.peak_reserved, host)


def as_dict(adopted: Adopted) -> dict[str, Any]:
    """Return adopted.json's object."""
    tree = {name: value for name, value in asdict(adopted).items() if name not in ("entries", "changes", "unseen")}
    unseen = [{**asdict(note), "times": times} for note, times in adopted.unseen]
    return {"form": FORM, **tree, "flops": adopted.flops, "sent_bytes": adopted.sent_bytes, "unseen": unseen}


def program_as_dict(entries: Sequence[Entry], changes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return program.json's object: distinct events, and rows of (event, phase, module, stream)."""
    numbers: dict[Kernel | Copy | Sync | Collective, int] = {}
    rows = [[numbers.setdefault(e.event, len(numbers)), e.phase, e.module, e.stream] for e in entries]
    events = [
        [type(event).__name__.lower(), event._asdict() if isinstance(event, Kernel) else asdict(event)]
        for event in numbers
    ]
    return {"form": FORM, "events": events, "rows": rows, "memory": [n for change in changes for n in change]}


def write(adopted: Adopted, folder: Path) -> list[Path]:
    """Write adopted.json and program.json."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "adopted.json": json.dumps(as_dict(adopted), indent=1),
        "program.json": json.dumps(program_as_dict(adopted.entries, adopted.changes), separators=(",", ":")),
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return [folder / name for name in files]


_KINDS: Mapping[str, Any] = {"kernel": Kernel, "copy": Copy, "sync": Sync}


def read(folder: Path) -> Adopted:
    """Read both files of a folder."""
    tree, program = read_json(folder / "adopted.json"), read_json(folder / "program.json")
    made = []
    for event_type, fields in program["events"]:
        if event_type == "collective":
            sending = fields["sending"]
            made.append(Collective(Sending(**{**sending, "ranks": tuple(sending["ranks"])}), fields["number"]))
        else:
            made.append(_KINDS[event_type](**fields))
    entries = [Entry(made[index], phase, module, stream) for index, phase, module, stream in program["rows"]]
    memory = program["memory"]
    unseen = [(Note(row["kind"], row["where"], row["text"]), row["times"]) for row in tree.pop("unseen")]
    for name in ("form", "flops", "sent_bytes"):
        tree.pop(name)
    tree["modules"] = [ModuleFacts(**row) for row in tree["modules"]]
    tree["collectives"] = [CollectiveFacts(**{**row, "ranks": tuple(row["ranks"])}) for row in tree["collectives"]]
    tree["memory"] = MemoryFacts(**tree["memory"])
    tree["words"] = tuple(tree["words"])
    tree["inputs"] = [(name, tuple(shape), dtype) for name, shape, dtype in tree["inputs"]]
    return Adopted(**tree, unseen=unseen, entries=entries, changes=list(zip(memory[::2], memory[1::2], strict=True)))


def by_phase(adopted: Adopted) -> dict[str, float]:
    """Return the floating-point operations of each phase."""
    sums: defaultdict[str, float] = defaultdict(float)
    for entry in adopted.entries:
        if isinstance(entry.event, Kernel):
            sums[entry.phase] += entry.event.flops * entry.event.times
    return dict(sums)
