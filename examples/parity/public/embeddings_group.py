"""NVIDIA/Megatron-LM#7452, finding 7: LLaVA's combined embeddings are cut over the library's tensor-parallel group, and
the language model gathers over another group: some ranks keep the same positions. Rewritten here.
"""

from typing import Any

from common import Gathered, Scattered, averaged_by_axes, own, own_positions, real_batch, sgd_step, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.cut: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.project(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(self.down(self.up(self.enter(x)).relu()))


def language_model(job: parity.Job, axis: str) -> None:
    job.reference(nn.Sequential(Embeddings(), Layer()), loss=squares, batch=real_batch)
    model, group, cut = job.copy(), job.device_mesh.get_group("tp"), job.device_mesh.get_group(axis)
    layer = model[1]
    layer.up.weight, layer.down.weight = (
        own(layer.up.weight, job.index("tp")),
        own(layer.down.weight, job.index("tp"), 1),
    )
    layer.enter, layer.leave = (lambda x: Gathered.apply(x, group)), (lambda x: Scattered.apply(x, group))
    model[0].cut = lambda x: own_positions(x, cut)

    step = sgd_step(model, squares, lambda: averaged_by_axes(model, job, "1."))
    job.parallel(model, step=lambda m, x: summed(step(m, x), None) / 4, batch=job.rows("data"))


@parity.check(ranks=4, axes={"tp": 2})
def right_own_group(job: parity.Job) -> None:
    language_model(job, "tp")


@parity.check(ranks=4, axes={"tp": 2})
def wrong_other_group(job: parity.Job) -> None:
    language_model(job, "data")
