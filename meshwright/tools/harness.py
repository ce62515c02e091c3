"""A checkpoint as a model of lm-evaluation-harness (the extra `harness`), measured by the harness' tasks.

    meshwright eval out/first --task lm-eval:hellaswag,arc_easy              # with --data FOLDER: tasks of your own
    python -m meshwright.tools.harness --model meshwright --model_args path=out/first --tasks hellaswag --num_fewshot 5

    import lm_eval
    import meshwright.tools.harness
    lm_eval.simple_evaluate(model="meshwright", model_args={"path": "out/first"}, tasks=["hellaswag"])

The second command is the harness' own command line with all options, and `meshwright` registered as a model. (The
harness has no entry points: a model of another package is registered by an import in the same process.)

The harness provides tasks, prompts and metrics. A model answers three requests: the likelihood of a text after a
context, the likelihood of a whole text, and a continuation up to a stop word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.chat import ChatTemplate, closing_token, kept_template, template_of
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.continuation import Opening, continuations
from meshwright.tools.evaluate.likelihood import likelihoods, text_likelihoods
from meshwright.tools.evaluate.load import Facts, load_text
from meshwright.tools.generate import Sampling

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise DataError('lm-evaluation-harness is not installed: pip install "meshwright[harness]"') from error

NAME = "meshwright"
"""The model type's name in the harness."""
HARNESS_TOKENS = 256
"""Tokens of a continuation if a task sets no limit."""
PLACE = "lm-eval"
"""The source of a dialogue, as named in error messages."""


@register_model(NAME)
class CheckpointLM(LM):
    """Model of the harness over a decoder's step folder, or over a run's newest checkpoint."""

    def __init__(
        self,
        path: str | Path,
        device: str = "auto",
        context: int | None = None,
        template: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
    ) -> None:
        """Load the checkpoint.

        Args:
            path: A step folder, or a run's folder.
            device: auto, cpu or cuda.
            context: Tokens per forward pass; default: the sequence length of training.
            template: A file with a chat template; default: the run's own.
            batch_size: Largest number of requests in a forward pass; auto: limited by BATCH_TOKENS alone.
            max_batch_size: The limit if `batch_size` is auto.

        Raises:
            ConfigError: The batch size is no positive number; and as `load_text`.
        """
        super().__init__()
        most = max_batch_size if batch_size == "auto" else batch_size
        if most is not None and not (str(most).isdecimal() and int(most) > 0):
            raise ConfigError.of("batch_size", most, "is no number of requests", "auto, or 1 or more")
        self._rows = None if most is None else int(most)
        self._template_file = template
        self._chats = False
        self.loaded = load_text(Path(path), device, context)

    @cached_property
    def _template(self) -> ChatTemplate:
        """The chat template. Raises DataError if there is none, or if the template can no longer be read."""
        if self._template_file is not None:
            return template_of("", self._template_file)
        folder = self.loaded.folder
        chat_template = self.loaded.config.data.chat_template(folder) or kept_template(folder)
        if chat_template is None:
            raise DataError(f"{folder}: has no chat template, nor had its tokenizer: template=FILE")
        return chat_template

    @property
    def tokenizer_name(self) -> str:
        """A name unique to this tokenizer and template; the harness' key for cached requests."""
        known = self.loaded.tokenizer.to_json() + self._template.text
        return f"{NAME}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template's text, which the harness stores in the results.

        The harness calls this method before any request if a template is to be applied. Raises ConfigError for the
        name of a template: a checkpoint has only one template.
        """
        if isinstance(chat_template, str):
            rule = "is a template's name, and a checkpoint has one template"
            raise ConfigError.of("apply_chat_template", chat_template, rule, "true, with template=FILE for another")
        self._chats = chat_template
        return self._template.text if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a dialogue as a prompt: up to the beginning of an answer, or up to the end of the last message."""
        self._chats = True
        return self._template.prompt(chat_history, PLACE, goes_on=not add_generation_prompt)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return (log probability, whether greedy decoding gives it) for each request's (context, continuation)."""
        asked = [request.args for request in requests]
        told = likelihoods(self.loaded, asked, marked=self._chats, rows=self._rows)
        return [(answer.log, answer.greedy) for answer in told]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log probability of each request's whole text."""
        return text_likelihoods(self.loaded, [request.args[0] for request in requests])

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Continue each request's context up to a stop word."""
        openings, tokenizer = [], self.loaded.tokenizer
        # An answer in a chat also ends at the special token that closes a turn; tasks do not list this token.
        closes = closing_token(self._template, tokenizer) if self._chats else None
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            # Tasks set temperature, do_sample or both. Sampling always uses seed 1, so that results are reproducible.
            sampled = options.get("do_sample", False) or options.get("temperature", 0) > 0
            marked = tokenizer.encode_placed(context, marked=True)[0] if self._chats else None
            opening = Opening(
                [*tokenizer.opening, *tokenizer.encode(context)] if marked is None else marked,
                int(options.get("max_gen_toks") or options.get("max_tokens") or HARNESS_TOKENS),
                (until,) if isinstance(until, str) else tuple(until),
                () if closes is None else (closes,),
                Sampling(float(options.get("temperature") or 1.0)) if sampled else Sampling(),
            )
            openings.append(opening)
        return continuations(self.loaded, openings, self._rows)


def measure_tasks(
    model: CheckpointLM, names: Sequence[str], folder: str | None, limit: int | None, *, chat: bool
) -> Facts:
    """Return the metrics that the harness computes.

    Args:
        model: The checkpoint.
        names: The tasks.
        folder: A folder with task files; None: the harness' own tasks.
        limit: Measure only the first `limit` requests of a task.
        chat: Whether requests are rendered as dialogues.

    Raises:
        ConfigError: There is no such task.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=folder, include_defaults=folder is None)
    if unknown := [name for name in names if not known.match_tasks([name])]:
        where = "of the harness" if folder is None else f"in {folder}"
        valid = "python -m meshwright.tools.harness ls tasks lists them" if folder is None else str(known.all_tasks)
        raise ConfigError.of("--task", f"lm-eval:{','.join(unknown)}", f"is no task {where}", valid)
    # Without standard errors: the harness would draw 100,000 bootstrap samples for each metric.
    told = lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=known, limit=limit, bootstrap_iters=0, apply_chat_template=chat,
        log_samples=False,
    )  # fmt: skip
    facts: Facts = {}
    for task, metrics in told["results"].items():
        for key, value in metrics.items():
            metric = key.partition(",")[0]
            if isinstance(value, int | float) and not metric.endswith("_stderr") and "," in key:
                facts[f"{task} {metric}" + ("" if key.endswith(",none") else f" ({key.partition(',')[2]})")] = value
    return facts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
