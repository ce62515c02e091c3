"""The printed summary of an adopted script."""

from __future__ import annotations

from collections import defaultdict

from meshwright.planner.adopt.adopted import Adopted, by_phase
from meshwright.planner.adopt.job import Answer, as_dict, chosen
from meshwright.planner.adopt.planned import Planned
from meshwright.planner.plan.memory import bytes_text
from meshwright.ranks.streams import say

MOST_NOTES = 12

__all__ = ["as_dict", "render"]


def render(answer: Answer) -> None:
    """Print the facts, the plan, the best edits, and everything that was not seen."""
    first, planned = answer.first, answer.planned
    say(facts_line(first))
    say("\n" + "\n".join(module_lines(first)))
    if first.collectives:
        say("\n" + "\n".join(collective_lines(first)))
    say(f"\nOn {answer.question.cluster.name}, {answer.question.ranks} devices:")
    say("\n".join(plan_lines(planned)))
    best = chosen(answer.tried, planned)
    for candidate in best:
        assert candidate.planned is not None
        change = 1 - candidate.planned.rank[1] / planned.rank[1]
        speed = f"{100 * abs(change):.0f} % {'less' if change >= 0 else 'more'} time a sample"
        fullest = max(sizes["total"] for sizes in candidate.planned.memory.values())
        say(f"\nEdit: {candidate.edit.title}: {speed}, {bytes_text(fullest)}")
        say(candidate.edit.diff.rstrip())
    if answer.tried and not best:
        say(f"\nNone of {len(answer.tried)} edits is faster and fits.")
    for candidate in answer.tried:
        if candidate.failure:
            say(f"\nEdit not run: {candidate.edit.title}: {candidate.failure}")
    say("\nNot seen, or assumed, in every number above:")
    say("\n".join(unseen_lines(first, planned)))


def facts_line(adopted: Adopted) -> str:
    """`gpt.py: step 2, 1 microbatch of (8, 1024), 124,475,904 parameters (AdamW), 6.61 Tflop, rank 0 of 1`."""
    shape = adopted.inputs[0][1] if adopted.inputs else ()
    passes = f"{adopted.microbatches} microbatch{'es' if adopted.microbatches > 1 else ''}"
    frozen = "" if adopted.trained == adopted.parameters else f", {adopted.trained:,} trained"
    return (
        f"{adopted.script}: step {adopted.step}, {passes} of {shape}, {adopted.parameters:,} parameters{frozen} "
        f"({', '.join(dict.fromkeys(adopted.optimizers))}), {adopted.flops / 1e12:.3g} Tflop, rank {adopted.rank} of "
        f"{adopted.ranks}"
    )


def module_lines(adopted: Adopted) -> list[str]:
    """Return operations by class of module, and by phase."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for row in adopted.modules:
        totals = sums[row.kind]
        totals[0] += 1
        totals[1] += row.forward_flops
        totals[2] += row.backward_flops + row.recomputed_flops
        totals[3] += row.kept_bytes
    rows = sorted(sums.items(), key=lambda item: -(item[1][1] + item[1][2] + item[1][3] / 1e3))[:8]
    lines = ["modules                        number  forward Tflop  backward Tflop     kept"]
    lines += [
        f"{class_name[:30]:<30} {int(n):>6} {forward / 1e12:>14.4g} {backward / 1e12:>15.4g} "
        f"{bytes_text(kept_bytes):>9}"
        for class_name, (n, forward, backward, kept_bytes) in rows
    ]
    phases = ", ".join(f"{name} {flops / 1e12:.4g}" for name, flops in by_phase(adopted).items() if flops)
    return [*lines, f"Tflop by phase: {phases}"]


def collective_lines(adopted: Adopted) -> list[str]:
    """Return the collectives: verb, group, calls, bytes, and the computation that may hide them."""
    lines = ["collective       group        phase     calls       sent  may hide under"]
    for row in adopted.collectives:
        group = f"{row.ranks[0]}..{row.ranks[-1]} ({len(row.ranks)})"
        hidden = f"{row.under_flops / max(1, row.calls) / 1e12:.3g} Tflop a call"
        lines.append(
            f"{row.verb:<16} {group:<12} {row.phase:<9} {row.calls:>5} {bytes_text(row.sent_bytes):>10}  {hidden}"
        )
    return lines


def plan_lines(planned: Planned) -> list[str]:
    """Return the seconds and the memory of each recorded rank."""
    lines = [f"  {planned.seconds:.4g} s a step, {100 * planned.utilisation:.1f} % of the peak in bf16"]
    for rank, step in planned.steps.items():
        sizes = planned.memory[rank]
        parts = ", ".join(
            f"{category} {bytes_text(size)}" for category, size in sizes.items() if size and category != "total"
        )
        lines.append(
            f"  rank {rank}: kernels {step.kernels:.4g} s, sends {step.sending:.4g} s (waited for {step.exposed:.4g} s)"
        )
        lines.append(f"    {bytes_text(sizes['total'])} of {bytes_text(planned.device_bytes)}: {parts}")
    return [*lines, "  fits" if planned.fits else "  does not fit"]


def unseen_lines(adopted: Adopted, planned: Planned) -> list[str]:
    """Return the notes with their lines, then the plan's assumptions."""
    lines = [f"  {note.where}: {note.text}" + (f" ({times} times)" if times > 1 else "")
             for note, times in adopted.unseen]  # fmt: skip
    more = [f"  ... {len(lines) - MOST_NOTES} more in adopted.json"] if len(lines) > MOST_NOTES else []
    return [*lines[:MOST_NOTES], *more, *(f"  {line}" for line in planned.assumed)]
