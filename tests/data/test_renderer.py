"""A template is a foreign program, and may use at most the time, memory and depth that a dialogue's text needs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from meshwright.data.chat import ChatTemplate
from meshwright.data.dialogue_records import Dialogue
from meshwright.data.renderer import Refusal, Renderer
from meshwright.ranks.errors import DataError

LOOP = "{% for a in range(99999) %}"
END = "{% endfor %}"
TIME, DEPTH = "takes more than 1 s", "calls itself more than"
MEMORY = f"takes more than 1024 MiB of memory|{TIME}"
"""Growth ends at the first of two bounds, and the machine decides which."""

HOSTILE = {
    "loops in loops": (LOOP * 3 + END * 3, TIME),
    "loops that write": (LOOP * 3 + "x" + END * 3, f"asks for more|{MEMORY}"),
    "a long text": ("{{ 'x' * 10**11 }}", MEMORY),
    "many texts": (LOOP + "{{ 'x' * 99999 }}" + END, f"asks for more|{MEMORY}"),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", DEPTH),
    "a loop that calls itself": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", DEPTH),
    "a list that doubles": (
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}", MEMORY,
    ),
    "lists in lists": (
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
        MEMORY,
    ),
    "a text that doubles": (
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", MEMORY,
    ),
    "a block that doubles": (
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = t %}{% endfor %}", MEMORY,
    ),
    "a wide format": ("{{ '%1000000000d'|format(1) }}", MEMORY),
    "a wide field": ("{{ '{:1000000000000}'.format(1) }}", f"{MEMORY}|asks for more"),
    "a wide center": ("{{ 'a'.center(10**12) }}", MEMORY),
    "a wide filter": ("{{ 'a'|center(10**12) }}", MEMORY),
    "a batch": ("{{ ('x' * 100)|batch(10**10, 'y')|list }}", MEMORY),
    "a product of texts": ("{{ 'a'.replace('', 'b' * 10**8).replace('', 'b' * 10**8) }}", f"{MEMORY}|asks for more"),
    "a number": ("{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
                 MEMORY),
    "a range": ("{{ range(10**12) }}", "asks for more than a machine has"),
    "filler": ("{{ lipsum(n=10**9) }}", MEMORY),
    "brackets": ("{{" + "(" * 100000, DEPTH),
    "signs": ("{{" + "-" * 100000 + "1}}", DEPTH),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_loop_grow_or_recurse_are_a_sentence(name: str) -> None:
    text, bound = HOSTILE[name]
    asked = [{"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=rf"^FILE: the template ({bound})|^FILE: is no chat template: ({bound})"):
        ChatTemplate(text, "FILE").render(asked, "here")


def test_a_text_costs_another_nothing() -> None:
    """After a bound, the same template renders the next dialogue, and other errors are reported as the template's."""
    renderer = Renderer("{% if big %}{{ 'x' * 10**11 }}{% endif %}{{ no.such.thing if bad else 'ok' }}", "FILE")
    with pytest.raises(DataError, match="takes more than 1024 MiB"):
        renderer.render({"big": True, "bad": False}, [{}])
    assert renderer.render({"big": False}, [{"bad": False}, {}]) == ["ok", "ok"]
    (refused,) = renderer.render({"big": False, "bad": True}, [{}])
    assert isinstance(refused, Refusal)
    assert "'no' is undefined" in refused.why


def test_threads_share_a_process_and_a_fork_has_its_own() -> None:
    template = ChatTemplate("{{ messages[0].content * 2 }}", "FILE")
    got: dict[int, set[str]] = {}

    def ask(number: int) -> None:
        got[number] = {template.render([{"role": "user", "content": f"<{number}>"}], "here") for _ in range(20)}

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: {f"<{number}><{number}>"} for number in range(6)}
    child = os.fork()
    if child == 0:  # the exit code reports the forked process's result
        os._exit(0 if template.render([{"role": "user", "content": "f"}], "here") == "ff" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ask(7)
    assert got[7] == {"<7><7>"}


def test_the_process_imports_nothing_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jinja2", "json", "resource", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of the current folder ran')")
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("{{ messages[0].content }}", "FILE").render([{"role": "user", "content": "a"}], "here") == "a"


def test_no_process_is_left() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "FILE")
    template.render([{"role": "user", "content": "a"}], "here")
    process = template._renderer._process
    assert process is not None
    del template
    assert process.wait(60) == 0


@pytest.mark.parametrize("code", ["{{ messages.__class__.__mro__ }}", "{{ self.__init__.__globals__ }}"])
def test_python_is_out_of_reach(code: str) -> None:
    with pytest.raises(DataError, match=r"FILE does not take it: .*unsafe"):
        ChatTemplate(code, "FILE").dialogue(Dialogue([{"role": "user", "content": "a"}], "here"))
