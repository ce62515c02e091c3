"""The page's clock has Meshwright's spans to the last bit, under every schedule, placement and delay of messages."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from meshwright.config.registry import OURS, entries
from meshwright.planner.explain.page import SCRIPTS
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.placement import ChunkPlacement, Shape
from meshwright.strategies.pipeline.task import Task
from tests.planner.explain.javascript import needs_javascript, run_javascript

CASES = 300

PROGRAM = """
const answer = JSON.stringify(CASES.map((one) => {
  const placement = new meshwrightClock.Placement(one.stages, one.chunks, one.shape);
  const name = (task) => task.kind + task.microbatch + "." + task.chunk;
  const spans = meshwrightClock.simulate(placement, one.microbatches, one.schedule, one.limit,
    (stage, task) => one.seconds[stage][name(task)], (from, to, task) => one.late[from][name(task)]);
  return spans.map((span) => [span.stage, span.name, span.microbatch, span.chunk, span.start, span.end]);
}));
"""


def drawn(index: int) -> dict[str, Any]:
    """Draw a pipeline at random: half of the pipelines have tied times, as in counted work; in the other half all times
    differ."""
    draw = random.Random(index)
    name = draw.choice(sorted(OURS["schedules"]))
    rule = entries("schedules")[name]
    chunks = draw.choice((1, 2, 3)) if rule.shapes else 1
    shape: Shape = draw.choice(rule.shapes) if chunks > 1 else "loop"
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 14)
    # A fixed order sets the limit; with a limit below one place a chunk no microbatch reaches the chain's end and
    # returns.
    limit = draw.choice((None, draw.randint(2 * chunks, 4 * stages * chunks + 1))) if not rule.fixed else None
    ties = draw.random() < 0.5
    tasks = [
        Task(kind, index, chunk) for kind in rule.kinds for index in range(microbatches) for chunk in range(chunks)
    ]

    def times(tied: tuple[float, ...]) -> dict[str, float]:
        # Not str(task), which leaves the first chunk's number out.
        return {f"{t.kind}{t.microbatch}.{t.chunk}": draw.choice(tied) if ties else draw.random() for t in tasks}

    return {
        "stages": stages, "chunks": chunks, "shape": shape, "microbatches": microbatches, "schedule": name,
        "limit": limit, "seconds": [times((1.0, 2.0)) for _ in range(stages)],
        "late": [times((0.0, 0.5)) for _ in range(stages)],
    }  # fmt: skip


def spans_of(one: dict[str, Any]) -> list[list[Any]]:
    rule = entries("schedules")[one["schedule"]]
    timeline = simulate(
        one["stages"], one["microbatches"], rule if one["limit"] is None else rule.limited(one["limit"]),
        lambda stage, task: one["seconds"][stage][f"{task.kind}{task.microbatch}.{task.chunk}"],
        lambda start, end, task: one["late"][start][f"{task.kind}{task.microbatch}.{task.chunk}"],
        placement=ChunkPlacement(one["stages"], one["chunks"], one["shape"]),
    )  # fmt: skip
    return sorted([s.stage, s.name, s.microbatch, s.chunk, s.start_seconds, s.end_seconds] for s in timeline.spans)


@needs_javascript
def test_equal_spans(tmp_path: Path) -> None:
    cases = [drawn(index) for index in range(CASES)]
    assert {case["schedule"] for case in cases} == set(OURS["schedules"])
    code = f"const CASES = {json.dumps(cases)};\n{(SCRIPTS / 'clock.js').read_text()}\n{PROGRAM}"
    for case, found in zip(cases, json.loads(run_javascript(code, tmp_path)), strict=True):
        told = {name: case[name] for name in ("schedule", "stages", "chunks", "shape", "microbatches", "limit")}
        assert sorted(found) == spans_of(case), told


@needs_javascript
def test_the_page_s_clock_knows_our_schedules(tmp_path: Path) -> None:
    """The page's clock has every schedule with the schedule's shapes of chunks."""
    code = f"{(SCRIPTS / 'clock.js').read_text()}\nconst answer = JSON.stringify(meshwrightClock.SCHEDULES)"
    known = json.loads(run_javascript(code, tmp_path))
    assert {name: rule["shapes"] for name, rule in known.items()} == {
        name: list(entries("schedules")[name].shapes) for name in OURS["schedules"]
    }
