"""Pairs of answers in every form of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.config import Config
from tests.data.dialogues import WORDS, config_for


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(number: int) -> tuple[list[dict[str, str]], str, str]:
    ask, good, bad = (WORDS[(number * step) % len(WORDS)] for step in (1, 3, 5))
    return [said("system", "be brief"), said("user", f"say {ask} {number}")], f"{good} {number}", f"{bad}"


def explicit(number: int) -> dict[str, Any]:
    prompt, good, bad = pair(number)
    return {"prompt": prompt, "chosen": [said("assistant", good)], "rejected": [said("assistant", bad)]}


def implicit(number: int) -> dict[str, Any]:
    prompt, good, bad = pair(number)
    return {"chosen": [*prompt, said("assistant", good)], "rejected": [*prompt, said("assistant", bad)], "score": 2}


def as_texts(number: int) -> dict[str, Any]:
    prompt, good, bad = pair(number)
    return {"prompt": prompt[1]["content"], "chosen": good, "rejected": bad}


FORMS = {"texts": as_texts, "messages": explicit, "implicit": implicit}


def make_pairs(folder: Path, form: str = "messages", count: int = 30, *more: dict[str, Any]) -> Path:
    path = folder / "pairs.jsonl"
    records = [*(FORMS[form](number) for number in range(count)), *more]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def on_pairs(folder: Path, source: Path, tokenizer: Path, *words: str, **data: Any) -> Config:
    return config_for(folder, source, tokenizer, "loss.kind=dpo", *words, **data)
