"""Printing: tables for terminals, aligned text for pipes, JSON for programs.

Names and log lines are untrusted: terminal control characters are escaped.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from wire.errors import TwineError

F = TypeVar("F", bound=Callable[..., Any])

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_COLOURS = {
    "green": ("healthy", "running", "stable", "up", "verified", "yes"),
    "yellow": ("starting", "stopping", "progressing", "waiting", "pending", "unknown", "applying"),
    "red": ("unhealthy", "lost", "down", "failed", "degraded", "drifted"),
}
_COLOUR_OF = {state: colour for colour, states in _COLOURS.items() for state in states}


def output_choice(*more: str, default: str = "table", text: str | None = None) -> Callable[[F], F]:
    """Return the option `--output`; `more` are further forms than table and JSON."""
    forms = click.Choice(["table", "json", *more])
    return click.option("-o", "--output", type=forms, default=default, show_default=True, help=text)


output_option = output_choice(text="For people or for programs.")


def printable(text: object) -> str:
    """Return text with control characters as escapes."""
    return "".join(
        c if unicodedata.category(c) not in _UNSAFE else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def json_text(value: object) -> str:
    """Return a value as JSON, with terminal control characters escaped."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "".join(
        c if c == "\n" or unicodedata.category(c) not in _UNSAFE else _json_escape(c) for c in text
    )


def emit(output: str, value: object, text: Callable[[], object]) -> None:
    """Print a value as JSON, or call `text` to print it as text."""
    if output == "json":
        click.echo(json_text(value))
    else:
        text()


def lines(*texts: object) -> None:
    """Print each text as a line."""
    for text in texts:
        click.echo(printable(text))


def on_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below their column names: with colour on a terminal, else aligned text."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if on_terminal():
        _rich_table(columns, cells)
        return
    for line in text_table(columns, cells):
        click.echo(line)


def text_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines: two spaces between columns, none at the end."""
    everything = [[c.upper() for c in columns], *cells]
    widths = [max(len(row[i]) for row in everything) for i in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in everything
    ]


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    Console(highlight=False).print(rich_table(columns, cells))


def rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Any:
    """Return a table for a terminal; words for a state get a colour."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:  # each may wrap; otherwise the last column takes the width of the others
        drawn.add_column(name.upper(), overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell, style=_COLOUR_OF.get(cell, "")) for cell in row))
    return drawn


def failure(error: TwineError) -> None:
    """Print what went wrong, why, and what to do next, in a few lines on stderr."""
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    label = click.style("error:", fg="red", bold=True) if colour else "error:"
    if error.errors:
        click.echo(f"{label} {printable(str(error).partition(': ')[0])}:", err=True)
        for found in error.errors:
            click.echo(f"  {printable(found.field)}: {printable(found.reason)}", err=True)
    else:
        click.echo(f"{label} {printable(error)}", err=True)
    if error.hint:
        click.echo(f"try:   {printable(error.hint)}", err=True)
    if error.request_id and (error.status >= 500 or error.status in (401, 403)):
        click.echo(f"request {printable(error.request_id)}", err=True)


def progress(text: str) -> None:
    """Print progress on stderr, so that stdout stays the result."""
    click.echo(printable(text), err=True)


def some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names and how many there are besides; `-` if there are none."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more]) or "-"


def share(part: float, whole: float) -> str:
    """Return a part in per cent; `-` if the whole is 0."""
    return f"{part / whole:.0%}" if whole else "-"


def ago(at: float) -> str:
    """Return how long ago a moment was, roughly; `-` for never."""
    return duration(time.time() - at) if at else "-"


def local_time(at: float) -> str:
    """Return a moment in the time zone of this computer."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def duration(seconds: float | None) -> str:
    """Return a time span in its two largest units; `-` for none."""
    if seconds is None:
        return "-"
    left = max(0, round(seconds))
    parts = []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


def _json_escape(char: str) -> str:
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
