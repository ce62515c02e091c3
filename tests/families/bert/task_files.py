"""Small files in the forms of MNLI, QQP, SQuAD and RACE, with answers that follow from the texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLOURS = ("red", "green", "blue", "white")
MNLI_COLUMNS = (
    "index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse",
    "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label",
)  # fmt: skip


def make_mnli(path: Path, count: int = 24, *more: str) -> Path:
    rows = ["\t".join(MNLI_COLUMNS)]
    for number in range(count):
        label = ("contradiction", "entailment", "neutral", "-")[number % 4]
        second = {"contradiction": "it is not so", "entailment": "it is so", "neutral": "who knows", "-": "hm"}[label]
        fields = [str(number), "1", "1e", "fiction", *["( x )"] * 4, f'the "{COLOURS[number % 4]}" one', second]
        rows.append("\t".join([*fields, label, label]))
    path.write_text("\n".join([*rows, *more]) + "\n")
    return path


def make_qqp(path: Path, count: int = 20) -> Path:
    rows = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
    for number in range(count):
        same = number % 2
        rows.append(f"{number}\t1\t2\twhat is {number}?\t{'what' if same else 'where'} is {number}?\t{same}")
    path.write_text("\n".join(rows) + "\n")
    return path


def squad_paragraph(number: int, *, version: int = 1) -> dict[str, Any]:
    colour = COLOURS[number % 4]
    passage = f"House {number} is old. Its door is {colour}, and its roof is flat. Nobody lives there."
    answer = {"text": colour, "answer_start": passage.index(colour)}
    asked: list[dict[str, Any]] = [{"id": f"q{number}", "question": "What is the door?", "answers": [answer]}]
    if version == 2:
        asked[0]["is_impossible"] = False
        asked.append({"id": f"n{number}", "question": "Who built it?", "answers": [], "is_impossible": True})
    return {"context": passage, "qas": asked}


def make_squad(path: Path, count: int = 12, *, version: int = 1, **changes: Any) -> Path:
    paragraphs = [squad_paragraph(number, version=version) for number in range(count)]
    paragraphs[0]["qas"][0] |= changes
    path.write_text(json.dumps({"version": f"{version}", "data": [{"title": "Houses", "paragraphs": paragraphs}]}))
    return path


def make_race(folder: Path, count: int = 8, **changes: Any) -> Path:
    for number in range(count):
        entry = {
            "article": f"Tom has a {COLOURS[number % 4]} hat. It is number {number}.",
            "questions": ["Tom's hat is _ .", "What does Tom have?"],
            "options": [list(COLOURS), ["a cat", "a hat", "a car", "a bee"]],
            "answers": ["ABCD"[number % 4], "B"],
            "id": f"{'high' if number % 2 else 'middle'}{number}.txt",
        }
        path = folder / ("high" if number % 2 else "middle") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(entry | (changes if number == 0 else {})))
    return folder
