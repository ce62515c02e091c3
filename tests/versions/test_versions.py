"""The report of broken promises names the right row, from a page and a JUnit report made here."""

from __future__ import annotations

from tests.versions.__main__ import broken, failures, pages, promises, releases

PAGE = """
| promise or fault | what comes | test |
|---|---|---|
| weights are equal | to the bit | `tests/strategies/optim/test_norm.py::test_large`, tests/compute/bits/test_root.py |
| nodes | losses | tests/nodes/ |
"""
REPORT = """<testsuites><testsuite>
<testcase classname="tests.strategies.optim.test_norm" name="test_large[3-4]"><failure message="x"/></testcase>
<testcase classname="tests.strategies.optim.test_norm" name="test_small"><failure message="x"/></testcase>
<testcase classname="tests.compute.bits.test_root" name="test_a"/>
<testcase classname="tests.nodes.test_equal" name="test_b"><error message="x"/></testcase>
</testsuite></testsuites>"""


def test_a_broken_promise_is_named_with_its_test() -> None:
    lost, unnamed = broken(failures(REPORT), PAGE)
    assert lost == [
        "weights are equal: tests/strategies/optim/test_norm.py::test_large",
        "nodes: tests/nodes/test_equal.py::test_b",
    ]
    assert unnamed == {("tests/strategies/optim/test_norm", "test_small")}


def test_nothing_is_broken_without_a_failure() -> None:
    assert broken(set(), PAGE) == ([], set())


def test_the_page_has_promises_and_the_releases_are_printed() -> None:
    assert len(promises(pages())) > 60
    assert "torch " in releases()
