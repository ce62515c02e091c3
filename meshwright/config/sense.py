"""A colleague's look at a legal run: one line for each oddity, with numbers and the field to change.

A check is a function of the run and of the known `Facts`. A check that lacks a fact returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.config.load import value_of_word
from meshwright.config.schema import Config
from meshwright.config.section import shown

Check = Callable[[Config, "Facts"], "str | None"]

SPARE_ROWS = 256
"""The most unused rows of a vocabulary without a line: these cost too little."""
BEGIN_ANEW = frozenset(("base", "from", "family", "kind", "name"))
"""Keys that name the kind of a section."""
OFTEN = 100
"""The number of passes over the same samples that is too large."""


@dataclass(frozen=True)
class Facts:
    """Numbers that a config alone does not have; None: unknown here."""

    tokens: int | None = None
    """The tokenizer's number of tokens, if data.tokenizer does not name the size."""
    samples: int | None = None
    """Training samples an epoch."""
    cores: int | None = None
    """Cores for the ranks of one host."""
    local_ranks: int | None = None
    """Ranks on one host."""
    padding: int | None = None
    """The padding token of the folder that weights were read from."""


def remarks(config: Config, facts: Facts = Facts()) -> list[str]:
    """Return the lines of all checks; an empty list for a run that makes sense."""
    return [line for line in (check(config, facts) for check in CHECKS) if line is not None]


def vocabulary_is_the_tokenizers(config: Config, facts: Facts) -> str | None:
    """Compare the vocabulary with the tokenizer; a published table of weights is left."""
    tokenizer, rows = config.data.model_dump().get("tokenizer", ""), config.model.num_tokens
    named = tokenizer.removeprefix("bpe:")
    # The size that the run names goes first: a small text fills fewer tokens of bpe:SIZE, and the rule asks for SIZE.
    size = 257 if tokenizer == "bytes" else int(named) if named.isdigit() else facts.tokens or rows
    size += len(config.model.special_tokens) + config.data.sentinels
    if config.weights is not None or rows - size <= SPARE_ROWS or rows < 1.5 * size:
        return None
    return (
        f"model.vocabulary={rows} is {rows / size:.1f} times the tokenizer's {size} tokens: {rows - size:,} rows of "
        f"the table and as many columns of logits are for no token; model.vocabulary={size} has none of them"
    )


def positions_are_reached(config: Config, facts: Facts) -> str | None:
    """Learned positions alone: rotary ones have no rows."""
    model, sequence = config.model, max(config.data.lengths)
    learned = any(field.endswith("positions") for field, _ in model.tables)
    if not learned or not sequence or model.longest < 4 * sequence or config.weights is not None:
        return None
    return (
        f"model.positions={model.longest} learned rows, of which data.sequence={sequence} reads the first {sequence}: "
        f"the others stay as they were drawn; model.positions={sequence}, or a longer data.sequence"
    )


def ranks_have_cores(config: Config, facts: Facts) -> str | None:
    ranks, cores = facts.local_ranks, facts.cores
    threads = 1 if config.threads == "auto" else config.threads
    if config.device != "cpu" or ranks is None or cores is None or ranks * threads <= max(cores, 1):
        return None
    return (
        f"{ranks} ranks x threads={threads} want {ranks * threads} cores, and {cores} are here: ranks wait for each "
        f"other's turns; threads={max(1, cores // ranks)}" + (", or a layout of fewer ranks" if ranks > cores else "")
    )


def a_batch_is_of_the_data(config: Config, facts: Facts) -> str | None:
    samples, batch = facts.samples, config.batch.global_
    if not samples or batch <= samples:
        return None
    return (
        f"batch.global={batch} is more than the {samples} training samples: a step takes each {batch / samples:.1f} "
        f"times; batch.global={samples} or less, or more data"
    )


def data_is_not_learned_by_heart(config: Config, facts: Facts) -> str | None:
    samples, batch, steps = facts.samples, config.batch.global_, config.steps
    if not samples or batch > samples or config.epochs is not None or steps * batch < OFTEN * samples:
        return None
    return (
        f"steps={steps} x batch.global={batch} are {steps * batch / samples:,.0f} passes over {samples:,} samples; "
        f"steps={max(1, -(-10 * samples // batch))} are ten"
    )


def patience_can_end_a_run(config: Config, facts: Facts) -> str | None:
    every, steps, patience = config.validation.every, config.steps, config.validation.patience
    if patience and every * patience >= steps:
        within = max(1, steps // (patience + 1))
        return (
            f"validation.patience={patience} validations, one in {every} steps, are not over before steps={steps}: it "
            f"never ends the run; validation.every={within}"
        )
    return None


def rate_is_an_optimizers(config: Config, facts: Facts) -> str | None:
    optimizer = config.optimizer
    least, most = optimizer.update.rates
    if optimizer.lr >= most:
        return f"optimizer.lr={optimizer.lr:g} of {optimizer.name} makes losses grow in most runs; optimizer.lr=1e-3"
    if optimizer.lr < least:
        return f"optimizer.lr={optimizer.lr:g} of {optimizer.name} moves no weight that one sees; optimizer.lr=1e-3"
    if optimizer.lr * optimizer.weight_decay >= 0.1:
        share = optimizer.lr * optimizer.weight_decay
        return (
            f"optimizer.weight_decay={optimizer.weight_decay:g} x optimizer.lr={optimizer.lr:g} takes {share:.0%} off "
            f"each matrix a step; optimizer.weight_decay=0.1"
        )
    return None


def moments_forget_in_order(config: Config, facts: Facts) -> str | None:
    first, second = config.optimizer.betas
    if "betas" not in config.optimizer.update.fields or first <= second:
        return None
    return (
        f"optimizer.betas=[{first:g}, {second:g}]: the mean of gradients is remembered longer than the mean of "
        f"their squares; optimizer.betas=[{second:g}, {first:g}]"
    )


def dropout_leaves_something(config: Config, facts: Facts) -> str | None:
    dropout = config.model.dropout
    return None if dropout < 0.5 else f"model.dropout={dropout:g} drops half of all numbers or more; model.dropout=0.1"


def restarts_have_a_checkpoint(config: Config, facts: Facts) -> str | None:
    if not config.restarts.times or config.checkpoint.every or config.checkpoint.best:
        return None
    return (
        f"restarts.times={config.restarts.times} begins again at the first step each time, since checkpoint.every=0 "
        f"writes one at the end alone; checkpoint.every={max(1, config.steps // 10)}"
    )


def stages_have_microbatches(config: Config, facts: Facts) -> str | None:
    stages, count = config.layout.pipeline.size, config.num_microbatches
    if stages == 1 or count >= stages:
        return None
    idle = (stages - 1) / (count + stages - 1)
    fitting = max(1, config.replica_batch // (2 * stages))
    return (
        f"layout.pipeline.size={stages} stages have {count} microbatch{'es' * (count > 1)} a step and wait {idle:.0%} "
        f"of it or more; batch.micro={fitting}, or a larger batch.global"
    )


def padding_is_at_rest(config: Config, facts: Facts) -> str | None:
    """Name the row to which transformers' Embedding(padding_idx=...) gives no gradient."""
    if facts.padding is None or config.weights is None:
        return None
    return (
        f"pad_token_id={facts.padding} of {config.weights}: transformers leaves this row of the embedding without a "
        f"gradient, and a run here trains the row if the data has the token"
    )


CHECKS: tuple[Check, ...] = (
    vocabulary_is_the_tokenizers,
    positions_are_reached,
    padding_is_at_rest,
    ranks_have_cores,
    a_batch_is_of_the_data,
    data_is_not_learned_by_heart,
    patience_can_end_a_run,
    rate_is_an_optimizers,
    moments_forget_in_order,
    dropout_leaves_something,
    restarts_have_a_checkpoint,
    stages_have_microbatches,
)
"""In the order of a run's sections."""


def lost_by_braces(tree: dict[str, Any], words: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each word in braces that replaces a section of the run file, with the lost fields.

    A dotted word changes one field. Braces with another kind, base or folder replace a section on purpose.
    """
    for word in words:
        field, _, text = word.partition("=")
        if not text.startswith("{"):
            continue
        section: Any = tree
        for name in field.split("."):
            section = section.get(name) if isinstance(section, dict) else None
        given = value_of_word(field, text)
        section = {"base": section} if field == "model" and isinstance(section, str) else section
        if not isinstance(section, dict) or BEGIN_ANEW & given.keys():
            continue
        if lost := {name: value for name, value in section.items() if name not in given}:
            changes = " ".join(f"{field}.{name}={shown(value).replace(', ', ',')}" for name, value in given.items())
            gone = ", ".join(f"{name}={shown(value)}" for name, value in lost.items())
            yield f"{field}={{...}} replaces the run file's section, and {gone} are lost; {changes} change these alone"
