"""The page and the summary of handmade results, for a reader of a pull request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.parity.check import ParityCheck, ParityResult
from meshwright.parity.compare import Row
from meshwright.parity.explain import COPY, CUT, PARTIAL, WRONG, Explanation
from meshwright.parity.gradients import Mistake
from meshwright.parity.judge import ModuleLine
from meshwright.parity.remedies import PAGE, REMEDIES
from meshwright.parity.report import LEGEND, PageHead, write_page
from meshwright.parity.summary import annotate, append_summary

ROOT = Path(__file__).resolve().parents[2]
CHECK = ParityCheck("ddp", ROOT / "examples/parity/ddp.py", (("data", 2),), "float64", line=41)


def line(name: str, kind: str = COPY) -> ModuleLine:
    explained = Explanation(kind, 0.5 if kind == WRONG else 0.0, 1e-14, axis="data")
    return ModuleLine(name, "Linear", explained, explained)


def result(finding: Mistake | None, wrong: str = "", kind: str = CUT, blocks: int = 12) -> ParityResult:
    names = [name for block in range(blocks) for name in (f"blocks.{block}.up", f"blocks.{block}")]
    modules = [*(line(name, WRONG if name == wrong else kind) for name in names), line("head", PARTIAL), line("")]
    rows = (Row("loss", "", 1e-3, 1e-14, 1), Row("gradient", "head.weight", 0.5, 1e-14, 1))
    return ParityResult(CHECK, "float64", 2.5, rows if finding else (), finding, tuple(modules))


def page_of(*results: ParityResult, folder: Path, recorded: bool = False) -> str:
    head = PageHead("checks.py", "meshwright parity checks.py --page 'a <b>.html'", recorded)
    return write_page(results, folder / "page.html", head).read_text()


def mistake(module: str) -> Mistake:
    return Mistake("wrong data", module, "rank 1's `x` are no rows of the global batch")


def test_a_page_says_its_program_command_and_words(tmp_path: Path) -> None:
    page = page_of(result(mistake("(data)")), folder=tmp_path)
    assert "<h1>checks.py: not equal to the reference</h1>" in page
    assert "<code>meshwright parity checks.py --page &#39;a &lt;b&gt;.html&#39;</code>" in page
    assert re.search(r"\d+ \w+ \d{4}, \d\d:\d\d", page)
    assert "prefers-color-scheme: dark" in page
    assert "rank 1&#39;s <code>x</code> are no rows" in page
    for word, text in LEGEND.values():
        assert word in page
        assert text in page.replace("&#39;", "'")
    assert "`" not in page


def test_a_mistake_at_no_module_is_the_first_row(tmp_path: Path) -> None:
    page = page_of(result(mistake("(data)")), folder=tmp_path)
    rows = re.findall(r'<td title="([^"]*)"', page)
    assert rows[0] == "(data)"


def test_links_of_a_page_go_to_places_of_the_page(tmp_path: Path) -> None:
    page = page_of(result(mistake("blocks.3.up"), "blocks.3.up"), result(mistake("(data)")), folder=tmp_path)
    links = re.findall(r'href="#([^"]+)"', page)
    assert set(links) == {"kind-wrong-data", "first-1", "first-2"}
    assert all(f'id="{link}"' in page for link in links)
    assert "http" not in page


def test_equal_blocks_are_one_and_a_wrong_one_is_not_hidden(tmp_path: Path) -> None:
    assert "blocks.0 to 11 <small>12 equal blocks</small>" in page_of(result(None), folder=tmp_path)
    page = page_of(result(mistake("blocks.3.up"), "blocks.3.up"), folder=tmp_path)
    for words in ("blocks.0 to 2 <small>3 equal", "blocks.4 to 11 <small>8 equal"):
        assert words in page
    assert re.findall(r'id="first-1"><td title="([^"]+)"', page) == ["blocks.3.up"]


def test_a_page_of_two_records_does_not_speak_of_one_process(tmp_path: Path) -> None:
    page = page_of(result(None), folder=tmp_path, recorded=True)
    assert "one process" not in page
    assert "Two recorded runs" in page


def test_a_remedy_names_a_heading_of_the_page_that_is_here() -> None:
    heads = re.findall(r"^### (.+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert set(REMEDIES) <= set(heads)


def test_a_summary_and_annotations_for_a_pull_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    results = [result(None), result(Mistake("scaled", "head", "100 % off:\na | b"))]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    append_summary(results, summary, "meshwright parity checks.py")
    lines = summary.read_text().splitlines()
    assert lines[0] == "before", "GitHub's file is everybody's"
    assert "| `ddp[data2]` | equal | equal to the reference |" in lines
    assert any("scaled at head: 100 % off: a &#124; b. look for a sum" in text for text in lines)
    annotate(results)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(
        "::error file=examples/parity/ddp.py,line=41,title=ddp[data2]::scaled at head: 100 %25 off:%0Aa"
    )
