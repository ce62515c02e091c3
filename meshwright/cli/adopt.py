"""`meshwright adopt`: the facts, the plan, the page and the check of anybody's script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from meshwright.cli.app import PREDICT, AsJson, ClusterName, app, print_result, progress


@app.command(
    rich_help_panel=PREDICT, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def adopt(
    script: Annotated[Path, Argument(metavar="SCRIPT", help="A training script, unchanged.")],
    words: Annotated[list[str] | None, Argument(metavar="...", help="The script's own words.")] = None,
    cluster: ClusterName = "dgx-h100",
    ranks: Annotated[int, Option(min=1, help="Devices; the script runs as rank 0 of so many.")] = 1,
    out: Annotated[Path | None, Option(help="The folder to make. Default: adopted, or adopted-2, ...")] = None,
    edits: Annotated[int, Option(min=0, help="How many edits of the script are tried.")] = 8,
    device: Annotated[str, Option(help="cuda; or cpu: the script finds no GPU.")] = "cuda",
    prove: Annotated[
        int | None, Option(min=2, metavar="N", help="Run the check: N processes here against one.")
    ] = None,
    single_words: Annotated[
        str | None,
        Option("--one", metavar="WORDS", help="With one process: the script's words. Default: N times the batch."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan, picture and proof of any training script.

    Runs the script unchanged for two steps on tensors without memory, and downloads nothing. Predicts memory and
    seconds on a cluster, tries edits in the words of its framework, and writes a page and a check for pytest. Every
    number is followed by what was not seen. The proof runs the script here for three steps; exit code 1: they differ.

    Example: meshwright adopt --cluster dgx-h100 --ranks 8 train.py --batch_size 8
    """
    from meshwright.output.outputs import new_path
    from meshwright.planner.adopt import proof, report
    from meshwright.planner.adopt.job import Question, checked_device
    from meshwright.planner.adopt.job import adopt as run
    from meshwright.planner.adopt.page import write_page
    from meshwright.planner.plan.cluster import load_cluster

    out = out or new_path(Path("adopted"))
    question = Question(script, tuple(words or ()), load_cluster(cluster), ranks, checked_device(device), out)
    alone = None if single_words is None else single_words.split()
    with progress() as show:
        answer = run(question, edits, show)
    written = [out / "adopted.json", out / "program.json", write_page(answer, out / "adopted.html")]
    written.append(proof.write_check(script, question.words, alone, prove or 2, out))
    if prove is None:
        print_result(report, answer, as_json, written)
        return
    if not as_json:
        print_result(report, answer, as_json, written)
    with progress() as show:
        proved = proof.prove_script(script, question.words, alone, prove, out / "proof", show)
    if as_json:
        print(json.dumps(report.as_dict(answer) | {"proof": proof.as_dict(proved), "written": list(map(str, written))}))
    else:
        proof.render(proved)
    raise typer.Exit(0 if proved.holds else 1)
