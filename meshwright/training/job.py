"""`meshwright train`: the launcher's work before the ranks start. The ranks' work is in worker.py.

Nothing here imports torch, with three exceptions: a resumed run, stages with `auto` layers or limit, and the check of
sums for a strategy of another package. The ranks' own imports begin before these (`prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.config import Config
from meshwright.config.registry import brought
from meshwright.data.files import silent
from meshwright.output.drawing import require_matplotlib
from meshwright.ranks.environment import read_environment
from meshwright.ranks.launch import Ranks, prepare, run
from meshwright.ranks.machine import Machine
from meshwright.training import folder
from meshwright.training.decisions import in_steps, resolve, resolve_process, this_machine, with_fewer_replicas
from meshwright.training.follow import Each, followed
from meshwright.training.sinks import require_sinks
from meshwright.training.status import STATUS

TRAIN_WORKER = "meshwright.training.worker:train_rank"


def train(
    config: Config,
    out: Path,
    *,
    resume: bool,
    resume_from: int | None = None,
    accept_changes: bool = False,
    trace: Sequence[int] = (),
    progress: Any = silent,
    each: Each | None = None,
) -> None:
    """Run a whole job into `out`, with a trace of the steps `trace`. `each`: called with every step (follow.py).

    `resume`: continue from the newest checkpoint, or from `resume_from`. `accept_changes`: even if the config differs
    in fields that a run must keep. Raises ConfigError, DataError, CheckpointError, LaunchError, Interrupted.
    """
    out = out.absolute()
    machine = this_machine()
    if not (resume or machine.joined):
        folder.refuse_used(out)  # before the corpus is prepared, which may take long
    require_sinks(config.metrics)
    if trace:
        require_matplotlib("a traced step")
    if resume:
        from meshwright.training.resume import decided_before, go_on, with_earlier_bits

        config = with_earlier_bits(config, out)
    counted = in_steps(config, data := config.data.prepare(config, progress))
    asked = config = counted.config
    if config.restarts.shrink and machine.joined and machine.world_size < config.layout.world_size:
        # torchrun --nnodes=1:N starts the nodes that are left; a number of ranks that does not fit is refused below.
        config = with_fewer_replicas(config, machine.world_size) or config
    resolved = resolve_process(config, machine)  # refuses an impossible run before anything is written
    prepare(TRAIN_WORKER, resolved.config.ranks())
    with ExitStack() as stack:
        notes = stack.enter_context(folder.locked(out)) if read_environment().rank == 0 else []
        before = config
        if not machine.joined:  # else the ranks find out whether this is a restart (worker.py)
            if resume:
                notes += go_on(out, config, config.data.fingerprint(data), resume_from, accept_changes=accept_changes)
                before = decided_before(config, out)
            else:
                folder.refuse_used(out)
                folder.begin(out, config)
            resolved = resolve(before, machine)
        arguments: dict[str, Any] = {
            "asked": asked,
            "out": out,
            "data": data,
            "resume": resume,
            "resume_from": resume_from,
            "accept_changes": accept_changes,
            "trace": list(trace),
            "follow": stack.enter_context(followed(each)),
        }

        notes = [*counted.notes, *resolved.notes, *notes_of_sums(resolved.config), *notes]
        ranks = resolved.config.ranks(str(out), out / STATUS)
        fewer = partial(_with_fewer, before, machine, arguments)
        run(TRAIN_WORKER, ranks, fewer=fewer, config=resolved.config, notes=notes, **arguments)


def notes_of_sums(config: Config) -> list[str]:
    """Check sums if a strategy is of another package or `check.sums` is always; return notes. Raises SumError."""
    if config.check.sums == "never" or not (config.check.sums == "always" or brought(config)):
        return []
    from meshwright.training.typed.check import checked  # imports torch, otherwise unused in this process

    return checked(config)


def _with_fewer(
    config: Config, machine: Machine, arguments: Mapping[str, Any], most: int
) -> tuple[Ranks, dict[str, Any]] | None:
    """Return at most `most` ranks and the arguments for a job that lost a rank; None: restart with the same number."""
    smaller = with_fewer_replicas(config, most) if config.restarts.shrink else None
    if smaller is None:
        return None
    resolved, out = resolve(smaller, machine), arguments["out"]
    size = smaller.layout.data.size
    note = f"layout.data.size={config.layout.data.size}: {size} from here on, since a rank was lost"
    changed = {"config": resolved.config, "notes": [note, *resolved.notes]}
    return resolved.config.ranks(str(out), out / STATUS), {**arguments, **changed}
