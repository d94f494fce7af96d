"""What was done to this host: one line for each run, the newest last, oldest lines dropped.

The journal lives only as long as a run; the history is for people, and for the duration of
switches. Losing it loses nothing that sidekick needs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from sidekick.report import ApplyOutcome, ProfileState, Report
from sidekick.state import StateFolder
from wire.errors import Forbidden, HostError

FILE = "history.jsonl"
KEPT = 500
"""Runs; some two years of a machine that changes its profile every day or two."""
_CHANGED = {
    ApplyOutcome.APPLIED,
    ApplyOutcome.UNDONE,
    ApplyOutcome.PARTIAL,
    ApplyOutcome.PENDING_REBOOT,
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    at: float
    """Seconds since 1970."""
    command: str
    name: str
    state: ProfileState
    rolled_back: bool = False
    detail: str = ""
    took_ms: float = 0.0
    changed: dict[str, float] = {}
    """What was written, and how long each took, in ms."""


def entry_of(report: Report) -> Entry:
    """Return the line that a run leaves."""
    return Entry(
        at=report.at,
        command=report.command,
        name=report.name,
        state=report.state,
        rolled_back=report.rolled_back,
        detail=report.detail,
        took_ms=report.took_ms,
        changed={
            s.setting: s.took_ms for s in report.settings if s.outcome in _CHANGED and s.took_ms
        },
    )


def note(state: StateFolder, report: Report) -> None:
    """Keep a run. A disk that refuses is no reason to call the run a failure."""
    path = _path(state)
    with contextlib.suppress(HostError, OSError):
        lines = path.read_text().splitlines() if path.exists() else []
        line = msgspec.json.encode(entry_of(report)).decode()
        if len(lines) < 2 * KEPT:
            state.disk.append(path, line)
        else:
            state.disk.write(path, "\n".join([*lines[-KEPT + 1 :], line]) + "\n")


def read(state: StateFolder) -> list[Entry]:
    """Return the runs that are remembered, the newest last; a torn line is left out."""
    path, entries = _path(state), []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except PermissionError as e:
        raise Forbidden(f"cannot read {path}: {e.strerror}", hint="run as root") from e
    except OSError as e:
        raise HostError(f"cannot read {path}: {e.strerror}") from e
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            entries.append(msgspec.json.decode(line, type=Entry))
    return entries[-KEPT:]


def _path(state: StateFolder) -> Path:
    return state.folder / FILE
