"""Edits of a script in the words of its own framework: arguments, or lines, as a diff that `patch` applies.

Each edit gives a whole new text of the script (or new words), which is run and recorded as the script was: the plan of
an edit is never derived from the plan of the script.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.planner.adopt.adopted import Adopted
from meshwright.planner.adopt.zero import changed_configs

_BATCH = re.compile(r"(per_device_train_|micro_|mini_?|train_)?(batch|bsz)(_?size)?|rows", re.IGNORECASE)


@dataclass(frozen=True)
class Edit:
    """A changed script. `source`: the whole new text, None if only words change."""

    title: str
    source: str | None
    words: tuple[str, ...]
    diff: str
    """A unified diff of the script or of the file; or the new arguments."""
    files: dict[str, str] = field(default_factory=dict)
    """New texts of files that the script reads, by path."""


def edits_of(script: Path, words: Sequence[str], adopted: Adopted, ranks: int) -> list[Edit]:
    """Return edits that may make the script faster or smaller."""
    text = script.read_text(encoding="utf-8")
    site = next((s for s in adopted.sites if s["line"] and s["models"]), None)
    found: list[Edit] = []

    def lines(title: str, made: str | None) -> None:
        if made is not None and made != text:
            diff = difflib.unified_diff(text.splitlines(True), made.splitlines(True), script.name, script.name, n=1)
            found.append(Edit(title, made, tuple(words), "".join(diff)))

    def arguments(title: str, *more: str) -> None:
        found.append(Edit(title, None, (*words, *more), "arguments: " + " ".join(more)))

    for path in adopted.configs[:1]:
        old = Path(path).read_text(encoding="utf-8")
        for title, new in changed_configs(old):
            name = Path(path).name
            diff = "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, name, n=1))
            found.append(Edit(title, None, tuple(words), diff, {path: new}))
    tree = ast.parse(text)
    if "TrainingArguments" in text:
        if ranks > 1 and not adopted.configs:
            lines("tensor-parallel plan", with_tensor_plan(text, ranks))
        _trainer(tree, text, words, arguments, lines)
    else:
        for factor in (2, 0.5):
            if (made := batch_times(text, words, factor)) is not None:
                title = f"batch x {factor:g}"
                if made[0] is None:
                    found.append(Edit(title, None, made[1], f"arguments: {made[2]}"))
                else:
                    lines(title, made[0])
        if site is not None:
            _insertions(adopted, text, site, lines, ranks)
        for title, name, value, source in (
            ("keep gathered weights", "reshard_after_forward", "False", ""),
            ("offload weights and states", "offload_policy", "CPUOffloadPolicy()", "torch.distributed.fsdp"),
        ):
            lines(title, _with_keyword(tree, text, r"(.*\.)?fully_shard", name, value, source))
    return found


def batch_times(text: str, words: Sequence[str], factor: float) -> tuple[str | None, tuple[str, ...], str] | None:
    """Scale the batch size of a script: among its words, else the first number of such a name in its text.

    Args:
        text: The script.
        words: The script's words.
        factor: New batch size over the old one.

    Returns:
        (The new text, None if only words change; the new words; the change.) None if the script has no batch size, or
        the new one would not be whole.
    """
    spaced, joined = re.compile(r"--([\w-]+)"), re.compile(r"((?:--)?([\w.-]+)=)(\d+)")
    for position, (option, value) in enumerate(pairwise([*words, ""])):
        pair = joined.fullmatch(option)
        name = pair[2] if pair else option[2:] if spaced.fullmatch(option) and value.isdigit() else ""
        if not _BATCH.fullmatch(name.rpartition(".")[2].replace("-", "_")):
            continue
        size = int(pair[3] if pair else value) * factor
        if size < 1 or size % 1:
            return None
        new = [f"{pair[1]}{int(size)}"] if pair else [option, str(int(size))]
        return None, (*words[:position], *new, *words[position + len(new) :]), " ".join(new)
    tree = ast.parse(text)
    if "TrainingArguments" in text and "HfArgumentParser" in text:
        # Trainer's own default is 8 rows.
        new = ["--per_device_train_batch_size", str(int(8 * factor))]
        return None, (*words, *new), " ".join(new)
    value_of = next(_numbers(tree, _BATCH), None)
    if value_of is None or not isinstance(value_of.value, int):
        return None
    size = value_of.value * factor
    if size < 1 or size % 1:
        return None
    rows = text.splitlines(keepends=True)
    # Columns of ast are bytes.
    row = rows[value_of.lineno - 1].encode()
    row = row[: value_of.col_offset] + str(int(size)).encode() + row[value_of.end_col_offset :]
    rows[value_of.lineno - 1] = row.decode()
    return "".join(rows), tuple(words), row.decode().strip()


def _trainer(
    tree: ast.Module, text: str, words: Sequence[str], arguments: Callable[..., None], lines: Callable[..., None]
) -> None:
    """Try arguments of transformers' Trainer: on the command line, or as keywords of TrainingArguments."""
    named = dict(zip(words, [*words[1:], ""], strict=True))
    batch = int(named.get("--per_device_train_batch_size", "8"))
    choices: list[tuple[str, tuple[tuple[str, str], ...]]] = [
        ("gradient checkpointing", (("gradient_checkpointing", "True"),)),
        ("batch x 2", (("per_device_train_batch_size", str(2 * batch)),)),
        ("batch / 2, accumulated twice", (
            ("per_device_train_batch_size", str(max(1, batch // 2))), ("gradient_accumulation_steps", "2"))),
        ("torch.compile", (("torch_compile", "True"),)),
    ]  # fmt: skip
    if "--bf16" not in words and "bf16" not in text:
        choices.append(("bf16", (("bf16", "True"),)))
    parses = "HfArgumentParser" in text
    for title, pairs in choices:
        if parses:
            arguments(title, *(word for name, value in pairs for word in (f"--{name}", value)))
        else:
            made: str | None = text
            for name, value in pairs:
                made = made and _with_keyword(ast.parse(made), made, r"(.*\.)?TrainingArguments", name, value)
            lines(title, made)


def with_tensor_plan(text: str, ranks: int) -> str | None:
    """Cut a model of transformers by its tensor-parallel plan: where the model is loaded, or else where it is made.

    Args:
        text: The script.
        ranks: The ranks of the plan.

    Returns:
        The new text; None if the script makes no model of transformers.
    """
    pattern, value = r"(\w+\.)*\w*(Model|For[A-Z]|LMHead)\w*", f"DistributedConfig(tp_size={ranks})"
    tree, source = ast.parse(text), "transformers.distributed"
    if made := _with_keyword(tree, text, rf"{pattern}\.from_pretrained", "distributed_config", value, source):
        return made
    known = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
             if (node.module or "").startswith("transformers")} | {"transformers"}  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or ast.unparse(call.func).partition(".")[0] not in known:
                continue
            if re.fullmatch(rf"{pattern}(\._?from_config)?", ast.unparse(call.func)):
                whole = ast.unparse(call)
                rows = text.encode().splitlines(keepends=True)
                first, last = call.lineno - 1, (call.end_lineno or 1) - 1
                tail = rows[last][call.end_col_offset :]
                rows[first] = rows[first][: call.col_offset] + b"whole.maybe_distribute_model(whole, plan, mesh)" + tail
                del rows[first + 1 : last + 1]
                return _before(b"".join(rows).decode(), node.lineno, [
                    f"from {source} import DistributedConfig", f"whole = {whole}",
                    f"plan, _, mesh = whole.prepare_distribute_model({value})",
                ])  # fmt: skip
    return None


def _insertions(adopted: Adopted, text: str, site: dict[str, Any], lines: Callable[..., None], ranks: int) -> None:
    """Insert lines before the optimizer is made, or a plan of tensors into the call that loads a model."""
    if (
        ranks > 1
        and not adopted.collectives
        and not adopted.configs
        and not re.search(r"\b(tp_plan|tp_size|device_map)\b", text)
    ):
        made = with_tensor_plan(text, ranks)
        # Lists of an optimizer's tensors cannot hold cut ones next to whole ones.
        class_name = rf"(.*\.)?{site['kind']}"
        lines(
            "tensor-parallel plan",
            made and (_with_keyword(ast.parse(made), made, class_name, "foreach", "False") or made),
        )
    model = site["models"][0]
    kinds = ", ".join(f'"{class_name}"' for class_name in adopted.repeated)
    layer = f'type(module).__name__.removeprefix("FSDP") in ({kinds},)'
    checkpointed = any(entry.phase == "recompute" for entry in adopted.entries)
    if kinds and not checkpointed:
        lines("recompute layers", _before(text, site["line"], [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing",
            f"apply_activation_checkpointing({model}, check_fn=lambda module: {layer})",
        ]))  # fmt: skip
        lines("offload activations", _before(text, site["line"], [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
            "    apply_activation_checkpointing, offload_wrapper)",
            f"apply_activation_checkpointing({model}, checkpoint_wrapper_fn=offload_wrapper,",
            f"                               check_fn=lambda module: {layer})",
        ]))  # fmt: skip
    compiled = any(note.kind == "program" and note.text.startswith("torch.compile") for note, _ in adopted.unseen)
    if not compiled:
        lines("torch.compile", _before(text, site["line"], [f"{model}.compile()"]))
    if not adopted.tf32:
        lines("TF32 products", _before(text, site["line"], [
            "from torch import set_float32_matmul_precision", 'set_float32_matmul_precision("high")']))  # fmt: skip
    cut = any(c.verb in ("all_gather", "reduce_scatter", "message") for c in adopted.collectives)
    summed = any(c.verb == "all_reduce" and c.phase != "backward" for c in adopted.collectives)
    if ranks > 1 and kinds and not cut and not summed and not adopted.configs:
        inner = f"getattr({model}, 'module', {model})"
        joined = [] if adopted.collectives else [
            "from torch.distributed import init_process_group", "init_process_group()"]  # fmt: skip
        lines("FSDP2", _before(text, site["line"], [
            *joined, "from torch.distributed.fsdp import fully_shard",
            f"{model} = {inner}", f"for module in {model}.modules():", f"    if {layer}:",
            "        fully_shard(module)", f"fully_shard({model})",
        ]))  # fmt: skip


def _before(text: str, line: int, new: Sequence[str]) -> str:
    """Insert lines before the statement that contains a line, with its indentation."""
    statements = [
        node for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno <= line <= (node.end_lineno or 0)
    ]  # fmt: skip
    first = min((node.lineno for node in statements), default=line)
    rows = text.splitlines(keepends=True)
    indent = re.match(r"\s*", rows[first - 1])
    assert indent is not None
    return "".join([*rows[: first - 1], *(f"{indent[0]}{row}\n" for row in new), *rows[first - 1 :]])


def _numbers(tree: ast.Module, named: re.Pattern[str]) -> Iterator[ast.Constant]:
    """Yield whole-number constants with a name: of an assignment, a keyword, a default, an argument's default."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, Any]] = []
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = value.elts if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple) else [value]
            pairs = [(n.id, v) for n, v in zip(names, values, strict=False) if isinstance(n, ast.Name)]
        elif isinstance(node, ast.keyword) and node.arg:
            pairs = [(node.arg, node.value)]
        elif isinstance(node, ast.arguments):
            pairs = [(a.arg, d) for a, d in zip(node.args[::-1], node.defaults[::-1], strict=False)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument") and node.args:
            name = str(getattr(node.args[0], "value", "")).lstrip("-").replace("-", "_")
            pairs = [(name, k.value) for k in node.keywords if k.arg == "default"]
        for name, value in pairs:
            if named.fullmatch(name) and isinstance(value, ast.Constant) and type(value.value) is int:
                yield value


def _with_keyword(
    tree: ast.Module, text: str, function: str, name: str, value: str, source: str = ""
) -> str | None:  # fmt: skip
    """Add a keyword to each call of a function; None if nothing calls it, or one call has the keyword already.

    Args:
        tree: The parsed text.
        text: The script.
        function: A pattern of the function as the script writes it.
        name: The keyword.
        value: The keyword's value, a name or a call of a name.
        source: The module with that name; empty for Python's own.
    """
    calls = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Call) and re.fullmatch(function, ast.unparse(node.func))
    ]  # fmt: skip
    if not calls or any(keyword.arg == name for call in calls for keyword in call.keywords):
        return None
    made = text.splitlines(keepends=True)
    for call in sorted(calls, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0), reverse=True):
        row = (call.end_lineno or 1) - 1
        line, column = made[row].encode(), (call.end_col_offset or 1) - 1
        comma = "" if line[:column].rstrip()[-1:] in (b"(", b",") else ", "
        made[row] = (line[:column] + f"{comma}{name}={value}".encode() + line[column:]).decode()
    if source:
        imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        first = next((n.lineno for n in imports if getattr(n, "module", "") != "__future__"), 1)
        made.insert(first - 1, f"from {source} import {value.partition('(')[0]}\n")
    return "".join(made)
