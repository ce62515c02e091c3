"""A Python script for Ray: `ray job submit -- python FILE`. What it calls: ray_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from meshwright.section import Count
from meshwright.tools.submit.job import JobSettings, Submission

_SCRIPT = '''"""Places the ranks of {name} on a Ray cluster: ray job submit -- python {name}_ray.py"""

import sys

from meshwright.tools.submit.ray_ranks import Placement, place_ranks

PLACEMENT = Placement(
    words={words!r},
    nodes={nodes},
    ranks_per_node={per_node},
    cpus={cpus},
    gpus={gpus},
    restarts={restarts},
)

if __name__ == "__main__":
    sys.exit(place_ranks(PLACEMENT))
'''


class Ray(JobSettings):
    """`restarts`: how often ranks that were lost are placed again."""

    shares_folders: ClassVar[bool] = True
    suffix: ClassVar[str] = "_ray.py"

    restarts: Count = 3

    def text(self, submission: Submission) -> str:
        words = submission.train_words("", submission.run.absolute(), resume=True)[1:]
        return _SCRIPT.format(
            name=submission.name,
            words=words,
            nodes=submission.nodes,
            per_node=submission.ranks_per_node,
            cpus=self.cpus,
            gpus=int(submission.uses_gpus),
            restarts=self.restarts,
        )

    def command(self, file: Path) -> list[str]:
        return ["ray", "job", "submit", "--", "python", str(file)]
