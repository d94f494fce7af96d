"""Printed output is safe for a terminal and keeps its meaning."""

from __future__ import annotations

import contextlib
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from control_plane.cli.jobfile import put, read_document
from control_plane.cli.show import (
    duration,
    json_text,
    printable,
    rich_table,
    table,
    text_table,
)
from wire.errors import InvalidInput
from wire.pipes import PipedGroup


def steers(text: str) -> bool:
    return any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in text if c != "\n")


@given(st.text())
def test_printable_text_cannot_steer_a_terminal(text: str) -> None:
    assert not steers(printable(text))
    assert "\n" not in printable(text)


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Zl", "Zp"])))
def test_ordinary_text_is_printed_as_it_is(text: str) -> None:
    assert printable(text) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_json_is_safe_and_decodes_to_the_same(text: str) -> None:
    printed = json_text({"name": text})
    assert not steers(printed)
    assert json.loads(printed) == {"name": text}


def test_a_table_in_a_pipe_is_aligned() -> None:
    lines = text_table(("job", "phase"), [["web", "stable"], ["a-long-name", ""]])
    assert lines == ["JOB          PHASE", "web          stable", "a-long-name"]


def test_markup_in_a_name_is_text_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, no_color=True)
    console.print(rich_table(("job", "phase"), [["[red]x[/red]", "stable"]]))
    out = console.file
    assert isinstance(out, io.StringIO)
    assert "[red]x[/red]" in out.getvalue()


@pytest.mark.behaviour("BUG-UX103")
def test_a_long_reason_leaves_room_for_the_other_columns_of_a_terminal() -> None:
    """Formerly, at 80 columns, a long last cell hid all other columns and was cut itself."""
    console = Console(file=io.StringIO(), width=80)
    reason = " ".join(["waits"] * 30)
    rows = [["web-0", "waiting", "unknown", "h0001", "2026-11-28 15:00:00Z", reason]]
    console.print(rich_table(("task", "phase", "health", "machine", "since", "reason"), rows))
    out = console.file
    assert isinstance(out, io.StringIO)
    assert out.getvalue().splitlines()[2].split()[:4] == ["web-0", "waiting", "unknown", "h0001"]
    assert out.getvalue().count("waits") == 30


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0s"), (59.6, "1m"), (3661, "1h1m"), (90_000, "1d1h"), (-5, "0s")],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tasks=3", {"tasks": 3}),
        ("limits.cpu_max_cores=1.5", {"limits": {"cpu_max_cores": 1.5}}),
        ("image=sha256:ab", {"image": "sha256:ab"}),
        ('name="3"', {"name": "3"}),
        ('command=["a", "b=c"]', {"command": ["a", "b=c"]}),
        ("environment.PORT=80", {"environment": {"PORT": "80"}}),
        ("environment.A=x=y", {"environment": {"A": "x=y"}}),
        ("when=1979-05-27", {"when": "1979-05-27"}),
        ("empty=", {"empty": ""}),
    ],
)
def test_a_setting_on_the_command_line_has_the_type_of_its_text(
    setting: str, value: dict[str, Any]
) -> None:
    document: dict[str, Any] = {}
    put(document, setting)
    assert document == value


@pytest.mark.parametrize("setting", ["", "tasks", "=3", "a..b=1", ".a=1", "name.x=1"])
def test_a_setting_that_cannot_be_put_is_refused(setting: str) -> None:
    with pytest.raises(InvalidInput):
        put({"name": "web"}, setting)


@given(st.text(max_size=20), st.sampled_from([".toml", ".yaml", ".json"]))
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, suffix: str
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / f"job{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(InvalidInput):
        read_document(path)


@pytest.mark.behaviour("BUG-UX146")
def test_characters_that_a_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a reason in another script ended with a traceback."""

    @click.group(cls=PipedGroup)
    def program() -> None:
        pass

    @program.command()
    def show_reason() -> None:
        table(("job", "reason"), [["web", "größe 日本"]])

    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
    monkeypatch.setattr("control_plane.cli.show.on_terminal", lambda: True)
    program(["show-reason"], standalone_mode=False)
    assert "größe \\u65e5\\u672c" in written.getvalue().decode("latin-1")
