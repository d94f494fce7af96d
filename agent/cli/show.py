"""Printing: tables for people, JSON for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Form of output."
)


def json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print aligned rows below a head."""
    cells = [head, *(tuple(printable(c) for c in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        text = "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))
        click.echo(text.rstrip())


def listing(
    output: str, value: Any, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> None:
    """Print a value: as JSON, or as a table for people."""
    if output == "json":
        json(value)
    else:
        table(head, rows)


def age(since: float | None) -> str:
    """Return the age of a moment in its largest unit; `-` for None."""
    if since is None:
        return "-"
    seconds = max(0, int(time.time() - since))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def when(at: float) -> str:
    """Return a moment in the host's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def printable(text: str) -> str:
    """Return text without control characters that could drive a terminal (trust F-86)."""
    if not os.isatty(1) and not os.isatty(2):
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
