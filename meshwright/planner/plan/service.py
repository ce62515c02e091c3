"""`meshwright answer`: questions as lines of JSON on stdin, an answer a line on stdout, estimates kept in between.

    {"model": "llama-3.1-8b", "sequence": 8192, "batch": 512, "devices": 64, "words": ["layout.data.sync=zero3"]}
    {"run": {"model": ..., "layout": ...}, "devices": 8, "ask": "layout"}

| field    | meaning                                                                                      |
|----------|----------------------------------------------------------------------------------------------|
| run      | the tree of a run file; otherwise model, sequence and batch                                  |
| devices  | the number of devices; with `ask: layout` the layout's own                                   |
| words    | `key=value` words, which fix fields                                                          |
| ask      | best: the fastest layouts that fit (the default); layout: the figures of the run's own layout |
| id       | any value, which the answer repeats                                                          |

An answer is the object of `plan --json`, or {"error": text}. A question reuses recordings and estimates of
earlier questions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.config import Config
from meshwright.config.load import DECIDED, ELSEWHERE, parse_run
from meshwright.config.section import with_field
from meshwright.planner.plan.choice import answered
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.kept import KeptRecordings
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.question import NamedRun
from meshwright.planner.plan.report import as_dict, figures_of
from meshwright.planner.plan.search import search
from meshwright.planner.plan.software import Program
from meshwright.planner.plan.space import fixed_fields, ranks_per_node
from meshwright.ranks.errors import ConfigError, MeshwrightError
from meshwright.ranks.foreign import parse_json

KEYS = ("run", "model", "sequence", "batch", "devices", "words", "ask", "id", "top")


class PlanService:
    """Answers of one cluster and program.

    The estimates of one model's runs are shared: figures of a layout that was asked before take milliseconds.
    """

    def __init__(self, cluster: Cluster, program: Program, recordings: KeptRecordings | None = None) -> None:
        self.cluster, self.program = program.on(cluster), program
        self.models = Estimates(Planner(self.cluster, program.software, recordings))

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question.

        Raises:
            ConfigError: The question has an unknown field, or its run cannot be planned.
        """
        if unknown := [key for key in question if key not in KEYS]:
            raise ConfigError.of(unknown[0], question[unknown[0]], "is no field of a question", ", ".join(KEYS))
        words = list(question.get("words", ()))
        if question.get("ask") == "layout":
            return self.layout(self.run_of(question, words, decided=False))
        devices = question.get("devices")
        if not isinstance(devices, int) or devices < 1:
            raise ConfigError.of("devices", devices, "is no number of devices", "a whole number >= 1")
        config = self.run_of(question, words, decided=True)
        fixed = fixed_fields(words)
        found = search(
            config, self.cluster, devices, question.get("top", 5), fixed=fixed, models=self.models, program=self.program
        )
        return as_dict(answered(found, self.models, fixed))

    def run_of(self, question: Mapping[str, Any], words: list[str], *, decided: bool) -> Config:
        """Return the run of a question. `decided`: the planner decides the layout."""
        if "run" not in question:
            return NamedRun(*(question.get(key) for key in ("model", "sequence", "batch"))).config(words, self.cluster)
        return parse_run(question["run"], words, undecided=DECIDED if decided else (), unread=ELSEWHERE)

    def layout(self, config: Config) -> dict[str, Any]:
        """Return the figures of a run's own layout."""
        node_ranks = ranks_per_node(self.cluster, config.layout.world_size)
        found = self.models.planner.predict(with_field(config, "layout.ranks_per_node", node_ranks))
        return figures_of(found)

    def serve(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield an answer for each line; an error is also an answer, and the service goes on."""
        for line in lines:
            if not line.strip():
                continue
            told: dict[str, Any] = {}
            try:
                question = parse_json(line)
                if not isinstance(question, dict):
                    raise ConfigError.of("question", line.strip()[:80], "is no JSON object", "{...}")
                told = {"id": question["id"]} if "id" in question else {}
                told |= self.ask(question)
            except (MeshwrightError, ValueError, TypeError) as error:
                told |= {"error": " ".join(str(error).split())}
            yield json.dumps(told)
