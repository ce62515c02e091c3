"""`meshwright config`: the fields of a run file, as text, as JSON, as a schema for editors and as docs/config.md."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from meshwright.cli.app import OPERATE, AsJson, app
from meshwright.cli.completion import complete_field
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.streams import say


@app.command(rich_help_panel=OPERATE)
def config(
    field: Annotated[
        str,
        Argument(
            metavar="FIELD",
            autocompletion=complete_field,
            help="A field, a section or a strategy: optimizer, layout.tensor.megatron.",
        ),
    ] = "",
    schema: Annotated[bool, Option("--schema", help="Print JSON's schema of run files, for editors.")] = False,
    page: Annotated[bool, Option("--page", help="Print all of it as Markdown: docs/config.md.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what the fields of runs and cluster files mean and take.

    `config cluster` lists a cluster file's fields.

    Example: meshwright config layout.data
    """
    if schema + page + as_json + bool(field and (schema or page)) > 1:
        raise ConfigError.of("config", field or "several", "is asked for in several forms", "FIELD, --schema or --page")
    if schema:
        from meshwright.config.json_schema import run_schema

        print(json.dumps(run_schema(), indent=1))
        return
    from meshwright.config import reference, reference_page

    if page:
        # docs/config.md is this output, which a test compares.
        say(reference_page.page(), end="")
        return
    if field.partition(".")[0] == "cluster":
        from meshwright.planner.plan.cluster_topic import cluster_topic

        topic = cluster_topic(field)
    else:
        topic = reference.topic_of(field)
    if as_json:
        say(json.dumps(asdict(topic)))
        return
    columns = shutil.get_terminal_size().columns
    # The author of a cluster file needs all sections, so these are printed one after the other.
    whole = [reference.Topic(each.name, (), (each,)) for each in topic.sections] if field == "cluster" else [topic]
    heads = [f"{each.name}: {each.sections[0].about}\n" if field == "cluster" else "" for each in whole]
    texts = [reference_page.topic_text(each, columns) for each in whole]
    say("\n\n".join(map("".join, zip(heads, texts, strict=True))))
