"""The head over all stages: of every microbatch each computes its part of the classes (vocabulary parallelism in
pipelines: Yeung et al., arXiv 2411.05288).

The head of a large vocabulary weighs as much as several layers, and the last stage alone has it. Cut over the stages
it makes none longer than the others, and each holds and steps its part of the table.

| piece | on the last stage | on every other | ends with                                                       |
|-------|-------------------|----------------|-----------------------------------------------------------------|
| gate  | layers, last norm | nothing        | the hidden states, which travel from the last stage to all      |
| head  | its classes       | its classes    | backward: its part of their gradient, which travels to the last |

The pieces are tasks, as those around an expert's rows are (pieces.py): a stage does others while hidden states or their
gradients are under way. In the head itself the stages meet, chunk by chunk of tokens, for each other's statistics
(tensor/cross_entropy.py); one that comes late keeps the others waiting, so the head goes before layers. A microbatch
goes there when the one before has left it: all stages then trade and meet in one order, over one comm.

Sends, a microbatch: p - 1 times the hidden states, and as much back, which the last stage adds up in the stages' order.
"""

from __future__ import annotations

from meshwright.strategies.pipeline.task import Task, TaskKind, View


def with_spread_head(view: View) -> Task | None:
    """The message-driven order of a stage with a part of the head: it precedes layers, as all stages wait for each
    other there. One microbatch is in the head at a time, so that all trade in one order."""
    head = len(view.chunks) - 1
    gate = head - 1  # what ends with the hidden states' trade: the last stage's layers, elsewhere nothing
    is_free = view.chunks[gate].forwards == view.chunks[head].backwards
    ahead = [(kind, head) for kind in view.kinds] + [(kind, gate) for kind in view.kinds if gate > 0]
    for kind, piece in (*ahead, *((kind, 0) for kind in (TaskKind.BACKWARD, TaskKind.FORWARD, TaskKind.WEIGHT))):
        if view.ready(kind, piece) and (is_free or piece != gate or kind is not TaskKind.FORWARD):
            return view.next(kind, piece)
    return None
