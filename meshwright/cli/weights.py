"""Commands on corpora and trained weights, and the doctor."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from meshwright.cli.app import (
    OPERATE,
    RUN,
    AsJson,
    Beams,
    CheckpointFolder,
    Context,
    DeviceOption,
    LengthPenalty,
    NewFolder,
    OptionalRun,
    Overrides,
    app,
    convert_app,
    data_app,
    print_result,
    progress,
)  # fmt: skip
from meshwright.output.outputs import free_path
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.streams import PatientStream, say, visible

if TYPE_CHECKING:
    from meshwright.data.section import TokenSection


@data_app.command("prepare")
def data_prepare(
    out: NewFolder,
    run: OptionalRun = None,
    overrides: Overrides = None,
    source: Annotated[
        str | None,
        Option(
            help="stdlib (if not given), unicode, a text/jsonl/json/csv/tsv/parquet file, a folder, hub:OWNER/NAME."
        ),
    ] = None,
    tokenizer: Annotated[str | None, Option(help="bytes (if not given), bpe:SIZE, or a tokenizer.json file.")] = None,
    validation: Annotated[float | None, Option(help="The share of the text that is held out; 0.05; 0: none.")] = None,
    split: Annotated[str | None, Option(help="The split of a folder or data set of several: train, test.")] = None,
    column: Annotated[str | None, Option(help="The key or column that has the text; text.")] = None,
    pairs: Annotated[
        bool, Option("--pairs", help="Pairs of texts: a tsv or jsonl file, two files, or stdlib's.")
    ] = False,
    target: Annotated[str | None, Option(metavar="FILE", help="The second file of pairs, line by line.")] = None,
    languages: Annotated[
        tuple[str, str] | None, Option(metavar="FROM TO", help="The keys of a jsonl file's pairs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a corpus into packed files that runs read.

    The same corpus gives the same bytes. With RUN, the run's data is prepared, of any kind.

    Example: meshwright data prepare --source wiki.train.txt --tokenizer bpe:8192 --out data/wiki

    Dialogues and tasks of a run: meshwright data prepare chat.yaml --out data/chat
    """
    if run is not None:
        given = {"source": source, "tokenizer": tokenizer, "validation": validation, "pairs": pairs or None}
        others = {"target": target, "languages": languages, "split": split, "column": column}
        for name, value in (given | others).items():
            if value is not None:
                raise ConfigError.of(f"--{name}", value, "is the run file's to say", f"data.{name}=... behind RUN")
        _prepare_run(run, overrides or (), out, as_json)
        return
    from meshwright.data.packing import pack
    from meshwright.data.told import read_lines

    section = _asked_texts({"source": source, "split": split, "column": column}, pairs, target, languages)
    with progress() as show:
        corpus = pack(section.corpus(), tokenizer or "bytes", out, 0.05 if validation is None else validation, show)
    if as_json:
        print(json.dumps(corpus.header.model_dump()))
        return
    say("\n".join(read_lines(corpus)))
    for subset in ("train", "validation"):
        facts = corpus.header.facts(subset)
        paired = corpus.header.kind == "pairs"
        count = f"{facts.documents // 2:,} pairs" if paired else f"{facts.documents:,} documents"
        say(f"{subset}: {facts.tokens:,} tokens, {count}, {facts.words:,} words")
    say(f"{out}: vocabulary {corpus.tokenizer.vocabulary_size}; train on it with data.source={out}")


def _asked_texts(
    texts: dict[str, str | None], pairs: bool, target: str | None, languages: tuple[str, str] | None
) -> TokenSection:
    """Return the data section of options. Raises ConfigError for one without an effect."""
    from meshwright.config.registry import entries
    from meshwright.data.text_section import TextData

    given = {name: value for name, value in texts.items() if value is not None}
    section: TokenSection = TextData.model_validate(given)
    if pairs or target is not None or languages is not None:
        # The registry is asked, since the kind of data that packs pairs belongs to a family and may be missing.
        kinds = (data_kind for data_kind, section in entries("data").items() if section.packs == "pairs")
        if (data_kind := next(kinds, None)) is None:
            raise ConfigError.of("--pairs", True, "are records of no kind of data that is here", "texts")
        if "column" in given:
            raise ConfigError.of("--column", given["column"], "has no effect on pairs", "--languages FROM TO")
        section = entries("data")[data_kind].model_validate(
            {"kind": data_kind, **given, "target": target, "languages": languages}
        )
    for name in given.keys() - {"source"} if section.source in section.source_names else ():
        raise ConfigError.of(f"--{name}", given[name], f"has no effect on {section.source}", "with a file or a folder")
    return section


def _prepare_run(run: Path, overrides: Sequence[str], out: Path, as_json: bool) -> None:
    """Prepare the data of a run once, for later runs with `data.source` set to `out`."""
    from meshwright.config.load import parse_run, read_run

    file = read_run(run, overrides)
    config = parse_run(file.tree, file.words)
    with progress() as show:
        folder = config.data.pack(config, out, show)
        # Opened as a run opens the data, so that a mistake shows here and not in a job.
        notes = config.data.open(config, folder).notes
    if as_json:
        print(json.dumps({"out": str(out), "kind": config.data.kind, "notes": notes}))
        return
    say("\n".join((*notes, f"{out}: {config.data.kind}; train on it with data.source={out}")))


@app.command(rich_help_panel=OPERATE)
def doctor(
    nodes: Annotated[bool, Option("--nodes", help="As a rank of torchrun, srun or mpirun: measure its nodes.")] = False,
    cluster: Annotated[
        Path | None, Option(metavar="FILE", help="Of --nodes: a file of calibrate, to write --out with their links.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Of --nodes --cluster: the cluster file to write; nodes.yaml, or nodes-2.yaml, ....")
    ] = None,
    folder: Annotated[
        list[Path] | None, Option(help="Of --nodes: is it shared? The current one and the cache.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, lacks, and how to add it.

    With --nodes: the hosts, the interface that connects hosts, the speed of each pair of hosts, and shared folders.

    Example: meshwright doctor

    On nodes: srun --nodes 2 --ntasks-per-node 1 meshwright doctor --nodes --cluster cluster.yaml
    """
    if not nodes:
        if cluster is not None or folder:
            name, value = ("--cluster", cluster) if cluster else ("--folder", folder)
            raise ConfigError.of(name, value, "has no effect on one machine", "leave it out, or add --nodes")
        from meshwright.tools import doctor

        print_result(doctor, doctor.examine(), as_json)
        return
    from meshwright.planner import nodes as nodes_tool

    if cluster is not None and out is not None and out.resolve() == cluster.resolve():
        raise ConfigError.of("--out", out, "is the file of --cluster", str(free_path(out)))
    path = out or free_path(Path("nodes.yaml"))
    report = nodes_tool.examine_nodes(folder or (), cluster, path)
    if report is not None:  # on the first rank alone
        print_result(nodes_tool, report, as_json, [] if cluster is None else [path])


@app.command("eval", rich_help_panel=RUN)
def evaluate(
    checkpoint: CheckpointFolder,
    task: Annotated[
        str, Option(help="perplexity, wikitext, bleu, lambada, masked-lm, images, pairs, squad, race, lm-eval:NAME.")
    ] = "perplexity",
    data: Annotated[str | None, Option(help="Text, pairs, images, prepared folder; held-out split.")] = None,
    target: Annotated[str | None, Option(help="Of two text files of pairs, the other; --data is one.")] = None,
    stride: Annotated[int | None, Option(help="Between windows of perplexity; half the context.")] = None,
    context: Context = None,
    samples: Annotated[int | None, Option(help="Of so many pairs, or lm-eval's questions; all.")] = None,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    chat: Annotated[bool, Option(help="Of lm-eval: ask by the run's chat template.")] = False,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint: perplexity, or a task.

    Decoders: perplexity of a text per token and per word, and LAMBADA, the accuracy on a passage's last word.
    Encoder-decoders: perplexity of targets, and BLEU of answers. BERT: the accuracy on masked tokens. ViT: the accuracy
    on images. Fine-tuned BERTs: MNLI, QQP, SQuAD and RACE. lm-eval:NAME is a task of lm-evaluation-harness.

    Example: meshwright eval out/first --data wiki.test.txt --stride 64
    """
    from meshwright.tools.evaluate.tasks import Question, finite, measure, table_of

    question = Question(checkpoint, device, data, target, stride, context, samples, beams, length_penalty, chat or None)
    with progress() as show:
        folder, result = measure(task, question, show)
    facts = {"checkpoint": str(folder), "task": task, **finite(result)}
    print(json.dumps(facts) if as_json else table_of(facts))


@app.command(rich_help_panel=RUN)
def generate(
    checkpoint: CheckpointFolder,
    prompt: Annotated[str, Option(help="The text to go on from, may be empty; or what is to be answered.")],
    tokens: Annotated[int | None, Option(help="At most so many; 100, or 50 more than the prompt's.")] = None,
    temperature: Annotated[float, Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int | None, Option(help="Draw from the K most likely; from all.")] = None,
    seed: Annotated[int | None, Option(help="Of the draws; 1.")] = None,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    chat: Annotated[
        bool, Option(help="The prompt is what a user says: answer it, by the template of the run's dialogues.")
    ] = False,
    exact: Annotated[
        bool, Option("--exact", help="With the bits of training's forward pass; of bits=layout-free. Slower.")
    ] = False,
    context: Context = None,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt, or answer it.

    A GPT-2 or Llama continues the prompt, an encoder-decoder answers; the same seed gives the same text. A T5 that
    learned spans fills in <extra_id_0>, <extra_id_1>, ...

    Example: meshwright generate out/first --prompt "def main" --temperature 0.8 --top-k 40
    """
    from meshwright.tools.generate import Request, Sampling
    from meshwright.tools.generate import generate as generate_from

    request = Request(prompt, tokens, Sampling(temperature, top_k, seed), beams, length_penalty, chat, exact)
    generated = generate_from(checkpoint, request, device, context)
    if as_json:
        print(json.dumps({"checkpoint": str(generated.folder), "prompt": prompt, "text": "".join(generated.parts)}))
        return
    # Each part is flushed: a pipe would buffer the text.
    # A terminal obeys control characters in a model's text, so it gets visible ones; files and pipes get the raw text.
    show = visible if sys.stdout.isatty() else str
    for text in chain([generated.begun], generated.parts, ["\n"]):
        print(show(text), file=PatientStream(sys.stdout), end="", flush=True)


@convert_app.command("import")
def convert_import(
    source: Annotated[Path, Argument(metavar="HF_DIR", help="Holds config.json and the weights.")],
    out: NewFolder,
    config: Annotated[
        Path | None, Option(metavar="HF_DIR", help="Holds config.json and the tokenizer, if SOURCE does not.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint from a Hugging Face folder.

    The weights are safetensors, or a distributed checkpoint of torch (DCP) by transformers, Accelerate, AutoModel or
    torchtitan, whose folder has no config.json. The checkpoint is for eval and generate. To train from a folder, set
    model.from in the run.

    Example: meshwright convert import gpt2 --out out/gpt2/checkpoints/step-0
    """
    from meshwright.training.convert import import_folder

    with progress() as show:
        imported = import_folder(source, out, show, beside=config)
    model = imported.model.model_dump()
    facts = {"checkpoint": str(out), "parameters": imported.parameters, "tokenizer": imported.has_tokenizer}
    if as_json:
        print(json.dumps({**facts, "model": model}))
        return
    say(f"{out}: {imported.parameters:,} parameters")
    if imported.reads_text and not imported.has_tokenizer:
        say(f"{source} has no tokenizer.json: copy the model's into {out}, or eval and generate will refuse it")
    say(f"to train from it, a run file says `model: {{from: {source}}}`; that is")
    print("model: {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in model.items()) + "}")


@convert_app.command("export")
def convert_export(
    checkpoint: CheckpointFolder,
    out: NewFolder,
    dtype: Annotated[
        str | None,
        Option(help="float32, bf16, fp16 or float64; as the weights came, else the run's.", show_default=False),
    ] = None,
    merged: Annotated[bool, Option("--merged", help="Of a run with adapters: whole weights, adapters added.")] = False,
    form: Annotated[
        str, Option(help="The weights' reader: transformers; dcp (torch.distributed.checkpoint); torchtitan.")
    ] = "transformers",
    push: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="Upload the folder to the Hub, with the model's README.md.")
    ] = None,
    private: Annotated[bool, Option("--private", help="Of --push: a model that only its owner sees.")] = False,
    evaluation: Annotated[
        Path | None,
        Option(metavar="FILE", help="Lines of `eval --json` for README.md, which is also written without --push."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a Hugging Face folder from a checkpoint.

    transformers' from_pretrained reads it; of a run with adapters (model.adapter), peft's. --form dcp and torchtitan
    write a distributed checkpoint of torch. --push uploads the folder with a README.md of the run's config,
    evaluations, and certificate if there is one.

    Example: meshwright convert export out/first --out first-hf
    """
    from meshwright.compute.precision import DTYPES
    from meshwright.training.checkpoint import Checkpoint
    from meshwright.training.convert import FORMS, export_folder
    from meshwright.training.convert.card import read_evaluations, upload, write_card

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError.of("--dtype", dtype, "is no dtype of weights", ", ".join(DTYPES))
    if form not in FORMS:
        raise ConfigError.of("--form", form, "is no form of weights", ", ".join(FORMS))
    if private and push is None:
        raise ConfigError.of("--private", True, "has no effect without an upload", "with --push OWNER/NAME")
    lines = [] if evaluation is None else read_evaluations(evaluation)
    with progress() as show:
        folder = export_folder(checkpoint, out, show, dtype=dtype, merged=merged, form=form)
    facts = {"checkpoint": str(folder), "out": str(out)}
    if push is not None or evaluation is not None:
        write_card(out, Checkpoint(folder), lines)
    if push is not None:
        facts["page"] = upload(out, push, private=private)
    print(json.dumps(facts) if as_json else f"{facts.get('page', out)}: exported from {folder}")
    try:
        # The export is complete without a chat template, so an unreadable template is a remark and no failure.
        Checkpoint(folder).config.data.chat_template(folder)
    except DataError as error:
        say(f"the run's chat template is not in it, since it cannot be read any more: {error}", file=sys.stderr)


app.add_typer(data_app, name="data", rich_help_panel=RUN)
app.add_typer(convert_app, name="convert", rich_help_panel=RUN)
