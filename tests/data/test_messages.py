"""Dialogues become samples: rendered by the tokenizer's template, with labels on the assistant's text alone.

Each dialogue is alone. Texts and masks equal the output of transformers' apply_chat_template.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from meshwright.compute.model import IGNORED
from meshwright.config import parse_run
from meshwright.data.chat import ChatTemplate, template_of
from meshwright.data.dialogue_records import Dialogue
from meshwright.data.messages import flagged
from meshwright.data.packed import IDS, SAID
from meshwright.data.packing import pack
from meshwright.data.tokenizer import load_tokenizer
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.generate import Request, generate
from meshwright.training.convert import export_folder
from meshwright.training.job import train
from tests.data.dialogues import MARKED, PLAIN, config_for, dialogue, make_dialogues, make_tokenizer, opened
from tests.training.convert.folders import saved
from tests.training.runs import lines_of

transformers = pytest.importorskip("transformers")

FORGETS = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by difference", "marked"])
def test_texts_and_masks_are_transformers(tmp_path: Path, template: str) -> None:
    path = make_tokenizer(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer, ours = load_tokenizer(path), template_of(str(path), None)
    for number in range(6):
        messages = dialogue(number)
        text, spans = ours.dialogue(Dialogue(messages, "here"))
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        tokens = flagged(tokenizer, text, spans)
        wanted = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=template == MARKED)
        assert (tokens & IDS).tolist() == wanted["input_ids"]
        said = ((tokens & SAID) != 0).tolist()
        if template == MARKED:
            assert said == [bool(one) for one in wanted["assistant_masks"]]
        else:
            answers = [f"{m['content'].strip()}<|over|>\n" for m in messages if m["role"] == "assistant"]
            told = tokenizer.decode([token for token, one in zip(wanted["input_ids"], said, strict=True) if one])
            assert told == "".join(answers)


def test_samples_are_dialogues_kept_apart(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer")
    config = config_for(tmp_path, make_dialogues(tmp_path), path, sequence=128)
    assert (config.data.kind, config.data.separate) == ("messages", True)
    data = opened(config)
    batch, tokenizer = data.train.samples(0, len(data.train)), load_tokenizer(path)
    said, seen = set(), 0
    for row in range(len(data.train)):
        starts, labels, tokens = (batch[name][row] for name in ("documents", "labels", "tokens"))
        for start in starts.unique().tolist():
            places = (starts == start).nonzero().flatten()
            assert batch["positions"][row, places].tolist() == list(range(len(places)))
            learned = labels[places][labels[places] != IGNORED]
            if not len(learned):  # the padding
                assert set(tokens[places].tolist()) == {tokenizer.end}
                continue
            following = [*tokens[places].tolist()[1:], int(labels[places][-1])]
            assert all(one in (IGNORED, two) for one, two in zip(labels[places].tolist(), following, strict=True))
            said.add(tokenizer.decode(learned.tolist()))
            seen += 1
    answers = {
        "".join(f"{m['content'].strip()}<|over|>\n" for m in dialogue(number) if m["role"] == "assistant")
        for number in range(40)
    }
    assert said <= answers
    assert 28 <= seen <= 36, "a fifth is held out"
    assert "dialogues in" in data.notes[2]
    places = batch["labels"].numel()
    assert data.notes[2].endswith(f", {100 * int((batch['labels'] != IGNORED).sum()) / places:.0f} % learned")


def test_what_is_longer_than_a_window_is_counted_and_cut_or_left_out(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer")
    long = {"role": "user", "content": "stone " * 200}
    lines = [
        json.dumps({"messages": [*dialogue(0)[:2], long, {"role": "assistant", "content": f"yes {n}"}]})
        for n in range(9)
    ] + [json.dumps({"messages": [long, {"role": "assistant", "content": f"no {n}"}]}) for n in range(9)]
    source = make_dialogues(tmp_path, *lines)
    note = opened(config_for(tmp_path, source, path)).notes[-1]
    assert "longer than data.sequence=64 left out (data.overlong=cut cuts them)" in note
    note = opened(config_for(tmp_path, source, path, "data.overlong=cut")).notes[-1]
    assert "longer than data.sequence=64 cut, " in note
    assert "of them left out, whose beginnings have nothing of the assistant" in note
    with pytest.raises(DataError, match=r"no dialogue fits data.sequence=4; the longest takes \d+"):
        opened(config_for(tmp_path, make_dialogues(tmp_path), path, sequence=4))


GOOD = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 3: is no JSON: "),
        ('{"text": "a"}', "line 3: has no list of messages; wanted"),
        (json.dumps({"messages": [GOOD]}), "line 3: has no message of the assistant: there is nothing to learn"),
        (json.dumps({"messages": [GOOD | {"role": "bot"}]}), "line 3 message 1: role='bot' is none of system, user"),
        (json.dumps({"messages": [GOOD | {"content": 1}]}), "line 3 message 1: `content` holds no string but 1"),
        (json.dumps({"messages": [GOOD, ANSWER | {"content": " "}]}), "line 3 message 2: the assistant says nothing"),
        (json.dumps({"messages": [GOOD | {"content": "a<|over|>"}, ANSWER]}), "its content spells '<|over|>', which"),
    ],
)
def test_bad_dialogues_are_named_and_nothing_is_written(tmp_path: Path, line: str, message: str) -> None:
    path = make_tokenizer(tmp_path / "tokenizer")
    config = config_for(tmp_path, make_dialogues(tmp_path, line, count=2), path, kind="messages")
    with pytest.raises(DataError) as refusal:
        pack(config.data.corpus(), config.data.tokenizer, tmp_path / "out", 0.2)
    assert message in str(refusal.value)
    assert str(tmp_path / "chat.jsonl") in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_templates_that_do_not_say_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here: t leaves out the content of message 2, .*; data.turns=last learns"):
        ChatTemplate(FORGETS, "t").dialogue(Dialogue(dialogue(1)[1:], "here"))
    with pytest.raises(DataError, match=r"here: t does not take it: only users"):
        ChatTemplate("{{ raise_exception('only users') }}", "t").dialogue(Dialogue(dialogue(0), "here"))
    with pytest.raises(DataError, match=r"t: is no chat template: "):
        ChatTemplate("{% for %}", "t").dialogue(Dialogue(dialogue(0), "here"))
    with pytest.raises(DataError, match=r"here: t does not take it: .*unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", "t").dialogue(Dialogue(dialogue(0), "here"))
    with pytest.raises(DataError, match=r"here: t leaves out the content of message 2, .*; leave it out"):
        ChatTemplate("{{ messages[0].content }}", "t").dialogue(Dialogue(dialogue(0), "here"))


def test_a_run_without_a_template_is_refused(tmp_path: Path) -> None:
    source, path = make_dialogues(tmp_path), make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"data.tokenizer=.* gives no chat template: .* has no chat template; wanted"):
        config_for(tmp_path, source, path)
    with pytest.raises(ConfigError, match=r"data.template=nowhere gives no chat template: nowhere: is no such file"):
        config_for(tmp_path, source, path, template="nowhere")
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert len(opened(config_for(tmp_path, source, path, template=str(tmp_path / "own.jinja"))).train)
    with pytest.raises(ConfigError, match=r"data.kind=messages"):
        parse_run({"model": {"family": "bert"}, "data": {"kind": "messages", "source": str(source)}})


def test_dialogues_are_prepared_once_for_many_runs(tmp_path: Path) -> None:
    """Prepared dialogues are read without the tokenizer and the template, and with other lengths of windows."""
    source, path = make_dialogues(tmp_path), make_tokenizer(tmp_path / "tokenizer")
    given, out = config_for(tmp_path, source, path), tmp_path / "prepared"
    given.data.pack(given, out, lambda *_: None)
    read = config_for(tmp_path, out, path)
    batches = [opened(config).train.samples(0, 6) for config in (given, read)]
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])
    path.unlink()
    alone = config_for(tmp_path, out, Path("bytes"), sequence=48)
    assert (alone.data.kind, opened(alone).train.samples(0, 1)["tokens"].shape) == ("messages", (1, 48))
    with pytest.raises(ConfigError, match=r"data.template=t has no effect: data.source=.* was prepared by another"):
        config_for(tmp_path, out, Path("bytes"), template="t")


def test_fine_tuning_from_weights(tmp_path: Path) -> None:
    """`model.from` takes the folder's tokenizer and template.

    The first loss is transformers' loss of the same dialogues, each alone, over the assistant's tokens. Two layouts
    train equally.
    """
    settings = transformers.LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    theirs = saved(transformers.LlamaForCausalLM, settings, tmp_path / "hf")
    make_tokenizer(tmp_path / "hf")
    tree = {
        "model": {"from": str(tmp_path / "hf")},
        "data": {"source": str(make_dialogues(tmp_path)), "sequence": 96, "validation": 0.2},
        "batch": {"global": 4, "micro": 2},
        "precision": {"level": "O0", "dtype": "float64"},
        "metrics": {"sinks": []},
        "layout": {"transport": "torch"},  # forked ranks import no module again
        "device": "cpu",
        "steps": 2,
    }
    config = parse_run(tree)
    assert config.data.kind == "messages"
    train(config, tmp_path / "one", resume=False)
    batch = opened(config).train.samples(0, 4)
    total, count = 0.0, 0
    for row in range(4):
        for start in batch["documents"][row].unique().tolist():
            places = batch["documents"][row] == start
            tokens, labels = batch["tokens"][row, places], batch["labels"][row, places]
            if (labels != IGNORED).any():
                with torch.no_grad():
                    total += float(F.cross_entropy(theirs(tokens[None]).logits[0], labels, reduction="sum"))
                count += int((labels != IGNORED).sum())
    export_folder(tmp_path / "one", tmp_path / "out")
    there, here = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "out"))
    said = [{"role": "user", "content": "how many ranks?"}, {"role": "assistant", "content": "two"}]
    assert here.apply_chat_template(said) == there.apply_chat_template(said)
    assert here.apply_chat_template(said, tokenize=False) == there.apply_chat_template(said, tokenize=False) != ""
    answered = generate(tmp_path / "one", Request("say apple 1", 8, chat=True), "cpu")
    template = template_of(str(tmp_path / "hf" / "tokenizer.json"), None)
    before, closing = template.question("say apple 1", "here")
    assert before == here.apply_chat_template([{"role": "user", "content": "say apple 1"}],
                                              tokenize=False, add_generation_prompt=True)  # fmt: skip
    assert closing.startswith("<|over|>")
    assert answered.begun == ""
    assert "<|over|>" not in "".join(answered.parts)
    losses = [line["loss"] for line in lines_of(tmp_path / "one")]
    assert losses[0] == pytest.approx(total / count, rel=1e-5)
    layout = "layout={context: {size: 2, kind: ring}, pipeline: {size: 2}, transport: torch}"
    train(parse_run(tree, [layout]), tmp_path / "four", resume=False)
    assert [line["loss"] for line in lines_of(tmp_path / "four")] == pytest.approx(losses, rel=1e-10)
