"""The site's own part of docs/: links into the repository, the loss table, pages as markdown, llms.txt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
INTO_REPOSITORY = re.compile(r"\[(?P<text>[^\]]*)\]\(\.\./(?P<path>[^)#\s]+)(?P<rest>[^)]*)\)")
INTO_DOCS = ("course/", "decisions/")
"""Prefixes of pages in a folder of docs/; `../` of these pages is docs/."""
TABLE = "<!-- the table of bits.md -->"
"""A comment that the site replaces by the table; the repository shows nothing."""
NOTEBOOK = re.compile(r"\.ipynb\)")
TITLES = re.compile(r"^# (.+)$", re.MULTILINE)
DESCRIPTION = re.compile(r"^description: (.+)$", re.MULTILINE)


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each notebook, with cells and stored outputs."""
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page_of(path)))
    return files


def page_of(path: Path) -> str:
    """Return a notebook as markdown, with pictures as data URLs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append("```text\n" + "".join(output["text"]).rstrip() + "\n```")
            else:
                parts.append(f"![what the cell draws](data:image/png;base64,{output['data']['image/png']})")
    return NOTEBOOK.sub(".md)", "\n\n".join(parts)) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page with links that work on the site.

    Raises:
        FileNotFoundError: A linked file is not in the repository.
    """

    def absolute(match: re.Match[str]) -> str:
        path = match["path"].rstrip("/")
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_path} has a link to {path}, which is not in the repository")
        if not (address := config.extra["repository"]):
            return match["text"] if path in match["text"] else f"{match['text']} (`{path}`)"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{match['text']}]({address}/{kind}/main/{path}{match['rest']})"

    if page.file.src_path == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_path.startswith("decisions"):
        page.meta["search"] = {"exclude": True}  # the history would be found before current pages
    if page.file.src_path.startswith("notebooks/"):
        name = Path(page.file.src_path).with_suffix(".ipynb")
        return f"{markdown}\nThis page is the notebook `docs/{name}`.\n"
    markdown = NOTEBOOK.sub(".md)", markdown)
    if page.file.src_path.startswith(INTO_DOCS):
        return markdown
    if TABLE in markdown:
        markdown = markdown.replace(TABLE, losses_table())
    return INTO_REPOSITORY.sub(absolute, markdown)


def losses_table() -> str:
    """Return the table of losses from docs/bits.md, the only copy."""
    page = (ROOT / "docs/bits.md").read_text()
    part = page[page.index("under 18 layouts\n") :]
    return "\n".join(line for line in part[: part.index("\n## ", 1)].splitlines() if line.startswith("|"))


def on_post_build(config: Any) -> None:
    """Write each page as markdown next to the HTML (guide/index.md), and llms.txt with all pages in order."""
    site, docs = Path(config.site_dir), Path(config.docs_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Skills", ""]
    for skill in sorted((ROOT / "skills").glob("*/SKILL.md")):
        target = site / skill.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(skill.read_text())
        (what,) = DESCRIPTION.findall(skill.read_text())
        lines.append(f"- [{skill.parent.name}]({target.relative_to(site)}): {what}")
    lines.append("")
    for entry in config.nav:
        ((section, pages),) = entry.items()
        lines += [f"## {section}", ""]
        for name in names_in(pages):
            source = docs / name
            text = source.read_text() if source.exists() else page_of(source.with_suffix(".ipynb"))
            text = text.replace(TABLE, losses_table())
            target = site / (name if name.endswith("index.md") else f"{name.removesuffix('.md')}/index.md")
            target.write_text(text)
            lines.append(f"- [{TITLES.findall(text)[0]}]({target.relative_to(site)}): {first_sentence(text)}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))


def names_in(pages: Any) -> list[str]:
    """Return the files of an entry of the navigation; entries may be nested."""
    if isinstance(pages, str):
        return [pages]
    # A section's first page has no title in the navigation.
    parts = [part for entry in pages for part in ([entry] if isinstance(entry, str) else entry.values())]
    return [name for part in parts for name in names_in(part)]


def first_sentence(markdown: str) -> str:
    """Return the first sentence of the page's text, without markup."""
    for line in re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE).splitlines():
        if line and line[0].isalpha():
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", line)
            return re.split(r"(?<=[.:]) ", plain)[0]
    return ""
