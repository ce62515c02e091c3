"""huggingface/transformers#34242 and #37474: a mean over each process's tokens instead of all. The Trainer of 5.23 has
average_tokens_across_devices=True. With False, the default of the threads' versions, ranks average local means."""

import tempfile

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import meshwright.parity as parity

CONFIG = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     attn_implementation="eager", use_cache=False)  # fmt: skip


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, 32, (4, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def trained(job: parity.Job, average: bool) -> None:
    job.reference(LlamaForCausalLM(CONFIG), loss=loss_of, batch=batch_of)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, report_to="none", max_grad_norm=0.0,
                                      average_tokens_across_devices=average)  # fmt: skip
        trainer = Trainer(model=job.copy(), args=arguments)
    model = trainer.accelerator.prepare(trainer.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        (batches, count) = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
        loss = trainer.training_step(model, batches[0], count)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2, precision="float32")
def over_all_devices(job: parity.Job) -> None:
    trained(job, average=True)


@parity.check(ranks=2, precision="float32")
def over_each_device(job: parity.Job) -> None:
    trained(job, average=False)
