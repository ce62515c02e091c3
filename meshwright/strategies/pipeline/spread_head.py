"""The head sharded over all stages: each stage computes a part of the classes of every microbatch.

(Vocabulary parallelism in pipelines: Yeung et al., arXiv 2411.05288.) The head of a large vocabulary costs about the
same as several layers, all on the last stage. Sharded over the stages, the head makes no stage longer than the others,
and each stage stores and steps one part of the table.

| piece | on the last stage | on every other | ends with                                                       |
|-------|-------------------|----------------|-----------------------------------------------------------------|
| gate  | layers, last norm | nothing        | the hidden states, sent from the last stage to all              |
| head  | its classes       | its classes    | backward: its part of their gradient, sent to the last stage    |

The pieces are tasks, like the pieces around experts (pieces.py): a stage runs other tasks while hidden states or
gradients are in transit. In the head all stages exchange softmax statistics, once for each chunk of tokens
(tensor/cross_entropy.py). A late stage delays all others, so the head has priority over layers. A microbatch enters the
head when the one before has left: all stages then exchange in one order, over one comm.

Sends, for each microbatch: the hidden states to p - 1 stages, and p - 1 gradients of the same size back. The last stage
adds these gradients in the order of the stages.
"""

from __future__ import annotations

from meshwright.strategies.pipeline.task import Task, TaskKind, View


def with_spread_head(view: View) -> Task | None:
    """Return the next task of a stage with a part of the head (message-driven).

    The head has priority over layers, since all stages wait for each other there. One microbatch is in the head at a
    time, so that all stages exchange in one order.
    """
    head = len(view.chunks) - 1
    gate = head - 1  # ends with sending the hidden states: the last stage's layers, no layers on other stages
    is_free = view.chunks[gate].forwards == view.chunks[head].backwards
    ahead = [(task_kind, head) for task_kind in view.kinds] + [
        (task_kind, gate) for task_kind in view.kinds if gate > 0
    ]
    for task_kind, piece in (
        *ahead,
        *((task_kind, 0) for task_kind in (TaskKind.BACKWARD, TaskKind.FORWARD, TaskKind.WEIGHT)),
    ):
        if view.ready(task_kind, piece) and (is_free or piece != gate or task_kind is not TaskKind.FORWARD):
            return view.next(task_kind, piece)
    return None
