"""Cases of dialogues: published forms of records and templates, from a file to the learned text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.data.packed import DIALOGUE, IDS, SAID, open_packed
from meshwright.data.tokenizer import byte_tokenizer
from tests.people.case import Case, Outcome, last_line, meshwright

RUN = """
model: {{family: llama, layers: 1, hidden: 16, heads: 2, feed_forward: 16, positions: 512, vocabulary: 264}}
data: {{source: chat.jsonl, tokenizer: tokenizer/tokenizer.json, sequence: 512, validation: 0.2{more}}}
batch: {{global: 2}}
steps: 1
device: cpu
threads: 1
metrics: {{sinks: []}}
"""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As in Qwen3's template: thoughts, empty thoughts too, are written in the last answer alone.
LAST_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if loop.last and m.role == 'assistant' %}<think>\n{{ parts[0].replace('<think>', '').strip()"
    " if parts | length > 1 else '' }}\n</think>\n\n{% endif %}{{ parts[-1].lstrip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ARGUMENTS = CHATML.replace("c.function.arguments | tojson", "'' + c.function.arguments")
EMPTY = "<think>\n\n</think>\n\n"

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TWO = [ASK, SAY, {"role": "user", "content": "and"}, {"role": "assistant", "content": "no"}]
THOUGHTS = [ASK, {"role": "assistant", "content": "<think>why</think>yes"}, TWO[2], TWO[3]]
FUNCTION = {"name": "f", "arguments": {"city": "x"}}
AS_TEXT = {"name": "f", "arguments": '{"city": "x"}'}


def calls(function: dict[str, Any]) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function",
            "function": function}]}, {"role": "tool", "tool_call_id": "c1", "content": "sun"}, SAY]  # fmt: skip


def write(folder: Path, record: dict[str, Any], template: str = CHATML, more: str = "", end: str = "") -> None:
    """Write a run of twenty records that differ in the question."""
    beside = folder / "tokenizer"
    beside.mkdir()
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_json())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (beside / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (beside / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [json.dumps(record).replace('"hi"', f'"hi {number}"') + "\n" for number in range(20)]
    (folder / "chat.jsonl").write_text("".join(lines) + end)
    (folder / "run.yaml").write_text(RUN.format(more=more))


def learned(
    record: dict[str, Any], *wanted: str, template: str = CHATML, more: str = "", end: str = ""
) -> Callable[[Path], Outcome]:
    """Return a case of a run with the wanted distinct learned texts, in order."""

    def run(folder: Path) -> Outcome:
        write(folder, record, template, more, end)
        code, text = meshwright(folder, "data", "prepare", "run.yaml", "--out", "prepared")
        if code:
            return Outcome(last_line(text), holds=False)
        packed = open_packed(folder / "prepared")
        texts: dict[str, None] = {}
        said: list[int] = []
        for token in [*packed.tokens("train").tolist(), DIALOGUE]:
            if said and not token & SAID:
                texts[packed.tokenizer.decode(said)] = None
                said = []
            said += [token & IDS] if token & SAID else []
        return Outcome(repr(list(texts)), list(texts) == list(wanted))

    return run


def refused(record: dict[str, Any], *words: str, template: str = CHATML, more: str = "") -> Callable[[Path], Outcome]:
    """Return a case of a run that ends in a sentence with the words."""

    def run(folder: Path) -> Outcome:
        write(folder, record, template, more)
        code, text = meshwright(folder, "data", "prepare", "run.yaml", "--out", "prepared")
        whole = " ".join(text.split())
        return Outcome(whole[-300:], code != 0 and "Traceback" not in text and all(word in whole for word in words))

    return run


def exported(folder: Path) -> Outcome:
    """The template in a trained run's export."""
    write(folder, {"messages": TWO}, LAST_THINKS)
    for words in (("train", "run.yaml", "--out", "out"), ("convert", "export", "out", "--out", "hf")):
        code, text = meshwright(folder, *words)
        if code:
            return Outcome(last_line(text), holds=False)
    kept = json.loads((folder / "hf/tokenizer_config.json").read_text())["chat_template"]
    return Outcome("the same" if kept == LAST_THINKS else kept[:80], kept == LAST_THINKS)


NULLS = {"name": None, "tool_calls": None, "weight": None}
LEARN_TWO = ("yes<|im_end|>\n", "no<|im_end|>\n")


def hostile(name: str, template: str, words: Sequence[str]) -> Case:
    right = "a sentence that names the bound"
    return Case(f"chat template: {name}", "A template loops, grows or recurses.", right,
                refused({"messages": TWO}, *words, template=template))  # fmt: skip


CASES = [
    Case("chat: the last answer thinks", "Qwen3's template writes an empty thought in the last answer.",
         "both answers are learned", learned({"messages": TWO}, LEARN_TWO[0], EMPTY + LEARN_TWO[1],
                                             template=LAST_THINKS)),
    Case("chat: lost thoughts", "A template leaves out thoughts of earlier answers.", "the text and the remedy",
         refused({"messages": THOUGHTS}, "message 2", "why", "data.turns=last", "data.turns=each",
                 template=LAST_THINKS)),
    Case("chat: turns each", "Thoughts of earlier answers are to be learned.", "each answer with its thought",
         learned({"messages": THOUGHTS}, "<think>\nwhy\n</think>\n\nyes<|im_end|>\n", EMPTY + LEARN_TWO[1],
                 template=LAST_THINKS, more=", turns: each")),
    Case("chat: turns last", "The last answer alone is learned.", "the last answer",
         learned({"messages": THOUGHTS}, EMPTY + LEARN_TWO[1], template=LAST_THINKS, more=", turns: last")),
    Case("chat: null keys", "Writers of jsonl fill missing keys with null.", "as without the keys",
         learned({"messages": [one | NULLS for one in TWO], "tools": None}, *LEARN_TWO)),
    Case("chat: a blank last line", "A file ends with a blank line.", "as without the line",
         learned({"messages": TWO}, *LEARN_TWO, end="\n")),
    Case("chat: ids and times", "Messages have ids and timestamps.", "as without the keys",
         learned({"messages": [one | {"id": "m1", "timestamp": 1.5} for one in TWO]}, *LEARN_TWO)),
    Case("chat: parts", "A content is a list of parts.", "their texts",
         learned({"messages": [one | {"content": [{"type": "text", "text": one["content"]}]} for one in TWO]},
                 *LEARN_TWO)),
    Case("chat: an image", "A content has an image.", "a sentence",
         refused({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAY]},
                 "message 1", "'image_url'")),
    Case("chat: developer", "OpenAI's newer role of instructions.", "the system's",
         learned({"messages": [{"role": "developer", "content": "be brief"}, *TWO]}, *LEARN_TWO)),
    Case("chat: arguments as text", "OpenAI's API writes arguments as JSON text.", "as the object",
         learned({"messages": calls(AS_TEXT)}, '{"name": "f", "arguments": {"city": "x"}}<|im_end|>\n', LEARN_TWO[0])),
    Case("chat: arguments as an object", "A record has arguments as an object.", "the object",
         learned({"messages": calls(FUNCTION)}, '{"name": "f", "arguments": {"city": "x"}}<|im_end|>\n',
                 LEARN_TWO[0])),
    Case("chat: a template of texts", "DeepSeek's template wants arguments as text.", "the text",
         learned({"messages": calls(FUNCTION)}, '{"name": "f", "arguments": {"city": "x"}}<|im_end|>\n', LEARN_TWO[0],
                 template=TEXT_ARGUMENTS)),
    Case("chat: no JSON", "Arguments are no JSON.", "a sentence",
         refused({"messages": calls({"name": "f", "arguments": "{city"})}, "the arguments of f are no JSON")),
    Case("chat: sharegpt", "ShareGPT's form.", "both answers",
         learned({"conversations": [{"from": "human" if one["role"] == "user" else "gpt", "value": one["content"]}
                                    for one in TWO]}, *LEARN_TWO)),
    Case("chat: prompt and completion", "TRL's form.", "the completion",
         learned({"prompt": TWO[:3], "completion": TWO[3:]}, LEARN_TWO[1])),
    Case("chat: template exported", "The export keeps the published template.", "the same", exported, slow=True),
    hostile("loops", "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, ["processor time"]),
    hostile("a long text", "{{ 'x' * 10**11 }}", ["MiB of memory"]),
    hostile("recursion", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ["levels deep"]),
    hostile("a wide format", "{{ '%1000000000d'|format(1) }}", ["the template takes more than"]),
]  # fmt: skip
