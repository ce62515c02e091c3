"""huggingface/trl#6843: under context parallelism a causal mask replaces every layer's mask, and a row of packed
documents is one text: tokens see earlier documents. Rewritten here; refused by trl since.
"""

from typing import Any

import torch
import torch.nn.functional as F
from common import Gathered, averaged, own_positions, sgd_step, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(4))
        self.whole: Any = lambda x: x
        self.first, self.by_documents = 0, True

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, documents = self.enter(batch["x"]), batch["documents"]
        q, k, v = self.q(x), self.whole(self.k(x)), self.whole(self.v(x))
        seen = (self.first + torch.arange(q.shape[1]))[:, None] >= torch.arange(k.shape[1])
        if self.by_documents:
            seen = seen & (documents[:, :, None] == self.whole(documents)[:, None])
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    """Draw rows of three documents; some documents are on both ranks."""
    begins = torch.tensor([[1, 4], [2, 5], [3, 4], [1, 3]])
    documents = (torch.arange(6)[:, None] >= begins[:, None]).sum(-1)
    return {"x": torch.randn(4, 6, 16, generator=generator), "documents": documents}


def packed(job: parity.Job, by_documents: bool) -> None:
    job.reference(Attention(), loss=squares, batch=batch_of, labels=None)
    model, group = job.copy(), job.device_mesh.get_group("cp")
    model.first, model.by_documents = 3 * job.rank, by_documents
    model.whole = lambda x: Gathered.apply(x, group)

    step = sgd_step(model, squares, lambda: averaged(model, group))
    half = lambda batch: {name: own_positions(x, group) for name, x in batch.items()}  # noqa: E731
    job.parallel(model, step=lambda model, batch: summed(step(model, batch), group) / 2, batch=half)


@parity.check(ranks=2, axes={"cp": 2})
def right_own_document(job: parity.Job) -> None:
    packed(job, True)


@parity.check(ranks=2, axes={"cp": 2})
def wrong_causal_alone(job: parity.Job) -> None:
    packed(job, False)
