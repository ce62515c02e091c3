"""Checks of the parallel plans in transformers' configurations: one check for each model type and kind of plan.

A model is an instance of the type's class, with random weights and small sizes. Reference and parallel model are both
read from a saved folder, the parallel one with the plan. Read without the plan, the second folder must give the
reference's weights. Otherwise saving and reading change the model, and the check gives no verdict on the plan.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import Trainer
from transformers.trainer_optimizer import has_mixed_dtensor
from transformers.utils import logging

import meshwright.parity as parity
from meshwright.parity.batches import IGNORED_LABEL, chunks_of, unequal
from meshwright.parity.tiny import SIZES, samples_of, small_model, terms_of
from meshwright.ranks.dtensor import from_all_ranks, local_of
from meshwright.ranks.errors import MeshwrightError, ParityError

logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True)
class Plan:
    """A kind of plan.

    `attribute`: the configuration's attribute with the plan. `axes`: sizes, outermost first. `sizes`: the arguments of
    DistributedConfig. `small`: sizes of the model. `refuses`: True if an error under the plan is a right refusal.
    """

    attribute: str
    axes: Mapping[str, int]
    sizes: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    refuses: bool = False


HEADS = {name: 4 for name in SIZES if name.endswith(("key_value_heads", "linear_num_key_heads"))}
"""Equal numbers of key and query heads, so that four ranks can cut both."""
PLANS = {
    "tensor": Plan("base_model_tp_plan", {"tensor": 2}, {"tp_size": 2, "tp_plan": "auto"}),
    "tensor4": Plan("base_model_tp_plan", {"tensor": 4}, {"tp_size": 4, "tp_plan": "auto"}, HEADS),
    # Four ranks cannot cut two heads of keys.
    "tensor4-heads": Plan("base_model_tp_plan", {"tensor": 4}, {"tp_size": 4, "tp_plan": "auto"}, refuses=True),
    "expert": Plan("base_model_ep_plan", {"data": 2}, {"fsdp_size": 2, "ep_size": 2}),
    "tensor-expert": Plan("base_model_ep_plan", {"tensor": 2}, {"tp_size": 2, "tp_plan": "auto", "ep_size": 2}),
    "fsdp": Plan("base_model_fsdp_plan", {"data": 2}, {"fsdp_size": 2}),
    "hsdp": Plan("base_model_fsdp_plan", {"data": 4}, {"dp_replicate_size": 2, "fsdp_size": 2}),
    "tensor-fsdp": Plan(
        "base_model_tp_plan", {"data": 2, "tensor": 2}, {"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto"}
    ),
}
TYPES = tuple(CONFIG_MAPPING_NAMES)
"""All model types, each a case of a check."""


def has_plan(model_type: str, kind_of_plan: Plan) -> bool:
    """Return True if a type's configuration defines a plan. The FSDP plan is shared by all configurations; this plan is
    tried with causal language models and with types that define another plan."""
    config_class, attribute = CONFIG_MAPPING[model_type], kind_of_plan.attribute
    plan = getattr(config_class, attribute, None)
    if "tp_plan" in kind_of_plan.sizes and not config_class.base_model_tp_plan:
        return False
    if not plan or plan is not getattr(PretrainedConfig, attribute, None):
        return bool(plan)
    others = (config_class.base_model_tp_plan, config_class.base_model_ep_plan)
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or any(others)


CONDITIONS = ("plain", "accumulated", "clipped", "lora", "resumed", "resumed-distributed")
"""Forms of a step; each is a separate check:
plain: one pass, and a second one of two halves;
accumulated: two microbatches with unequal numbers of labels;
clipped: one pass, and the norm of gradients is clipped;
lora: as plain, with a trained adapter and frozen weights;
resumed, resumed-distributed: after the first step the model is saved, by one process or by all ranks, and read again
under the plan."""
PEFT = "peft"
"""The package of adapters; the condition `lora` imports it."""
SHARDS = 3
"""Least number of files of a checkpoint."""
CLIP = 0.01
"""The norm that gradients are clipped to: less than any model's."""
MICROBATCHES = 2
RAISES = "raises under the plan: "
"""Begins the error of a check if the model runs without the plan, but not with the plan."""
ANOTHER = "is another after saving and reading under the plan"
"""Ends the error of a check if a tensor's values are lost in the model's own checkpoint."""


@(
    parity.check(ranks=2, precision="float32")
    .parametrize("plan", PLANS)
    .parametrize("condition", CONDITIONS)
    .parametrize("model_type", TYPES)
)
def registered(job: parity.Job, plan: str, condition: str, model_type: str) -> None:
    """Compare a model under a plan with the same model on one process."""
    options: dict[str, Any] = {"dtype": torch.get_default_dtype(), "attn_implementation": "eager"}
    planned = options | {"distributed_config": DistributedConfig(**PLANS[plan].sizes)}
    rows = 2 * max(MICROBATCHES, job.axes.get("data", 1))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(from_all_ranks(temporary.encode())[0].decode())
        made, names = small_model(model_type, PLANS[plan].small)
        whole = saved_and_read(job, folder / "first", made, options)
        # Even without a plan, a parameter that the class freezes may be read as trained.
        for mine, first in zip(whole.parameters(), made.parameters(), strict=True):
            mine.requires_grad_(first.requires_grad)
        if broken := next((name for name, p in whole.named_parameters() if not p.isfinite().all()), None):
            raise ParityError(f"{broken} is not finite after saving and reading, without a plan")

        def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
            batch = samples_of(whole, names, generator, rows)
            if condition != "accumulated" or "input_ids" not in batch:
                return batch
            labelled: dict[str, Tensor] = unequal(batch | {"labels": batch["input_ids"]}, "labels")
            return labelled

        adapted = with_adapter(whole) if condition == "lora" else None
        job.reference(whole.train(), loss_of, batch_of, clip=CLIP if condition == "clipped" else None, labels=None)
        base = job.copy()
        if adapted is not None:
            adapted.save_pretrained(folder / "adapter", is_main_process=job.rank == 0)
            base = copy.deepcopy(adapted).unload()
        again = saved_and_read(job, folder / "second", base, options)
        same_weights(base, again)
        if adapted is not None:
            same_weights(whole, adapted_from(again, folder / "adapter"))
        with raising_under_plan():
            model = read(folder / "second", type(whole), type(whole.config), planned)
            if condition == "lora":
                model = adapted_from(model, folder / "adapter")
        torch.distributed.barrier()
        with raising_under_plan():
            model.train()
            share = job.rows("data") if "data" in job.axes else None
            if condition in ("plain", "lora"):
                job.parallel(model, batch=share)
            elif condition in ("accumulated", "clipped"):
                job.parallel(model, step=trainer_step(job, condition), batch=share)
            else:
                step = resumed_step(trainer_step(job, condition), folder / "third", planned, condition != "resumed")
                job.parallel({"": model}, step=step, batch=share)
        torch.distributed.barrier()


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of a model's loss terms over all labels."""
    terms = terms_of(model, batch)
    return terms.sum() / (counted(batch) or terms.numel())


def counted(batch: Mapping[str, Tensor]) -> int:
    """Return the number of labels that are not ignored; 0 for a batch without labels."""
    return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) if "labels" in batch else 0


def with_adapter(model: PreTrainedModel) -> Any:
    """Put a LoRA adapter with random values into all linear layers of a model, in place; return peft's wrapper."""
    # Imported here, so that other conditions run without peft.
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)  # the same on each rank
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    )  # fmt: skip


def adapted_from(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Load a folder's adapter into a model, for training."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, folder, is_trainable=True).get_base_model()
    assert isinstance(adapted, PreTrainedModel)
    return adapted


def resumed_step(
    step: Callable[[Any, Any], Tensor], folder: Path, planned: Mapping[str, Any], distributed: bool
) -> Callable[[dict[str, PreTrainedModel], Any], Tensor]:
    """Return a step that resumes once: after the first call the model is saved, read again under the plan, and replaced
    by the read model. `distributed`: each rank writes its own parts."""
    resumed = False

    def step_and_resume(models: dict[str, PreTrainedModel], batch: Mapping[str, Tensor]) -> Tensor:
        nonlocal resumed
        model = models[""]
        loss = step(model, batch)
        if not resumed:
            resumed = True
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            model.save_pretrained(folder, max_shard_size=size // SHARDS, distributed_checkpoint=distributed)
            torch.distributed.barrier()
            files = len([*folder.glob("*.safetensors")])
            if files < 2:
                raise ParityError(f"the checkpoint has {files} file: nothing is said of several")
            models[""] = again = read(folder, type(model), type(model.config), planned).train()
            for p, trained in zip(again.parameters(), model.parameters(), strict=True):
                p.requires_grad_(trained.requires_grad)
            same_parts(model, again)
        return loss

    return step_and_resume


def same_parts(saved: nn.Module, read: nn.Module) -> None:
    """Compare this rank's parts of a model, including buffers, with the parts of the model that is read.

    Raises:
        ParityError: A tensor differs.
    """
    again = {**dict(read.named_parameters()), **dict(read.named_buffers())}
    for name, x in {**dict(saved.named_parameters()), **dict(saved.named_buffers())}.items():
        mine, theirs = local_of(x), local_of(again[name]) if name in again else None
        # NaN counts as equal to NaN.
        if (
            theirs is None
            or mine.shape != theirs.shape
            or not bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())
        ):
            raise ParityError(f"{name} {ANOTHER}")


def trainer_step(job: parity.Job, condition: str) -> Callable[[Any, Any], Tensor]:
    """Return a step like the Trainer's in transformers. Each microbatch's loss is divided by the number of labels of
    all microbatches and ranks. The norm of gradients is clipped by the Trainer's own function."""
    ranks = job.axes.get("data", 1)

    def over_data(x: float) -> float:
        """Sum `x` over the ranks of the data axis."""
        added = torch.tensor(x, dtype=torch.float64)
        torch.distributed.all_reduce(added)
        return float(added) * ranks / job.world_size

    def step(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        parts = chunks_of(batch, MICROBATCHES) if condition == "accumulated" else [batch]
        labels, total = over_data(sum(counted(chunk) for chunk in parts)), 0.0
        for chunk in parts:
            terms = terms_of(model, chunk)
            # FSDP averages gradients over the ranks, so each rank's loss is multiplied by the number of ranks.
            loss = terms.sum() * ranks / (labels or terms.numel() * len(parts) * ranks)
            loss.backward()
            total += float(local_of(loss)) / ranks
        if condition == "clipped":
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if has_mixed_dtensor(gradients):
                Trainer._mixed_mesh_grad_norm(cast(Any, None), model, CLIP)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # plain, without a state
        optimizer.step()
        optimizer.zero_grad()
        return torch.tensor(over_data(total))

    return step


@contextmanager
def raising_under_plan() -> Iterator[None]:
    """Raise an error of the body again, with the last line of the library's code in the traceback."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        # A configuration that refuses an attribute is not the cause; the code that reads the attribute is.
        every = extract_tb(error.__traceback__)
        frames = [f for f in every if any(f"/{name}/" in f.filename for name in (transformers.__name__, PEFT))]
        frames = [f for f in frames if not f.filename.endswith("configuration_utils.py")]
        # A backward pass runs no line of the library, only torch's.
        frames = frames or [f for f in every[-1:] if f"{torch.__name__}/" in f.filename]
        if not frames:
            raise
        location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        said = (str(error).splitlines() or [""])[0]
        raise ParityError(f"{RAISES}{type(error).__name__} at {location}: {said}") from error


def read(
    folder: Path, model_class: type[PreTrainedModel], config: type[PretrainedConfig], options: Any
) -> PreTrainedModel:
    """Read a folder's model with the configuration class `config`, since several configurations share a model class."""
    model: PreTrainedModel = model_class.from_pretrained(folder, config=config.from_pretrained(folder), **options)
    return model


def saved_and_read(job: parity.Job, folder: Path, model: nn.Module, options: Mapping[str, Any]) -> PreTrainedModel:
    """Save a model on rank 0, and read it on every rank."""
    assert isinstance(model, PreTrainedModel)
    if job.rank == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    return read(folder, type(model), type(model.config), options)


def same_weights(saved: nn.Module, read: nn.Module) -> None:
    """Compare a model with the model read from the folder where the first was saved.

    Raises:
        ParityError: A tensor differs.
    """
    again = read.state_dict()
    for name, x in saved.state_dict().items():
        if name not in again or not torch.equal(x, again[name]):
            raise ParityError(f"{name} is another after saving and reading, without a plan")
