"""Checks of AutoModel's parallelize functions on transformers' models: one for each model type and kind of plan.

A model is an instance of the type's class, made as in the register of transformers. AutoModel uses its own plan for a
class, or else translates the plan of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import meshwright.parity as parity
from meshwright.parity import registered as models
from meshwright.parity.tiny import LENGTH, VOCABULARY
from meshwright.ranks.dtensor import whole_of


@dataclass(frozen=True)
class Plan:
    """A kind of plan. `axes`: sizes, outermost first; `sizes`: the arguments of ParallelismSizes."""

    axes: Mapping[str, int]
    sizes: Mapping[str, int]


PLANS = {
    "tensor": Plan({"tensor": 2}, {"tp_size": 2}),
    "fsdp": Plan({"data": 2}, {"dp_size": 2}),
    "tensor-fsdp": Plan({"data": 2, "tensor": 2}, {"dp_size": 2, "tp_size": 2}),
}
TYPES = tuple(models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SHARED = (
    "transformers.modeling_utils", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "nemo_automodel.components.distributed.model_parallelizer",
    "nemo_automodel.components.distributed.parallelizer",
)  # fmt: skip
"""Modules that all checks import."""


def carries(model_type: str, plan: str) -> bool:
    """Return True if AutoModel has a plan to use or to translate; fully_shard is tried on the same types."""
    return bool(getattr(models.CONFIG_MAPPING[model_type], "base_model_tp_plan", None))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the next tokens from whole logits, as AutoModel's own losses do."""
    output = model(input_ids=batch["tokens"], use_cache=False)
    logits = whole_of(output.logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    """Draw random tokens of 4 rows."""
    return {"tokens": torch.randint(3, VOCABULARY, (4, LENGTH), generator=generator)}


@parity.check(ranks=2, precision="float32").parametrize("plan", PLANS).parametrize("model_type", TYPES)
def registered(job: parity.Job, plan: str, model_type: str) -> None:
    """Compare a model that AutoModel has made parallel with the same model on one process."""
    # Imported here, so that the checks can be listed without AutoModel.
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
    from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients

    whole, _ = models.small_model(model_type)
    job.reference(whole.train(), loss_of, batch_of)
    config = FSDP2Config()
    single = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), torch.float32)
    config = replace(config, mp_policy=replace(config.mp_policy, **single))
    mesh = MeshContext.build(config, ParallelismSizes(**PLANS[plan].sizes))
    model = parallelize_model(job.copy(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """A step of AutoModel's recipes: reduce replicas over the tensor group before the update."""
        loss = loss_of(model, batch)
        loss.backward()
        synchronize_tp_replica_gradients([model], mesh.device_mesh)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model.train(), step=step, batch=job.rows("data") if "data" in job.axes else None)
