"""NVIDIA/Megatron-LM#737, #7464, and finding 1 of #7452: with label smoothing, vocab_parallel_cross_entropy takes the
rank's shard of the vocabulary for the whole vocabulary. Seen on megatron-core 0.16.1."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor, nn

import meshwright.parity as parity

VOCABULARY, SMOOTHING = 16, 0.1


class Enter(torch.autograd.Function):
    """A copy; the backward pass sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        dist.all_reduce(total := gradients[0].clone())
        return total


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Identity(), nn.Linear(8, VOCABULARY, bias=False))


def reference_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return Megatron's loss over the whole vocabulary: V - 1 tokens share the mass of smoothing equally."""
    log_p = model(batch["tokens"]).log_softmax(-1)
    a = SMOOTHING * VOCABULARY / (VOCABULARY - 1)
    return ((a - 1) * log_p.gather(-1, batch["labels"][..., None])[..., 0] - a * log_p.mean(-1)).mean()


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, (4, 6), generator=generator) for name in ("tokens", "labels")}


def check(job: parity.Job, smoothing: float, loss: object) -> None:
    job.reference(model(), loss=loss, batch=batch_of, labels=None)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    cut = job.copy()
    cut[2].weight = nn.Parameter(cut[2].weight.detach().chunk(2)[job.rank].clone())
    cut[1].register_forward_hook(lambda module, _, y: Enter.apply(y))
    job.parallel(cut, lambda m, b: vocab_parallel_cross_entropy(m(b["tokens"]), b["labels"], smoothing).mean())


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def without_smoothing(job: parity.Job) -> None:
    check(job, 0.0, lambda m, b: nn.functional.cross_entropy(m(b["tokens"]).flatten(0, 1), b["labels"].flatten()))


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def with_smoothing(job: parity.Job) -> None:
    check(job, SMOOTHING, reference_loss)
