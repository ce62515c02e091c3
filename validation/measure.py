"""Questions that rows ask of a prediction."""

from __future__ import annotations

from meshwright.compute.models.section import TextTransformer
from meshwright.config import Config
from meshwright.planner.plan.predict import Prediction
from meshwright.training.phases import DATA_PARALLEL


def forward_seconds(prediction: Prediction) -> float:
    """Return the seconds of all microbatches of the first stage."""
    return _task_seconds(prediction, "forward")


def backward_seconds(prediction: Prediction) -> float:
    """Return the backward seconds, with the weights' gradients and the wait for the gradients' sums."""
    tasks = _task_seconds(prediction, "backward") + _task_seconds(prediction, "weight")
    return tasks + prediction.phases[DATA_PARALLEL]


def total_memory_bytes(prediction: Prediction) -> int:
    """Return the bytes of tensors on all devices, which torch's allocator counts as allocated."""
    ranks_of_a_stage = prediction.config.layout.world_size // len(prediction.memory)
    return ranks_of_a_stage * sum(memory.allocated for memory in prediction.memory)


def paper_flops(config: Config) -> float:
    """Return floating-point operations of a step of GPT by the papers' formula, which always counts recomputation.

    96 b s l h² (1 + s/(6h) + V/(16 l h)) (Narayanan et al., SC 2021, equation 3).
    """
    model, batch, sequence = config.model, config.batch.global_, config.data.lengths.source
    assert isinstance(model, TextTransformer), "the formula is of GPT"
    layers, hidden = model.layers, model.hidden
    rest = 1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * rest


def paper_tflops(prediction: Prediction) -> float:
    """Return Tflop/s a device, by that formula."""
    return paper_flops(prediction.config) / prediction.config.layout.world_size / prediction.seconds / 1e12


def _task_seconds(prediction: Prediction, category: str) -> float:
    tasks = prediction.timeline.tasks
    return sum(span.seconds for span in tasks if span.stage == 0 and span.category == category)
