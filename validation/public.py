"""The referee: other people's measured rows, predicted as their pages describe the rows, by set.

A row has a model, devices, a layout, a step's seconds or memory (validation/public/NAME.csv); the row's set has all
other facts (sets.yaml). A fact of a row that a plan cannot express is named; a doubtful row is counted and left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from meshwright.config import Config, parse_config
from meshwright.config.load import read_yaml
from meshwright.planner.foreign.job import Degrees
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.memory import Memory, verdict
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.software import Software, load_program
from meshwright.ranks.errors import ConfigError
from validation.arguments import job_of
from validation.paper import Line, read_table

FOLDER = Path(__file__).resolve().parent / "public"
LOW = {"fp8-mx": "mxfp8", "mxfp8": "mxfp8", "fp8-cs": "fp8", "fp8": "fp8"}
"""Formats of products, by the beginnings of tables' words, in small letters: MX, per block; CS, current scaling."""
SYNCS = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp": "zero3", "hsdp": "zero3", "none": "allreduce"}
"""Our syncs, by the beginnings of tables' words."""
HSDP = "hsdp"
OUT_OF_MEMORY = "OOM"
"""A word of a row's note."""


class MemoryColumn(BaseModel, extra="forbid", frozen=True):
    """The program that counts the bytes in a table's memory column, and the unit's bytes. `rank`: the logged stage."""

    of: str
    unit: int
    rank: Literal["fullest", "last"] = "fullest"


class Recipe(BaseModel, extra="forbid", frozen=True):
    """Facts from a job's file for some rows, and the file's name.

    Facts, and fields of the run, are for rows of these models (by the beginnings of names), devices, notes (by a part
    of the note), microbatches, stages and precisions. An empty field means all. `held`: memory that the job spares and
    no plan knows, or the reason to doubt a row.
    """

    source: str
    held: str = ""
    facts: tuple[str, ...] = ()
    run: dict[str, Any] = Field(default_factory=dict)
    models: tuple[str, ...] = ("",)
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ("",)
    micro: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()

    def fits(self, line: Line) -> bool:
        """Return whether the facts are of a row."""
        said = (
            ("device", self.devices), ("micro", self.micro), ("pp", self.stages), ("precision", self.precisions),
        )  # fmt: skip
        told = all(not own or line[key] in own for key, own in said)
        named = line["model"].startswith(self.models)
        return told and named and any(note in line["note"] for note in self.notes)


class RowSet(BaseModel, extra="forbid", frozen=True):
    """A set's entry of sets.yaml."""

    title: str
    source: str
    checked: str
    software: str
    arguments: bool = False
    facts: tuple[str, ...] = ()
    low_facts: tuple[str, ...] = ()
    facts_by_note: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    spared: tuple[Recipe, ...] = ()
    doubted: tuple[Recipe, ...] = ()
    expert_tensor: int | None = None
    clusters: dict[str, str | dict[str, Any]]
    family: str
    model: dict[str, Any] = Field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    memory: MemoryColumn | None = None
    recompute: dict[str, Any] = Field(default_factory=dict)
    sharding: dict[str, int] = Field(default_factory=dict)
    sums: dict[str, str] = Field(default_factory=dict)
    contexts: str = "ring"
    cuts_sequences: bool = True
    missing: dict[str, str] = Field(default_factory=dict)
    missing_by_note: dict[str, str] = Field(default_factory=dict)
    missing_by_word: dict[str, str] = Field(default_factory=dict)
    doubtful: dict[str, str] = Field(default_factory=dict)
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublicRow:
    """A row with its prediction: seconds and bytes, measured (None: not given) and predicted.

    Attributes:
    dispatch: How rows are sent to experts of other ranks.
    fits: The verdict of memory.
    missing: The fact of the row that a plan cannot express.
    doubtful: The reason why the row does not count.
    ran_out: Whether the row ran out of the device's memory, of `device_bytes` bytes.
    """

    label: str
    measured_seconds: float | None
    measured_bytes: float | None
    seconds: float | None = None
    bytes: float | None = None
    dispatch: str = ""
    fits: str = ""
    missing: str = ""
    doubtful: str = ""
    ran_out: bool = False
    device_bytes: int = 0

    @property
    def seconds_error(self) -> float:
        """Return predicted over measured, less 1."""
        assert self.seconds is not None, self
        assert self.measured_seconds is not None, self
        return self.seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Judged:
    """A set with all rows of the set."""

    name: str
    rows_set: RowSet
    rows: tuple[PublicRow, ...] = field(default_factory=tuple)

    @property
    def timed(self) -> list[PublicRow]:
        return [row for row in self.rows if row.seconds is not None and row.measured_seconds is not None]

    @property
    def weighed(self) -> list[PublicRow]:
        return [row for row in self.rows if row.bytes is not None and row.measured_bytes is not None]

    def errors(self) -> list[float]:
        """Return the errors of seconds."""
        return [row.seconds_error for row in self.timed]

    def memory_errors(self) -> list[float]:
        return [row.bytes / row.measured_bytes - 1 for row in self.weighed]  # type: ignore[operator]

    @property
    def most_unseen(self) -> float:
        """Return the most by which a row's memory exceeds the prediction, as a share of the prediction.

        A row that ran out of memory counts with the device's memory.
        """
        held = [(row.measured_bytes, row.bytes) for row in self.weighed]
        held += [(row.device_bytes, row.bytes) for row in self.rows if row.ran_out and row.bytes]
        return max((real / told - 1 for real, told in held), default=0.0)  # type: ignore[operator]

    @property
    def ran_out(self) -> Counter[str]:
        """Return the verdicts on rows that ran out of memory, each with a number of rows."""
        return Counter(row.fits for row in self.rows if row.ran_out and row.fits)

    @property
    def ordered(self) -> tuple[int, int]:
        """Return the number of pairs of rows predicted in the measured order, and of all pairs with unequal steps."""
        pairs = [
            (one.measured_seconds < other.measured_seconds) == (one.seconds < other.seconds)  # type: ignore[operator]
            for one, other in combinations(self.timed, 2)
            if one.measured_seconds != other.measured_seconds
        ]
        return sum(pairs), len(pairs)

    @property
    def said(self) -> Counter[str]:
        """Return the number of rows that each missing fact costs."""
        return Counter(row.missing for row in self.rows if row.missing)


def load_sets() -> dict[str, RowSet]:
    """Return all sets, by name."""
    return {name: RowSet.model_validate(tree) for name, tree in read_yaml(FOLDER / "sets.yaml").items()}


def judge(name: str, rows_set: RowSet) -> Judged:
    """Predict a set's rows."""
    planners: dict[Any, Planner] = {}
    rows = [_judged(line, rows_set, planners) for line in read_table(FOLDER / f"{name}.csv")]
    return Judged(name, rows_set, tuple(rows))


def _judged(line: Line, rows_set: RowSet, planners: dict[Any, Planner]) -> PublicRow:
    unit = rows_set.memory.unit if rows_set.memory else 0
    row = PublicRow(
        _label(line),
        float(line["seconds"]) if line["seconds"] else None,
        float(line["memory_gb"]) * unit if line["memory_gb"] and unit else None,
        ran_out=OUT_OF_MEMORY in line["note"],
    )
    doubts = {why: word in line["note"] for word, why in rows_set.doubtful.items()}
    doubts |= {each.held: each.fits(line) for each in rows_set.doubted}
    if doubt := next((why for why, holds in doubts.items() if holds), ""):
        return replace(row, doubtful=doubt)
    missing = next(_missing(line, rows_set), "")
    if missing:
        return replace(row, missing=missing)
    try:
        job = job_of(line) if rows_set.arguments else None
        # The tokenizer's file is not at hand, and changes no step.
        tree = job.run | {"data": {"sequence": job.run["data"]["sequence"]}} if job else _tree(line, rows_set)
        recipe = next((recipe for recipe in rows_set.recipes if recipe.fits(line)), Recipe(source=""))
        for name, value in {**_of_model(rows_set.runs, line), **recipe.run}.items():
            *sections, key = name.split(".")
            reduce(lambda inside, section: inside.setdefault(section, {}), sections, tree)[key] = value
        config = parse_config(tree)
        spared = next((each.facts for each in rows_set.spared if each.fits(line)), ())
        facts = [*_facts(line, rows_set), *recipe.facts, *spared, *(job.facts if job else ())]
        place = line["device"], tuple(facts)
        if place not in planners:
            program = load_program(rows_set.software, facts)
            planners[place] = Planner(program.on(_cluster(rows_set.clusters[line["device"]])), program.software)
        prediction = planners[place].predict(config)
    except ConfigError as error:
        return replace(row, missing=str(error).splitlines()[-1].strip())
    fullest = prediction.fullest
    memory = prediction.memory[-1] if rows_set.memory and rows_set.memory.rank == "last" else fullest
    return replace(
        row,
        seconds=prediction.seconds,
        bytes=float(_bytes(memory, rows_set.memory.of)) if rows_set.memory else None,
        dispatch=_dispatch(planners[place].software, config),
        fits=verdict(fullest, prediction.cluster),
        device_bytes=prediction.cluster.device.memory_bytes,
    )


def _dispatch(software: Software, config: Config) -> str:
    """Return `hybridep, overlapped`, or an empty text for a layout without experts on other ranks."""
    ranks = software.expert_ranks
    if not config.model.routing.num_experts or ranks is None or not ranks.axes(config.grid):
        return ""
    return ranks.dispatcher + (", overlapped" if "experts" in software.overlapped else "")


def _bytes(memory: Memory, of: str) -> int:
    return {"allocated": memory.allocated, "reserved": memory.reserved, "process": memory.total}[of]


def _label(line: Line) -> str:
    """Return `llama3-8b, 8 H100: tp 1, pp 1, micro 2, fp8`."""
    cuts = ", ".join(f"{key} {line[key]}" for key in ("tp", "pp", "vpp", "cp", "ep") if line[key] not in ("", "1"))
    rest = f"{line['sharding']}, micro {line['micro']}, {line['seq']} tokens, {line['precision'].lower()}"
    return f"{line['model']}, {line['gpus']} {line['device']}: {f'{cuts}, ' if cuts else ''}{rest}"


def _missing(line: Line, rows_set: RowSet) -> Iterator[str]:
    """Yield the facts that a plan needs for a row and cannot express."""
    yield from (fact for word, fact in rows_set.missing.items() if word in line["model"])
    yield from (fact for word, fact in rows_set.missing_by_note.items() if word in line["note"])
    if line["recompute"] in rows_set.missing_by_word:
        yield rows_set.missing_by_word[line["recompute"]]
    if line["precision"].lower() not in ("bf16", "fp16") and _low(line) is None:
        yield f"products in {line['precision']}"
    if line["device"] not in rows_set.clusters:
        yield f"a cluster of {line['device']}"
    if not (line["tp"] and line["pp"]):
        yield "the layout, which stands in a script beside the page"
    if not line["hidden"]:
        yield "the model's sizes"
    if not line["micro"]:
        yield "the microbatch, which the page does not say"
    if not (line["seconds"] or line["memory_gb"] or OUT_OF_MEMORY in line["note"]):
        yield "a step's seconds, which the page does not say"
    if not line["batch"]:
        yield "the batch, which the page does not say"


def _facts(line: Line, rows_set: RowSet) -> list[str]:
    low = _low(line)
    by_note = [fact for word, facts in rows_set.facts_by_note.items() if word in line["note"] for fact in facts]
    if rows_set.arguments or not (line["tp"] and line["pp"]):
        ranks: tuple[str, ...] = ()
    else:
        ranks = _degrees(line, rows_set).expert_facts(int(line["gpus"]))
    return [*rows_set.facts, *by_note, *ranks, *([f"products={low}", *rows_set.low_facts] if low else [])]


def _degrees(line: Line, rows_set: RowSet) -> Degrees:
    """Return the row's axes, as counted by the row's program."""
    tensor, stages, context, experts = (int(line[key] or 1) for key in ("tp", "pp", "cp", "ep"))
    cut = rows_set.expert_tensor if experts > 1 else None
    return Degrees(tensor=tensor, stages=stages, context=context, experts=experts, expert_tensor=cut)


def _low(line: Line) -> str | None:
    return next((ours for word, ours in LOW.items() if line["precision"].lower().startswith(word)), None)


def _tree(line: Line, rows_set: RowSet) -> dict[str, Any]:
    """Return the row as a run file."""
    number = {key: int(line[key] or 1) for key in ("gpus", "tp", "pp", "vpp", "cp", "ep", "micro", "batch", "layers")}
    replicas = number["gpus"] // (number["tp"] * number["pp"] * number["cp"])
    word = next((word for word in SYNCS if line["sharding"].startswith(word)), "none")
    data: dict[str, Any] = {"size": replicas, "sync": SYNCS[word] if replicas * number["cp"] > 1 else "allreduce"}
    number["ep"] = _degrees(line, rows_set).dealt(number["gpus"])[0]
    data |= {"expert": number["ep"]} if number["ep"] > 1 else {}
    part = (
        8 if word == HSDP else next((n for told, n in rows_set.sharding.items() if told in line["sharding"]), replicas)
    )
    data |= {"shard": part} if part < replicas else {}
    layout: dict[str, Any] = {"data": data}
    if number["tp"] > 1:
        layout["tensor"] = {
            "kind": "megatron", "size": number["tp"], "sequence_parallel": rows_set.cuts_sequences,
        }  # fmt: skip
    if number["pp"] > 1:
        layout["pipeline"] = {"size": number["pp"], "schedule": "1f1b"} | _chunks(number)
    if number["cp"] > 1:
        layout["context"] = {"kind": rows_set.contexts, "size": number["cp"]}
    if number["pp"] > 1:
        # Stages are outermost in Megatron-LM ("tp-cp-ep-dp-pp") and torchtitan, so that replicas share nodes.
        sizes = {"pipe": number["pp"], "replicate": 1, "data": replicas // number["ep"], "expert": number["ep"]}
        sizes |= {"context": number["cp"], "tensor": number["tp"]}
        layout["order"] = [axis for axis, size in sizes.items() if size > 1]
    batch = number["micro"] * replicas
    return {
        "model": _model(line, rows_set),
        "data": {"sequence": int(line["seq"])},
        # The remainder is left out: microbatches beyond the largest multiple, of a step of many microbatches.
        "batch": {"global": max(1, number["batch"] // batch) * batch, "micro": number["micro"]},
        "layout": layout,
        "precision": {
            "level": "O2",
            "dtype": "fp16" if line["precision"] == "fp16" else "bf16",
            "accumulate": rows_set.sums.get(line["precision"], "float32"),
        },
        "memory": {"recompute": rows_set.recompute.get(line["recompute"], line["recompute"] or "none")},
    }


def _chunks(number: Mapping[str, int]) -> dict[str, Any]:
    """Return interleaved stages: the row's number of chunks, or else the nearest number that divides the layers."""
    if number["vpp"] == 1:
        return {}
    per_stage = number["layers"] / number["pp"]
    fitting = [n for n in range(2, math.floor(per_stage) + 1) if number["layers"] % (n * number["pp"]) == 0]
    if not fitting:
        return {}
    return {"chunks": min(fitting, key=lambda n: abs(n - number["vpp"]))}


def _of_model(fields: Mapping[str, dict[str, Any]], line: Line) -> dict[str, Any]:
    return next((own for word, own in fields.items() if line["model"].startswith(word)), {})


def _model(line: Line, rows_set: RowSet) -> dict[str, Any]:
    own = _of_model(rows_set.models, line)
    family = own.get("family", rows_set.family)
    model: dict[str, Any] = {
        "family": family,
        "layers": int(line["layers"]),
        "hidden": int(line["hidden"]),
        "heads": int(line["heads"]),
        "vocabulary": int(line["vocab"]),
        "positions": int(line["seq"]),
    }
    if family == "llama":
        model["key_value_heads"] = int(line["kv_heads"] or line["heads"])
    if family in ("llama", "deepseek"):
        model["feed_forward"] = int(line["ffn"])
    return model | rows_set.model | own


def _cluster(told: str | Mapping[str, Any]) -> Cluster:
    """Return a cluster by name, or a cluster like the named one.

    The second has other bytes of `memory`, a share of the `bandwidth`, and other bytes a second out of a node (`outer`)
    and between the node's devices (`inner`).
    """
    if isinstance(told, str):
        return load_cluster(told)
    cluster = load_cluster(told["like"])
    tree = cluster.model_dump(by_alias=True)
    if "memory" in told:
        tree["device"]["memory"] = told["memory"]
    for dtype in tree["device"]["peak"] if "peak" in told else ():
        tree["device"]["peak"][dtype] *= float(told["peak"])
    if "bandwidth" in told:
        curve = tree["device"]["bandwidth"]
        tree["device"]["bandwidth"] = [(size, rate * float(told["bandwidth"])) for size, rate in curve]
    for links in tree["links"].values():
        levels = [dict(level) for level in links["levels"]]
        if "inner" in told:
            levels[0]["bandwidth"] = float(told["inner"])
        if "outer" in told:
            levels[-1]["bandwidth"] = float(told["outer"])
        links["levels"] = levels
    return Cluster.model_validate(tree)
