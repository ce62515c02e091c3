"""`parity compare A B`: compare two recorded runs step by step, with the comparison of checks.

A is the reference: one process, or the joined tensors of several ranks. B's ranks hold copies, cuts or partial sums of
A's tensors. Two runs of one layout are compared rank by rank. The tolerances are derived from runs of A with
perturbations of one rounding (`record --perturb`). In later steps they grow as training amplifies the perturbation.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.parity.check import ParityCheck, ParityResult
from meshwright.parity.compare import Row, factor_of, relative_error
from meshwright.parity.explain import COPY, CUT, explain_tensors
from meshwright.parity.gradients import ALL, MODEL, Mistake
from meshwright.parity.judge import Evidence, explain_modules, one_thread
from meshwright.parity.kinds import first_finding
from meshwright.parity.locate import locate
from meshwright.parity.parts import PADDING, Part, box_part, find_part, is_constant
from meshwright.parity.record import CLIPPED, PARALLEL, REFERENCE, STATE, PartFacts, ReferenceFacts, write_record
from meshwright.parity.recorded import (
    Key,
    RecordedRank,
    RecordedRun,
    RecordedStep,
    at_strides,
    common_first,
    common_strides,
    put_together,
)
from meshwright.parity.reference import MARGIN, StepRecording, movements
from meshwright.parity.rows import compare_all
from meshwright.parity.sampling import coarser
from meshwright.parity.trace import Trace
from meshwright.ranks.errors import ParityError
from meshwright.ranks.launch.session import temporary_folder

PartOf = Callable[[str, int], tuple[str, tuple[slice, ...]]]
"""part(name of a parameter of B, rank): (name of the parameter of A, slices of this rank's part)."""

TRACED = ("input", "output", "output-gradient")


def compare_runs(first: RecordedRun, second: RecordedRun, slices_of: PartOf | None = None) -> list[ParityResult]:
    """Compare each step that both runs have.

    Raises:
        ParityError: the runs cannot be compared.
    """
    steps = sorted({*first.steps} & {*second.steps})
    if not steps:
        raise ParityError(
            f"{first.folder} has the steps {first.steps or 'none'} and {second.folder} {second.steps or 'none'}: "
            "record the same --steps of both, up to their ends"
        )
    moved = [RecordedRun.read(folder) for folder in sorted(first.folder.glob("perturbed-*"))]
    if not moved:
        raise ParityError(
            f"{first.folder} has no run as rounding moves it, from which what may differ is derived: record it once "
            f"more, to the same folder, with --perturb 1"
        )
    for run in moved:
        if not same_samples(first, run, steps[0]):
            raise ParityError(
                f"{run.folder} took other samples than {first.folder}: seed the script, so that two runs of it are "
                "the same"
            )
    results: list[ParityResult] = []
    with one_thread():
        for step in steps:
            result = StepComparison(first, second, moved, step, slices_of).result()
            if wrong := next((earlier.check.name for earlier in results if not earlier.holds), ""):
                result = replace(result, notes=(f"begins with what {wrong} left, which differs", *result.notes))
            results.append(result)
    return results


def same_samples(first: RecordedRun, second: RecordedRun, step: int) -> bool:
    """Return True if two runs of a layout read the same samples in a step."""
    for ours, theirs in zip(first.ranks, second.ranks, strict=True):
        if step in theirs.steps:
            a, b = (rank.step(step).tensors for rank in (ours, theirs))
            keys = [key for key in a if key[0].startswith("sample:")]
            if any(key not in b or not torch.equal(a[key], b[key]) for key in keys):
                return False
    return True


@dataclass
class StepComparison:
    """One step of two runs. `a` and `b`: the recorded steps of the ranks, at common samples."""

    first: RecordedRun
    second: RecordedRun
    moved: Sequence[RecordedRun]
    step: int
    slices_of: PartOf | None
    unseen: list[tuple[list[str], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        having = [self.second, self.first, *(run for run in self.moved if self.step in run.steps)]
        ours, theirs, *moved = ([rank.step(self.step) for rank in run.ranks] for run in having)
        # Gradients before clipping are compared first, if all runs keep both: clipped gradients follow from these.
        clipped = [all(step.clipped for step in steps) for steps in (ours, theirs, *moved)]
        before, self.explained_by_norm = all(clipped), clipped[1] and not clipped[0]
        if not before:
            ours, theirs, *moved = ([step.as_stepped() for step in steps] for steps in (ours, theirs, *moved))
        self.unclipped = [
            run.folder for run, is_clipped in zip(having, clipped, strict=True) if any(clipped) and not is_clipped
        ]
        common, lost = common_strides([*ours, *theirs])
        self.b, self.a, *self.perturbed = (
            [at_strides(step, common, lost) for step in steps] for steps in (ours, theirs, *moved)
        )
        if not self.perturbed:
            raise ParityError(f"no run of {self.first.folder} as rounding moves it has step {self.step}: record it too")
        self.strides, lost_first = common_first([*self.first.ranks, *self.second.ranks])
        self.lost = {name for _, name in lost_first} | {
            name for quantity, name in lost if quantity in ("gradient", "weight")
        }
        self.unseen.append(
            (sorted({n for _, n in [*lost, *lost_first]}), "was cut between samples: record with a larger --most")
        )

    @property
    def same_layout(self) -> bool:
        """True if equal ranks of both runs have tensors of equal shapes."""
        if len(self.a) != len(self.b):
            return False
        return all(
            {n: x.shape for n, x in ours.first.items()} == {n: x.shape for n, x in theirs.first.items()}
            and {k: x.shape for k, x in a.tensors.items()} == {k: x.shape for k, x in b.tensors.items()}
            for ours, theirs, a, b in zip(self.first.ranks, self.second.ranks, self.a, self.b, strict=True)
        )

    def result(self) -> ParityResult:
        start = time.monotonic()
        if len(self.a) == 1 or not self.same_layout:
            found = self._against_whole()
        else:
            # Each rank is compared with the same rank; nothing is joined over ranks.
            alone = [{axis: 0 for axis, _ in self.second.axes}]
            pairs = [
                self._judge(*put_together(self.a[rank]), self._first(self.first.ranks[rank]), [rank], alone, [rank])
                for rank in range(len(self.a))
            ]
            found = min(pairs, key=earliness)
            # Different layouts may have equal shapes, with rows assigned differently.
            if not found.holds and self.first.axes != self.second.axes and (joined := self._against_whole()).holds:
                found = joined
        named = re.compile(r"\bstep 1\b")
        finding = found.finding and replace(found.finding, text=named.sub(f"step {self.step}", found.finding.text))
        rows = tuple(replace(row, step=self.step, name=named.sub(f"step {self.step}", row.name)) for row in found.rows)
        notes = tuple(dict.fromkeys(self._notes(found)))
        return replace(found, finding=finding, rows=rows, notes=notes, dead=(), seconds=time.monotonic() - start)

    def _notes(self, found: ParityResult) -> Iterator[str]:
        """Yield sentences on the parts of the runs that were not compared."""
        for unseen, why in self.unseen:
            if unseen:
                more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
                yield f"not compared: {unseen[0]}{more}, which {why}"
        samples = [step.facts.kept for step in (*self.a, *self.b)]
        if any(samples):
            yield (
                f"compared by samples and norms: {max(len(k) for k in samples)} of {len(self.a[0].file.keys)} tensors "
                "of a rank, which are larger than --most"
            )
        names = [{name for step in steps for name, _ in step.facts.order} for steps in (self.a, self.b)]
        for called, elsewhere, run in ((names[0], names[1], self.first), (names[1], names[0], self.second)):
            if only := sorted(called - elsewhere):
                more = " ..." if len(only) > 4 else ""
                words = ", ".join(name or MODEL for name in only[:4])
                yield f"not compared: modules that only {run.folder} calls: {words}{more}"
        compared = {row.kind for row in found.rows}
        for quantity, word in (("gradient", "gradients"), ("state", "optimizers' states")):
            if "weight" in compared and quantity not in compared:
                yield f"not compared: {word}, which no parameter of both runs has as an optimizer steps"
        if self.unclipped:
            yield f"not compared: gradients before clipping, which {self.unclipped[0]} does not keep"
        facts = [rank.facts for run in (self.first, self.second) for rank in run.ranks]
        if any(f.compiled for f in facts):
            yield "compiled modules were recorded as they are written: what the compiler makes of them is not compared"
        if any(f.dropout for f in facts):
            yield "dropout layers were off"
        if found.dead:
            yield f"zero on both sides: the gradient of {found.dead[0]}" + f" and {len(found.dead) - 1} more" * (
                len(found.dead) > 1
            )

    def _against_whole(self) -> ParityResult:
        """Compare B's ranks as parts of A's whole tensors, with the axes that explain most."""
        best: ParityResult | None = None
        for first_axes, second_axes in product(self.first.readings, self.second.readings):
            self.first, self.second = first_axes, second_axes
            sides = [put_together(step) for step in self.a]
            firsts = [self._first(rank) for rank in self.first.ranks]
            whole, order, first = (*sides[0], firsts[0]) if len(sides) == 1 else self._merged(sides, firsts)
            everyone = list(range(len(self.b)))
            found = self._judge(whole, order, first, list(range(len(self.a))), self.second.coordinates, everyone)
            best = found if best is None else max(best, found, key=earliness)
            if best.holds:
                break
        assert best is not None
        return best

    def _first(self, rank: RecordedRank) -> dict[str, Tensor]:
        """Return a rank's first weights at the common samples."""
        first = {}
        for name, x in rank.first.items():
            if name not in self.lost:
                strides = rank.facts.kept.get(name, (x.shape, (1,) * x.ndim))[1]
                common = self.strides.get(("first", name))
                first[name] = x if common is None else coarser(x, tuple(strides), common)
        return first

    def _moved(self, ranks: Sequence[int]) -> dict[tuple[str, int, str], float]:
        """Return the relative change of each tensor of the reference by one rounding: the largest over the ranks."""
        moved: dict[tuple[str, int, str], float] = {}
        for rank in ranks:
            exact, *others = (as_recording(step) for step in (self.a[rank], *(run[rank] for run in self.perturbed)))
            for quantity, step, name, value in movements(exact, others):
                moved[quantity, step, name] = max(moved.get((quantity, step, name), 0.0), value)
        return moved

    def _merged(
        self, sides: Sequence[tuple[dict[Key, Tensor], list[tuple[str, int]]]], firsts: Sequence[Mapping[str, Tensor]]
    ) -> tuple[dict[Key, Tensor], list[tuple[str, int]], dict[str, Tensor]]:
        """Join the tensors of a reference of several ranks.

        Of all ways to join a tensor, the first is taken for which B's tensors are copies, cuts or terms of the whole.

        Returns:
            (tensors, calls of modules, first weights).
        """
        places, theirs = self.first.coordinates, [put_together(step)[0] for step in self.b]
        moved = self._moved(range(len(self.a)))
        eps = torch.finfo(vars(torch)[self.first.ranks[0].facts.dtype]).eps
        first, recipes = dict[str, Tensor](), dict[str, Recipe]()
        mine = [self._first(rank) for rank in self.second.ranks]
        for name in dict.fromkeys(name for held in firsts for name in held):
            held = {rank: weights[name] for rank, weights in enumerate(firsts) if name in weights}
            for recipe, x in wholes_of(held, places):
                found = [find_part(name, local[name], x.to(local[name].dtype)) for local in mine if name in local]
                # A match with padding is no match: the joined tensor lacks elements.
                fits = all(p is not None and all(PADDING not in i for i in p.index if i) for p in found)
                if name not in first or fits:
                    first[name], recipes[name] = x, recipe
                if fits:
                    break
        whole = dict[Key, Tensor]()
        for key in dict.fromkeys(key for tensors, _ in sides for key in tensors):
            quantity, _, name = key
            held = {rank: tensors[key] for rank, (tensors, _) in enumerate(sides) if key in tensors}
            if quantity not in TRACED:
                if name in recipes:
                    made = _made(recipes[name], held, places, strict=False)
                    # If copies differ, the first rank's copy is taken.
                    whole[key] = next(iter(held.values())) if made is None else made
                continue
            ours = {rank: tensors[key] for rank, tensors in enumerate(theirs) if key in tensors}
            allowed = MARGIN * max(moved.get((quantity, 1, name), 0.0), eps)
            for _, x in wholes_of(held, places):
                fits = bool(ours) and x.ndim > 0 and explain_tensors(
                    {r: y.double() for r, y in ours.items()}, x.double(), allowed, self.second.coordinates
                ).explained  # fmt: skip
                if key not in whole or fits:
                    whole[key] = x
                if fits:
                    break
        order = max((order for _, order in sides), key=len)
        return whole, order, first

    def _judge(
        self, whole: Mapping[Key, Tensor], order: list[tuple[str, int]], first: Mapping[str, Tensor],
        of_first: Sequence[int], coordinates: Sequence[Mapping[str, int]], of_second: Sequence[int],
    ) -> ParityResult:  # fmt: skip
        """Write both sides in the form of a check's records, and judge these as a check."""
        run = self.first.ranks[of_first[0]].facts
        located = [self._parts(rank, self._first(self.second.ranks[rank]), first) for rank in of_second]
        names = [name for name in first if not any(name in vague for _, _, vague in located)]
        constant = sorted(set(first) - set(names))
        self.unseen.append((constant, "is constant at first, so that its part is not known: give --layout"))
        steps = [self.a[rank].facts for rank in of_first]
        losses = [loss for step in steps for loss in step.losses]
        loss = math.fsum(losses) / len(of_first)
        moved = [(*key, value) for key, value in self._moved(of_first).items()]
        parents = {name: name.rpartition(".")[0] for name in run.classes if name}
        gradients = {name for (quantity, _, name), x in whole.items() if quantity == "gradient" and bool(x.any())}
        # An optimizer with private copies of parameters records no gradients; frozen and zero gradients are unknown.
        keeps = any(quantity == "gradient" for quantity, _, _ in whole)
        frozen = [name for name in names if name in run.frozen or (keeps and ("gradient", 1, name) not in whole)]
        samples = {key[0]: list(x.shape) for key, x in whole.items() if key[0].startswith("sample:") and x.ndim > 1}
        # Gradients before clipping are compared directly; else the norm explains the error of clipped gradients.
        known = self.explained_by_norm and len(steps[0].clips) == 1
        clip, norms = (steps[0].clips[0][0], [steps[0].clips[0][1]]) if known else (None, [])
        facts = ReferenceFacts(
            names, [loss] if losses else [], norms, run.dtype, clip=clip, moved=moved, order=order,
            consumers=steps[0].consumers, parents=parents, classes=run.classes, frozen=frozen, rates=[steps[0].rates],
            dead=[name for name in names if keeps and name not in frozen and name not in gradients],
            batch=samples if len(self.a) == len(of_first) == 1 else {},
            buffers=sorted({name for quantity, _, name in whole if quantity == "buffer"}),
        )  # fmt: skip
        compared = {key: x for key, x in whole.items() if not key[0].startswith("sample:")}
        wholes = {("initial", 0, name): first[name] for name in names}
        with temporary_folder() as folder:
            write_record(folder, REFERENCE, {**compared, **wholes}, facts)
            for index, (rank, (parts, lost, _)) in enumerate(zip(of_second, located, strict=True)):
                self._write_rank(folder, index, rank, {n: p for n, p in parts.items() if p.name in names}, lost,
                                 coordinates[index], whole if facts.batch else {})  # fmt: skip
            evidence = Evidence(folder, len(of_second))
            rows = list(compare_all(evidence))
            evidence.modules = explain_modules(evidence)
            if len(of_first) == 1:  # for several ranks it is unknown which norms add up
                rows += self._norms(evidence, of_first, of_second)
            found = first_finding(evidence, rows)
            if found is not None and found.kind == "wrong values" and len(of_first) == 1 and len(of_second) > 1:
                found = self._own_means(whole, order, of_second) or found
            added = {rank: self.b[rank].facts.added for rank in of_second if self.b[rank].facts.added}
            forward = all(line.output is None or line.output.explained for line in evidence.modules)
            if added and forward and not any(step.added for step in steps) and any(
                row.kind == "gradient" and not row.holds for row in rows
            ):  # fmt: skip
                rank, passes = next(iter(added.items()))
                text = (
                    f"rank {rank} clips the gradients of earlier microbatches, and adds {passes} more to what it has "
                    "clipped; the reference adds nothing behind clipping"
                )
                found = Mistake("clipping", ALL, text)
        check = ParityCheck(f"step {self.step}", self.second.folder, self.second.axes, run.dtype)
        return ParityResult(check, run.dtype, 0.0, tuple(rows), found, tuple(evidence.modules), tuple(facts.dead))

    def _own_means(
        self, whole: Mapping[Key, Tensor], order: Sequence[tuple[str, int]], of_second: Sequence[int]
    ) -> Mistake | None:
        """Find ranks that each take the mean over the rank's labels.

        The gradients of a rank's outputs are then the reference's gradients of these rows times one factor per rank.
        The inverses of the factors, the ranks' shares of all labels, add up to 1.
        """
        held = [put_together(self.b[rank])[0] for rank in of_second]
        samples = [key for key, x in whole.items() if key[0].startswith("sample:") and x.ndim > 1]
        # A model that returns its loss has no rows there.
        last = next((("output-gradient", call, name) for name, call in reversed(order)
                     if (y := whole.get(("output-gradient", call, name))) is not None and y.ndim), None)  # fmt: skip
        factors: list[float] = []
        if last is None or not samples:
            return None
        for tensors in held:
            ours, theirs = tensors.get(samples[0]), whole[samples[0]]
            found = None if ours is None or ours.dtype != theirs.dtype else find_part("", ours, theirs)
            x, y = tensors.get(last), whole[last]
            if found is None or found.index[0] is None or x is None or len(y) != len(theirs):
                return None
            rows = y[list(found.index[0])]
            factor = factor_of(x, rows, 1e-4) if x.shape == rows.shape else None
            if factor is None:
                return None
            factors.append(factor)
        if abs(math.fsum(1 / f for f in factors) - 1) > 1e-3 or max(factors) < 1.001 * min(factors):
            return None
        shares = ", ".join(f"{1 / f:.4g}" for f in factors)
        text = f"each rank takes the mean over its own labels, {shares} of all: a mean of means"
        return Mistake("token counts", "(loss)", text)

    def _write_rank(
        self, folder: Path, index: int, rank: int, parts: Mapping[str, Part], lost: Mapping[str, str],
        coordinates: Mapping[str, int], whole: Mapping[Key, Tensor],
    ) -> None:  # fmt: skip
        step, rows = self.b[rank], {}
        samples = put_together(step)[0]
        for key, theirs in whole.items():
            ours = samples.get(key)
            # Samples with another number of dims have a private form of the program, and are not compared.
            if key[0].startswith("sample:") and ours is not None and ours.ndim == theirs.ndim > 1:
                found = find_part(key[0], ours, theirs) if ours.dtype == theirs.dtype else None
                rows[key[0]] = None if found is None else found.as_json()
        facts = PartFacts(
            [math.fsum(step.facts.losses) if step.facts.losses else None],
            {name: shard.as_json() for name, shard in parts.items()}, dict(coordinates), lost=dict(lost), rows=rows,
            counts=[None], stepped=[step.facts.stepped], rates=[step.facts.rates],
        )  # fmt: skip
        compared = {key: x for key, x in step.tensors.items() if not key[0].startswith("sample:")}
        write_record(folder, f"{PARALLEL}-{index}", compared, facts)

    def _parts(
        self, rank: int, locals_: Mapping[str, Tensor], wholes: Mapping[str, Tensor]
    ) -> tuple[dict[str, Part], dict[str, str], set[str]]:
        """Locate each parameter of a rank in A.

        Returns:
            (part of A by name, shapes of parameters that are no part of A, parameters of A with an unknown part).
        """
        facts = self.second.ranks[rank].facts
        stated: dict[str, Part] = {}
        for name, x in locals_.items():
            shape = facts.kept.get(name, (tuple(x.shape), ()))[0]
            if self.slices_of is not None:
                target, slices = self.slices_of(name, rank)
                lengths = self.first.ranks[0].facts.kept.get(target, (tuple(wholes[target].shape), ()))[0]
                bounds = [cut.indices(n)[:2] for cut, n in zip(slices, lengths, strict=True)]
            elif name in facts.boxes and name in wholes and len(facts.boxes[name]) == wholes[name].ndim:
                target, offsets = name, facts.boxes[name]
                bounds = [(start, start + n) for start, n in zip(offsets, shape, strict=True)]
            else:
                continue
            strides = self.strides.get(("first", target), (1,) * len(bounds))
            starts = [-(-start // s) for (start, _), s in zip(bounds, strides, strict=True)]
            sizes = [-(-stop // s) - start for (_, stop), s, start in zip(bounds, strides, starts, strict=True)]
            stated[name] = box_part(target, starts, sizes, wholes[target].shape)
        rest = {name: x for name, x in locals_.items() if name not in stated}
        places = {axis: (self.second.coordinates[rank][axis], size) for axis, size in self.second.axes}
        parts, lost = locate(rest, wholes, {}, False, None, places)
        for name, shard in stated.items():
            same = torch.equal(shard.take(wholes[shard.name]).to(locals_[name].dtype), locals_[name])
            if same:
                parts[name] = shard
            else:
                lost[name] = f"shape {tuple(locals_[name].shape)}"
        vague = set[str]()
        for name, shard in list(parts.items()):
            # Constant values match at any place: only the located weight of the same module decides the place.
            if name not in stated and not shard.whole and is_constant(locals_[name]):
                beside = self.part_beside(name, locals_[name], parts)
                parts[name] = beside or shard
                vague |= set() if beside else {shard.name}
        return parts, lost, vague

    def part_beside(self, name: str, local: Tensor, parts: Mapping[str, Part]) -> Part | None:
        """Return the part of a bias by the rows of the weight of the same module; None if unknown."""
        for sibling, shard in parts.items():
            rows = shard.index[0] if shard.index else None
            if sibling != name and sibling.rpartition(".")[0] == name.rpartition(".")[0] and local.ndim == 1 and rows:
                stride = self.strides.get(("first", shard.name), (1,))[0]
                follows = rows == tuple(range(rows[0], rows[0] + len(rows)))
                if follows and len(rows) * stride == len(local):
                    return Part(name, (tuple(range(rows[0] * stride, rows[0] * stride + len(local))),))
        return None

    def _norms(self, evidence: Evidence, of_first: Sequence[int], of_second: Sequence[int]) -> Iterator[Row]:
        """Yield comparisons of norms for sampled tensors: norms of copies, and of all cuts together."""
        pieces = {line.name for line in evidence.modules if line.output and line.output.kind in (COPY, CUT)}
        for quantity in ("output", "gradient", "weight"):
            for name in dict.fromkeys(key[2] for key in self.a[of_first[0]].tensors if key[0] == quantity):
                if quantity == "output" and name not in pieces:
                    continue
                theirs, ours = (
                    squares_of([steps[rank] for rank in ranks], quantity, name)
                    for steps, ranks in ((self.a, of_first), (self.b, of_second))
                )
                if theirs and ours:
                    error = abs(math.sqrt(ours / theirs) - 1)
                    # A norm in float32 accumulates rounding, hence 1e-5.
                    yield Row("norm", f"{quantity} of {name}", error, 4 * evidence.allowed(quantity, 1, name) + 1e-5, 1)


def squares_of(steps: Sequence[RecordedStep], quantity: str, name: str) -> float | None:
    """Return the mean square over the elements of some ranks' tensors; None unless some are recorded as samples."""
    total, count, is_sampled = 0.0, 0, False
    for step in steps:
        for text in step.file.keys:
            its_quantity, _, its_name = text.split("|", 2)
            if (its_quantity, its_name) == (quantity, name):
                shape = step.facts.kept[text][0] if text in step.facts.kept else None
                x = None if shape is not None else step.file.get(text)
                total += step.facts.norms[text] ** 2 if x is None else float(x.double().square().sum())
                count += math.prod(shape) if shape is not None else 0 if x is None else x.numel()
                is_sampled |= shape is not None
    return total / count if is_sampled and count else None


def as_recording(step: RecordedStep) -> StepRecording:
    """Return a recorded step as a `StepRecording`, for `movements`."""
    whole, _ = put_together(step)
    trace = Trace(nn.Module(), tensors={(k, n, c): x for (k, c, n), x in whole.items() if k in TRACED})
    tensors = {(k, c, n): x for (k, c, n), x in whole.items()
               if k in ("gradient", CLIPPED, "weight", "buffer") or k.startswith(STATE)}  # fmt: skip
    return StepRecording([math.fsum(step.facts.losses)], [], tensors, {"": trace})


def earliness(result: ParityResult) -> tuple[bool, bool, int]:
    """Return a sort key, least for the earliest mistake: outputs in forward order, then gradients in backward order."""
    order = list(enumerate(result.modules))
    forward = next((index for index, line in order if line.output and not line.output.explained), None)
    if forward is not None:
        return result.holds, False, forward
    return (
        result.holds,
        True,
        -next((p for p, line in reversed(order) if line.gradient and not line.gradient.explained), -1),
    )


Recipe = tuple[tuple[str, str, int], ...]
"""(axis, word, dim) for each axis, innermost first: join ranks by copy, by cat along a dim, or by sum."""


def wholes_of(held: Mapping[int, Tensor], places: Sequence[Mapping[str, int]]) -> Iterator[tuple[Recipe, Tensor]]:
    """Yield ways to join ranks' tensors, the simplest first: copies, cuts along one dim per axis, sums."""
    axes = [axis for axis in reversed(list(places[0])) if len({places[rank][axis] for rank in held}) > 1]
    dims = range(next(iter(held.values())).ndim)
    options = [("copy", 0), *(("cat", dim) for dim in dims), ("sum", 0)]
    for chosen in product(options, repeat=len(axes)):
        recipe = tuple((axis, word, dim) for axis, (word, dim) in zip(axes, chosen, strict=True))
        if (x := _made(recipe, held, places, strict=True)) is not None:
            yield recipe, x
    if axes and len({x.shape for x in held.values()}) > 1:
        yield (), next(iter(held.values()))


def _made(
    recipe: Recipe, held: Mapping[int, Tensor], places: Sequence[Mapping[str, int]], *, strict: bool
) -> Tensor | None:
    at = {tuple(places[rank].items()): x for rank, x in held.items()}
    for axis, word, dim in recipe:
        groups: dict[tuple[tuple[str, int], ...], list[Tensor]] = {}
        for pairs, x in sorted(at.items(), key=lambda item: dict(item[0])[axis]):
            groups.setdefault(tuple(pair for pair in pairs if pair[0] != axis), []).append(x)
        at = {}
        for rest, terms in groups.items():
            same = len({x.shape for x in terms}) == 1
            if word == "copy":
                # Replicas of a run have equal bits, or nearly equal ones: they are results of one sum.
                near = same and all(relative_error(x, terms[0]) < 1e-5 for x in terms)
                if strict and not near:
                    return None
                at[rest] = terms[0]
            elif word == "sum" and same:
                at[rest] = torch.stack(terms).sum(0)
            elif word == "cat" and len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in terms}) == 1:
                at[rest] = torch.cat(terms, dim)
            else:
                return None
    return next(iter(at.values())) if len(at) >= 1 else None
