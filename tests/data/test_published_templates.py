"""Published chat templates can be trained on unchanged; texts and marks equal transformers'.

The templates are read from the installed package `trl`, which ships the templates of many families.
"""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from meshwright.data.chat import ChatTemplate
from meshwright.data.dialogue_records import Dialogue, dialogue_of
from meshwright.data.messages import samples_of
from meshwright.data.template_process import DAY
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.ranks.errors import DataError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
DATES = {"date_string": "26 Jul 2024", "current_date": "2024-07-26"}
"""Variables of templates that write today's date if no date is given."""


@cache
def templates() -> dict[str, Path]:
    try:
        files = metadata.files("trl") or []
    except metadata.PackageNotFoundError:
        return {}
    return {file.stem: Path(str(file.locate())) for file in files if file.suffix == ".jinja"}


if not templates():
    pytest.skip("trl, whose chat templates these tests read, is not installed", allow_module_level=True)

ORIGINAL = sorted(name for name in templates() if not name.endswith("_training"))


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "D"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "D", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "ANSWER-city"}
CALL = {"id": "callid001", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
FOUND = {"role": "tool", "name": "look", "tool_call_id": "callid001", "content": "OTHER-found"}
TWO = [asks("OTHER-one"), says("ANSWER-one"), asks("OTHER-two"), says("ANSWER-two")]
TAGGED = [says(f"<think>\nANSWER-why-{one}\n</think>\n\nANSWER-{one}") for one in ("one", "two")]
THINKS = [says(f"ANSWER-{one}", reasoning_content=f"ANSWER-why-{one}") for one in ("one", "two")]

DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "one turn": TWO[:2],
    "two turns": TWO,
    "system": [{"role": "system", "content": "OTHER-system"}, *TWO],
    "tool": [TWO[0], says(None, tool_calls=[CALL]), FOUND, TWO[1]],
    "tool, two turns": [TWO[0], says("", tool_calls=[CALL]), FOUND, *TWO[1:]],
    "thoughts": [TWO[0], THINKS[0], TWO[2], THINKS[1]],
    "thoughts in tags": [TWO[0], TAGGED[0], TWO[2], TAGGED[1]],
}

# Templates of models with vision take parts, and DeepSeek's take arguments as a text.
PARTS = {"smolvlm", "idefics3", "llava_next"}
TEXT_ARGUMENTS = {"deepseekv3", "deepseek_r1_distill"}
# transformers drops a content that is null, and these templates need a content.
EMPTY = {"deepseekv3", "deepseekv3_training"}
CANNOT = {"deepseek_r1_distill", "deepseek_r1_distill_training"}
"""Templates that write calls only next to a content of null, so that transformers cannot render the calls."""

WITHOUT_SYSTEM = {"gemma"}
WITHOUT_TOOLS = {
    "cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl",
    "smolvlm",
}  # fmt: skip
KEEPS_ALL_THOUGHTS = {"muse_glimmer", "qwen3_8"}
"""Templates that keep all thoughts by the key reasoning_content."""
CUTS_TAGS = {
    "deepseek_r1_distill", "deepseekv3", "glm4moe", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl",
    "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink",
    "qwen3_5_think", "qwen3_6",
}  # fmt: skip
"""Templates that cut thoughts at `</think>`."""
REFUSED = (
    {(name, "system") for name in WITHOUT_SYSTEM}
    | {(name, case) for name in WITHOUT_TOOLS for case in ("tool", "tool, two turns")}
    | {(name, "thoughts") for name in ORIGINAL if name not in KEEPS_ALL_THOUGHTS}
    | {(name, "thoughts in tags") for name in CUTS_TAGS}
)
"""Refused templates and cases; all others can be trained on."""


@cache
def template_of(name: str) -> ChatTemplate:
    text = templates()[name].read_text(encoding="utf-8")
    return ChatTemplate(text, name, SPECIAL, {key: day for key, day in DATES.items() if key in text})


def record(case: str) -> Dialogue:
    tools = {"tools": TOOLS} if case.startswith("tool") else {}
    # A null key counts as a missing key.
    messages = [{"name": None, "tool_calls": None, **message} for message in DIALOGUES[case]]
    return dialogue_of({"messages": messages, **tools}, "here", list(SPECIAL.values()))


@cache
def byte_tokens() -> Any:
    transformers = pytest.importorskip("transformers")
    library = Tokenizer.from_str(byte_tokenizer().to_json())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL)


def theirs(name: str, dialogue: Dialogue, **options: Any) -> Any:
    """Return transformers' text of a dialogue, or the tokens."""
    family = name.removesuffix("_training")
    messages = json.loads(json.dumps(dialogue.messages))
    for message in messages:
        if family in PARTS:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            if name in TEXT_ARGUMENTS:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            if not message.get("content") and name in EMPTY:
                message["content"] = ""
    template = template_of(name)
    return byte_tokens().apply_chat_template(
        messages, tools=dialogue.tools, chat_template=template.text, **template.arguments, **options
    )


def without_today(text: str) -> str:
    return text.replace(date.today().isoformat(), DAY.isoformat())


def check(text: str, spans: list[tuple[int, int]], dialogue: Dialogue) -> None:
    """Check that the learned text is all of the assistant's text, in order, and nothing else."""
    learned = [text[begin:end] for begin, end in spans]
    rest = "".join(
        text[end:begin] for (_, end), (begin, _) in zip([(0, 0), *spans], [*spans, (len(text), 0)], strict=True)
    )
    assert "OTHER" not in "".join(learned)
    assert "ANSWER" not in rest
    for message, part in zip((one for one in dialogue.messages if one["role"] == "assistant"), learned, strict=True):
        said = [str(message.get("reasoning_content", "")), *str(message.get("content") or "").splitlines()]
        said += [ARGUMENTS["city"]] if message.get("tool_calls") else []
        place = 0
        for line in said if not message.get("tool_calls") else said[-1:]:
            if line not in ("<think>", "</think>"):  # gemma's and gpt-oss' thoughts have other marks
                place = part.index(line, place) + len(line)


@pytest.mark.parametrize("case", DIALOGUES)
@pytest.mark.parametrize("name", ORIGINAL)
def test_dialogues_are_trained_on_or_refused_by_the_text_that_is_lost(name: str, case: str) -> None:
    template, dialogue = template_of(name), record(case)
    if (name, case) in REFUSED:
        with pytest.raises(DataError) as refusal:
            template.dialogue(dialogue)
        told = str(refusal.value)
        assert told.startswith("here: ")
        lost = "ANSWER-city" if case.startswith("tool") else "ANSWER-why-one"
        assert f"{name} does not take it: " in told or lost in told
        assert "TypeError" not in told
        field = {"thoughts": "reasoning_content", "thoughts in tags": "content"}.get(case)
        assert field is None or f"{name} leaves out the {field} of message 2, " in told
        return
    text, spans = template.dialogue(dialogue)
    if name not in CANNOT or not case.startswith("tool"):
        assert text == without_today(theirs(name, dialogue, tokenize=False))
    check(text, spans, dialogue)


@pytest.mark.parametrize("turns", ["last", "each"])
@pytest.mark.parametrize("name", ["qwen3", "gemma4_v5", "glm4moe", "nemotron_3_nano", "lfm2_2_5_v2", "qwen3_5_think"])
def test_thoughts_of_earlier_turns_are_learned_by_other_turns(name: str, turns: Any) -> None:
    template, dialogue = template_of(name), record("thoughts")
    with pytest.raises(DataError, match=r"data\.turns=last learns the last answer only, data\.turns=each makes"):
        template.dialogue(dialogue)
    learned = []
    for sample in samples_of(dialogue, turns):
        text, [(begin, end)] = template.dialogue(sample)
        assert text == theirs(name, sample, tokenize=False)
        learned.append(text[begin:end])
    wanted = ["one", "two"][-1 if turns == "last" else 0 :]
    assert len(learned) == len(wanted)
    for part, word in zip(learned, wanted, strict=True):
        assert part.index(f"ANSWER-why-{word}") < part.rindex(f"ANSWER-{word}")
        assert "OTHER" not in part


@pytest.mark.parametrize("case", ["one turn", "two turns", "system", "tool"])
@pytest.mark.parametrize("name", sorted(set(templates()) - set(ORIGINAL)))
def test_marks_of_templates_are_transformers(name: str, case: str) -> None:
    if (name.removesuffix("_training"), case) in REFUSED or (name in CANNOT and case == "tool"):
        pytest.skip("transformers renders no such message of this family")
    dialogue = record(case)
    text, spans = template_of(name).dialogue(dialogue)
    assert text == without_today(theirs(name, dialogue, tokenize=False))
    wanted = theirs(name, dialogue, return_dict=True, return_assistant_tokens_mask=True)
    masked = zip(wanted["input_ids"], wanted["assistant_masks"], strict=True)
    learned = "".join(text[begin:end] for begin, end in spans)
    assert learned
    assert learned == byte_tokens().decode([token for token, one in masked if one])


LEARNED = {
    ("qwen3", "two turns"): ["ANSWER-one<|im_end|>\n", "<think>\n\n</think>\n\nANSWER-two<|im_end|>\n"],
    ("qwen3", "tool"): [
        '<tool_call>\n{"name": "look", "arguments": {"city": "ANSWER-city"}}\n</tool_call><|im_end|>\n',
        "<think>\n\n</think>\n\nANSWER-one<|im_end|>\n",
    ],
    ("qwen2_5", "two turns"): ["ANSWER-one<|im_end|>\n", "ANSWER-two<|im_end|>\n"],
    ("qwen2_5", "tool"): [
        '<tool_call>\n{"name": "look", "arguments": {"city": "ANSWER-city"}}\n</tool_call><|im_end|>\n',
        "ANSWER-one<|im_end|>\n",
    ],
    ("llama3_1", "two turns"): ["ANSWER-one<|eot_id|>", "ANSWER-two<|eot_id|>"],
    ("llama3_1", "tool"): ['{"name": "look", "parameters": {"city": "ANSWER-city"}}<|eot_id|>', "ANSWER-one<|eot_id|>"],
    ("deepseekv3", "two turns"): ["ANSWER-one<｜end▁of▁sentence｜>", "ANSWER-two<｜end▁of▁sentence｜>"],
    ("phi3", "two turns"): ["ANSWER-one<|end|>\n", "ANSWER-two<|end|>\n</s>"],
    ("gptoss", "two turns"): [
        "<|channel|>final<|message|>ANSWER-one<|end|>", "<|channel|>final<|message|>ANSWER-two<|return|>",
    ],
    ("gptoss", "tool"): [
        ' to=functions.look<|channel|>commentary json<|message|>{"city": "ANSWER-city"}<|call|>',
        "<|channel|>final<|message|>ANSWER-one<|return|>",
    ],
    ("gemma3", "two turns"): ["ANSWER-one<end_of_turn>\n", "ANSWER-two<end_of_turn>\n"],
}  # fmt: skip


@pytest.mark.parametrize("name, case", LEARNED)
def test_learned_parts_end_as_a_turn_does(name: str, case: str) -> None:
    text, spans = template_of(name).dialogue(record(case))
    assert [text[begin:end] for begin, end in spans] == LEARNED[name, case]
