"""`parity register LIBRARY`: try every plan in a library's configurations or functions, with a check for each plan.

A line of JSON is written at the end of each check, so that an interrupted register can be continued. The page has a row
for each model type and plan.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from meshwright.parity.check import PROGRAM, ParityCheck, ParityResult, run_check
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.foreign import parse_json
from meshwright.ranks.streams import say

PASSES, FAILS, DOES_NOT_RUN, RAISES = "passes", "fails", "does not run", "raises"
PLAIN = "plain"
RAISED = re.compile(r"raises under the plan: \w+ at (?P<place>[\w.]+:\d+).*")
"""An error raised only with the plan; `place`: file and line of the library."""
LOST = re.compile(r"(?P<name>[\w.]+) is another after saving and reading under the plan")
"""A tensor with other values after saving and reading the model's own checkpoint."""
CHECKPOINT = "checkpoint"
PACKAGES = {"transformers": "transformers", "torchtitan": "torchtitan", "automodel": "nemo_automodel"}
"""Packages by library name on the command line of `register`."""
CHECKS = {"torchtitan": "registered_titan", "automodel": "registered_automodel"}
"""Modules with checks of libraries that have functions as plans: plans, types, and the plans of each type."""
SHARED = (
    "transformers.modeling_utils", "transformers.distributed", "transformers.models.auto.modeling_auto",
    "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "transformers.trainer",
    "transformers.generation.utils", "transformers.models.llama.modeling_llama", "meshwright.parity.tiny",
)  # fmt: skip
"""Modules that all checks import."""


@dataclass(frozen=True)
class Entry:
    """Line of a register.

    `verdict`: passes, fails or does not run. `module`, `kind`: of the first mistake. `text`: the sentence, or the
    reason for a missing comparison. `unproved`: parameters with zero gradients in the reference.
    """

    model_type: str
    plan: str
    verdict: str
    module: str
    kind: str
    text: str
    unproved: tuple[str, ...]
    seconds: float
    library: str
    torch: str

    @staticmethod
    def of(model_type: str, result: ParityResult, library: str, refuses: bool = False) -> Entry:
        """Make a line from a check's result. `refuses`: an error under the plan is a right refusal."""
        finding, verdict, module, category, text = result.finding, PASSES, "", "", ""
        if result.error:
            verdict, text = DOES_NOT_RUN, reason_of(result.error)
            if (raised := RAISED.search(result.error)) is not None:
                text = raised[0]
                if not refuses:
                    verdict, module, category = FAILS, raised["place"], RAISES
            elif (lost := LOST.search(result.error)) is not None:
                verdict, module, category, text = FAILS, lost["name"].rpartition(".")[0], CHECKPOINT, lost[0]
        elif finding is not None:
            verdict, module, category, text = FAILS, finding.module, finding.kind, finding.text
        elif result.failed:
            verdict, text = FAILS, result.verdict
        return Entry(
            model_type, result.check.name, verdict, module, category, text, result.dead, round(result.seconds, 2),
            f"{library} {version(library)}", version("torch"),
        )  # fmt: skip


def reason_of(error: str) -> str:
    """Return the last line of an error that names an exception, without the launcher's own lines."""
    lines = [line.strip() for line in error.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (raised or [line for line in lines if re.search(r"\w", line)])[-1][:300]


def register_parser() -> argparse.ArgumentParser:
    """Make the parser of `register`."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} register",
        description="Prove the parallel plans of a library's models, each on a tiny model with random weights of its "
        "own class, CPU processes, float32. Exit code 1 if a plan fails.",
        epilog=f"Example: {PROGRAM} register transformers --plans tensor --only qwen --out register",
    )
    parser.add_argument("library", choices=tuple(PACKAGES), help="the installed library")
    parser.add_argument(
        "--plans", nargs="+", default=["tensor"], metavar="PLAN",
        help="tensor, tensor4, tensor4-heads, expert, tensor-expert, fsdp, hsdp, tensor-fsdp (tensor); "
        "torchtitan: tensor, fsdp, tensor-fsdp, expert; automodel: tensor, fsdp, tensor-fsdp",
    )  # fmt: skip
    parser.add_argument(
        "--conditions", nargs="+", default=["plain", "accumulated", "clipped"], metavar="CONDITION",
        help="transformers' step: plain, accumulated (microbatches of unequal numbers of labels), clipped (these three "
        "without the option); lora (peft's adapters), resumed (saved in several files and read again), "
        "resumed-distributed (each rank saves its parts)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="NAME", help="the model types that have this in their names")
    parser.add_argument("--out", type=Path, default=Path("register"), metavar="FOLDER", help="of lines and page")
    return parser


def register_plans(arguments: argparse.Namespace, command: str) -> int:
    """Try the plans selected by the arguments, write the page, and return the exit code.

    Raises:
        ConfigError: The library is missing, or no plan fits.
    """
    library = PACKAGES[arguments.library]
    if find_spec(library) is None:
        raise ConfigError.of("LIBRARY", arguments.library, "is not installed", f"pip install {library}")
    if arguments.library in CHECKS:
        checks = list(function_checks(CHECKS[arguments.library], arguments.plans, arguments.only or ""))
    else:
        checks = list(checks_of(arguments.plans, arguments.only or "", arguments.conditions))
    if not checks:
        raise ConfigError.of(
            "--only", arguments.only, "is in no model type with such a plan", "a part of a type's name"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = arguments.out / "register.jsonl"
    done = known_entries(lines, library)
    entries, left_out = list[Entry](), Counter[str]()
    for index, (model_type, check, refuses) in enumerate(checks, 1):
        plain = done.get((model_type, check.name.partition(",")[0]))
        if "," in check.name and plain is not None and (plain.verdict == DOES_NOT_RUN or plain.kind == RAISES):
            left_out[check.name] += 1
            continue  # for the same reason as the plain step
        if (model_type, check.name) not in done:
            entry = Entry.of(model_type, run_check(check), library, refuses)
            done[model_type, check.name] = entry
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
            say(f"{index} of {len(checks)}: {model_type}, {entry.plan}: {line_of(entry)}", file=sys.stderr)
        entries.append(done[model_type, check.name])
    page = write_register(entries, arguments.out / "register.html", command)
    for line in table_of(entries, left_out):
        say(line)
    for entry in entries:
        if entry.verdict == FAILS:
            say(f"  {entry.model_type}, {entry.plan}: {line_of(entry)}")
    say(f"written: {lines}, {page}")
    return int(any(entry.verdict == FAILS for entry in entries))


def checks_of(
    plans: Sequence[str], only: str, conditions: Sequence[str] = (PLAIN,)
) -> Iterator[tuple[str, ParityCheck, bool]]:
    """Yield (model type, check, True if the plan may refuse) for each type with a plan of the kind, and each condition.

    Raises:
        ConfigError: A kind of plan or a condition is unknown, or the package of a condition is missing.
    """
    # Imported here, since this module imports transformers.
    from meshwright.parity import registered

    for option, words, known in (
        ("--plans", plans, registered.PLANS), ("--conditions", conditions, registered.CONDITIONS)
    ):  # fmt: skip
        for name in (name for name in words if name not in known):
            raise ConfigError.of(option, name, "is not known", ", ".join(known))
    if "lora" in conditions and find_spec(registered.PEFT) is None:
        raise ConfigError.of("--conditions", "lora", "needs peft, which is not installed", "pip install peft")
    preload = (*SHARED, registered.PEFT) if "lora" in conditions else SHARED
    kinds, types = list(registered.PLANS), registered.TYPES
    for name in plans:
        plan = registered.PLANS[name]
        for type_index, model_type in enumerate(types):
            if only not in model_type or not registered.has_plan(model_type, plan):
                continue
            for condition_index, condition in enumerate(registered.CONDITIONS):
                if condition in conditions:
                    case = (kinds.index(name) * len(registered.CONDITIONS) + condition_index) * len(types) + type_index
                    yield model_type, ParityCheck(
                        name_of(name, condition), Path(registered.__file__), tuple(plan.axes.items()), "float32",
                        case=case, words=model_type, preload=preload,
                    ), plan.refuses  # fmt: skip


def name_of(plan: str, condition: str) -> str:
    """Name a kind of plan under a condition."""
    return plan if condition == PLAIN else f"{plan}, {condition}"


def function_checks(name: str, plans: Sequence[str], only: str) -> Iterator[tuple[str, ParityCheck, bool]]:
    """Yield the checks of a library with functions as plans, from the module `name`.

    Raises:
        ConfigError: A kind of plan is unknown.
    """
    module = import_module(f"{__package__}.{name}")
    for plan in plans:
        if plan not in module.PLANS:
            raise ConfigError.of("--plans", plan, "is no kind of plan", ", ".join(module.PLANS))
        row = list(module.PLANS).index(plan) * len(module.TYPES)
        for case, model_type in enumerate(module.TYPES):
            if only in model_type and module.carries(model_type, plan):
                yield model_type, ParityCheck(
                    plan, Path(str(module.__file__)), tuple(module.PLANS[plan].axes.items()), "float32",
                    case=row + case, words=model_type, preload=module.SHARED,
                ), False  # fmt: skip


def known_entries(lines: Path, library: str) -> dict[tuple[str, str], Entry]:
    """Read the lines written with the installed versions, by model type and plan."""
    found: dict[tuple[str, str], Entry] = {}
    if lines.is_file():
        for line in lines.read_text(encoding="utf-8").splitlines():
            told = parse_json(line)
            entry = Entry(**told | {"unproved": tuple(told["unproved"])})
            if (entry.library, entry.torch) == (f"{library} {version(library)}", version("torch")):
                found[entry.model_type, entry.plan] = entry
    return found


def line_of(entry: Entry) -> str:
    """Write a verdict in one line."""
    where = f" at {entry.module} ({entry.kind})" if entry.kind else ""
    return f"{entry.verdict}{where}{f': {entry.text}' if entry.text else ''}"


def counts_of(entries: Sequence[Entry]) -> Mapping[str, Counter[str]]:
    """Count entries by plan and verdict."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        counts.setdefault(entry.plan, Counter())[entry.verdict] += 1
    return counts


def table_of(entries: Sequence[Entry], left_out: Mapping[str, int]) -> Iterator[str]:
    """Yield a row for each plan in Markdown, and a line for all. `left_out`: by plan, the number of types left out
    because the plain step does not run or raises."""
    yield "| plan | tried | passes | fails | does not run | as plain | median s | s |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for plan, found in counts_of(entries).items():
        seconds = [entry.seconds for entry in entries if entry.plan == plan]
        numbers = (sum(found.values()), *(found[verdict] for verdict in (PASSES, FAILS, DOES_NOT_RUN)), left_out[plan])
        yield f"| {plan} | {' | '.join(map(str, numbers))} | {median(seconds):.1f} | {sum(seconds):.0f} |"
    without = [entry for entry in entries if entry.verdict == DOES_NOT_RUN]
    judged = len(entries) - sum(RAISED.search(entry.text) is None for entry in without)
    yield (
        f"{judged} of {len(entries)} have a verdict ({100 * judged / len(entries):.1f} %): a plan that may refuse and "
        f"does has one; {sum(entry.seconds for entry in entries):.0f} s"
    )


def write_register(entries: Sequence[Entry], path: Path, command: str) -> Path:
    """Write a page with a row for each entry; one HTML file that needs nothing else."""
    # Imported here: a check in a terminal needs no templates.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    order = {FAILS: 0, DOES_NOT_RUN: 1, PASSES: 2}
    page = templates.get_template("register.html").render(
        entries=sorted(entries, key=lambda entry: (order[entry.verdict], entry.plan, entry.model_type)),
        counts=counts_of(entries), command=command, verdicts=tuple(order),
    )  # fmt: skip
    path.write_text(page, encoding="utf-8")
    return path
