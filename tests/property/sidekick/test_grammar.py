"""sidekick's own reader and click interpret a plain command line alike."""

from __future__ import annotations

from typing import Any

import click
from hypothesis import given
from hypothesis import strategies as st

from sidekick.cli import PROGRAM
from sidekick.click_commands import group
from sidekick.grammar import FunctionCall

WORDS = [
    *("web", "-", "--", "", "-x", "json", "-o", "-ojson", "-o=json", "--output", "--output=json"),
    *("--output=", "--out=json", "--wait-s", "--wait-s=3", "0.5", "3600.5", "-1", "nan", "1_0"),
    *("--reboot", "--reboot=yes", "--no-reboot", "--generation=7", "--generation", "7", "007"),
    *("--epoch=x", "--timer", "--for=90s", "--for", "10m", "0.5h", "5.", "25h", "soon", "--due"),
    *("-h", "--help", "--state=/a", "--root", "/b", "--profiles=/c", "--profiles", "/d", "-v"),
    *("--verbose", "-vv", "é", "--étrange"),
]
LINES = st.tuples(
    st.lists(st.sampled_from(WORDS), max_size=3),
    st.sampled_from([*PROGRAM.commands, "list", "nothing"]),
    st.lists(st.sampled_from(WORDS), max_size=5),
).map(lambda parts: [*parts[0], parts[1], *parts[2]])


def by_click(line: list[str]) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """Return click's interpretation of a line, None if it prints help or an error."""
    made = group(PROGRAM, [], lambda **_: None)
    try:
        with made.make_context("sidekick", list(line)) as outer:
            name, command, rest = made.resolve_command(outer, [*outer._protected_args, *outer.args])
            assert command is not None
            with command.make_context(name, rest, parent=outer) as inner:
                return str(name), outer.params, inner.params
    except (click.UsageError, click.exceptions.Exit):
        return None


def by_us(call: FunctionCall) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return call.command.name, dict(call.program), dict(call.values)


@given(LINES)
def test_the_grammar_reads_a_line_as_click_does(line: list[str]) -> None:
    call = PROGRAM.read(line)
    assert call is None or by_us(call) == by_click(line)


@given(
    st.lists(st.sampled_from(["--state=/a", "-v", "--profiles=/c"]), max_size=3),
    st.lists(
        st.sampled_from(
            [("--reboot",), ("--wait-s", "3"), ("-o", "json"), ("--generation=7",), ("web",)]
        ),
        unique=True,
    ),
)
def test_lines_that_are_waited_for_are_read_here(
    before: list[str], after: list[tuple[str, ...]]
) -> None:
    """sidekick reads exactly those of these lines that click accepts, and does not call click."""
    line = [*before, "apply-profile", *(word for words in after for word in words)]
    assert (PROGRAM.read(line) is None) is (by_click(line) is None)
