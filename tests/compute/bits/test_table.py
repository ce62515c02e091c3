"""The page of layouts with equal bits is made from the rules, and is the page in docs/."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bits_table import page, refusals, words_of

PAGE = Path(__file__).parents[3] / "docs" / "bits_table.md"


def test_the_page_is_what_the_rules_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.bits_table > docs/bits_table.md"


def test_a_refusal_has_its_reason() -> None:
    (said, *_) = refusals("qwen3-next-mini", "layout-free", *words_of("1-D", 2), "bits.tensor=2")
    assert said == "`bits.tensor` cuts layers of a qwen3-next, whose states are sums over tokens without parts"
    assert refusals("gpt2-small", "layout-free", *words_of("1-D", 2)) == []
