"""Dialogues, templates and tokenizers of small corpora."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.config import Config, parse_run
from meshwright.data.tokenizer import train_bpe

TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|over|>\n{% endfor %}"

PLAIN = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"

MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|over|>{% endgeneration %}{% else %}{{ m.content + '<|over|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)

WORDS = ["apple", "river", "seven", "quiet", "stone", "green", "under", "letter"]


def dialogue(number: int) -> list[dict[str, str]]:
    ask, answer, more = (WORDS[(number * step) % len(WORDS)] for step in (1, 3, 5))
    turns = [("user", f"say {ask} {number}"), ("assistant", f" {answer}, {ask}.\n"), ("user", more)]
    turns = [("system", "be brief"), *turns, ("assistant", f"{more} {more}")] if number % 2 else turns[:2]
    return [{"role": role, "content": content} for role, content in turns]


def make_tokenizer(folder: Path, template: str = PLAIN) -> Path:
    """Write a tiny tokenizer with a chat template, as in a Hugging Face folder; return the tokenizer's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_str(train_bpe([" ".join(WORDS) * 3], 280).to_json())
    tokenizer.add_special_tokens(["<|turn|>", "<|over|>"])
    path.write_text(tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|turn|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def make_dialogues(folder: Path, *lines: str, count: int = 40) -> Path:
    texts = [json.dumps({"messages": dialogue(number)}) for number in range(count)]
    path = folder / "chat.jsonl"
    path.write_text("".join(f"{line}\n" for line in [*texts, *lines]))
    return path


def config_for(folder: Path, source: Path, tokenizer: Path, *words: str, **data: Any) -> Config:
    tree = {
        "model": {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "feed_forward": 16, "vocabulary": 320},
        "data": {"source": str(source), "tokenizer": str(tokenizer), "sequence": 64, "validation": 0.2} | data,
        "batch": {"global": 2},
        "device": "cpu",
        "metrics": {"sinks": []},
    }
    return parse_run(tree, words)


def opened(config: Config) -> Any:
    return config.data.open(config, config.data.prepare(config, lambda *_: None))
