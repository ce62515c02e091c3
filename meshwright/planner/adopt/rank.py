"""One process of a proof: `python -m meshwright.planner.adopt.rank PARENT STEPS FOLDER SEED SCRIPT ...`.

Runs the script as `meshwright parity record` does. The process ends with its parent, also by `kill -9`. It ends after
the optimizer's step behind the last recorded one: each rank then has the records of all steps, also a stage of a
pipeline that waits for a message before it calls its model.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.parity.command import main as record
from meshwright.ranks.launch.tether import die_with_parent
from meshwright.ranks.streams import flush


def main() -> None:
    """Record the script. SEED is empty for a run without an added rounding."""
    parent, steps, folder, seed, *script = sys.argv[1:]
    die_with_parent(int(parent))
    done = Counter[int]()

    def stepped(optimizer: Any, *_: Any) -> None:
        done[id(optimizer)] += 1
        if done[id(optimizer)] > int(steps):
            raise SystemExit(0)

    register_optimizer_step_post_hook(stepped)
    wanted = ",".join(str(step) for step in range(1, int(steps) + 1))
    perturbed = ["--perturb", seed] if seed else []
    sys.argv[1:] = ["record", "--steps", wanted, "--out", folder, *perturbed, *script]
    try:
        record()
    except SystemExit as ended:
        # Peers may be gone: torch's end of a process group would wait for them.
        flush(sys.stdout, sys.stderr)
        os._exit(ended.code if isinstance(ended.code, int) else 1)


if __name__ == "__main__":
    main()
