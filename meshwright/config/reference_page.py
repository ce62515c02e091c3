"""The reference as text: for a terminal, and as the page docs/config.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from meshwright.config.reference import SectionFacts, Topic, all_sections

_FEW_FIELDS = 20
"""The fields of all kinds of a section are printed, if these are no more than this number in total."""

HEAD = """# Fields of a run

Made by `python -m meshwright config --page > docs/config.md`, which a test checks. `meshwright config FIELD` prints the
same of one field, section or strategy, those of other packages too; [the guide](guide.md) has a run file. A field is
written in the file, or as a word: `optimizer.lr=1e-3`. One without a default must be given. Many have an effect only
where something else is there (a schedule with two stages or more): a field that is written and has none is a mistake,
and the message says what it needs.
"""


def topic_text(topic: Topic, width: int) -> str:
    """Format a topic for a terminal of `width` columns."""
    if not topic.name:
        (run,) = topic.sections
        overview = [line for facts in run.fields for line in _listed(facts.name, facts.meaning, width, "")]
        return "\n".join((*overview, "", "meshwright config FIELD says more, such as layout.data"))
    lines: list[str] = []
    for facts in topic.fields:
        kinds = f"{', '.join(facts.kinds)}: " if facts.kinds else ""
        lines += _wrapped(f"{topic.name}: {kinds}{facts.meaning}", width)
        lines += _wrapped(f"default {facts.default}" if facts.default else "", width, "  ")
        lines += _wrapped(facts.valid, width, "  ") if not (facts.strategies or topic.sections) else ()
        lines += [line for name, meaning in facts.strategies for line in _listed(name, meaning, width)]
    lines += _wrapped(topic.short, width, "  ")
    few = sum(len(section.fields) for section in topic.sections) <= _FEW_FIELDS
    for section in topic.sections if few or len(topic.sections) == 1 else ():
        lines += [*([""] if lines else []), *_section(section, width)]
    if topic.sections and len(topic.sections) > 1:
        tag = topic.sections[-1].kind
        lines += ["", f"meshwright config {topic.name}.{tag} has the fields of that kind"]
    return "\n".join(lines)


def page() -> str:
    """Format all sections as Markdown."""
    parts = [HEAD]
    for topic in all_sections():
        parts.append(f"## {topic.name or 'The run'}\n")
        parts += [f"{_cell(facts.meaning)}\n" for facts in topic.fields[:1]]
        if topic.short:
            parts.append(f"In short: {_cell(topic.short)}.\n")
        for section in topic.sections:
            named = f"**`{section.kind}`**: " if section.kind else ""
            if named or topic.name:
                parts.append(f"{named}{_cell(section.about)}\n")
            rows = [
                f"| `{facts.name.rpartition('.')[2]}` | {f'`{facts.default}`' if facts.default else ''} "
                f"| {_cell(facts.valid)} | {_cell(facts.meaning)} |"
                for facts in section.fields
            ]
            head = ("| field | default | valid | meaning |", "|---|---|---|---|")
            parts += ["\n".join((*head, *rows, ""))] if rows else []
        fields = [facts for section in topic.sections for facts in section.fields if topic.name]
        for facts in (facts for facts in fields if facts.strategies):
            rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in facts.strategies]
            parts.append("\n".join((f"| `{facts.name}` | |", "|---|---|", *rows, "")))
    return "\n".join(parts)


def _section(section: SectionFacts, width: int) -> Iterator[str]:
    """Yield the lines of a section: each field with default, meaning and valid values."""
    if section.kind:
        yield from _wrapped(f"{section.kind}: {section.about}", width)
    for facts in section.fields:
        yield f"  {facts.name.rpartition('.')[2]}" + (f" = {facts.default}" if facts.default else "")
        yield from _wrapped(facts.meaning, width, "      ")
        yield from _wrapped(facts.valid, width, "      ")


def _listed(name: str, meaning: str, width: int, before: str = "  ") -> list[str]:
    indent = before + " " * 16
    first, *others = _wrapped(meaning, width, indent, indent) or [""]
    return [f"{before}{name:<15} {first.lstrip()}".rstrip(), *others]


def _wrapped(text: str, width: int, indent: str = "", then: str | None = None) -> list[str]:
    then = f"{indent}  " if then is None else then
    return textwrap.wrap(
        text,
        max(40, width),
        initial_indent=indent,
        subsequent_indent=then,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _cell(text: str) -> str:
    """Escape a text for a Markdown table: `|` would end the cell, and < begin a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")
