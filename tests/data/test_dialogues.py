"""Records in the forms of data sets become the messages of these forms, tools and weights included.

A template's text, and the learned parts of the text, equal transformers'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import dump_tree, parse_run
from meshwright.data.chat import ChatTemplate, template_for, template_of
from meshwright.data.dialogue_records import Dialogue
from meshwright.data.dialogues import read_dialogues
from meshwright.data.messages import flagged
from meshwright.data.packed import IDS, SAID
from meshwright.data.tokenizer import load_tokenizer
from meshwright.ranks.errors import ConfigError, DataError
from tests.data.dialogues import config_for, make_tokenizer, opened

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"name": "add", "arguments": {"x": 1, "y": "zwölf"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
USED: list[dict[str, Any]] = [
    {"role": "user", "content": "add one"},
    CALLING,
    {"role": "tool", "content": "13", "name": "add", "tool_call_id": "a1"},
    {"role": "assistant", "content": "It is thirteen."},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "Yes."},
]
"""A dialogue with a call of a tool."""

# As in Qwen's and Llama's templates: tools first, calls as JSON, a tool's turn as the user's.
BEGIN = "{% if tools %}<|turn|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|over|>\n{% endif %}"
CALLS = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endif %}"
)
TURN = "<|turn|>{{ 'user' if m.role == 'tool' else m.role }}\n"
SAYS = "{% if m.content %}{{ m.content }}{% endif %}" + CALLS + "<|over|>"
PLAIN = BEGIN + "{% for m in messages %}" + TURN + SAYS + "\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
MARKED = BEGIN + "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}{% generation %}" + SAYS
MARKED += "{% endgeneration %}{% else %}" + SAYS + "{% endif %}{{ '\n' }}{% endfor %}"
MARKED += "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"


def read(folder: Path, *records: Any) -> list[Dialogue]:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return list(read_dialogues(str(path), ["<|over|>"]))


def messages_of(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


ASKED = messages_of(("user", "ask"), ("assistant", "answer"))


@pytest.mark.parametrize(
    "record, messages",
    [
        ({"instruction": "ask", "output": "answer"}, ASKED),
        ({"instruction": "ask", "input": "", "output": "answer", "id": 7}, ASKED),
        ({"instruction": "ask", "input": "this", "output": "answer"},
         messages_of(("user", "ask\nthis"), ("assistant", "answer"))),
        ({"instruction": "ask", "output": "answer", "system": "be brief", "history": [["a", "b"]]},
         [*messages_of(("system", "be brief"), ("user", "a"), ("assistant", "b")), *ASKED]),
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]}, ASKED),
        ({"id": "x", "system": "s", "conversations": [{"from": "user", "value": "ask"},
                                                      {"from": "assistant", "value": "answer"}]},
         [*messages_of(("system", "s")), *ASKED]),
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "function_call", "value": json.dumps(CALL)},
                            {"from": "observation", "value": "13"}, {"from": "gpt", "value": "answer"}]},
         [ASKED[0], {"role": "assistant", "tool_calls": CALLING["tool_calls"]},
          *messages_of(("tool", "13")), ASKED[1]]),
        ({"messages": USED, "tools": TOOLS}, USED),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, ASKED),
        ({"prompt": "ask", "completion": "answer"}, ASKED),
        ({"messages": [one | {"name": None, "tool_calls": None, "weight": None} for one in ASKED], "tools": None,
          "conversations": None}, ASKED),
        ({"conversations": ASKED}, ASKED),
        ({"messages": [ASKED[0], {"role": "assistant", "content": None, "function_call": CALL},
                       {"role": "function", "name": "add", "content": "13"}, ASKED[1]]},
         [ASKED[0], CALLING, {"role": "tool", "content": "13", "name": "add"}, ASKED[1]]),
        ({"messages": [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, ASKED[1]]},
         [ASKED[0], CALLING, ASKED[1]]),
        ({"messages": [ASKED[0] | {"weight": 0}, ASKED[1] | {"tool_calls": []}]}, ASKED),
        ({"messages": [ASKED[0] | {"id": "m"}, ASKED[1] | {"timestamp": 1}]},
         [ASKED[0] | {"id": "m"}, ASKED[1] | {"timestamp": 1}]),
        ({"messages": [ASKED[0] | {"content": ["a", {"type": "text", "text": "sk"}]}, ASKED[1]]},
         [ASKED[0] | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "sk"}]}, ASKED[1]]),
    ],
    ids=[
        "alpaca", "no input", "input", "history", "sharegpt", "system", "calls", "tools", "prompt", "texts", "nulls",
        "roles in conversations", "function_call", "bare call", "empty calls", "keys", "parts",
    ],
)  # fmt: skip
def test_forms_are_messages(record: dict[str, Any], messages: list[dict[str, Any]], tmp_path: Path) -> None:
    (dialogue,) = read(tmp_path, record)
    assert dialogue.messages == messages
    assert dialogue.unlearned == frozenset()
    assert dialogue.tools == record.get("tools")


def test_tools_may_be_a_text_of_json(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]
    texts = [{"conversations": turns, "tools": tools} for tools in (json.dumps(TOOLS), "", "[]")]
    assert [dialogue.tools for dialogue in read(tmp_path, *texts)] == [TOOLS, None, None]


def test_answers_of_a_prompt_are_read_only(tmp_path: Path) -> None:
    (dialogue,) = read(tmp_path, {"prompt": [*ASKED, ASKED[0]], "completion": ASKED[1:]})
    assert (dialogue.messages, dialogue.unlearned) == ([*ASKED, *ASKED], {1})


def learned_of(template: str, messages: list[dict[str, Any]]) -> list[str]:
    text, spans = ChatTemplate(template, "FILE").dialogue(Dialogue(messages, "here"))
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    "arguments", [CALL["arguments"], json.dumps(CALL["arguments"]), json.dumps(CALL["arguments"], indent=2)]
)
def test_arguments_are_as_the_template_takes_them(arguments: Any) -> None:
    calling = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }
    wanted = '<call>add {"x": 1, "y": "zwölf"}</call><|over|>\n'
    assert learned_of(PLAIN, [USED[0], calling]) == [wanted]
    of_texts = PLAIN.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    # A template of texts gets a text unchanged.
    kept = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    assert learned_of(of_texts, [USED[0], calling]) == [f"<call>add {kept}</call><|over|>\n"]


@pytest.mark.parametrize("text", ["{x", "[1]", '"a"', "3"])
def test_arguments_that_are_no_object_are_named(text: str) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": text}}]}
    with pytest.raises(DataError, match=r"here message 2: the arguments of add are no JSON"):
        learned_of(PLAIN, [USED[0], calling])


@pytest.mark.parametrize(
    "content", ['a <b> "q" c\\n', "<|turn|>user", "{{ 7 * 7 }}", "x\ufffd", "ä\n\n- b", "hi", "assistant"]
)
@pytest.mark.parametrize("form", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content | tojson }}",
                                  "{{ m.content | e }}", "{{ m.content | upper }}"])  # fmt: skip
def test_answers_are_found_however_they_are_written(form: str, content: str) -> None:
    """The last turn has a mark that others lack, so that no shorter dialogue is a prefix."""
    template = "{% for m in messages %}[{{ m.role }}]" + form + "{{ '<last>' if loop.last else '<over>' }}{% endfor %}"
    messages = messages_of(("user", content), ("assistant", content), ("user", content), ("assistant", content))
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    text, spans = ChatTemplate(template, "FILE").dialogue(Dialogue(messages, "here"))
    first, second = text.split("[assistant]")[1:]
    answers = [text[begin:end] for begin, end in spans]
    # The end of the first turn is no end of a dialogue, so the turn's end is known only from the next turn.
    assert answers in ([first.partition("[user]")[0], second], [first.partition("<over>[user]")[0], second])


def test_keys_without_a_meaning_are_told_once(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    records = ({"messages": [ASKED[0] | {"content": f"ask {n}", "id": n}, ASKED[1] | {"time": n}]} for n in range(20))
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    opened_data = opened(config_for(tmp_path, source, make_tokenizer(tmp_path / "tokenizer")))
    assert sum(note.endswith("; the template reads no id, time of a message") for note in opened_data.notes) == 1


def test_arguments_of_a_template_reach_training_and_are_checked(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    lines = (json.dumps({"messages": [ASKED[0] | {"content": f"ask {n}"}, ASKED[1]]}) + "\n" for n in range(20))
    source.write_text("".join(lines))
    path = make_tokenizer(tmp_path / "tokenizer", "{{ tone }}" + PLAIN)
    given = config_for(tmp_path, source, path, template_arguments={"tone": "grave"})
    assert template_for(given.data).render(ASKED, "here").startswith("grave<|turn|>user")
    assert parse_run(json.loads(json.dumps(dump_tree(given)))) == given
    with pytest.raises(ConfigError, match=r"data.template_arguments.mood=x has no effect: .* has no such word"):
        config_for(tmp_path, source, path, template_arguments={"mood": "x"})
    with pytest.raises(ConfigError, match=r"data.template_arguments.messages=x is a variable of each dialogue"):
        config_for(tmp_path, source, path, template_arguments={"messages": "x"})


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": 0}])
def test_messages_may_be_read_only(mark: dict[str, Any], tmp_path: Path) -> None:
    answer = ASKED[1] | mark
    shared = {"from": "gpt", "value": "answer"} | mark
    (one, two, none) = read(
        tmp_path,
        {"messages": [ASKED[0], answer, *ASKED]},
        {"conversations": [shared, {"from": "human", "value": "ask"}, {"from": "gpt", "value": "b", "weight": 1}]},
        {"messages": [ASKED[0], ASKED[1] | {"weight": 1, "train": True}]},
    )
    assert (one.unlearned, two.unlearned, none.unlearned) == ({1}, {0}, frozenset())
    assert one.messages[1] == ASKED[1]  # the template sees no weight


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by difference", "marked"])
@pytest.mark.parametrize("unlearned", [(), (1,), (3,), (1, 5)])
def test_texts_and_masks_are_transformers(template: str, unlearned: tuple[int, ...], tmp_path: Path) -> None:
    """Calls are the assistant's, and learned; tool turns are not. Unlearned messages keep the other masks unchanged."""
    transformers = pytest.importorskip("transformers")
    path = make_tokenizer(tmp_path, template)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), template_of(str(path), None)
    text, spans = ours.dialogue(Dialogue(USED, "here", frozenset(unlearned), TOOLS))
    assert text == theirs.apply_chat_template(USED, tools=TOOLS, tokenize=False)
    assert "zwölf" in text
    marked = theirs.apply_chat_template(
        USED, tools=TOOLS, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = flagged(load_tokenizer(path), text, spans)
    assert (tokens & IDS).tolist() == marked["input_ids"]
    said = [bool(flag) for flag in (tokens & SAID)]
    wanted = [bool(one) for one in marked["assistant_masks"]]
    if template == PLAIN:  # a message ends with the line end, which the mark leaves out
        wanted = [one or (at > 0 and wanted[at - 1]) for at, one in enumerate(wanted)]
    runs = [at for at, one in enumerate(wanted) if one and not wanted[at - 1]]
    for place, message in zip(runs, (1, 3, 5), strict=True):
        for at in range(place, len(wanted)):
            if not wanted[at]:
                break
            wanted[at] = message not in unlearned
    assert said == wanted


def test_a_template_that_marks_calls_apart_has_no_weights(tmp_path: Path) -> None:
    twice = MARKED.replace(SAYS + "{% endgeneration %}", "{{ m.content }}{% endgeneration %}{% generation %}<|over|>"
                           "{% endgeneration %}")  # fmt: skip
    ours = template_of(str(make_tokenizer(tmp_path, twice)), None)
    assert len(ours.dialogue(Dialogue(ASKED, "here"))[1]) == 2
    with pytest.raises(DataError, match=r"here: .* marks 2 parts of 1 messages of the assistant, so that weights of"):
        ours.dialogue(Dialogue(ASKED, "here", frozenset({1})))


@pytest.mark.parametrize("record", [
    {"messages": ASKED}, {"instruction": "ask", "input": "now", "output": "answer"},
    {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]},
])  # fmt: skip
def test_forms_need_no_word(record: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    lines = (json.dumps(record).replace("ask", f"ask {number}") + "\n" for number in range(20))
    source.write_text("".join(lines))
    config = config_for(tmp_path, source, make_tokenizer(tmp_path / "tokenizer"))
    assert config.data.kind == "messages"
    assert "dialogues in" in opened(config).notes[2]


def test_a_text_beside_an_instruction_is_a_text(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps({"instruction": "ask", "output": "answer", "text": "ask: answer"}) + "\n")
    assert parse_run({"data": {"source": str(source)}}).data.kind == "text"


@pytest.mark.parametrize(
    "record, message",
    [
        ({"messages": [ASKED[0], ASKED[1] | {"weight": 0.5}]}, "message 2: weight=0.5 is neither 0 nor 1"),
        ({"messages": [ASKED[0], ASKED[1] | {"weight": 0, "train": True}]}, "weight=0 and train=True say the opposite"),
        ({"messages": [ASKED[0], ASKED[1] | {"weight": 0}]}, "line 1: no message of the assistant is to be learned"),
        ({"messages": [ASKED[0] | {"weight": 1}, ASKED[1]]}, "message 1: weight=1 at a message of the user: the assis"),
        ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": []}]}, "its tool_calls are no list of calls"),
        ({"messages": [ASKED[0], ASKED[1] | {"tool_calls": [{"name": "f"}]}]}, "a call of its tool_calls names no fun"),
        ({"messages": [ASKED[0], {"role": "assistant"}]}, "message 2: `content` holds no string but None"),
        ({"messages": ASKED, "tools": "[{"}, "line 1: its tools are no JSON"),
        ({"messages": ASKED, "tools": ["add"]}, "line 1: its tools are no list of JSON schemas"),
        ({"messages": ASKED, "tools": [{"name": "<|over|>"}]}, "tools: spells '<|over|>', which the tokenizer reads"),
        ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "<|over|>"}}]}]}, "message 2: its content spells '<|over|>'"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "message 1: from='bot' is none of system, user, "),
        ({"conversations": [{"speaker": "user", "text": "a"}]}, "message 1: has the keys speaker, text; wanted role"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "its function_call is no JSON"),
        ({"conversations": []}, "line 1: has no list of messages"),
        ({"instruction": "a", "output": ""}, "message 2: the assistant says nothing"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "its history is no list of pairs"),
        ({"instruction": 1, "output": "b"}, "line 1: `instruction` holds no string but 1"),
    ],
)  # fmt: skip
def test_records_that_would_lose_something_are_named(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        read(tmp_path, record)
    assert message in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
