"""A checkpoint in lm-evaluation-harness: found by name, run in batches, with the run's chat template.

The harness's tasks give the scores of our own functions.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.continuation import Opening, continuations
from meshwright.tools.evaluate.likelihood import likelihoods, text_likelihoods
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Sampling, generate_text, generate_tokens, whole_characters
from tests.data.dialogues import MARKED, PLAIN, dialogue, make_tokenizer
from tests.tools.evaluate.tiny import rigged_checkpoint, tiny_checkpoint, tiny_config

FOLLOWS = {ord(" "): ord("c"), ord("c"): ord("a"), ord("a"): ord("t"), ord("b"): ord(" ")}
"""The rigged model's next byte after a letter: `b cat`."""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def needs_harness() -> Any:
    return pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: "meshwright[harness]"')


def write_task(folder: Path, name: str, rows: Sequence[dict[str, Any]], **fields: Any) -> None:
    """Write a task of the harness, with the questions in a file next to the task."""
    folder.mkdir(exist_ok=True)
    source = folder / f"{name}.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(source)}}}
    (folder / f"{name}.yaml").write_text(json.dumps(task | {"test_split": "test"} | fields))  # JSON is YAML


def write_tasks(folder: Path) -> None:
    """Write tasks of three questions, two known to the rigged model; of texts; and of continuations."""
    asked = [("see b", ["at", "cat"], 1), ("b", ["cat", "dog"], 0), ("see b", ["dog", "cat"], 0)]
    rows = [{"asked": text, "choices": choices, "right": right} for text, choices, right in asked]
    write_task(
        folder, "choices", rows, output_type="multiple_choice", doc_to_text="asked", doc_to_choice="choices",
        doc_to_target="right", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    write_task(
        folder, "texts", [{"text": text} for text in ("b cat b cat", "to be or not to be, that is the question")],
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="text", metric_list=[
            {"metric": "word_perplexity"}],
    )  # fmt: skip
    write_task(
        folder, "says", [{"asked": "b", "right": " ca"}, {"asked": "ab", "right": " ca"}, {"asked": "b", "right": "x"}],
        output_type="generate_until", doc_to_text="asked", doc_to_target="right",
        generation_kwargs={"until": ["t"], "max_gen_toks": 8}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip


def test_the_model(tmp_path: Path) -> None:
    needs_harness()
    from lm_eval.api.model import LM
    from lm_eval.api.registry import get_model

    from meshwright.tools.harness import CheckpointLM

    assert get_model("meshwright") is CheckpointLM
    model = CheckpointLM(rigged_checkpoint(tmp_path, FOLLOWS), "cpu", batch_size=1)
    assert isinstance(model, LM)
    asked = [SimpleNamespace(args=("see b", " cat")), SimpleNamespace(args=("see b", " cab"))]
    assert [greedy for _, greedy in model.loglikelihood(asked)] == [True, False]
    assert len(model.loglikelihood_rolling([SimpleNamespace(args=("b cat",))])) == 1
    options = {"until": ["t"], "max_gen_toks": 8}
    assert model.generate_until([SimpleNamespace(args=("b", options))]) == [" ca"]
    with pytest.raises(ConfigError, match=r"batch_size=0 is no number of requests; valid: auto, or 1 or more"):
        CheckpointLM(tmp_path, "cpu", batch_size=0)
    with pytest.raises(DataError, match="has no chat template"):
        model.chat_template(True)


@pytest.mark.parametrize("batch", ["auto", 1])
def test_tasks_give_what_our_functions_give(batch: str | int, tmp_path: Path) -> None:
    lm_eval = needs_harness()
    from lm_eval.tasks import TaskManager

    import meshwright.tools.harness  # noqa: F401 - which makes the name known

    write_tasks(tmp_path / "tasks")
    checkpoint = rigged_checkpoint(tmp_path / "run", FOLLOWS)
    told = lm_eval.simple_evaluate(
        model="meshwright", model_args={"path": str(tmp_path / "run")}, batch_size=batch, device="cpu",
        tasks=["choices", "texts", "says"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
    )["results"]  # fmt: skip
    assert told["choices"]["acc,none"] == pytest.approx(2 / 3)
    assert told["says"]["exact_match,none"] == pytest.approx(2 / 3)
    texts = [json.loads(line)["text"] for line in (tmp_path / "tasks" / "texts.jsonl").read_text().splitlines()]
    ours = -sum(text_likelihoods(load_text(checkpoint, "cpu"), texts)) / sum(len(text.split()) for text in texts)
    assert told["texts"]["word_perplexity,none"] == pytest.approx(math.exp(ours), rel=1e-9)


def test_the_command(tmp_path: Path) -> None:
    needs_harness()
    write_tasks(tmp_path / "tasks")
    rigged_checkpoint(tmp_path / "run", FOLLOWS)

    def answer(*words: str) -> Any:
        base = ["eval", str(tmp_path / "run"), "--device", "cpu", "--data", str(tmp_path / "tasks"), *words]
        return CliRunner().invoke(app, base)

    told = json.loads(answer("--task", "lm-eval:choices,says", "--json").output.splitlines()[-1])
    assert told["choices acc"] == pytest.approx(2 / 3)
    assert told["says exact_match"] == pytest.approx(2 / 3)
    assert told["checkpoint"].endswith("step-1")
    table = answer("--task", "lm-eval:choices", "--samples", "2").output
    assert "choices acc  1.0000" in table
    assert "is no task in" in str(answer("--task", "lm-eval:nothing").exception)
    assert "--beams=2 has no effect on --task lm-eval:choices" in str(
        answer("--task", "lm-eval:choices", "--beams", "2").exception
    )
    assert "--chat=True has no effect on --task perplexity; valid: --task lm-eval:NAME" in str(
        answer("--chat").exception
    )


@pytest.mark.long
def test_the_harness_own_command_line(tmp_path: Path) -> None:
    needs_harness()
    write_tasks(tmp_path / "tasks")
    rigged_checkpoint(tmp_path / "run", FOLLOWS)
    words = ["--model", "meshwright", "--model_args", f"path={tmp_path / 'run'}", "--tasks", "choices", "--device"]
    words += ["cpu", "--include_path", str(tmp_path / "tasks")]
    command = [sys.executable, "-m", "meshwright.tools.harness", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "|choices" in ran.stdout
    assert "0.6667" in ran.stdout


def test_continuations_are_those_of_each_prompt_alone(tmp_path: Path) -> None:
    """Prompts have several lengths; some end early by a token or a word, and some exceed the context."""
    loaded = load_text(tiny_checkpoint(tmp_path, tiny_config(sequence=24, positions=24)), "cpu")
    texts = ["b", "abc", "abd", "to be", "or not", "is the", "a question, isn't it", "", "zzzzz", "xyzzy"]
    asked = [Opening(loaded.tokenizer.encode(text), 9) for text in texts]
    alone = ["".join(generate_text(loaded, text, 9, Sampling())) for text in texts]
    assert len(set(alone)) > 4
    for rows in (None, 1, 2):
        assert continuations(loaded, asked, rows) == alone
    word = next(text for text in alone if len(text) > 3)[2:4]
    stopped = [Opening(one.prompt, 9, (word,)) for one in asked]
    assert continuations(loaded, stopped) == [text.partition(word)[0] for text in alone]
    end = loaded.tokenizer.encode(alone[1])[-1]
    with_end = [Opening(one.prompt, 9, (), (end,)) for one in asked]
    one_by_one = [
        "".join(whole_characters(loaded.tokenizer, ids, generate_tokens(loaded, ids, 9, Sampling(), (end,))))
        for ids in (list(one.prompt) for one in asked)
    ]
    assert one_by_one != alone
    assert continuations(loaded, with_end) == one_by_one
    drawn = Opening(asked[1].prompt, 9, (), (), Sampling(0.8))
    assert continuations(loaded, [drawn]) == ["".join(generate_text(loaded, texts[1], 9, Sampling(0.8)))]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_chat_templates_are_transformers(template: str, tmp_path: Path) -> None:
    needs_harness()
    transformers = pytest.importorskip("transformers")
    from meshwright.tools.harness import CheckpointLM

    make_tokenizer(tmp_path / "tokenizer", template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    (tmp_path / "own.jinja").write_text(template.replace("{{ bos_token }}", ""))
    model = CheckpointLM(rigged_checkpoint(tmp_path / "run", FOLLOWS), "cpu", template=str(tmp_path / "own.jinja"))
    said = dialogue(1)
    assert model.chat_template(True) == (tmp_path / "own.jinja").read_text()
    wanted = theirs.apply_chat_template(
        said[:2], chat_template=model.chat_template(True), tokenize=False, add_generation_prompt=True
    )
    assert model.apply_chat_template(said[:2]) == wanted
    begun = theirs.apply_chat_template(
        said, chat_template=model.chat_template(True), tokenize=False, continue_final_message=True
    )
    assert model.apply_chat_template(said, add_generation_prompt=False) == begun
    assert model.tokenizer_name.startswith("meshwright-")
    with pytest.raises(ConfigError, match="is a template's name, and a checkpoint has one template"):
        model.chat_template("default")


def test_tasks_are_asked_by_the_chat_template(tmp_path: Path) -> None:
    """The harness's prompts, rendered, are as likely as our function says of the template's text, marks included."""
    lm_eval = needs_harness()
    from lm_eval.tasks import TaskManager

    from meshwright.tools.harness import CheckpointLM

    write_tasks(tmp_path / "tasks")
    (tmp_path / "own.jinja").write_text(MARKED.replace("{{ bos_token }}", ""))
    checkpoint = tiny_checkpoint(tmp_path / "run", tiny_config(sequence=64, positions=64))
    model = CheckpointLM(checkpoint, "cpu", template=str(tmp_path / "own.jinja"))
    told = lm_eval.simple_evaluate(
        model=model, tasks=["choices"], apply_chat_template=True, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
    )  # fmt: skip
    samples = told["samples"]["choices"]
    assert len(samples) == 3
    for sample in samples:
        before = f"<|turn|>user\n{sample['doc']['asked']}<|over|>\n<|turn|>assistant\n"
        asked = [(before, choice) for choice in sample["doc"]["choices"]]
        ours = likelihoods(load_text(checkpoint, "cpu"), asked, marked=True)
        assert [one[0][0] for one in sample["resps"]] == pytest.approx([one.log for one in ours], rel=1e-12)
    assert told["config"]["model"] == "CheckpointLM"
