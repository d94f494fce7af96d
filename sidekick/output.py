"""The output of commands: tables and colour on a terminal, tabs in a pipe, JSON on request.

In a pipe every line is a row, except the summary at the end, so that `sidekick plan web | cut -f1`
works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import msgspec

from sidekick.report import (
    ApplyOutcome,
    Disruption,
    PlanReport,
    ProfileState,
    Report,
    WantedSetting,
)
from wire.errors import TwineError

BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33
"""As terminals take them (ECMA-48, Select Graphic Rendition)."""
RISKS = {
    Disruption.LIVE: "none",
    Disruption.RESTART: "a service",
    Disruption.DRAIN: "tasks",
    Disruption.KEXEC: "the host",
    Disruption.REBOOT: "the host",
}
"""What a change affects."""
COLOURS: dict[str, int] = {
    Disruption.LIVE: GREEN,
    Disruption.RESTART: YELLOW,
    Disruption.DRAIN: YELLOW,
    Disruption.KEXEC: RED,
    Disruption.REBOOT: RED,
    ApplyOutcome.APPLIED: GREEN,
    ApplyOutcome.ALREADY: GREEN,
    ApplyOutcome.UNDONE: GREEN,
    ApplyOutcome.PARTIAL: YELLOW,
    ApplyOutcome.UNSUPPORTED: YELLOW,
    ApplyOutcome.PENDING_REBOOT: YELLOW,
    ApplyOutcome.DRIFTED: RED,
    ApplyOutcome.FAILED: RED,
    ProfileState.VERIFIED: GREEN,
    ProfileState.DEGRADED: RED,
    "not possible": RED,
}


def print_json(value: Any) -> None:
    """Print a value as a document of several lines."""
    _write_line(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns: aligned, coloured and with a header on a terminal, else tabs.

    The last column is cut to the width of the terminal, the others never.
    """
    lines = [[printable(" ".join(str(cell).split())) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in lines:
            _write_line("\t".join(line))
        return
    if not lines:
        return
    widths = [max(len(row[i]) for row in [list(header), *lines]) for i in range(len(header))]
    import shutil  # with its compressors: for a table alone

    room = shutil.get_terminal_size((200, 24)).columns
    left = max(12, room - sum(widths[:-1]) - 2 * (len(widths) - 1))
    _print_row([_styled(name.ljust(w), BOLD) for name, w in zip(header, widths, strict=True)])
    for line in lines:
        if len(line[-1]) > left:
            line[-1] = line[-1][: left - 1] + "…"
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        _print_row([_coloured(cell) for cell in cells])


def print_rows(
    keys: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[object]], output: str
) -> None:
    """Print rows as columns, or as JSON with these keys."""
    if output == "json":
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(header, rows)


def printable(text: str) -> str:
    """Return text with control characters as escapes: a profile or a program may contain some."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _write_line(line: str, to: TextIO | None = None) -> None:
    (to or sys.stdout).write(f"{line}\n")


def _styled(text: str, style: int, to: TextIO | None = None) -> str:
    return f"\033[{style}m{text}\033[0m" if (to or sys.stdout).isatty() else text


def _coloured(cell: str) -> str:
    colour = COLOURS.get(cell.rstrip())
    return _styled(cell, colour) if colour else cell


def _print_row(cells: Sequence[str]) -> None:
    _write_line("  ".join(cells).rstrip())


def print_report(report: Report) -> None:
    """Print the outcome of each setting, and the state of the host."""
    print_table(
        ("SETTING", "OUTCOME", "WANTED", "ACTUAL", "MS", "DETAIL"),
        [
            (s.setting, s.outcome, s.wanted, s.actual, f"{s.took_ms:.1f}", s.detail)
            for s in report.settings
        ],
    )
    name = report.name or "no profile"
    before = f" (before: {report.effective or 'no profile'})"
    effective = before if report.effective != report.name else ""
    detail = f": {printable(report.detail)}" if report.detail else ""
    _write_line(f"{name}: {_coloured(report.state)}{effective}{detail}")


def print_plan(report: PlanReport, why: dict[str, str]) -> None:
    """Print the changes, their way and risk; `why` has the reason for each missing setting."""
    rows: list[Sequence[object]] = [
        (c.setting, c.before, c.after, c.needs, RISKS[c.needs], c.why) for c in report.changes
    ]
    rows += [_absent(w, "not possible", why) for w in report.missing]
    rows += [_absent(w, "unsupported", why) for w in report.unsupported]
    print_table(("SETTING", "NOW", "WANTED", "HOW", "RISK", "FROM"), rows)
    needs = "" if report.needs is Disruption.LIVE else f", needs a {report.needs}"
    counts = [f"{len(report.changes)} to change", f"{report.unchanged} as wanted"]
    counts += [f"{len(report.unsupported)} unsupported"] if report.unsupported else []
    counts += [f"{len(report.missing)} not possible"] if report.missing else []
    _write_line(f"{report.name}: {', '.join(counts)}{needs}")


def _absent(wanted: WantedSetting, how: str, why: dict[str, str]) -> Sequence[object]:
    reason = why.get(wanted.setting, "")
    return (wanted.setting, "-", wanted.value, how, "-", f"{wanted.source}: {reason}")


def print_error(error: TwineError) -> None:
    """Print the error, all its details, and what to try."""
    _write_line(f"{_styled('sidekick:', RED, sys.stderr)} {printable(str(error))}", sys.stderr)
    for each in error.errors:
        _write_line(printable(f"  {each.field}: {each.reason}"), sys.stderr)
    if error.hint:
        _write_line(printable(f"  try: {error.hint}"), sys.stderr)
