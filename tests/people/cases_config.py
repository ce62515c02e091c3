"""Cases of run files: legal and absurd runs, YAML's numbers, words for what Meshwright is not, remedies to follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.people.case import Case, Outcome, last_line, meshwright

MODEL = "{family: llama, layers: 1, hidden: 16, heads: 2, feed_forward: 32, positions: 16, vocabulary: 257}"
RUN = f"""model: {MODEL}
data: {{source: text.txt, sequence: 16}}
batch: {{global: 4}}
optimizer: {{schedule: {{warmup: 30}}}}
steps: 4
device: cpu
threads: 1
"""


def refused(name: str, report: str, right: str, *words: str, run: str = RUN, command: str = "train") -> Case:
    """Return a case of a run that is refused in the right words, before anything is written."""

    def tried(folder: Path) -> Outcome:
        (folder / "run.yaml").write_text(run)
        (folder / "text.txt").write_text("a line of words\n" * 200)
        code, text = meshwright(folder, command, "run.yaml", *words)
        return Outcome(last_line(text), code == 2 and right in text and not (folder / "out").exists())

    return Case(name, report, right, tried)


def trained(name: str, report: str, right: str, *words: str) -> Case:
    """Return a case of a run that trains, and prints the right words once in the first lines."""

    def tried(folder: Path) -> Outcome:
        (folder / "run.yaml").write_text(RUN)
        (folder / "text.txt").write_text("a line of words\n" * 200)
        code, text = meshwright(folder, "train", "run.yaml", *words)
        line = next((line for line in text.splitlines() if right in line), last_line(text))
        return Outcome(line, code == 0 and text.count(right) == 1)

    return Case(name, report, right, tried, slow=True)


def not_an_option(folder: Path) -> Outcome:
    code, text = meshwright(folder, "convert", "export", "out", "--out", "hf", "--push-to-hub")
    return Outcome(last_line(text), code == 2 and "`hf upload OWNER/NAME FOLDER`" in text)


def one_shot(tree: str, right: str) -> Callable[[Path], Outcome]:
    def tried(folder: Path) -> Outcome:
        (folder / "run.yaml").write_text(tree)
        code, text = meshwright(folder, "explain", "run.yaml")
        return Outcome(last_line(text), code == 2 and right in text)

    return tried


CASES = [
    *(
        refused(f"yaml number {text}", "YAML read `steps: 1_0` as another number.", right, f"steps={text}")
        for text, right in {
            "010": "write 10 (or 8, the octal number)", "1:30": "write 90", "1_0": "write 10", "0b11": "write 3",
        }.items()
    ),
    refused(
        "yaml rate 1:30.5", "YAML read `lr: 1_0.5` as another number.", "line 8, column 17",
        run=RUN + "validation: {x: 1:30.5}\n",
    ),
    refused("yaml rate 1_0.5", "YAML read `lr: 1_0.5` as another number.", "write 10.5", "optimizer.lr=1_0.5"),
    *(
        refused(f"scope {word}", "A word of other trainers was an unknown key.", right, word)
        for word, right in {
            "lora.rank=8": "valid: model.adapter={rank: 16}", "use_lora=true": "docs/scope.md",
            "precision=fp8": "linears of layers multiply in FP8", "device=mps": "a Mac's GPU is not used",
            "dpo=true": "TRL", "data.source=s3://b/x": "aws s3 sync", "push_to_hub=true": "hf upload",
            "sweep=4": "a loop of the shell",
        }.items()
    ),
    Case("scope --push-to-hub", "A word of other trainers was an unknown key.", "hf upload", not_an_option),
    Case(
        "remedy of layout.tensor.d", "`valid: 1 to 1` cannot be followed.", "valid: 1",
        one_shot("layout: {tensor: {kind: tesseract, q: 1, d: 2}}\n", "does the same for less; valid: 1\n"),
    ),
    Case(
        "remedy of bits.sequence", "`valid: fewer runs or parts` names no number.", "valid: 1, 2, 3",
        one_shot(
            "model: {layers: 1, hidden: 32, heads: 4, positions: 32, vocabulary: 257}\nbatch: {global: 8}\n"
            "data: {source: unicode, tokenizer: bytes, sequence: 30}\nbits: {kind: layout-free, sequence: 16}\n",
            "bits.sequence=16 does not cut data.sequence=30 into equal runs of two tokens or more; valid: 1, 2, 3, 5",
        ),
    ),
    Case(
        "missing size", "`layout.tensor.size=nothing is missing`.", "layout.tensor.size is missing",
        one_shot("layout: {tensor: megatron}\n", "layout.tensor.size is missing; valid: a whole number >= 1"),
    ),
    trained("warmup of a trial", "steps=2 was refused for a warmup of 30.", "optimizer.schedule.warmup=30: 4 steps"),
    trained(
        "vocabulary of braces", "`model={...}` keeps the tokenizer and takes 50,257 rows, without a message.",
        "model.vocabulary=50257 is 195.6 times the tokenizer's 257 tokens", "model={layers: 1, hidden: 16, heads: 2}",
    ),
    trained(
        "fields lost by braces", "A word merges and braces replace, without a message.",
        "model={...} replaces the run file's section, and family=llama", "model={layers: 1, hidden: 16, heads: 2}",
    ),
]  # fmt: skip
